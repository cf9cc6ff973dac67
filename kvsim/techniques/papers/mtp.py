"""Multi-token prediction: DeepSeek-V3's module drafts the token after the next."""

from dataclasses import replace

from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.models.families import FAMILIES_WITH_MTP
from kvsim.models.model import LayerShape, Model
from kvsim.techniques.axes.base import Launches
from kvsim.techniques.axes.drafting import MOST_DRAFTS
from kvsim.techniques.axes.settings import param
from kvsim.techniques.papers.eagle import Head


@frozen
class Mtp(Head):
    """Multi-token prediction: drafts with an extra layer of the model.

    One extra layer (DeepSeek-V3, Qwen3-Next) drafts the next tokens with the shared output head.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3 technical report", 2024, sections 2.2 and 5.4.3: 85 to 90 % of
       second tokens are accepted; their mean stands for one draft per round.
    """

    name = "mtp"
    launches = Launches(decode={"attn": 6})

    gamma: int = param(1, "tokens drafted per round", high=MOST_DRAFTS)

    def lacks(self, model: Model) -> str:
        """Return that the model was published without prediction modules, or an empty string."""
        if not self.gamma or model.family in FAMILIES_WITH_MTP:
            return ""
        return (
            f"{model.name} has no MTP modules (deepseek-v3 and qwen3-next-80b-a3b have); draft "
            "with eagle, draft or ngram"
        )

    def layer_shape(self, deployment: Deployment) -> LayerShape:
        """Return the shape of the extra layer: that of a layer with attention and an MLP."""
        return replace(deployment.model.cached_shape, mlp=True)
