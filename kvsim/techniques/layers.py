"""One pass through one layer: what every axis is asked about, and what several of them share."""

from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.engine import attention, ops
from kvsim.engine.formats import Format
from kvsim.frozen import frozen
from kvsim.graph import Number, Op, Point
from kvsim.machines.deployment import Deployment, WeightFormat
from kvsim.models.model import LayerShape

if TYPE_CHECKING:
    from kvsim.techniques.axes import Drafting, Placement, Selection, Storage
    from kvsim.techniques.terms import Part


@frozen
class Parts:
    """One part of each axis: what a layer does."""

    selection: "Selection"
    storage: "Storage"
    placement: "Placement"
    drafting: "Drafting"
    mlp: WeightFormat | None = None  # of a draft pass, where its MLPs are narrower
    keeps: bool = True  # whether what the pass adds stays: drafts' tokens do not

    def for_prompt(self, prompt: Number) -> "Parts":
        """The same for prompts of known lengths: shares of them are whole numbers of tokens."""
        if not (self.selection.shares or self.drafting.shares):
            return self
        chosen, drafting = self.selection.for_prompt(prompt), self.drafting.for_prompt(prompt)
        return replace(self, selection=chosen, drafting=drafting)

    def at(self, index: int, deployment: Deployment) -> "Parts":
        """What one layer does."""
        own = {part.axis: part.at(index, deployment) for part in self.every()[:3]}
        same = all(own[part.axis] is part for part in self.every()[:3])
        return self if same else replace(self, **own)  # type: ignore[arg-type]

    def every(self) -> "tuple[Part, ...]":
        """The parts in the order of the axes."""
        return self.selection, self.storage, self.placement, self.drafting

    def breaks(self, deployment: Deployment) -> set[int]:
        """First layers from which on some part says something else."""
        return {first for part in self.every() for first in part.breaks(deployment)}


@frozen
class LayerPass:
    """One pass through one layer: all that its ops and its bytes depend on."""

    d: Deployment
    p: Point  # of one part of the batch in ops, of the whole batch in what stays resident
    shape: LayerShape
    parts: Parts
    part: Point | None = None  # of one part of the batch, where p is of the whole
    known: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # found so far

    @property
    def selection(self) -> "Selection":
        """Which tokens stay and are read, budgets in tokens."""
        own = self.parts.selection
        return own.for_prompt(self.p.prompt) if own.shares else own

    @property
    def storage(self) -> "Storage":
        """How they are stored."""
        return self.parts.storage

    @property
    def placement(self) -> "Placement":
        """The part that says where the cached tokens live."""
        return self.parts.placement

    @property
    def drafting(self) -> "Drafting":
        """The part that says who drafts, and how many tokens."""
        own = self.parts.drafting
        return own.for_prompt(self.p.prompt) if own.shares else own

    @property
    def pieces(self) -> "tuple[Part, ...]":
        """The parts in the order of the axes, budgets in tokens."""
        return self.selection, self.storage, self.placement, self.drafting

    @property
    def cached(self) -> Number:
        """Tokens per sequence that the layer would keep without selection. [tokens]"""
        return attention.cached(self.d, self.p, self.shape)

    @property
    def kept(self) -> Number:
        """Tokens per sequence that it keeps after the pass. [tokens]"""
        if "kept" not in self.known:
            self.known["kept"] = self.selection.kept(self)
        found: Number = self.known["kept"]
        return found

    @property
    def of_prompt(self) -> Number:
        """Tokens of the prompt that stay once it is read. [tokens]"""
        if self.selection.evicts == "never":
            return self.p.prompt
        return np.minimum(self.p.prompt, self.selection.prompt_kept(self))

    @property
    def staying(self) -> Number:
        """New tokens of the batch that stay: rejected drafts do not. [tokens]"""
        if not self.parts.keeps:
            return 0.0
        if self.p.prefill or not self.drafting.drafts:
            return self.p.tokens
        return self.p.batch * (1.0 + self.drafting.accepted)

    def alone(self) -> "LayerPass":
        """The same of a layer without a window."""
        return LayerPass(self.d, self.p, LayerShape(), self.parts, self.part)

    def then(self, point: Point) -> "LayerPass":
        """The same layer in another pass."""
        return replace(self, p=point, part=None, known={})


def resident_kv(at: LayerPass, stored: Format) -> Number:
    """Memory of one layer's kept tokens in a format. [B]"""
    m = at.d.shard
    size = stored.resident(m.k_width, m.v_width, at.kept)
    return at.d.stack.cache.overhead * at.p.batch * size


def attend(
    at: LayerPass, after: tuple[str, ...] = (), *, share: float = 1.0, **more: Any
) -> list[Op]:
    """Attention of the new tokens over a share of what the selection reads, as it is stored."""
    p, extra = at.p, more.pop("extra_bytes", 0.0)
    limit = None if p.prefill else at.selection.limit(at)
    if share < 1.0:
        length = at.cached
        limit = share * (length if limit is None else np.minimum(length, limit))
    extra = extra + share * (at.storage.extra_bytes(at) + at.selection.extra_bytes(at))
    extra = extra + at.drafting.extra_bytes(at) * at.shape.keeps
    behind = _behind(at, limit)
    if limit is not None and behind is not None:  # what the first of the new tokens sees
        limit = limit - (p.new - 1) * (np.asarray(behind) > 0)
    found = attention.ops(
        at.d, p, at.shape, stored=at.storage.read, limit=limit, extra_bytes=extra,
        scored=at.selection.scored or at.storage.scored, after=after, **more,
    )  # fmt: skip
    return found if behind is None else [_with(op, at, behind) for op in found]


def _behind(at: LayerPass, limit: Number | None) -> Number | None:
    """Pairs per head and sequence of several new tokens with each other, behind a cut prompt.

    Other limits are what each query sees; this one is what the last of them sees.
    """
    if at.p.prefill or at.selection.evicts != "after the prompt" or not np.any(at.p.new > 1):
        return None
    own = at.p.new * (at.p.new - 1) / 2
    return own * (np.asarray(limit) < at.cached)


def _with(op: Op, at: LayerPass, pairs: Number) -> Op:
    """Attention with the products of these pairs too."""
    if op.kernel not in ("attention", "attention-fp8", "lowbit") or at.d.shard.latent:
        return op
    m = at.d.shard
    return replace(op, flops=op.flops + 4.0 * at.p.batch * m.heads * m.head_dim * pairs)


def pack(at: LayerPass) -> list[Op]:
    """Packing of what a pass adds: of the prompt what stays, later every token that does."""
    stored = at.storage.stored
    if at.p.prefill:
        kept = at.selection.prompt_kept(at)
        before = np.minimum(kept, at.p.context)  # packed by earlier passes over the prompt
        return ops.pack_prompt(at.d, at.p.batch, kept, stored, before)
    return ops.quantise(at.d, at.staying, stored)
