"""XAttention: blocks of a prompt's attention are chosen by sums along their antidiagonals."""

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import LayerPass, Parts
from kvsim.techniques.axes.selection import SparsePrompt, block_density
from kvsim.techniques.axes.settings import param


@frozen
class Xattention(SparsePrompt):
    """Attends to the blocks whose antidiagonals have the highest scores.

    References
    ----------
    .. [1] R. Xu et al., "XAttention: block sparse attention with antidiagonal scoring", ICML 2025,
       section 2 and table 5: at a stride of 8 a fifth of the pairs at 32k tokens and less beyond;
       https://arxiv.org/abs/2503.16428.
    """

    name = "xattention"

    stride: int = param(8, "stride between antidiagonals", low=1, high=128)
    block: int = param(128, "tokens per block", low=8, high=1024)
    share: float = param(
        0.2, "share of query-key pairs that are computed", low=0.001, high=1, whole=False
    )

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why it cannot run, or an empty string: the stride must divide the block."""
        if self.block % self.stride:
            return f"stride {self.stride} does not divide blocks of {self.block}"
        return super().refuses(deployment, parts)

    def density(self, at: LayerPass) -> Number:
        """Return the share of causal pairs in ``share`` of each row's blocks, rounded up."""
        return block_density(at, self.block, self.share)

    def estimate(self, at: LayerPass) -> list[Op]:
        """Return the ops that multiply every stride-th query and key, and choose blocks."""
        m, p = at.d.shard, at.p
        asked, before = p.new / self.stride, p.context / self.stride
        pairs = p.batch * m.heads * (asked * before + asked * (asked + 1) / 2)
        read = ops.FP16_BYTES * p.batch * (m.k_width * p.length + m.heads * m.head_dim * p.new)
        blocks = p.batch * m.heads * (p.new / self.block) * (p.length / self.block)
        return [
            Op("antidiagonals", kernel="prompt", flops=2.0 * m.head_dim * self.stride * pairs,
               bytes={"hbm": read + ops.FP16_BYTES * blocks}, size=p.new,
               columns=p.tokens * m.heads),
            ops.top_k("rank_blocks", blocks),
        ]  # fmt: skip
