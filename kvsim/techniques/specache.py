"""SpeCache: a packed cache on the GPU, the best tokens in fp16 fetched one step ahead."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.engine.formats import Format, kivi
from kvsim.graph import Buffers, Cycle, Number, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.base import Technique, sequences_alive
from kvsim.techniques.settings import param


@dataclass(frozen=True)
class Specache(Technique):
    """Speculative prefetch of the key-value pairs that the next token will attend to.

    Every step decodes the output token and a speculative next token; the latter's scores choose
    what is prefetched for the next step. A step's own tokens are attended to in fp16 and packed
    afterwards.

    Without speculation the output token's own scores choose, and attention is recalculated when
    the pairs have arrived. A fused kernel has kept no scores and attends to everything again;
    where scores leave the chip, those of the pairs are corrected, as the step times of table 4
    show: a second pass over the cache would take half as long again as was measured.

    References
    ----------
    .. [1] S. Jie et al., "SpeCache: speculative key-value caching for efficient generation of
       LLMs", ICML 2025, section 3.3, algorithms 1 to 3, table 4.
    """

    name: ClassVar[str] = "specache"
    first: ClassVar[bool] = False  # the pass before the first step

    bits: float = param(2, "bits per cached number", choices=(1, 2, 4, 8))
    group: int = param(64, "numbers that share a scale", low=8, high=1024)
    k: Number = param(64, "pairs prefetched per KV head", high=1e7)
    residual: int = param(64, "latest tokens kept in fp16", high=1e6)
    speculative: bool = param(True, "prefetch one step ahead", choices=(True, False))

    @property
    def stored(self) -> Format:
        """As KIVI, with fetched pairs beside it."""
        return kivi(self.bits, self.group, self.residual, late=True)

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Packed attention with the fetched pairs in place of their packed copies."""
        m, stored = d.shard, self.stored
        kept = p.tokens if p.prefill else p.batch  # the speculative token's KV is dropped
        host_copy = blocks.kv_bytes(m, kept) * (np.asarray(self.k) > 0)
        store = blocks.copy("store_kv", "d2h", host_copy, launches=2, after=("qkv",))
        if p.prefill:
            return [store, *attention.ops(d, p, shape), *blocks.pack_prompt(d, p, stored)]
        length = attention.cached(d, p, shape)
        chosen = np.minimum(self.k, length - 1)  # all but the query that chooses
        scores = p.batch * m.heads * length * (chosen > 0)
        size = blocks.kv_bytes(m, p.batch * chosen)
        rows = 2 * p.batch * m.cached_heads * chosen
        sync = d.stack.gather_sync
        known = self.speculative and not self.first  # pairs that are in place, chosen before
        held = blocks.kv_bytes(m, p.batch * np.minimum(self.k, length - p.new))
        look = attention.ops(
            d, p, shape, stored=stored, extra_bytes=held if known else 0.0,
            after=("prefetch@step-1",) if known else (),
        )  # fmt: skip
        fetch = blocks.copy("prefetch", "h2d", size, rows=rows, after=("topk",))
        chooses = [*look, blocks.top_k("topk", scores, sync=sync), fetch]
        if self.first:  # what it adds to the cache is dropped
            return chooses
        packed = blocks.quantise(d, kept, stored)
        ops = [*packed, *chooses, store]
        return ops if self.speculative else [*ops, *self._again(d, p, shape, chosen)]

    def _again(self, d: Deployment, p: Point, shape: LayerShape, chosen: Number) -> list[Op]:
        """Attention recalculated with the pairs in place (section 4.5)."""
        m, after = d.shard, ("prefetch",)
        pairs = blocks.kv_bytes(m, p.batch * chosen)
        if not d.stack.score_bytes:  # all of it; the new token is written already
            more = pairs - blocks.kv_bytes(m, p.tokens)
            return attention.ops(
                d, p, shape, name="attn_again", stored=self.stored, extra_bytes=more, after=after
            )
        flops = 2.0 * p.tokens * m.heads * (m.head_dim + m.v_width / m.cached_heads) * chosen
        return [Op("attn_again", "gpu", "attention", flops, {"hbm": pairs}, after=after)]

    def cycle(self, d: Deployment, p: Point) -> Cycle:
        """A speculative step carries two query tokens and yields one token."""
        new = 2.0 if self.speculative else 1.0
        return Cycle((self.forward(d, replace(p, new=new)),), 1.0)

    def between(self, d: Deployment, p: Point) -> tuple[Step, ...]:
        """Pre-decoding: one step whose scores choose the first prefetch."""
        return (_Predecoding(**self.settings).forward(d, p),) if self.speculative else ()

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """The packed cache and fetched pairs on the GPU, all pairs in fp16 on the host.

        Table 1 counts the cache and the pairs. A cache that is written in place has room for a
        step's own tokens too; one that is concatenated has them in the layer at hand alone.
        """
        m, stored = d.shard, self.stored
        own = (2 if self.speculative else 1) * (d.stack.append_passes == 0)
        chosen = np.minimum(self.k, p.max_length)
        pairs = blocks.kv_bytes(m, p.batch * chosen)
        indices = d.stack.index_bytes * p.batch * m.cached_heads * chosen
        host = attention.resident_kv(d, p, shape) * (np.asarray(self.k) > 0)
        return {
            "gpu": {
                "kv": attention.resident_kv(d, p, shape, stored),
                "fetched pairs": pairs,
                "new tokens": blocks.kv_bytes(m, p.batch * own),
                "indices": indices,
            },
            "host": {"kv": host},
        }

    def once(self, d: Deployment, p: Point) -> Buffers:
        """In prefill two layers' fp16 pairs, one computed while the other leaves."""
        leaving = sequences_alive(d, p) * p.new * (np.asarray(self.k) > 0)
        pairs = 2 * blocks.kv_bytes(d.shard, leaving) if p.prefill else 0.0
        return {"gpu": {"kv on the way out": pairs}}

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """The paper's widths and groups over k."""
        k = np.array([16.0, 64.0, 256.0])[:, None, None]
        return [Specache(bits, group, k) for bits in (1, 2) for group in (32, 64)]


@dataclass(frozen=True)
class _Predecoding(Specache):
    """The pass between prompt and first step: no pairs are in place yet, nothing is kept."""

    first: ClassVar[bool] = True
