"""Expected Attention: tokens are scored by the expected attention of future queries."""

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Op
from kvsim.techniques.axes.base import Launches, LayerPass
from kvsim.techniques.axes.selection import PromptCut


@frozen
class ExpectedAttention(PromptCut):
    """Scores tokens by expected attention, with future queries modelled as Gaussian.

    Rotated to the mean of the next positions, these queries give each key an expected attention
    weight, which is multiplied by the norm of its value.

    References
    ----------
    .. [1] A. Devoto, M. Jeblick, S. Jegou, "Expected Attention: KV cache compression by estimating
       attention from future queries distribution", 2025, section 3;
       https://arxiv.org/abs/2510.00636, github.com/NVIDIA/kvpress.
    """

    name = "expected-attention"
    launches = Launches(
        prefill={"query_spread": 21, "expect": 33, "select": 8, "compact": 5}, decode={"attn": 1}
    )

    def score(self, at: LayerPass) -> list[Op]:
        """Return the ops of the queries' covariance, and of each key's expected score."""
        m, p, cut = at.d.shard, at.p, self.cut(at)
        rows = p.batch * m.heads * p.prompt
        spread = 2.0 * rows * m.head_dim**2 * cut
        queries = 2 * ops.FP16_BYTES * rows * m.head_dim * cut
        cached = ops.kv_bytes(m, p.batch * p.prompt) * cut
        scores = 2 * ops.FP16_BYTES * rows * cut
        flops = 2.0 * rows * (m.head_dim**2 + m.head_dim) * cut
        return [
            Op("query_spread", kernel="gemm", flops=spread, bytes={"hbm": queries}, size=p.prompt),
            Op("expect", kernel="gemm", flops=flops, bytes={"hbm": cached + scores}, size=p.prompt),
        ]
