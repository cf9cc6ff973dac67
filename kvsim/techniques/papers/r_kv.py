"""R-KV: keeps the important and non-redundant tokens of long reasoning."""

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Launches, LayerPass, Parts
from kvsim.techniques.axes.selection import Bounded
from kvsim.techniques.axes.settings import Budget, param


@frozen
class RKv(Bounded):
    """Cuts the cache to its budget every ``buffer`` tokens, by attention and redundancy.

    Redundancy is a key's mean cosine similarity to the other kept keys, computed for every pair.

    The published gains are not an independent test. After its errors on them had been seen, the
    model
    was changed: decode attention now runs in rounds of blocks (``unit_blocks`` of stack hf-fa2).
    The parameters of these rounds come from FlashAttention 2 itself; none is fitted.

    References
    ----------
    .. [1] Z. Cai et al., "R-KV: redundancy-aware KV cache compression for reasoning models",
       NeurIPS 2025, section 3, algorithm 1: a buffer of 128, the latest 8 queries observe;
       https://arxiv.org/abs/2505.24133.
    """

    name = "r-kv"
    per_head = True
    launches = Launches(
        prefill={"redundancy": 41, "select": 5, "compact": 5},
        decode={"attn": 1, "redundancy": 41, "select": 5, "compact": 5},
    )

    kept: Number = param(1024, "tokens kept after a cut [tokens]", low=1, high=1e7, share=True)
    buffer: int = param(128, "tokens between two cuts [tokens]", low=1, high=1e5)
    window: int = param(8, "latest queries that score tokens [tokens]", low=1, high=1e4)
    redundancy: str = param(
        "each", "sequences whose redundancy a cut computes; first: as released in 2025, where the "
        "redundancy of a batch's first sequence counted for all", choices=("each", "first"),
    )  # fmt: skip

    candidates = ({"kept": Budget((0.125, 0.25, 0.5))},)

    @property
    def budget(self) -> Number:
        """Tokens cached at most: those kept, and those added until the next eviction. [tokens]"""
        return self.kept + self.buffer

    def count_kept_prompt(self, at: LayerPass) -> Number:
        """Return the prompt tokens that remain after the first eviction. [tokens]"""
        return np.minimum(at.p.length, self.kept)

    def limit(self, at: LayerPass) -> Number:
        """Return the tokens that a query attends to, averaged between two evictions. [tokens] These
        are the kept tokens and those added since.
        """
        return self.kept + (self.buffer + 1) / 2

    def resident(self, at: LayerPass) -> Buffers:
        """Return the memory of the latest queries, which score tokens at the next eviction. [B]"""
        m, p = at.d.shard, at.p
        queries = ops.FP16_BYTES * p.batch * m.heads * (m.k_width / m.cached_heads) * self.window
        return {"gpu": {"latest queries": queries}}

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the ops of an eviction after the prompt; in decoding, 1 / ``buffer`` of one."""
        m, p = at.d.shard, at.p
        every = 1.0 if p.prefill else float(self.buffer)
        tokens = p.length if p.prefill else np.minimum(p.length, self.budget)
        cut = (np.asarray(p.length) > self.kept).astype(float) / every
        width = m.k_width / m.cached_heads
        asked = p.batch * m.heads * np.minimum(self.window, tokens) * tokens * cut
        compared = p.batch if self.redundancy == "each" else 1.0  # sequences
        alike = compared * m.cached_heads * tokens**2 * cut
        asking = p.batch * m.heads * width * np.minimum(self.window, tokens)
        numbers = ((p.batch + compared) * m.k_width * tokens + asking) * cut
        moved = ops.FP16_BYTES * numbers + 2 * ops.SCORE * asked + ops.SCORE * alike
        held = ops.kv_bytes(m, p.batch * np.minimum(self.kept, tokens)) * cut
        return [
            Op("redundancy", kernel="gemm", flops=2.0 * width * (asked + alike),
               bytes={"hbm": moved}, size=tokens, launches=1.0 / every),
            ops.top_k("select", p.batch * m.cached_heads * tokens * cut, every=every),
            Op("compact", kernel="gather", bytes={"hbm": 2 * held}, launches=1.0 / every),
        ]  # fmt: skip

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why it cannot run, or an empty string: ``window`` may not exceed ``buffer``."""
        if self.window > self.buffer:
            return f"a cut every {self.buffer} tokens has no {self.window} queries; lower window"
        return super().refuses(deployment, parts)
