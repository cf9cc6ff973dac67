"""MagicDec: drafts attend to a small sparse cache, verification to the whole one."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.graph import Buffers, Cycle, Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.base import SCORE_MEMORY, Technique, merge
from kvsim.techniques.eviction import gather_kept, select
from kvsim.techniques.quantspec import Draft
from kvsim.techniques.settings import param
from kvsim.techniques.snapkv import kept_tokens, observe
from kvsim.techniques.speculation import (
    acceptance_rate,
    assumed_acceptance,
    draft_points,
    verify_point,
)

SINK = 4  # first tokens that a StreamingLLM draft keeps
WINDOW = 32  # SnapKV's observing queries
GATHERED = 2.5  # copies of the chosen tokens alive at once: gathered, reordered, one part joined


@dataclass(frozen=True)
class Magicdec(Technique):
    """Self-speculation with a StreamingLLM or SnapKV draft cache beside the full one.

    References
    ----------
    .. [1] R. Sadhukhan et al., "MagicDec: breaking the latency-throughput tradeoff for long
       context generation with speculative decoding", ICLR 2025, section 4; acceptance from
       QuantSpec's table 6.
    """

    name: ClassVar[str] = "magicdec"
    lossless: ClassVar[bool] = True

    draft: str = param("streamingllm", "draft cache", choices=("streamingllm", "snapkv"))
    budget: Number = param(1024, "tokens of the draft cache [tokens]", low=1, high=1e7)
    gamma: int = param(2, "tokens drafted per round", high=16)
    acceptance: float | str = param(
        "auto", "accepted over drafted tokens", high=1, choices=("auto",), whole=False
    )

    @property
    def rate(self) -> float:
        """Accepted over drafted tokens."""
        return acceptance_rate(self.acceptance, self.draft, self.gamma) if self.gamma else 0.0

    @property
    def assumes(self) -> str:
        """An acceptance that was measured elsewhere."""
        return "" if not self.gamma else assumed_acceptance(self.acceptance, self.rate)

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Full attention; after the prompt the draft cache is filled."""
        if not self.gamma:
            return attention.ops(d, p, shape)
        if not p.prefill:  # verification writes what it adds into both caches
            return attention.ops(d, p, shape, extra_bytes=blocks.kv_bytes(d.shard, p.tokens))
        ops = attention.ops(d, p, shape)
        if self.draft == "snapkv":
            ops.append(observe(d, p, WINDOW, self.budget))
            ops.append(select(d, p, self.budget, scored=p.prompt))
            return [*ops, gather_kept(d, p, self.budget)]
        return [*ops, gather_kept(d, p, self.budget + self.gamma)]

    def cycle(self, d: Deployment, p: Point) -> Cycle:
        """Gamma drafts over the small cache, one verification over the whole."""
        drafts = [self._draft(q).forward(d, q) for q in draft_points(p, self.gamma)]
        verify = self.forward(d, verify_point(p, self.gamma))
        return Cycle((*drafts, verify), 1.0 + self.gamma * self.rate)

    def _draft(self, p: Point) -> Draft:
        """A StreamingLLM draft sees its budget, a SnapKV draft also what was generated since."""
        if self.draft == "snapkv":
            return Draft(limit=kept_tokens(p, self.budget))
        return Draft(limit=self.budget, idle=self.gamma)

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """Both caches, with room for the drafts of a round."""
        full: Buffers = {"gpu": {"kv": attention.resident_kv(d, p, shape)}}
        if not self.gamma:
            return full
        drafts = blocks.kv_bytes(d.shard, p.batch * self.gamma)
        tokens: Number = np.minimum(attention.cached(d, p, shape), self.budget)
        if self.draft == "snapkv":
            tokens = kept_tokens(p, self.budget)
        small = blocks.kv_bytes(d.shard, p.batch * tokens) + drafts
        return merge(full, {"gpu": {"kv": drafts, "draft kv": small}})

    def scratch(self, d: Deployment, p: Point) -> Number:
        """What filling SnapKV's draft cache needs beside attention. [B]

        The layer's keys and values are copied out of their pages; then come the scores of the
        prompt's last queries, or the chosen tokens, joined with the window, reordered.
        """
        own = super().scratch(d, p)
        if self.draft != "snapkv" or not p.prefill:
            return own
        scores = p.batch * d.shard.heads * WINDOW * p.prompt
        chosen = blocks.kv_bytes(d.shard, p.batch * np.minimum(self.budget, p.prompt))
        ranking = np.maximum(SCORE_MEMORY * scores, blocks.HALF * scores + GATHERED * chosen)
        return own + blocks.kv_bytes(d.shard, p.batch * p.prompt) + ranking

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """A quarter of the context, for which the acceptance was published."""
        quarter = float(np.ceil((prompt + generate) / 4))
        return [
            Magicdec(draft, quarter, gamma, self.acceptance)
            for draft in ("streamingllm", "snapkv")
            for gamma in (1, 2, 3)
        ]
