"""The cache of one layer: a selection over a storage. The default keeps and reads every token."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from torch import Tensor

from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape, Model
from kvsim.techniques.axes.base import Parts
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import Kind, NullCounter
from kvsim.validate.model.attention import Pass, Seen, visible
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.generation import RunningGeneration
from kvsim.validate.model.weights import LayerWeights
from kvsim.validate.parts.rows import PerTokenCache
from kvsim.validate.parts.scores import KeptQueries
from kvsim.validate.parts.store import (
    KvStore,
    Made,
    Resident,
    Settings,
    SharedObjects,
    SlotRange,
    hold_chunk,
    join_resident,
)
from kvsim.validate.transfer import Transfers

NONE: Mapping[str, str] = MappingProxyType({})


class LayeredRun:
    """Base of a run of one technique: the interface for its layers, stores and drafters."""

    technique: Technique
    decoder: Decoder
    batch: int  # sequences that run together
    prompt: int  # length of each prompt [tokens]
    capacity: int  # most positions in use [tokens]
    gamma: int  # drafts per round [tokens]
    drafted: list[int]  # drafts of each round so far [tokens]
    generate: int  # tokens to generate per sequence [tokens]
    beyond: int  # positions after the prompt, drafts included [tokens]
    deployment: Deployment  # predicted deployment
    parts: list[Parts]  # the technique's parts, by layer
    layers: "list[LayerCache]"  # caches by layer; several per layer that divides the batch
    common: SharedObjects  # objects that layers share

    @property
    def counter(self) -> NullCounter:
        """Counter of the FLOPs and bytes of ops."""
        return self.decoder.counter

    @property
    def model(self) -> Model:
        """The model that runs."""
        return self.decoder.arch.model

    @cached_property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Heads, widths and window of every layer."""
        return self.decoder.arch.shapes

    def weights(self, layer: int, kind: Kind) -> LayerWeights:
        """Return the weights of a layer, which may differ in draft passes or when streamed.

        Parameters
        ----------
        kind
            What the pass is for, such as "prefill" or "draft".
        """
        return self.decoder.weights.layers[layer]

    def make_store(self, context: "LayerContext", slots: int) -> KvStore:
        """Create the storage of a layer in the memory that its placement chooses."""
        raise NotImplementedError

    def transfers(self, layer: int) -> Transfers:
        """Return the copy streams that a layer's placement uses."""
        raise NotImplementedError

    def shared(self, key: object, make: Callable[[], Made]) -> Made:
        """Return an object that all layers share, made at the first call with its key.

        Parameters
        ----------
        key, make
            As for ``SharedObjects.get``.
        """
        return self.common.get(key, make)

    def shared_objects(self, rows: slice) -> SharedObjects:
        """Return the objects that all layers share for one part of the batch.

        Parameters
        ----------
        rows
            Sequences of the part.
        """
        return self.shared(("part", rows.start), SharedObjects)

    def round_room(self, cached: list[int]) -> int:
        """Return the number of tokens that the next round may append.

        Parameters
        ----------
        cached
            Cached tokens of each sequence. [tokens]

        Returns
        -------
        int
            Most new tokens per sequence. [tokens]
        """
        raise NotImplementedError


@dataclass
class LayerContext:
    """The layer of a run, and the part of the batch, that a cache belongs to.

    Attributes
    ----------
    run
        The run.
    layer
        Index of the layer.
    parts
        The technique's parts in this layer.
    heads
        Number of KV heads that the storage holds; 0 for all.
    rows
        Sequences of the part of the batch.
    """

    run: LayeredRun
    layer: int
    parts: Parts
    heads: int = 0
    rows: slice = field(default_factory=lambda: slice(0, None))

    @property
    def batch(self) -> int:
        """Number of sequences in this part of the batch."""
        return len(range(self.run.batch)[self.rows])

    @property
    def visit(self) -> tuple[int, int]:
        """Index of the layer, and index of the first sequence in this part of the batch."""
        return self.layer, self.rows.start

    def settings(self, kind: type[Settings]) -> Settings:
        """Return the technique's selection in this layer, typed as the class of its settings.

        Parameters
        ----------
        kind
            Class that the selection must be an instance of.

        Raises
        ------
        AssertionError
            If the selection is of another class.
        """
        assert isinstance(self.parts.selection, kind)
        return self.parts.selection


class LayerCache:
    """Cache of one layer; the base class reads every token, subclasses are selections.

    A selection determines the number of slots, the prompt tokens that are kept, the slots of new
    tokens, and the attention. Keys and values are stored by ``kv``, which may pack them.
    """

    in_order = True  # whether a token's slot is its position
    replays = False  # whether what it does follows from nothing but the number of slots
    guesses = ""  # the technique that runs its rounds, if these guess a token behind the newest
    last: KeptQueries | None = None  # queries of prompts by which tokens are ranked
    differences: Mapping[str, str] = NONE
    """Ops and buffers that really differ from what is stated, and why."""

    def __init__(self, place: LayerContext) -> None:
        run = place.run
        self.context, self.parts, self.layer = place, place.parts, place.layer
        self.run = run
        self.batch, self.prompt = place.batch, run.prompt
        self.capacity, self.generate = run.capacity, run.generate
        self.shape: LayerShape = run.shapes[place.layer]
        self.model: Model = run.model
        self.device, self.dtype = run.decoder.device, run.decoder.dtype
        self.kv: KvStore = self.make(self.slots)
        if self.shape.window and not self.kv.plain:
            raise InputError(
                f"{self.parts.storage.name}: {self.model.name} has sliding windows, which its "
                f"packed cache does not roll over; choose a model that attends to every token"
            )
        if self.kv.by_position and not self.in_order:
            raise InputError(
                f"{self.parts.storage.name}: where a token is stored follows from its position, "
                f"and {self.parts.selection.name} keeps tokens in other places; use grouped"
            )

    # what a selection says

    @property
    def slots(self) -> int:
        """Slots per sequence to allocate. [tokens]"""
        return self.capacity

    @property
    def direct(self) -> bool:
        """Whether chunks of prompts are written to their slots directly, without a buffer."""
        return self.kv.plain and self.slots >= self.prompt

    @property
    def divided(self) -> bool:
        """Whether a prompt has no single place, so that ``prefill`` appends it as new tokens."""
        return self.kv.divided

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend with a chunk of the prompts to the prompts so far.

        Selections override it to read fewer tokens, or to record data for ranking tokens; the
        queries in ``last`` are recorded here.

        Parameters
        ----------
        queries
            Queries of the chunk, (sequences, heads, chunk, dim).
        keys, values
            Keys and values of the prompts up to the end of the chunk, (sequences, KV heads, tokens,
            dim).
        step
            The pass over the chunk.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, chunk, dim).
        """
        self.observe(queries, step)
        return self.kv.attend_prompt(queries, keys, values, step, self._visible(step))

    def observe(self, queries: Tensor, step: Pass) -> None:
        """Record the queries of a chunk of the prompts by which tokens are ranked, if any are."""
        if self.last:
            self.last.observe(queries, step)

    def before_input(self, tensor: Tensor, step: Pass) -> None:
        """Hook that receives the previous layer's input after prefill; ignored by default.

        Parameters
        ----------
        tensor
            Normed hidden states that the previous layer's projections read, (sequences, new,
            hidden).
        step
            The pass.
        """

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Store the tokens that stay of a prompt that has been read, if they are not stored yet.

        Parameters
        ----------
        keys, values
            Keys and values of the prompts, (batch, KV heads, prompt, dim).
        """
        if not self.direct:
            self.kv.fill(keys, values)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Store the new tokens of a pass after the prompt, and attend with them.

        Parameters
        ----------
        queries
            Queries of the new tokens, (sequences, heads, new, dim).
        keys, values
            Keys and values of the new tokens, (sequences, KV heads, new, dim).
        step
            The pass: positions of the new tokens and number of cached ones.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, new, dim).
        """
        return self.attend_behind(queries, keys, values, step, SlotRange.after_cached(step))

    def prompt_done(self) -> None:
        """Free the memory that only prefill needs; called after prefill of all layers."""

    def after_prompt(self, generation: RunningGeneration) -> None:
        """Hook that runs between the first token and the first round; does nothing by default.

        Parameters
        ----------
        generation
            The generation, which can run further passes of the model.
        """

    def buffers(self) -> Resident:
        """Return the tensors that a selection keeps besides the storage of keys and values.

        Returns
        -------
        dict
            Tensors by memory tier (``gpu`` or ``host``) and name of the buffer; empty by default.
        """
        return {}

    def in_flight(self) -> list[Tensor]:
        """Return copies of prompts that have not arrived in host memory yet."""
        return []

    def stored_tokens(self, tokens: list[int]) -> list[int]:
        """Return how many tokens of each sequence the storage holds.

        Parameters
        ----------
        tokens
            Tokens of each sequence. [tokens]
        """
        return tokens

    def op_shares(self, cached: list[int]) -> Mapping[str, float]:
        """State how much of each op the next round does; by default what ``KvStore`` says.

        Parameters
        ----------
        cached
            Tokens of each sequence before the round. [tokens]
        """
        return self.kv.op_shares([n + 1 for n in self.stored_tokens(cached)])

    # what they share

    @property
    def counter(self) -> NullCounter:
        """Counter of the FLOPs and bytes of ops."""
        return self.run.counter

    def make(self, slots: int) -> KvStore:
        """Create storage in the memory that the layer's placement chooses.

        Parameters
        ----------
        slots
            Slots per sequence. [tokens]
        """
        return self.run.make_store(self.context, slots)

    def prompt_buffer(self) -> tuple[Tensor, Tensor]:
        """Return where chunks of prompts are written if ``direct``; by default to their slots.

        Returns
        -------
        tuple of Tensor
            Keys and values, (batch, KV heads, prompt, dim) each.
        """
        return self.kv.prompt(self.prompt)

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Write a chunk of the prompts to its place, and attend with it to the prompts so far.

        It is called only if ``direct`` is true; otherwise the run keeps the prompts in a buffer and
        calls ``attend_prompt`` itself.

        Parameters
        ----------
        queries
            Queries of the chunk, (sequences, heads, chunk, dim).
        keys, values
            Keys and values of the chunk, (sequences, KV heads, chunk, dim).
        step
            The pass over the chunk, which may contain only some sequences of the batch.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, chunk, dim).
        """
        if self.divided:
            return self.attend_behind(queries, keys, values, step, SlotRange.after_cached(step))
        buffer = self.prompt_buffer()
        with self.counter.op("attn") as record:
            k, v = hold_chunk(record, buffer, keys, values, step)
        return self.attend_prompt(queries, k, v, step)

    def attend_behind(
        self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass, span: SlotRange
    ) -> Tensor:
        """Store new tokens in given slots, and attend to all slots in use.

        Parameters
        ----------
        queries
            Queries of the new tokens, (sequences, heads, new, dim).
        keys, values
            Keys and values of the new tokens, (sequences, KV heads, new, dim).
        step
            The pass.
        span
            Slots of the new tokens, and slots in use after the pass.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, new, dim).
        """
        if step.fixed:
            span = replace(span, room=self.kv.slots)
        self.kv.append(keys, values, span)
        return self.kv.attend(queries, span, span.visible(step, self.shape.window))

    def resident(self) -> Resident:
        """Return every tensor that the layer keeps, by memory tier and name."""
        return join_resident({"gpu": self.kv.tensors()}, self.buffers())

    @property
    def rows(self) -> PerTokenCache:
        """The storage, for selections that read or write the rows of single tokens.

        Raises
        ------
        InputError
            If the storage packs several tokens together, or keeps rotated numbers.
        """
        if not isinstance(self.kv, PerTokenCache) or not self.kv.keeps_numbers:
            chosen, stored = self.parts.selection.name, self.parts.storage.name
            raise InputError(
                f"{chosen}: no real implementation works on single rows of {stored}; use grouped"
            )
        return self.kv

    def refuse_drafts(self) -> None:
        """Check that the run has no drafts, for selections that choose tokens for a single query.

        Raises
        ------
        InputError
            If the run drafts tokens.
        """
        if self.run.gamma:
            raise InputError(
                f"{self.parts.selection.name}: its real implementation chooses for one query, and "
                f"drafts are verified together; run it without drafts"
            )

    def refuse_windows(self) -> None:
        """Check that the layer has no sliding window, for selections that do not know positions.

        Raises
        ------
        InputError
            If the layer has a sliding window.
        """
        if self.shape.window:
            raise InputError(
                f"{self.parts.selection.name}: {self.model.name} has sliding windows, which evict "
                f"by themselves; choose a model without them, or another technique"
            )

    def _visible(self, step: Pass) -> Seen:
        return visible(step, step.length, self.shape.window)


class All(LayerCache):
    """A cache that keeps and reads all tokens."""

    replays = True
