"""KeyDiff: keeps the tokens whose keys are least similar to the others."""

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Op
from kvsim.techniques.axes.base import Launches, LayerPass
from kvsim.techniques.axes.selection import PromptCut


@frozen
class Keydiff(PromptCut):
    """Scores tokens by the distance of their keys from the mean key, without queries.

    References
    ----------
    .. [1] J. Park et al., "KeyDiff: key similarity-based KV cache eviction for long-context LLM
       inference in resource-constrained environments", NeurIPS 2025, section 3, equation 5;
       https://arxiv.org/abs/2504.15364.
    """

    name = "keydiff"
    launches = Launches(prefill={"score": 5, "select": 8, "compact": 5}, decode={"attn": 1})

    def score(self, at: LayerPass) -> list[Op]:
        """Return the ops of the mean direction of the keys, and of each key's distance from it."""
        m, cut = at.d.shard, self.cut(at)
        keys = 2 * ops.FP16_BYTES * at.p.batch * m.k_width * at.p.prompt
        scores = ops.FP16_BYTES * at.p.batch * m.cached_heads * at.p.prompt
        return [Op("score", kernel="pointwise", bytes={"hbm": (keys + scores) * cut})]
