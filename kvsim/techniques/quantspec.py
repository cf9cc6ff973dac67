"""QuantSpec: drafts read the upper four bits of the cache, verification all eight."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.engine.formats import Format
from kvsim.graph import Buffers, Cycle, Number, Op, Point, Step
from kvsim.machines.deployment import WEIGHTS, Deployment, WeightFormat
from kvsim.models.model import LayerShape
from kvsim.techniques.base import Technique, merge
from kvsim.techniques.settings import param
from kvsim.techniques.speculation import (
    acceptance_rate,
    assumed_acceptance,
    draft_points,
    verify_point,
)


@dataclass(frozen=True)
class Quantspec(Technique):
    """Self-speculation with a hierarchical 4+4-bit cache and 4-bit MLP weights.

    The output is that of the model with an 8-bit cache. Tokens are packed in blocks behind a
    double buffer of ``residual`` tokens, whose halves swap roles when one is packed. Rounds that
    the buffer cuts short, about one per half, are not modelled.

    References
    ----------
    .. [1] R. Tiwari et al., "QuantSpec: self-speculative decoding with hierarchical quantized KV
       cache", ICML 2025, sections 4.2 and 4.3, algorithm 1; acceptance from table 6.
    """

    name: ClassVar[str] = "quantspec"

    gamma: int = param(4, "tokens drafted per round", high=16)
    acceptance: float | str = param(
        "auto", "accepted over drafted tokens", high=1, choices=("auto",), whole=False
    )
    group: int = param(128, "numbers that share a scale", low=8, high=1024)
    residual: int = param(256, "full-precision buffer [tokens]", low=2, high=1e5)
    weight_bits: float = param(4, "bits of the draft's MLP weights", choices=(4, 16))

    @property
    def stored(self) -> Format:
        """The cache as verification sees it; both halves of the buffer roll over together."""
        half = self.residual // 2
        tails = {"k_tail": half, "v_tail": half, "k_block": half, "v_block": half}
        return Format(8, self.group, **tails, late=True)

    @property
    def _draft_weights(self) -> WeightFormat | None:
        return WEIGHTS["int4"] if self.weight_bits == 4 else None

    @property
    def rate(self) -> float:
        """Accepted over drafted tokens."""
        return acceptance_rate(self.acceptance, self.name, self.gamma) if self.gamma else 0.0

    @property
    def assumes(self) -> str:
        """An acceptance that was measured elsewhere."""
        return "" if not self.gamma else assumed_acceptance(self.acceptance, self.rate)

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Verification, prefill: the whole 8-bit cache; the tokens that stay are packed."""
        if p.prefill:
            packed = blocks.pack_prompt(d, p, self.stored)
            return [*attention.ops(d, p, shape), *packed]
        kept = p.batch * (1.0 + self.gamma * self.rate)
        every = self.residual / 2 / (1.0 + self.gamma * self.rate)  # rounds per flush
        return [
            *blocks.quantise(d, kept, self.stored, every=every),
            *attention.ops(d, p, shape, stored=self.stored),
        ]

    def draft(self, d: Deployment, p: Point) -> Step:
        """One draft pass."""
        return Draft(seen=replace(self.stored, bits=4), mlp=self._draft_weights).forward(d, p)

    def cycle(self, d: Deployment, p: Point) -> Cycle:
        """Gamma drafts, one verification; rejected tokens are dropped from the buffer."""
        drafts = [self.draft(d, q) for q in draft_points(p, self.gamma)]
        verify = self.forward(d, verify_point(p, self.gamma))
        return Cycle((*drafts, verify), 1.0 + self.gamma * self.rate)

    def weights(self, d: Deployment, shape: LayerShape) -> Buffers:
        """The model's weights, and the draft's MLP beside them."""
        own = super().weights(d, shape)
        draft = self._draft_weights
        if not self.gamma or draft is None or d.weights == "int4" or shape.routed:
            return own
        size = sum(draft.bytes(*matrix) for matrix in d.shard.mlp_matrices(d.shard.ffn).values())
        return merge(own, {"gpu": {"draft weights": size}})

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """Upper and lower halves with one set of scales, and the buffer."""
        return {"gpu": {"kv": attention.resident_kv(d, p, shape, self.stored)}}

    def once(self, d: Deployment, p: Point) -> Buffers:
        """One layer's whole prompt until it is packed."""
        return blocks.prompt_kv(d, p)

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """The paper's gammas, with the acceptance set or its published mean."""
        return [Quantspec(gamma, self.acceptance) for gamma in (1, 2, 4, 6)]


@dataclass(frozen=True)
class Draft(Technique):
    """A pass that reads a narrower cache, keeps what it adds, and may use narrower MLPs."""

    name: ClassVar[str] = "draft"

    seen: Format = Format()
    limit: Number | None = None
    idle: Number = 0.0  # slots beyond the limit that are read all the same [tokens]
    mlp: WeightFormat | None = None

    def __post_init__(self) -> None:
        """Built by techniques, never from user input."""

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Attention over what the draft sees."""
        idle: Number = 0.0
        if self.limit is not None:
            seen = np.minimum(p.length, self.limit)
            idle = np.minimum(p.length, self.limit + self.idle) - seen
        unseen = blocks.kv_bytes(d.shard, p.batch * idle)
        return attention.ops(d, p, shape, stored=self.seen, limit=self.limit, extra_bytes=unseen)

    def layer(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """As every layer, with the draft's own MLP weights."""
        return [
            *blocks.before_attention(d, p),
            *self.attend(d, p, shape, on_gpu),
            *blocks.after_attention(d, p, shape, self.mlp),
        ]
