"""Multi-token prediction: DeepSeek-V3's module drafts the token after the next."""

from dataclasses import replace

from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.axes.base import Launches
from kvsim.techniques.axes.drafting import acceptance_param
from kvsim.techniques.axes.settings import param
from kvsim.techniques.papers.eagle import Head


@frozen
class Mtp(Head):
    """One decoder layer with a product that joins hidden state and embedding, the head shared.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3 technical report", 2024, sections 2.2 and 5.4.3: 85 to 90 % of
       second tokens are accepted; their mean stands for one draft per round.
    """

    name = "mtp"
    launches = Launches(decode={"attn": 5})

    gamma: int = param(1, "tokens drafted per round", high=16)
    acceptance: float | str = acceptance_param()

    def shape(self, deployment: Deployment) -> LayerShape:
        """The kind of the model's last layer that attends, with an MLP."""
        return replace(deployment.model.cached_shape, mlp=True)
