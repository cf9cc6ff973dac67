"""SpeCache: a packed cache on the GPU, the best tokens in fp16 fetched one step ahead.

S. Jie, Y. Tang, K. Han, Z.-H. Deng, J. Han, "SpeCache: speculative key-value caching for efficient
generation of LLMs", ICML 2025, https://arxiv.org/abs/2503.16163

The whole cache C is on the host in fp16; the GPU has C', KIVI's 1 or 2 bits with the latest tokens
in fp16. Three stages (section 3.3, algorithms 1 to 3):

1. Prefilling: layer by layer, attention in fp16; then C' = Quant(C) stays and C is offloaded.
2. Pre-decoding: one pass of the first output token T_1 over C' alone. Its scores choose the top-k
   pairs K_1 of every layer, which are prefetched, and its answer T'_2 is the first speculative
   token. What the pass adds to the cache is dropped.
3. Decoding: the output token T_t and the speculative T'_(t+1) pass together,
   O = Attn([T_t, T'_(t+1)], C' u C_Kt)                                              (equation 1)
   with the k prefetched pairs C_Kt in place of their packed copies. The scores of T'_(t+1) choose
   K_(t+1); those pairs are fetched beside the later layers and the next step's start. T_t's own
   keys and values are packed into C' and offloaded to C; the speculative token's are dropped.
   The answers are the next output token and the next speculative one.

Two tokens read the same weights and cache, so that the second is nearly free while decoding waits
for memory. With one bit per number the zero point and the scale are computed otherwise (equation
3), which takes no more time or memory.

Where kvsim departs from the paper: a token is not among its own top k, as its pair is on the GPU.
Pairs are chosen per KV head; the paper does not say how query heads that share one choose.

``Specache`` has the paper's settings, ``Pairs`` the prefetch and ``LateKivi`` the packed cache.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from kvsim.engine import ops
from kvsim.engine.buffers import sequences_alive
from kvsim.engine.formats import Format, kivi
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import (
    Launches,
    LayerPass,
    Part,
    Parts,
    Selection,
    Storage,
    Term,
    attend,
    pack,
)
from kvsim.techniques.axes.settings import combine, make_axis, param


@frozen
class Specache(Term):
    """Prefetches from the host the pairs to which a speculated next token attends.

    Each step decodes the output token and a speculative next token, whose scores choose the pairs
    to prefetch for the next step. New tokens are attended to in fp16 and packed afterwards.

    Without speculation (section 4.5) the output token's own scores choose, and attention is
    recalculated when the pairs have arrived. A fused kernel keeps no scores and attends to
    everything again. A kernel that writes its scores to GPU memory corrects those of the pairs
    alone, as the step times of table 4 show: with a second pass over the cache a step would take
    half as long again as was measured.

    References
    ----------
    .. [1] S. Jie et al., "SpeCache: speculative key-value caching for efficient generation of
       LLMs", ICML 2025, section 3.3, algorithms 1 to 3, table 4,
       https://arxiv.org/abs/2503.16163
    """

    name: ClassVar[str] = "specache"

    bits: float = param(2, "bits per cached number", choices=(1, 2, 4, 8), gentler=1)
    group: int = param(64, "numbers that share a scale", low=8, high=1024, gentler=-1)
    k: Number = param(64, "pairs prefetched per KV head", high=1e7, gentler=1)
    residual: int = param(64, "latest tokens kept in fp16", high=1e6, gentler=1)
    speculative: bool = param(True, "prefetch one step ahead", choices=(True, False), gentler=-1)

    candidates = combine(  # the paper's widths and groups over k
        bits=(1, 2), group=(32, 64), k=(make_axis(16, 64, 256),)
    )

    def pieces(self) -> tuple[Part, ...]:
        """Return KIVI's packed cache, and the prefetched fp16 pairs."""
        return Pairs(self.k, self.speculative), LateKivi(self.bits, self.group, self.residual)


@frozen
class Pairs(Selection):
    """Prefetches the best k keys and values per KV head, in full precision, one step ahead.

    References
    ----------
    .. [1] S. Jie et al., "SpeCache", ICML 2025, section 3.3, algorithms 1 to 3.
    """

    name = "pairs"
    exact = True  # every token is read, in the storage's format
    borrows = False
    preset = False
    first: ClassVar[bool] = False  # whether this is the pre-decoding pass
    launches = Launches(
        prefill={"store_kv": 2}, decode={"attn": 10, "topk": (5, 10), "prefetch": 2}
    )

    k: Number = param(64, "pairs prefetched per KV head", high=1e7)
    speculative: bool = param(True, "prefetch one step ahead", choices=(True, False))

    @property
    def queries(self) -> int:
        """Query tokens per sequence and step: the output token and the speculative one."""
        return 2 if self.speculative else 1

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why it cannot run: it needs a packed cache on the GPU, of single tokens."""
        place, storage = parts.placement, parts.storage
        if not storage.stored.packs:
            return f"{self.name} needs a packed cache, but {storage.name} is not packed"
        if not storage.read.packs:
            return (
                f"{self.name} needs attention to read the packed cache, but {storage.name} "
                "unpacks it first"
            )
        if storage.upper is not None:
            return f"{self.name} packs single tokens, but {storage.name} packs half buffers"
        if np.any(np.asarray(place.v_host) + place.on_cpu > 0):
            return f"{self.name} keeps its own copy on the host; the packed cache stays on the GPU"
        if parts.drafting.drafts and self.speculative:
            return "its speculative token and drafts would both guess the next token; keep one"
        return ""

    def attend(self, at: LayerPass) -> list[Op]:
        """Return the ops of attention with fetched pairs, of the choice and of the next fetch."""
        d, p, m, storage = at.d, at.p, at.d.shard, at.storage
        # algorithm 3: T_t's keys and values stay, the speculative token's are dropped
        kept = p.batch if self.speculative and not p.prefill else at.staying
        host_copy = ops.kv_bytes(m, kept) * (np.asarray(self.k) > 0)
        store = ops.copy("store_kv", "d2h", host_copy, launches=2, after=("qkv",))
        if p.prefill:  # algorithm 1: Offload(C), attention in fp16, C' = Quant(C)
            packed = [*_pack_prompt(at), *storage.complete(at), *at.drafting.fill_draft_cache(at)]
            return [store, *attend(at), *packed]
        length = at.cached
        chosen = np.minimum(self.k, length - 1)  # at most all tokens but the one that chooses
        # ArgTopK over the scores of one token alone, the speculative one (A_1 of algorithm 3)
        scores = p.batch * m.heads * length * (chosen > 0)
        size = ops.kv_bytes(m, p.batch * chosen)
        rows = 2 * p.batch * m.cached_heads * chosen
        has_pairs = self.speculative and not self.first  # chosen and fetched by the step before
        pair_bytes = ops.kv_bytes(m, p.batch * np.minimum(self.k, length - p.new))
        # equation 1: attention waits for the pairs, and reads them besides the packed cache
        waits = ("prefetch@step-1",) if has_pairs else ()
        attention = attend(at, waits, extra_bytes=pair_bytes if has_pairs else 0.0)
        choice = ops.top_k("topk", scores, sync=d.stack.selection.gather_sync)
        fetch = ops.copy("prefetch", "h2d", size, rows=rows, after=("topk",))
        attend_and_choose = [*attention, choice, fetch]
        if self.first:  # algorithm 2 ends here: what it adds to the cache is dropped
            return attend_and_choose
        packed = ops.quantise(d, kept, storage.stored)
        step = [*packed, *attend_and_choose, store, *storage.complete(at)]
        return step if self.speculative else [*step, *self._recalculate(at, chosen)]

    def _recalculate(self, at: LayerPass, chosen: Number) -> list[Op]:
        """Return the ops that repeat attention when the pairs have arrived (section 4.5)."""
        p, m, after = at.p, at.d.shard, ("prefetch",)
        pairs = ops.kv_bytes(m, p.batch * chosen)
        if not at.d.stack.attention.score_bytes:  # all again; the new token is written already
            more = pairs - ops.kv_bytes(m, p.tokens)
            return attend(at, after, name="attn_again", extra_bytes=more)
        flops = 2.0 * p.tokens * m.heads * (m.head_dim + m.v_width / m.cached_heads) * chosen
        return [Op("attn_again", "gpu", "attention", flops, {"hbm": pairs}, after=after)]

    def predecoding(self, parts: Parts) -> Parts | None:
        """Return the parts of pre-decoding, a pass whose scores choose the first prefetch."""
        if not self.speculative:
            return None
        return replace(parts, selection=_Predecoding(self.k, self.speculative))

    def resident(self, at: LayerPass) -> Buffers:
        """Return the memory of fetched pairs on the GPU, and of all pairs in fp16 on the host. [B]

        Table 1 counts the packed cache and the pairs. A stack that writes its cache in place has
        room for a step's own tokens in every layer; one that concatenates has none.
        """
        d, p, m = at.d, at.p, at.d.shard
        own = self.queries * (d.stack.cache.append_passes == 0)  # tokens per sequence
        chosen = np.minimum(self.k, p.max_length)
        whole = p.batch * ops.kv_bytes(m, at.cached)
        return {
            "gpu": {
                "fetched pairs": ops.kv_bytes(m, p.batch * chosen),
                "new tokens": ops.kv_bytes(m, p.batch * own),
                "indices": d.stack.selection.index_bytes * p.batch * m.cached_heads * chosen,
            },
            "host": {"kv": whole * (np.asarray(self.k) > 0)},
        }

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of two layers' fp16 pairs in prefill. [B]

        One layer is copied to the host while the next is computed.
        """
        leaving = sequences_alive(at.d, at.p) * at.p.new * (np.asarray(self.k) > 0)
        pairs = 2 * ops.kv_bytes(at.d.shard, leaving) if at.p.prefill else 0.0
        return {"gpu": {"kv on the way out": pairs}}


@frozen
class _Predecoding(Pairs):
    """The pass between prefill and the first step: no pairs are there yet, and none are added."""

    first: ClassVar[bool] = True
    launches = Pairs.launches

    queries = 1  # the first output token alone


def _pack_prompt(at: LayerPass) -> list[Op]:
    stored = at.storage.stored
    return ops.pack_prompt(at.d, at.p.batch, at.p.length, stored, at.p.context)


@frozen
class LateKivi(Storage):
    """KIVI's layout, packed after attention, so that new tokens are read in FP16.

    References
    ----------
    .. [1] S. Jie et al., "SpeCache", ICML 2025, section 3.3, algorithms 1 to 3.
    """

    name = "late-kivi"
    by_token = False  # keys of a group of tokens share their scales
    preset = False
    launches = Launches(prefill={"attn": 3, "quantise": 44}, decode={"quantise": 16, "attn": 9})

    bits: float = param(2, "bits per cached number", choices=(1, 2, 4, 8))
    group: int = param(64, "numbers that share a scale", low=8, high=1024)
    residual: int = param(64, "latest tokens kept in fp16", high=1e6)

    @property
    def stored(self) -> Format:
        """Format of the cache: quantised groups and an fp16 residual."""
        return kivi(self.bits, self.group, self.residual, late=True)

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the ops that pack new tokens after attention; none if ``pairs`` packs them."""
        return [] if isinstance(at.parts.selection, Pairs) else pack(at)
