"""The four axes of a technique: base classes of its parts, and their hooks.

*Selection* says which cached tokens stay and which of them a query reads, *storage* how keys and
values are stored, *placement* where they live and how they come to where attention runs, and
*drafting* who proposes tokens. A :class:`Term` is a name of the notation with its settings; it
sets one axis (a :class:`Part`) or several. Selection, storage and placement may differ by layer;
drafting is the whole model's. Whatever a technique does not set has defaults that change nothing.

A part is asked about a :class:`LayerPass`, ``at``: one pass through one layer of a model on a
machine. Its numbers may be arrays that broadcast against each other (batch, context, settings).
Hooks return ops in the order in which a layer issues them, or bytes that stay resident.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import numpy as np

from kvsim.engine import attention, ops
from kvsim.engine.formats import FP16, Format
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op, Point, Step
from kvsim.machines.deployment import Deployment, WeightFormat
from kvsim.models.model import LayerShape, Model
from kvsim.techniques.axes.settings import Budget, check, is_share, simplify

Axis = Literal["selection", "storage", "placement", "drafting"]
TOKEN_ROUNDING = 1e-6  # of a token: a tenth of 4100 tokens is 410 of them
AXES: tuple[Axis, ...] = ("selection", "storage", "placement", "drafting")
Evicts = Literal["never", "after the prompt", "always"]
Family = Literal["packing", "selection", "eviction"]


@frozen
class Launches:
    """Number of kernels that kvsim's own implementation launches for each op of a layer.

    Serving engines fuse an op into one kernel, as techniques state it. Eager PyTorch launches many.
    Under the stack ``kvsim`` the counts of all parts of a layer are added; an op without a count is
    one kernel. ``python -m benchmarks.launches`` counts the kernels of a real step.

    Attributes
    ----------
    prefill, draft, decode : kernels by op in each kind of pass. Of a pair, the second number is
        added at long contexts (``steps.RANKED_ALONE``).
    """

    prefill: Mapping[str, int | tuple[int, int]] = field(default_factory=dict)
    draft: Mapping[str, int | tuple[int, int]] = field(default_factory=dict)
    decode: Mapping[str, int | tuple[int, int]] = field(default_factory=dict)


@frozen
class Parts:
    """How one layer handles its cache, with one part for each axis.

    Attributes
    ----------
    selection : which cached tokens are kept or read.
    storage : the format in which they are stored.
    placement : the memory in which they are held.
    drafting : how tokens are drafted for speculative decoding.
    mlp : weight format of the MLP in a draft pass if narrower than the model's; else None.
    keeps : whether the tokens of the pass stay cached; those of a draft pass do not.
    """

    selection: "Selection"
    storage: "Storage"
    placement: "Placement"
    drafting: "Drafting"
    mlp: WeightFormat | None = None  # of a draft pass, where its MLPs are narrower
    keeps: bool = True  # whether what the pass adds stays: drafts' tokens do not

    def for_prompt(self, prompt: Number) -> "Parts":
        """Return the parts with shares of the prompt converted to numbers of tokens.

        Parameters
        ----------
        prompt : lengths of the prompts. [tokens]
        """
        if not (self.selection.shares or self.drafting.shares):
            return self
        chosen, drafting = self.selection.for_prompt(prompt), self.drafting.for_prompt(prompt)
        return replace(self, selection=chosen, drafting=drafting)

    def for_layer(self, index: int, deployment: Deployment) -> "Parts":
        """Return the parts of one layer.

        Parameters
        ----------
        index : index of the layer, from 0.
        deployment : model, machine and software.
        """
        own = {part.axis: part.for_layer(index, deployment) for part in self.by_axis()[:3]}
        same = all(own[part.axis] is part for part in self.by_axis()[:3])
        return self if same else replace(self, **own)  # type: ignore[arg-type]

    def by_axis(self) -> "tuple[Part, ...]":
        """Return the parts in the order of the axes."""
        return self.selection, self.storage, self.placement, self.drafting

    def boundaries(self, deployment: Deployment) -> set[int]:
        """Return the layers, other than the first, at which some part changes.

        Parameters
        ----------
        deployment : model, machine and software.
        """
        return {first for part in self.by_axis() for first in part.boundaries(deployment)}


@frozen
class LayerPass:
    """One forward pass through one layer: the argument of most methods of a technique's parts.

    Numbers may be arrays: settings along the first axis, batch and context along the next ones.
    They broadcast against each other.

    Attributes
    ----------
    d : the deployment (model, machine and software); ``d.shard`` is the model's part on one GPU.
    p : operating point: batch [sequences], cached context [tokens], new tokens per sequence,
        whether
        these are the prompt's, the prompt's length, and the greatest length of a sequence.
        ``p`` covers the part of the batch that the layer serves at a time; for memory, the whole.
    shape : kind of the layer: attention or recurrence, sliding window, and MLP.
    parts : the technique's selection, storage, placement and drafting in this layer, with budgets
        in
        tokens.
    part : operating point of one part of the batch where ``p`` is that of the whole batch.
    known : cache of values that have been computed for this pass.
    """

    d: Deployment
    p: Point  # of one part of the batch in ops, of the whole batch in what stays resident
    shape: LayerShape
    parts: Parts
    part: Point | None = None  # of one part of the batch, where p is of the whole
    known: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # found so far

    @property
    def selection(self) -> "Selection":
        """The selection of cached tokens, with its budgets in tokens."""
        own = self.parts.selection
        return own.for_prompt(self.p.prompt) if own.shares else own

    @property
    def storage(self) -> "Storage":
        """The format in which cached tokens are stored."""
        return self.parts.storage

    @property
    def placement(self) -> "Placement":
        """The memory tier of cached tokens: GPU, host or drive."""
        return self.parts.placement

    @property
    def drafting(self) -> "Drafting":
        """The method that drafts tokens, and how many."""
        own = self.parts.drafting
        return own.for_prompt(self.p.prompt) if own.shares else own

    @property
    def pieces(self) -> "tuple[Part, ...]":
        """The parts in the order of the axes, budgets in tokens."""
        return self.selection, self.storage, self.placement, self.drafting

    @property
    def cached(self) -> Number:
        """Tokens per sequence that the layer caches if no selection drops any. [tokens]"""
        return attention.cached(self.d, self.p, self.shape)

    @property
    def kept_tokens(self) -> Number:
        """Tokens per sequence that the layer caches after the pass. [tokens]"""
        if "kept" not in self.known:
            self.known["kept"] = self.selection.count_kept(self)
        found: Number = self.known["kept"]
        return found

    @property
    def kept_of_prompt(self) -> Number:
        """Prompt tokens per sequence that stay cached after prefill. [tokens]"""
        if self.selection.evicts == "never":
            return self.p.prompt
        return np.minimum(self.p.prompt, self.selection.count_kept_prompt(self))

    @property
    def staying(self) -> Number:
        """New tokens of the batch that stay cached, without rejected drafts. [tokens]"""
        if not self.parts.keeps:
            return 0.0
        if self.p.prefill or not self.drafting.drafts:
            return self.p.tokens
        return self.p.batch * (1.0 + self.drafting.accepted)

    def without_window(self) -> "LayerPass":
        """This pass, in a layer without a sliding window."""
        return LayerPass(self.d, self.p, LayerShape(), self.parts, self.part)

    def in_pass(self, point: Point) -> "LayerPass":
        """Return the same layer in another pass."""
        return replace(self, p=point, part=None, known={})


@frozen
class Term:
    """A named technique, or a piece of one, with its settings; each is a :func:`settings.param`.

    Numeric settings may be arrays that broadcast with a point's batch and context; those that
    change the structure of a step (bits, layers, schedules) are scalars.

    Attributes
    ----------
    name : name in the notation of techniques.
    preset : whether it is a paper's whole technique rather than a piece of one.
    candidates : settings that a plan considers, each a mapping; if empty, only the term's own
        settings.
    planned : whether a plan may choose it; False if its settings describe the requests.
    evidence_kind : group of techniques whose measured quality losses also apply to it; empty if
        none.
    """

    name: ClassVar[str]
    preset: ClassVar[bool] = True  # a paper's technique rather than a piece of one
    candidates: ClassVar[tuple[Mapping[str, object], ...]] = ()  # settings that a plan considers
    planned: ClassVar[bool] = True  # whether a plan may choose it
    evidence_kind: ClassVar[str] = ""  # what it shares with others that lose quality in one way

    def __post_init__(self) -> None:
        for f in fields(self):
            check(self.name, f.name, getattr(self, f.name), f.metadata)

    def pieces(self) -> "tuple[Part, ...]":
        """Return the parts that make up the term, at most one per axis."""
        raise NotImplementedError

    def options(self, deployment: Deployment, prompt: int, generate: int) -> "Iterable[Term]":
        """Return the settings worth considering for a workload: by default ``candidates``.

        Array-valued settings lie along the first axis. Subclasses whose choice is not a fixed list
        override it.

        Parameters
        ----------
        deployment : model, machine and software.
        prompt, generate : lengths of prompts and answers. [tokens]
        """
        return self._filled(lambda budget: budget.tokens(prompt, generate))

    def options_of_shares(
        self, deployment: Deployment, prompt: int, generate: int
    ) -> "Iterable[Term]":
        """Return settings worth considering for requests of many lengths, with budgets as shares.

        Parameters
        ----------
        prompt, generate : mean lengths of prompts and answers, for settings other than budgets.
            [tokens]
        """
        if not self.candidates:
            return self.options(deployment, prompt, generate)
        return self._filled(lambda budget: budget.of_each_prompt)

    def _filled(self, number: Callable[[Budget], object]) -> "list[Term]":
        """Return the candidates with numbers for their budgets, and the acceptance unchanged."""
        kept = {key: v for key, v in self.settings.items() if key == "acceptance"}
        made = [
            {key: number(v) if isinstance(v, Budget) else v for key, v in some.items()}
            for some in self.candidates
        ]
        return [type(self)(**kept | some) for some in made] or [self]

    def notes(self, at: "LayerPass") -> tuple[str, ...]:
        """Return remarks on these settings for readers of a plan.

        Parameters
        ----------
        at : the last decoding pass of a layer.
        """
        return tuple(note for part in self.pieces() for note in part.notes(at))

    def prompt_budget(self) -> Number | None:
        """Return the number of prompt tokens that later queries can attend to. [tokens]

        Measured quality losses are looked up by this number. None if losses do not depend on it.
        """
        return None

    @property
    def settings(self) -> dict[str, Any]:
        """Values of all settings by their names."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        """Return the notation, which ``kvsim.techniques.parse`` reads back."""
        said = [
            f.name for f in fields(self) if not f.metadata["quiet"] or np.any(getattr(self, f.name))
        ]
        given = ",".join(f"{k}={simplify(getattr(self, k))}" for k in said)
        return f"{self.name}:{given}" if given else self.name


@frozen
class Part(Term):
    """A term that sets a single axis.

    Attributes
    ----------
    axis : the axis that it sets.
    launches : kernels that its own implementation launches; not inherited by subclasses with other
        code.
    """

    axis: ClassVar[Axis]
    launches: ClassVar[Launches] = Launches()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.launches = vars(cls).get("launches", Launches())  # a subclass runs by other code

    def pieces(self) -> "tuple[Part, ...]":
        """Return this part, as a tuple of one."""
        return (self,)

    @cached_property
    def shares(self) -> tuple[str, ...]:
        """The settings given as a share of each prompt rather than a number of tokens."""
        could = (f.name for f in fields(self) if f.metadata.get("share"))
        return tuple(name for name in could if np.any(is_share(getattr(self, name))))

    def for_prompt(self, prompt: Number) -> Self:
        """Return the part with shares of the prompt in whole tokens.

        Parameters
        ----------
        prompt : length of the prompts. [tokens]
        """
        tokens: dict[str, Any] = {}
        for name in self.shares:
            own = np.asarray(getattr(self, name), dtype=float)
            tokens[name] = np.where(
                is_share(own), np.maximum(np.ceil(own * prompt - TOKEN_ROUNDING), 1.0), own
            )
        return replace(self, **tokens) if tokens else self

    @property
    def launch_tables(self) -> tuple[Launches, ...]:
        """The tables of kernels that its implementation launches per op; their counts add up."""
        return (self.launches,)

    @property
    def exact(self) -> bool:
        """Whether outputs equal those with a full-precision cache, up to rounding."""
        return False

    def boundaries(self, deployment: Deployment) -> tuple[int, ...]:
        """Return the layers, other than the first, at which the part changes.

        Asked once per deployment. A part that returns any also overrides ``for_layer``.

        Parameters
        ----------
        deployment : model, machine and software.
        """
        return ()

    def for_layer(self, index: int, deployment: Deployment) -> Self:
        """Return this part as it applies to one layer; itself unless a subclass varies by layer.

        The layers at which a part changes are its ``boundaries``.

        Parameters
        ----------
        index : index of the layer, from 0.
        deployment : model, machine and software.
        """
        return self

    def refuses(self, deployment: Deployment, parts: "Parts") -> str:
        """Return why the part cannot run in a deployment, or an empty string.

        Parameters
        ----------
        deployment : model, machine and software.
        parts : those of the other axes, in the same layers.
        """
        return ""

    def shared_buffers(self, at: "LayerPass") -> Buffers:
        """Return the memory of buffers that all layers share, by tier and name. [B]

        They are counted once, at the size that the layer with the largest need has.

        Parameters
        ----------
        at : the pass through the layer with the widest window.
        """
        return {}

    def scratch(self, at: "LayerPass") -> Any:
        """Return the memory of temporary copies of one layer's cache during attention. [B]

        Parameters
        ----------
        at : the pass through a layer without a window.
        """
        return 0.0

    def notes(self, at: "LayerPass") -> tuple[str, ...]:
        """Return remarks on the part for readers of a plan; none by default.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return ()


@frozen
class Selection(Part):
    """Which tokens stay in the cache, and which of them a query attends to; by default all.

    Attributes
    ----------
    evicts : when tokens are dropped for good.
    per_head : whether heads keep or read different tokens.
    chooses : whether the tokens to read are chosen by the query.
    borrows : whether it works in layers that attend to an earlier layer's cache.
    """

    name = "all"
    axis: ClassVar[Axis] = "selection"
    evicts: ClassVar[Evicts] = "never"
    per_head: ClassVar[bool] = False  # heads keep different tokens
    chooses: ClassVar[bool] = False  # what is read is known only when the query is
    borrows: ClassVar[bool] = True  # whether layers may attend to an earlier one's cache

    @property
    def queries(self) -> int:
        """Query tokens per sequence in a decoding pass that yields one token."""
        return 1

    @property
    def exact(self) -> bool:
        """Whether every query attends to every token."""
        return type(self) is Selection

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why the selection cannot run: evicting tokens needs storage by single token.

        Parameters
        ----------
        deployment : model, machine and software.
        parts : those of the other axes, in the same layers.
        """
        if self.evicts == "always" and not parts.storage.by_token:
            return f"{self.name} drops single tokens, but {parts.storage.name} packs them together"
        return ""

    @property
    def family(self) -> Family:
        """Return how quality is lost: tokens are dropped or skipped, or fewer bits are kept."""
        if self.evicts != "never":
            return "eviction"
        return "selection" if self.chooses else "packing"

    def count_kept(self, at: LayerPass) -> Number:
        """Return the cached tokens per sequence that stay after a pass. [tokens]

        Parameters
        ----------
        at : the pass through the layer.
        """
        return at.cached

    def count_kept_prompt(self, at: LayerPass) -> Number:
        """Return the prompt tokens that stay cached after prefill. [tokens]

        Parameters
        ----------
        at : the pass through the layer.
        """
        return at.p.length

    def limit(self, at: LayerPass) -> Number | None:
        """Return the most tokens that a query attends to; None for all. [tokens]

        Parameters
        ----------
        at : a decoding pass through the layer; in prefill, queries attend to the whole prompt.
        """
        return None

    @property
    def scored(self) -> bool:
        """Whether attention over the prompt has to write its scores to GPU memory."""
        return False

    def extra_bytes(self, at: LayerPass) -> Number:
        """Return the bytes that attention reads besides the selected tokens. [B]

        Parameters
        ----------
        at : the pass through the layer.
        """
        return 0.0

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the ops before attention in decoding, such as estimates or shifted positions.

        Parameters
        ----------
        at : a decoding pass through the layer.
        """
        return []

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the ops after attention: updated scores in decoding, eviction in prefill.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return []

    def density(self, at: LayerPass) -> Number | None:
        """Return the share of a prompt's causal query-key pairs that is computed; None for all.

        Parameters
        ----------
        at : a pass over the prompt.
        """
        return None

    def thin_prompt(self, at: LayerPass, attention: Op) -> Op:
        """Return the op of a prompt's attention, reduced to the query-key pairs that are computed.

        Parameters
        ----------
        at : a pass over the prompt.
        attention : the op with all pairs.
        """
        share = self.density(at)
        if share is None:
            return attention
        return replace(attention, flops=attention.flops * np.minimum(share, 1.0))

    def attend(self, at: LayerPass) -> list[Op]:
        """Return the ops between a layer's projections, in issue order.

        It calls the hooks of all axes. Override it for techniques that change attention itself.

        Parameters
        ----------
        at : the pass through the layer.
        """
        storage, place, drafting = at.storage, at.placement, at.drafting
        if not at.p.prefill:
            return [
                *place.runtime(at), *place.fetch(at), *storage.prepare(at), *place.store(at),
                *self.prepare(at), *place.attend(at), *storage.complete(at), *self.complete(at),
            ]  # fmt: skip
        if self.evicts == "never":
            return [
                *place.runtime(at), *storage.prepare(at), *place.store(at),
                *attend(at, place.attention_waits(at)), *place.finish(at),
                *storage.complete(at), *self.complete(at), *drafting.fill_draft_cache(at),
            ]  # fmt: skip
        return [  # only what stays is packed and sent away
            *place.runtime(at), *attend(at), *self.complete(at),
            *storage.prepare(at), *place.store(at), *place.finish(at),
            *storage.complete(at), *drafting.fill_draft_cache(at),
        ]  # fmt: skip

    def borrow(self, at: LayerPass) -> list[Op]:
        """Return the ops of a layer that attends to the cache of an earlier one.

        Nothing is quantised, evicted or copied to the host; tokens on the host are fetched again.

        Parameters
        ----------
        at : the pass through the layer.
        """
        place = at.placement
        if at.p.prefill:
            return attend(at)
        return [*place.runtime(at), *place.fetch(at), *self.prepare(at), *place.attend(at)]

    def resident(self, at: LayerPass) -> Buffers:
        """Return the memory that one layer needs besides its cache, by tier and name. [B]

        Examples are scores, bounds of pages, and copies on the host.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return {}

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's full prompt cache, if it is reduced later. [B]"""
        return {} if self.evicts == "never" else ops.prompt_kv(at.d, at.p)

    def predecoding(self, parts: Parts) -> Parts | None:
        """Return the parts of an extra pass between prompt and first round, or None.

        Parameters
        ----------
        parts : of the layer in all other passes.
        """
        return None


@frozen
class Storage(Part):
    """How keys and values are stored, and how attention reads them; by default in fp16."""

    name = "fp16"
    axis: ClassVar[Axis] = "storage"
    launches = Launches(prefill={"attn": 3}, draft={"attn": 3}, decode={"attn": 3})

    @property
    def stored(self) -> Format:
        """Format of the numbers in the cache."""
        return FP16

    @property
    def read(self) -> Format:
        """Format that the attention kernel reads; fp16 if numbers are dequantised before it."""
        return self.stored

    @property
    def upper(self) -> "Storage | None":
        """The upper bits of a hierarchical cache, which drafts read; None for other caches."""
        return None

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """Return which kernels the predicted time of a low-bit cache assumes."""
        stack, said = at.d.stack, "the low-bit cache assumes"
        if self.read != self.stored:
            share = stack.kernel("quantise").memory
            return (
                f"{said} kernels that unpack what arrives from the host before attention, at "
                f"{share:.0%} of memory bandwidth",
            )
        if self.read.kernel != "lowbit":
            return ()
        if stack.packed_cache.unpack_bytes:
            return (
                f"{said} software that unpacks a layer to fp16 before attention, moving "
                f"{stack.packed_cache.unpack_bytes:g} bytes per number for it",
            )
        if stack.packed_cache.unpack_ops:
            each = f"{stack.packed_cache.unpack_ops:g} vector operations per number"
            return (
                f"{said} an attention kernel that unpacks in registers ({each}); a naive one is "
                f"slower",
            )
        passes = (
            f" in {stack.packed_cache.passes:g} passes" if stack.packed_cache.passes > 1 else ""
        )
        return (
            f"{said} attention kernels that read a packed cache{passes} at "
            f"{stack.kernel('lowbit').memory:.0%} of memory bandwidth, with unpacking hidden",
        )

    @property
    def by_token(self) -> bool:
        """Whether single tokens can be dropped, moved or fetched without their neighbours."""
        return True

    @property
    def scored(self) -> bool:
        """Whether attention over the prompt has to write its scores to GPU memory."""
        return False

    def scores_prompt(self, at: "LayerPass") -> bool:
        """Return whether this stack writes the prompt's scores to GPU memory.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return self.scored

    @property
    def exact(self) -> bool:
        """Whether the cache is stored without quantisation."""
        return not self.stored.packs

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the ops before attention, which quantise the new tokens.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return []

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the ops after attention; none if tokens are quantised before it.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return []

    def restore(self, at: LayerPass, tokens: Number) -> list[Op]:
        """Return the ops that dequantise or reconstruct the keys of chosen tokens.

        Parameters
        ----------
        at : a decoding pass through the layer.
        tokens : chosen per KV head. [tokens]
        """
        return []

    def extra_bytes(self, at: LayerPass) -> Number:
        """Return the bytes that attention reads besides keys and values in the format ``read``. [B]

        Negative if it reads fewer.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return 0.0

    def extra_flops(self, at: LayerPass) -> Number:
        """Return the FLOPs of attention besides those of whole keys and values. [FLOP]

        Negative if channels are pruned.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return 0.0

    def number_bytes(self, at: LayerPass) -> tuple[Number, Number]:
        """Return the average size of a stored number of a key, and of a value. [B]

        Parameters
        ----------
        at : the pass through the layer.
        """
        return self.stored.k_number, self.stored.v_number

    def transfer_bytes(self, at: LayerPass, tokens: Number) -> tuple[Number, Number]:
        """Return the bytes of the keys and of the values of some tokens, as stored. [B]

        Parameters
        ----------
        at : the pass through the layer.
        tokens : cached tokens per sequence. [tokens]
        """
        m, stored = at.d.shard, self.stored
        k, v = stored.packed_sides(m.k_width, m.v_width, tokens)
        return at.p.batch * k * stored.k_number, at.p.batch * v * stored.v_number

    def side_bytes(self, at: LayerPass) -> tuple[Number, Number]:
        """Return the bytes of one layer's keys and of its values, all on the GPU. [B]

        Recent tokens in full precision are not counted.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return _format_side_bytes(at, self.read)

    def tail_bytes(self, at: LayerPass) -> Number:
        """Return the bytes of recent tokens in full precision, which stay on the GPU. [B]

        Parameters
        ----------
        at : the pass through the layer.
        """
        m = at.d.shard
        return at.p.batch * self.read.tail_bytes(m.k_width, m.v_width)

    def host_bytes(self, at: LayerPass) -> tuple[Number, Number]:
        """Return the size of one layer's keys and values if all are in host memory. [B]

        Parameters
        ----------
        at : the pass through the layer.
        """
        return (
            self.side_bytes(at) if self.read == self.stored else _format_side_bytes(at, self.stored)
        )

    def resident(self, at: LayerPass) -> dict[str, Number]:
        """Return the memory of one layer's cache on the GPU, by buffer; ``kv`` is the cache. [B]

        Parameters
        ----------
        at : the pass through the layer.
        """
        return {"kv": sum(self.side_bytes(at), self.tail_bytes(at))}


def _format_side_bytes(at: LayerPass, stored: Format) -> tuple[Number, Number]:
    m = at.d.shard
    k, v = stored.resident_sides(m.k_width, m.v_width, at.kept_tokens)
    return at.p.batch * k, at.p.batch * v


@frozen
class Placement(Part):
    """Where cached tokens, weights and hidden states live; by default all on the GPU."""

    name = "gpu"
    axis: ClassVar[Axis] = "placement"

    @property
    def exact(self) -> bool:
        """Always true: copies do not change numbers."""
        return True

    @property
    def k_host(self) -> Number:
        """Share of the cached keys that is in host memory and is copied to the GPU."""
        return 0.0

    @property
    def v_host(self) -> Number:
        """Share of the cached values that is in host memory and is copied to the GPU."""
        return 0.0

    @property
    def on_cpu(self) -> Number:
        """Share of the cached tokens whose attention the CPU computes."""
        return 0.0

    @property
    def recomputes(self) -> bool:
        """Whether some keys and values are recomputed from layer inputs."""
        return False

    @property
    def streams(self) -> bool:
        """Whether copies run ahead of layers, or the CPU attends."""
        return False

    @property
    def fills_drive(self) -> bool:
        """Whether a part of the cache, weights or hidden states is on a drive."""
        return False

    @property
    def streams_weights(self) -> bool:
        """Whether a part of the weights comes from the host or a drive."""
        return False

    def weights_alone(self) -> "Placement":
        """Return this placement of weights and hidden states, with all caches on the GPU."""
        return self

    @property
    def tiles(self) -> int:
        """Parts of the batch that pass through a layer one after another."""
        return 1

    def runtime(self, at: LayerPass) -> list[Op]:
        """Return an op with the fixed time per layer of software that offloads caches.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return []

    def fetch(self, at: LayerPass) -> list[Op]:
        """Return the ops that copy the cache from the host to the GPU in decoding.

        Parameters
        ----------
        at : a decoding pass through the layer.
        """
        return []

    def store(self, at: LayerPass) -> list[Op]:
        """Return the ops that copy the keys and values of new tokens to the host.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return []

    def attention_waits(self, at: LayerPass) -> tuple[str, ...]:
        """Return the names of the ops that attention waits for.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return ()

    def attend(self, at: LayerPass) -> list[Op]:
        """Return the ops of attention in a decoding pass.

        Parameters
        ----------
        at : a decoding pass through the layer.
        """
        return attend(at)

    def finish(self, at: LayerPass) -> list[Op]:
        """Return further copies to the host after the prompt's attention.

        Parameters
        ----------
        at : a pass over the prompt.
        """
        return []

    def prefetch(self, at: LayerPass) -> list[Op]:
        """Return the copies of weights and hidden states that start before the layer.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return []

    def weights_wait(self) -> tuple[str, ...]:
        """Return the names of the ops that the layer's first matrix product waits for."""
        return ()

    def output_wait(self, at: LayerPass) -> tuple[str, ...]:
        """Return the names of the ops that the output projection waits for.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return ()

    def cache(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's cache, by tier and name. [B]

        Parameters
        ----------
        at : the pass through the layer.
        """
        return {"gpu": at.storage.resident(at)}

    def draft_room(self, at: LayerPass) -> Buffers:
        """Return the memory that the layer's cache reserves for a round's drafts. [B]

        Parameters
        ----------
        at : the pass through the layer.
        """
        return {"gpu": {"kv": sum(draft_bytes(at))}} if at.drafting.room else {}

    def weights(self, size: float) -> Buffers:
        """Return the memory of one layer's weights, by tier and name. [B]

        Parameters
        ----------
        size : of the layer's weights. [B]
        """
        return {"gpu": {"weights": size}}


@frozen
class Drafting(Part):
    """How tokens are drafted, which one pass of the model then verifies; by default not at all."""

    name = "none"
    axis: ClassVar[Axis] = "drafting"

    @property
    def exact(self) -> bool:
        """Always true: verified tokens are those that the model would generate."""
        return True

    @property
    def drafts(self) -> int:
        """Tokens proposed per round."""
        return 0

    @property
    def verified(self) -> int:
        """Tokens per sequence in the verifying pass: all drafts and one more."""
        return self.drafts + 1

    @property
    def accepted(self) -> float:
        """Drafts accepted per round, on average."""
        return 0.0

    @property
    def assumes(self) -> str:
        """What the predicted speed assumes, such as an acceptance rate; empty if nothing."""
        return ""

    def lacks(self, model: Model) -> str:
        """Return why a published model cannot draft by this method, or an empty string.

        Not a part of ``refuses``: a real run may use untrained heads.

        Parameters
        ----------
        model : the model.
        """
        return ""

    @property
    def spread(self) -> float:
        """Relative standard deviation of tokens per round, if acceptance is not given."""
        return 0.0

    def own_pass(self, point: Point, parts: Parts) -> Parts | None:
        """Return the parts of a draft pass through the model's layers; None for other drafters.

        Parameters
        ----------
        point : the draft's pass.
        parts : of the layer in a verifying pass.
        """
        return None

    def steps(self, deployment: Deployment, point: Point) -> tuple[Step, ...]:
        """Return the draft passes of a round by a draft model or head.

        Parameters
        ----------
        deployment : model, machine and software.
        point : the first pass of the round.
        """
        return ()

    def round_ops(self, deployment: Deployment, point: Point) -> tuple[Op, ...]:
        """Return the engine's work per round besides the passes.

        Parameters
        ----------
        deployment : model, machine and software.
        point : the first pass of the round.
        """
        return ()

    def prompt_steps(self, deployment: Deployment, point: Point) -> tuple[Step, ...]:
        """Return the prefill passes of a draft model or head.

        Parameters
        ----------
        deployment : model, machine and software.
        point : the model's own pass over the prompt.
        """
        return ()

    def fill_draft_cache(self, at: LayerPass) -> list[Op]:
        """Return the ops that fill a layer's draft cache after prefill.

        Parameters
        ----------
        at : a pass over the prompt.
        """
        return []

    def extra_bytes(self, at: LayerPass) -> Number:
        """Return the bytes that verification writes for the drafts within attention. [B]

        Parameters
        ----------
        at : the pass through the layer.
        """
        return 0.0

    @property
    def room(self) -> int:
        """Return the further tokens per sequence that caches reserve for drafts. [tokens]"""
        return 0

    def resident(self, at: LayerPass) -> Buffers:
        """Return the memory of a layer's draft cache, by tier and name. [B]

        Parameters
        ----------
        at : the pass through the layer.
        """
        return {}

    def draft_weights(self, at: LayerPass) -> Buffers:
        """Return the memory of a layer's weights that only drafts use. [B]

        Parameters
        ----------
        at : the pass through the layer.
        """
        return {}

    def draft_memory(self, deployment: Deployment, point: Point) -> Buffers:
        """Return the memory of a draft model or head, by tier and name. [B]

        Parameters
        ----------
        deployment : model, machine and software.
        point : a pass of the model.
        """
        return {}


PLAIN = Parts(Selection(), Storage(), Placement(), Drafting())
"""A layer without a technique."""


# what parts of several axes call


def attend(
    at: LayerPass, after: tuple[str, ...] = (), *, extra_bytes: Number = 0.0, **more: Any
) -> list[Op]:
    """Return the ops of the new tokens' attention to the selected tokens, in their stored format.

    Parameters
    ----------
    at : the pass through the layer.
    after : names of the ops that it waits for.
    extra_bytes : bytes read in addition to the selected tokens. [B]
    more : further arguments of :func:`kvsim.engine.attention.ops`.
    """
    p = at.p
    limit = None if p.prefill else at.selection.limit(at)
    extra = extra_bytes + (at.storage.extra_bytes(at) + at.selection.extra_bytes(at))
    extra = extra + at.drafting.extra_bytes(at) * at.shape.keeps
    pairs = _pairs_of_new_tokens(at, limit)
    if limit is not None and pairs is not None:  # what the first of the new tokens sees
        limit = limit - (p.new - 1) * (np.asarray(pairs) > 0)
    found = attention.ops(
        at.d, p, at.shape, stored=at.storage.read, limit=limit, extra_bytes=extra,
        scored=at.selection.scored or at.storage.scores_prompt(at), after=after, **more,
    )  # fmt: skip
    if type(at.storage).extra_flops is not Storage.extra_flops:
        thin = at.storage.extra_flops(at)
        found = [replace(op, flops=op.flops + thin) if op.name == "attn" else op for op in found]
    if p.prefill:
        return [at.selection.thin_prompt(at, op) if op.name == "attn" else op for op in found]
    return found if pairs is None else [_with_pairs(op, at, pairs) for op in found]


def _pairs_of_new_tokens(at: LayerPass, limit: Number | None) -> Number | None:
    """Count the pairs of several new tokens with each other, behind a cut prompt, per head and
    sequence.
    """
    if at.p.prefill or at.selection.evicts != "after the prompt" or not np.any(at.p.new > 1):
        return None
    own = at.p.new * (at.p.new - 1) / 2
    return own * (np.asarray(limit) < at.cached)


def _with_pairs(op: Op, at: LayerPass, pairs: Number) -> Op:
    """Attention with the products of these pairs too."""
    if op.kernel not in ("attention", "attention-fp8", "lowbit") or at.d.shard.latent:
        return op
    m = at.d.shard
    return replace(op, flops=op.flops + 4.0 * at.p.batch * m.heads * m.head_dim * pairs)


def pack(at: LayerPass) -> list[Op]:
    """Return the op that quantises kept prompt tokens in prefill, and new tokens later.

    Parameters
    ----------
    at : the pass through the layer.
    """
    stored = at.storage.stored
    if at.p.prefill:
        kept = at.selection.count_kept_prompt(at)
        before = np.minimum(kept, at.p.context)  # packed by earlier passes over the prompt
        return ops.pack_prompt(at.d, at.p.batch, kept, stored, before)
    return ops.quantise(at.d, at.staying, stored)


def resident_kv(at: LayerPass, stored: Format) -> Number:
    """Return the memory of one layer's kept tokens in a format. [B]

    Parameters
    ----------
    at : the pass through the layer.
    stored : the format.
    """
    m = at.d.shard
    size = stored.resident(m.k_width, m.v_width, at.kept_tokens)
    return at.p.batch * size


def draft_bytes(at: LayerPass) -> tuple[Number, Number]:
    """Return the memory that a layer's cache reserves for the drafts of a round. [B]

    Parameters
    ----------
    at : the pass through the layer.
    """
    tokens = at.p.batch * at.drafting.room
    k, v = at.storage.number_bytes(at)
    return tokens * at.d.shard.k_width * k, tokens * at.d.shard.v_width * v
