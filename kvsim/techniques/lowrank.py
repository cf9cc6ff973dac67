"""ShadowKV's storage: keys as a product of low rank, values in fp16."""

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes import Storage
from kvsim.techniques.layers import LayerPass, Parts
from kvsim.techniques.settings import param

SINGLE = 4.0  # bytes of an fp32 number [B]


@frozen
class Lowrank(Storage):
    """Keys before their positions as a product of two thin matrices, values in fp16.

    The decomposition of the prompt takes 6 s w^2 + 20 w^3 operations for s tokens of width w.

    References
    ----------
    .. [1] H. Sun et al., "ShadowKV", ICML 2025, section 3.1.
    .. [2] G. Golub and C. Van Loan, "Matrix computations", figure 8.6.1: R-SVD.
    """

    name = "lowrank"
    preset = False

    rank: int = param(160, "rank of the prompt's keys", low=1, high=4096)

    @property
    def exact(self) -> bool:
        """The product approximates the keys."""
        return False

    def refuses(self, deployment: Deployment, beside: Parts) -> str:
        """A product pays if it is smaller, and if few tokens are multiplied out."""
        m = deployment.shard
        if self.rank >= m.k_width:
            return f"rank {self.rank} is no less than the {m.k_width} numbers of a token's keys"
        if not beside.selection.chooses:
            return f"{self.name} multiplies out the keys that are read; choose pages of them"
        return ""

    def _left(self, at: LayerPass, tokens: Number) -> Number:
        """A row per token of the prompt. [B]"""
        return ops.HALF * self.rank * at.p.batch * np.minimum(tokens, at.p.prompt)

    def _right(self, at: LayerPass) -> Number:
        """A column per number of a token's keys, for every sequence. [B]"""
        return ops.HALF * self.rank * at.d.shard.k_width * at.p.batch

    def after(self, at: LayerPass) -> list[Op]:
        """The prompt's keys are decomposed."""
        if not at.p.prefill:
            return []
        m, p = at.d.shard, at.p
        flops = p.batch * (6.0 * p.new * m.k_width**2 + 20.0 * m.k_width**3)
        made = self._left(at, p.new) + self._right(at)
        moved = (ops.HALF + 2 * SINGLE) * m.k_width * p.tokens + made
        return [Op("svd", kernel="gemm", flops=flops, bytes={"hbm": moved}, dtype="fp32")]

    def restore(self, at: LayerPass, tokens: Number) -> list[Op]:
        """Keys of so many tokens per KV head, with their positions."""
        m, p = at.d.shard, at.p
        keys = p.batch * m.cached_heads * tokens
        moved = ops.HALF * keys * (self.rank + m.head_dim) + self._right(at)
        flops = 2.0 * keys * self.rank * m.head_dim
        return [Op("restore_keys", kernel="gemm", flops=flops, bytes={"hbm": moved}, size=tokens)]

    def sides(self, at: LayerPass) -> tuple[Number, Number]:
        """Factors in place of the prompt's keys; generated keys and all values as they are."""
        m, p, overhead = at.d.shard, at.p, at.d.stack.cache.overhead
        generated = np.maximum(at.kept - p.prompt, 0.0)
        keys = (
            self._left(at, at.kept) + self._right(at) + ops.HALF * m.k_width * p.batch * generated
        )
        return overhead * keys, overhead * ops.HALF * m.v_width * p.batch * at.kept

    def once(self, at: LayerPass) -> Buffers:
        """One layer's keys while the prompt is read."""
        read = ops.HALF * at.d.shard.k_width * at.p.tokens if at.p.prefill else 0.0
        return {"gpu": {"prompt keys": read}}
