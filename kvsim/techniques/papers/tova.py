"""TOVA: keeps the prompt tokens to which its last query attends."""

from kvsim.frozen import frozen
from kvsim.graph import Op
from kvsim.techniques.axes.base import Launches, LayerPass
from kvsim.techniques.axes.selection import PromptCut, observe


@frozen
class Tova(PromptCut):
    """Evicts the tokens with the lowest attention of the last query, averaged over heads.

    All heads of a layer keep the same tokens. Tokens are evicted once, after prefill, as in
    kvpress; the paper drops a token at every step.

    References
    ----------
    .. [1] M. Oren et al., "Transformers are multi-state RNNs", EMNLP 2024, section 4;
       https://arxiv.org/abs/2401.06104.
    """

    name = "tova"
    launches = Launches(
        prefill={"attn": 12, "observe": 2, "select": 8, "compact": 5}, decode={"attn": 1}
    )
    per_head = False

    def score(self, at: LayerPass) -> list[Op]:
        """Return the op that scores all keys by the last query."""
        return [observe(at, 1, self.budget)]
