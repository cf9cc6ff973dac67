"""MiKV: tokens that would be evicted are kept at low precision, the others at high."""

import numpy as np

from kvsim.engine import ops
from kvsim.engine.buffers import merge
from kvsim.engine.formats import Format, averaged, bytes_per_number, mixed_bits
from kvsim.frozen import frozen
from kvsim.graph import Array, Buffers, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Launches, LayerPass, Parts
from kvsim.techniques.axes.selection import score_matrix, score_upkeep
from kvsim.techniques.axes.settings import combine, make_axis, param
from kvsim.techniques.axes.storage import WholeStorage


@frozen
class Mikv(WholeStorage):
    """Stores important tokens in higher precision and the others at few bits.

    Tokens are ranked by attention scores accumulated over all queries, as in H2O. Each token is
    quantised in groups; key channels are balanced with those of queries first. The attention kernel
    has to write all scores, in prefill and in decoding. Each new token moves another one to low
    precision.

    References
    ----------
    .. [1] J. Y. Yang et al., "No token left behind: reliable KV cache compression via
       importance-aware mixed precision quantization", 2024, section 3.
    .. [2] Y. He et al., "ZipCache", NeurIPS 2024, section 5.3: MiKV on standard attention.
    """

    name = "mikv"
    scored = True  # the whole score matrix is added up
    by_token = True  # a token's numbers are packed alone
    launches = Launches(
        prefill={"balance": 15, "attn": 34, "scores": 9, "rank": 4, "quantise": 32},
        decode={"balance": 1, "quantise": 30, "lowest": 6, "attn": 26, "scores": 16},
    )

    salient: Number = param(
        0.6, "share of tokens at high precision", high=1, whole=False, gentler=1
    )
    high: float = param(4, "bits per number of salient tokens", choices=(2, 4, 8, 16), gentler=1)
    low: float = param(
        2, "bits per number of the other tokens", choices=(1, 2, 4, 8, 16), gentler=1
    )
    group: int = param(64, "numbers of a token that share a scale", low=8, high=1e5, gentler=-1)

    candidates = combine(  # shares around the paper's, at its widths and those of ZipCache
        widths=({"high": 4, "low": 2}, {"high": 16, "low": 2}, {"high": 16, "low": 4}),
        salient=(make_axis(0.2, 0.4, 0.6, 0.8),),
    )

    @property
    def _number(self) -> Number:
        """Return the mean size of a cached value with its scale and zero point. [B]"""
        high, low = (
            float(bytes_per_number(bits, np.inf if bits == 16 else self.group))
            for bits in (self.high, self.low)
        )
        return mixed_bits(self.salient, high, low)

    @property
    def _packs(self) -> Array:
        return (np.asarray(self._number) < ops.FP16_BYTES).astype(float)

    @property
    def stored(self) -> Format:
        """Format that the kernel reads: the average width with its scales."""
        return averaged(8 * self._number)

    @property
    def exact(self) -> bool:
        """Whether both precisions are fp16, so that nothing is packed."""
        return not self._packs.any()

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why it cannot run, or an empty string: it cannot be combined with eviction."""
        if parts.selection.evicts == "always" and parts.selection.scored:
            return f"mikv stores at low precision what {parts.selection.name} drops; keep one"
        return ""

    def number_bytes(self, at: LayerPass) -> tuple[Number, Number]:
        """Return the mean size of a cached value over both precisions. [B]"""
        return self._number, self._number

    def transfer_bytes(self, at: LayerPass, tokens: Number) -> tuple[Number, Number]:
        """Return the bytes of keys and of values, averaged over both precisions. [B]"""
        size = at.p.batch * at.d.shard.kv_width / 2 * tokens * np.asarray(self._number)
        return size, size

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the ops that balance channels, and pack new tokens.

        In prefill the balancer's maxima are found; in decoding new queries are balanced.
        """
        m, p = at.d.shard, at.p
        queries = m.heads * m.head_dim
        balanced = queries + m.k_width if p.prefill else 2 * queries
        new = at.staying
        if p.prefill and at.selection.evicts != "never":
            new = p.batch * at.selection.count_kept_prompt(at)
        moved = m.kv_width * new * (ops.FP16_BYTES + np.asarray(self._number))
        balance = ops.FP16_BYTES * p.tokens * balanced * self._packs
        return [
            Op("balance", kernel="pointwise", bytes={"hbm": balance}),
            Op("quantise", kernel="quantise", bytes={"hbm": moved * self._packs}),
        ]

    def extra_bytes(self, at: LayerPass) -> Number:
        """Return the bytes that attention reads beyond those of a single mean precision. [B]"""
        if at.p.prefill:  # the prompt reads its own keys and values in fp16
            return 0.0
        less = np.asarray(self._number) - self.stored.number
        return at.p.batch * at.d.shard.kv_width * at.kept_tokens * less

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the ops that add up scores and rank tokens.

        In decoding each new token replaces the least important one, which is reduced to fewer bits.
        """
        d, p, tokens = at.d, at.p, at.kept_tokens
        upkeep = score_upkeep(at, tokens)
        if not p.prefill:
            sums = 4.0 * p.batch * d.shard.heads * tokens
            return [*upkeep, Op("lowest", kernel="topk", bytes={"hbm": sums})]
        ranked = p.batch * d.shard.cached_heads * tokens
        lists = [] if self.exact else ops.id_lists(d, p.batch)
        return [*upkeep, ops.top_k("rank", ranked), *lists]

    def resident(self, at: LayerPass) -> dict[str, Number]:
        """Return the memory of packed tokens, their precisions, scores and the balancer. [B]"""
        d, p, m, tokens = at.d, at.p, at.d.shard, at.kept_tokens
        packed = p.batch * m.kv_width * tokens * np.asarray(self._number)
        mixed = (np.asarray(self.salient) > 0) & (np.asarray(self.salient) < 1)
        return {
            "kv": packed,
            "indices": d.stack.selection.index_bytes * p.batch * m.cached_heads * tokens * mixed,
            "scores": 4.0 * p.batch * m.heads * tokens,
            "balancer": ops.FP16_BYTES * p.batch * m.k_width * self._packs,
        }

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's prompt, and of scores if attention keeps none. [B]"""
        return merge(ops.prompt_kv(at.d, at.p), score_matrix(at))
