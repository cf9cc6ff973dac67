"""The model drafts for itself, over a narrower cache or with narrower weights."""

from dataclasses import replace

import numpy as np

from kvsim.engine import ops
from kvsim.engine.buffers import SCORE_MEMORY
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op, Point
from kvsim.machines.deployment import WEIGHTS, Deployment, WeightFormat
from kvsim.techniques.acceptance import (
    Acceptance,
    acceptance_param,
    accepted_drafts,
    assumed_acceptance,
)
from kvsim.techniques.axes import Drafting, Selection, Storage
from kvsim.techniques.eviction import gather_kept, kept_tokens, observe, select
from kvsim.techniques.layers import LayerPass, Parts
from kvsim.techniques.settings import param

SINK = 4  # first tokens that a StreamingLLM draft keeps
WINDOW = 32  # SnapKV's observing queries
GATHERED = 2.5  # copies of the chosen tokens alive at once: gathered, reordered, one part joined
READS = ("upper", "streamingllm", "snapkv", "all")


@frozen
class Selfdraft(Drafting):
    """Drafts by the model's own layers.

    They read the upper half of a hierarchical cache, or a small cache of their own beside the
    verified one: attention sinks and a window, or what SnapKV keeps of the prompt and all since.

    References
    ----------
    .. [1] R. Tiwari et al., "QuantSpec", ICML 2025, algorithm 1 and table 6.
    .. [2] R. Sadhukhan et al., "MagicDec", ICLR 2025, section 4.
    """

    name = "selfdraft"
    preset = False

    gamma: int = param(2, "tokens drafted per round", high=16)
    acceptance: Acceptance = acceptance_param()
    reads: str = param("streamingllm", "cache that drafts read", choices=READS)
    budget: Number = param(1024, "tokens of a draft cache [tokens]", low=1, high=1e7, share=True)
    weight_bits: float = param(16, "bits of the draft's MLP weights", choices=(4, 16))

    def __post_init__(self) -> None:
        super().__post_init__()
        accepted_drafts(self.name, self.acceptance, self.gamma, self._published)

    @property
    def _published(self) -> str:
        narrow = {"upper": "quantspec", "all": "narrow weights"}.get(self.reads, self.reads)
        return narrow if self.reads == "upper" or self.weight_bits == 16 else "narrow weights"

    @property
    def drafts(self) -> int:
        """Tokens drafted per round: gamma."""
        return self.gamma

    @property
    def kernels(self) -> tuple[str, ...]:
        """By what drafts read, if there are any."""
        return (f"drafts over {self.reads}",) if self.gamma else ()

    @property
    def accepted(self) -> float:
        """Tokens accepted per round, of gamma drafts."""
        return accepted_drafts(self.name, self.acceptance, self.gamma, self._published)

    @property
    def assumes(self) -> str:
        """An acceptance that was measured elsewhere."""
        return assumed_acceptance(self.acceptance, self.accepted, self.gamma)

    @property
    def _mlp(self) -> WeightFormat | None:
        return WEIGHTS["int4"] if self.weight_bits == 4 else None

    @property
    def _small(self) -> bool:
        """Whether drafts have a cache of their own."""
        return self.gamma > 0 and self.reads in ("streamingllm", "snapkv")

    def refuses(self, deployment: Deployment, beside: Parts) -> str:
        """Drafts need what they read, and tokens that can be taken back."""
        selection, storage = beside.selection, beside.storage
        if not self.gamma:
            return ""
        if self.reads == "upper" and storage.upper is None:
            return (
                f"drafts read the upper half of a hierarchical cache, and {storage.name} has none"
            )
        if self.reads == "all" and self._mlp is None:
            return "drafts that read everything with the same weights save nothing"
        return can_roll_back(selection)

    def own_pass(self, point: Point, parts: Parts) -> Parts:
        """The model's layers over what a draft sees."""
        plain, mlp = Drafting(), self._mlp
        if self.reads == "upper":
            upper = parts.storage.upper
            assert upper is not None
            return replace(parts, storage=upper, drafting=plain, mlp=mlp, keeps=False)
        if not self._small:
            return replace(parts, drafting=plain, mlp=mlp, keeps=False)
        seen = DraftCache(self.budget, 0 if self.reads == "snapkv" else self.gamma)
        place = parts.placement.weights_alone()
        return Parts(seen, Storage(), place, plain, mlp, keeps=False)

    def after_prompt(self, at: LayerPass) -> list[Op]:
        """The draft cache is filled."""
        if not self._small:
            return []
        if self.reads == "streamingllm":
            filled = [gather_kept(at, self.budget + self.gamma)]
        else:
            chosen = select(at, self.budget, scored=at.p.prompt)
            filled = [observe(at, WINDOW, self.budget), chosen, gather_kept(at, self.budget)]
        if at.selection.evicts == "never":
            return filled
        return [replace(op, name=f"draft_{op.name}") for op in filled]  # beside the selection's

    def extra_bytes(self, at: LayerPass) -> Number:
        """Verification writes what it adds into both caches."""
        if not self._small or at.p.prefill:
            return 0.0
        return ops.kv_bytes(at.d.shard, at.p.tokens)

    @property
    def room(self) -> int:
        """A round's drafts; upper halves have room for them."""
        return 0 if self.reads == "upper" else self.gamma

    def resident(self, at: LayerPass) -> Buffers:
        """The draft cache, with room for the drafts of a round."""
        if not self._small:
            return {}
        tokens: Number = np.minimum(at.cached, self.budget)
        if self.reads == "snapkv":
            tokens = kept_tokens(at, self.budget)
        small = ops.kv_bytes(at.d.shard, at.p.batch * (tokens + self.gamma))
        return {"gpu": {"draft kv": small}}

    def beside_weights(self, at: LayerPass) -> Buffers:
        """The draft's MLP beside the model's own."""
        d, mlp = at.d, self._mlp
        if not self.gamma or mlp is None or d.weights == "int4" or at.shape.routed:
            return {}
        size = sum(mlp.bytes(*matrix) for matrix in d.shard.mlp_matrices(d.shard.ffn).values())
        return {"gpu": {"draft weights": size}}

    def scratch(self, at: LayerPass) -> Number:
        """What filling SnapKV's draft cache needs beside attention. [B]

        The layer's keys and values are copied out of their pages; then come the scores of the
        prompt's last queries, or the chosen tokens, joined with the window, reordered.
        """
        p, m = at.p, at.d.shard
        if self.reads != "snapkv" or not p.prefill or not self._small:
            return 0.0
        scores = p.batch * m.heads * WINDOW * p.prompt
        chosen = ops.kv_bytes(m, p.batch * np.minimum(self.budget, p.prompt))
        ranking = np.maximum(SCORE_MEMORY * scores, ops.HALF * scores + GATHERED * chosen)
        return ops.kv_bytes(m, p.batch * p.prompt) + ranking


@frozen
class DraftCache(Selection):
    """What a draft sees of a small cache; with ``idle`` slots it is a ring, else it grows."""

    name = "draft cache"

    budget: Number = param(1024, "tokens [tokens]", low=1, high=1e7, share=True)
    idle: int = param(0, "slots that are read all the same [tokens]", high=16)

    @property
    def kernels(self) -> tuple[str, ...]:
        """A ring finds its slots by other kernels than a cache that grows."""
        return ("draft ring",) if self.idle else (self.name,)

    def kept(self, at: LayerPass) -> Number:
        """The budget, and what is generated where it grows."""
        return np.minimum(at.cached, self.limit(at))

    def limit(self, at: LayerPass) -> Number:
        """Tokens that are kept, all of which a draft sees. [tokens]"""
        return self.budget if self.idle else kept_tokens(at, self.budget)

    def extra_bytes(self, at: LayerPass) -> Number:
        """Slots beyond the budget."""
        if not self.idle:
            return 0.0
        seen = np.minimum(at.p.length, self.budget)
        idle = np.minimum(at.p.length, self.budget + self.idle) - seen
        return ops.kv_bytes(at.d.shard, at.p.batch * idle)


def can_roll_back(selection: Selection) -> str:
    """Why rejected drafts could not be taken back, or nothing."""
    if selection.evicts == "always":
        return f"{selection.name} drops tokens at every step, which a rejected draft cannot undo"
    return ""
