"""MiKV: what eviction would drop is kept at low precision, the rest at high."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.engine.formats import Format, averaged, bytes_per_number, mixed_bits
from kvsim.graph import Array, Buffers, Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.base import Technique, merge
from kvsim.techniques.eviction import score_upkeep
from kvsim.techniques.settings import param


@dataclass(frozen=True)
class Mikv(Technique):
    """Mixed precision by attention scores accumulated over all queries, as H2O ranks tokens.

    Numbers are packed token by token in groups, keys after a balancing of their channels with
    those of the queries. The whole score matrix leaves the attention kernel, in prefill and in
    decoding; a token that comes in pushes one token down to low precision.

    References
    ----------
    .. [1] J. Y. Yang et al., "No token left behind: reliable KV cache compression via
       importance-aware mixed precision quantization", 2024, section 3.
    .. [2] Y. He et al., "ZipCache", NeurIPS 2024, section 5.3: MiKV on standard attention.
    """

    name: ClassVar[str] = "mikv"

    salient: Number = param(0.6, "share of tokens at high precision", high=1, whole=False)
    high: float = param(4, "bits of salient tokens", choices=(2, 4, 8, 16))
    low: float = param(2, "bits of the others", choices=(1, 2, 4, 8, 16))
    group: int = param(64, "numbers of a token that share a scale", low=8, high=1e5)

    @property
    def _number(self) -> Number:
        """Average size of a cached number with its scale and zero point. [B]"""
        high, low = (
            float(bytes_per_number(bits, np.inf if bits == 16 else self.group))
            for bits in (self.high, self.low)
        )
        return mixed_bits(self.salient, high, low)

    @property
    def _packs(self) -> Array:
        return (np.asarray(self._number) < blocks.HALF).astype(float)

    @property
    def stored(self) -> Format:
        """The kernel's format: the average width with its scales."""
        return averaged(8 * self._number)

    @property
    def exact(self) -> bool:
        """Only without packing."""
        return not self._packs.any()

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Attention over both precisions, the upkeep of the scores, packing of what goes down."""
        m, stored = d.shard, self.stored
        tokens = attention.cached(d, p, shape)
        less = p.batch * m.kv_width * tokens * (np.asarray(self._number) - stored.number)
        less = less * (not p.prefill)  # the prompt reads its own keys and values in fp16
        ranked = p.batch * m.cached_heads * tokens
        return [
            *self._pack(d, p),
            *attention.ops(d, p, shape, stored=stored, extra_bytes=less, scored=True),
            *score_upkeep(d, p, tokens),
            *([] if p.prefill else [_lowest(d, p, tokens)]),
            *([blocks.top_k("select", ranked)] if p.prefill else []),
            *(blocks.id_lists(d, p.batch) if p.prefill and not self.exact else []),
        ]

    def _pack(self, d: Deployment, p: Point) -> list[Op]:
        """The balancer's maxima over the prompt, or its use on new queries; then packing."""
        m = d.shard
        queries = m.heads * m.head_dim
        balanced = queries + m.k_width if p.prefill else 2 * queries
        moved = m.kv_width * p.tokens * (blocks.HALF + np.asarray(self._number))
        balance = blocks.HALF * p.tokens * balanced * self._packs
        return [
            Op("balance", kernel="pointwise", bytes={"hbm": balance}),
            Op("quantise", kernel="quantise", bytes={"hbm": moved * self._packs}),
        ]

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """Both precisions, which token has which, accumulated scores, and the balancer."""
        m, tokens = d.shard, attention.cached(d, p, shape)
        packed = p.batch * m.kv_width * tokens * np.asarray(self._number)
        mixed = (np.asarray(self.salient) > 0) & (np.asarray(self.salient) < 1)
        return {
            "gpu": {
                "kv": d.stack.cache_overhead * packed,
                "indices": d.stack.index_bytes * p.batch * m.cached_heads * tokens * mixed,
                "scores": 4.0 * p.batch * m.heads * tokens,
                "balancer": blocks.HALF * p.batch * m.k_width * self._packs,
            }
        }

    def once(self, d: Deployment, p: Point) -> Buffers:
        """One layer's prompt and its score matrix, where the stack's attention keeps none."""
        there = p.prefill and not attention.score_bytes(d, p)
        alive = np.minimum(p.tokens, d.stack.prefill_chunk) * p.length
        scores = blocks.HALF * d.shard.heads * alive if there else 0.0
        return merge(blocks.prompt_kv(d, p), {"gpu": {"score matrix": scores}})

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """Shares around the paper's, at its widths and at those ZipCache compares with."""
        shares = np.array([0.2, 0.4, 0.6, 0.8])[:, None, None]
        return [Mikv(shares, high, low) for high, low in ((4, 2), (16, 2), (16, 4))]


def _lowest(d: Deployment, p: Point, tokens: Number) -> Op:
    """The least important token is looked for among all, one at a time."""
    sums = 4.0 * p.batch * d.shard.heads * tokens
    return Op("lowest", kernel="topk", bytes={"hbm": sums})
