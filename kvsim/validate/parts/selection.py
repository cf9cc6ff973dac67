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
from kvsim.validate.model.attention import Pass, Seen, attend, visible
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import LayerWeights
from kvsim.validate.parts.rows import PerTokenCache
from kvsim.validate.parts.store import (
    KvStore,
    Made,
    Resident,
    RunningGeneration,
    SharedObjects,
    SlotRange,
    hold_chunk,
    join_resident,
)
from kvsim.validate.transfer import Transfers, to_device

NONE: Mapping[str, str] = MappingProxyType({})


class LayeredRun:
    """What the pieces of a composition may ask of the run that they are part of.

    Attributes
    ----------
    lengths
        Of the prompts. [tokens]
    prompt
        The longest of them. [tokens]
    capacity
        Positions in use at most. [tokens]
    gamma
        Tokens drafted per round.
    drafted
        Tokens drafted in each round.
    generate
        Tokens to generate per sequence.
    beyond
        Tokens after the longest prompt, with drafts.
    parts
        Of every layer.
    layers
        Part by part of the batch where a layer has several.
    """

    technique: Technique
    decoder: Decoder
    lengths: list[int]
    prompt: int
    capacity: int
    gamma: int
    drafted: list[int]
    generate: int
    beyond: int
    deployment: Deployment
    parts: list[Parts]
    layers: "list[LayerCache]"

    @property
    def counter(self) -> NullCounter:
        """Where ops are counted."""
        return self.decoder.counter

    @property
    def model(self) -> Model:
        """The model that runs."""
        return self.decoder.arch.model

    @property
    def batch(self) -> int:
        """Sequences that run together."""
        return len(self.lengths)

    @cached_property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Heads, widths and window of every layer."""
        return self.decoder.arch.shapes

    def weights(self, layer: int, kind: Kind) -> LayerWeights:
        """Return the weights of a layer; those of drafts and streamed ones may differ."""
        return self.decoder.weights.layers[layer]

    def make_store(self, context: "LayerContext", slots: int) -> KvStore:
        """Make the storage of a layer where its placement wants it."""
        raise NotImplementedError

    def transfers(self, layer: int) -> Transfers:
        """Return the copy lanes of a layer's placement."""
        raise NotImplementedError

    def shared(self, key: object, make: Callable[[], Made]) -> Made:
        """Return what layers share, and make it when it is first asked for."""
        raise NotImplementedError

    def shared_objects(self, rows: slice) -> SharedObjects:
        """Return what the layers share for one part of the batch."""
        raise NotImplementedError

    def round_room(self, cached: list[int]) -> int:
        """Count the tokens that the next round may append.

        Returns
        -------
        int
            New tokens of every sequence at most. [tokens]
        """
        raise NotImplementedError


@dataclass
class LayerContext:
    """Which layer of which run a cache is of.

    Attributes
    ----------
    parts
        What the technique says of the layer.
    heads
        KV heads that the store holds; 0 for all of the model's.
    rows
        One part of the batch.
    """

    run: LayeredRun
    layer: int
    parts: Parts
    heads: int = 0
    rows: slice = field(default_factory=lambda: slice(0, None))

    @property
    def lengths(self) -> list[int]:
        """Prompts of these sequences [tokens]."""
        return self.run.lengths[self.rows]

    @property
    def batch(self) -> int:
        """How many sequences they are."""
        return len(self.lengths)

    @property
    def visit(self) -> tuple[int, int]:
        """The layer, and the part's first sequence."""
        return self.layer, self.rows.start

    def shared(self, key: object, make: Callable[[], Made]) -> Made:
        """Return what layers share for this part of the batch, made when it is first asked for."""
        return self.run.shared_objects(self.rows).get(key, make)


class LayerCache:
    """What one layer keeps and reads; subclasses are named as the selection they do.

    A selection says how many slots it needs, what stays of the prompt, where new tokens go, and
    attends. It stores numbers through ``kv`` alone.
    """

    in_order = True  # whether a token's slot is its position
    replays = False  # whether what it does follows from nothing but the number of slots
    guesses = ""  # the technique that runs its rounds, if these guess a token behind the newest
    differences: Mapping[str, str] = NONE
    """Ops and buffers that really differ from what is stated, and why."""

    def __init__(self, place: LayerContext) -> None:
        run = place.run
        self.context, self.parts, self.layer = place, place.parts, place.layer
        self.run = run
        self.lengths, self.batch, self.prompt = place.lengths, place.batch, run.prompt
        self.capacity, self.generate = run.capacity, run.generate
        self.shape: LayerShape = run.shapes[place.layer]
        self.model: Model = run.model
        self.device, self.dtype = run.decoder.device, run.decoder.dtype
        self._on_device = to_device(self.lengths, self.device)
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
        """Tokens per sequence that there is room for."""
        return self.capacity

    @property
    def direct(self) -> bool:
        """Whether chunks of the prompt go straight into their slots."""
        return self.kv.plain and self.slots >= self.prompt

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend with a chunk of the prompt to the prompt so far."""
        return self.kv.attend_prompt(queries, keys, values, step, self._visible(step))

    def attend_from(
        self, held: tuple[Tensor, Tensor], queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Attend with a chunk of a prompt that is held elsewhere until it leaves.

        Parameters
        ----------
        held
            Room for the prompt's keys and values, which the chunk is written to.
        """
        with self.counter.op("attn") as record:
            k, v = hold_chunk(record, held, keys, values, step)
            return attend(record, queries, k, v, self._visible(step))

    def before_input(self, tensor: Tensor, step: Pass) -> None:
        """See the input of the layer before, in any pass after the prompt."""

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Store what stays of a prompt that has been read.

        Parameters
        ----------
        keys, values
            Those of the prompt, (batch, KV heads, longest prompt, dim).
        """
        self.kv.fill(keys, values, self.lengths)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Store the new tokens of a pass, and attend with them."""
        return self.attend_behind(queries, keys, values, step, SlotRange.after_cached(step))

    def prompt_done(self) -> None:
        """Every layer has read the prompt."""

    def after_prompt(self, generation: RunningGeneration) -> None:
        """Do what comes between the first token and the first round: further passes."""

    def buffers(self) -> Resident:
        """What the selection keeps besides the cells."""
        return {}

    def in_flight(self) -> list[Tensor]:
        """Copies of the prompt that are on their way to the host, beside that of the run."""
        return []

    def stored_tokens(self, tokens: list[int]) -> list[int]:
        """Count the tokens that the storage holds. [tokens]"""
        return tokens

    # what they share

    @property
    def counter(self) -> NullCounter:
        """Where ops are counted."""
        return self.run.counter

    def make(self, slots: int) -> KvStore:
        """Make storage where the layer's placement wants it."""
        return self.run.make_store(self.context, slots)

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Store a chunk of the prompt straight in its slots, and attend with it."""
        if len(step.starts) < self.batch:
            held = self.kv.prompt(self.slots)
            return self.attend_from(held, queries, keys, values, step)
        return self.attend_behind(queries, keys, values, step, SlotRange.after_cached(step))

    def attend_behind(
        self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass, span: SlotRange
    ) -> Tensor:
        """Store new tokens in given slots, and attend to all slots in use."""
        if step.fixed:
            span = replace(span, room=self.kv.slots)
        self.kv.append(keys, values, span)
        return self.kv.attend(queries, span, span.visible(step, self.shape.window))

    def resident(self) -> Resident:
        """Every tensor that the layer keeps."""
        return join_resident({"gpu": self.kv.tensors()}, self.buffers())

    @property
    def rows(self) -> PerTokenCache:
        """The cells, for selections that read or write single rows.

        Raises
        ------
        InputError
            If the storage packs tokens together, or keeps rotated ones.
        """
        if not isinstance(self.kv, PerTokenCache) or not self.kv.keeps_numbers:
            chosen, stored = self.parts.selection.name, self.parts.storage.name
            raise InputError(
                f"{chosen}: no real implementation works on single rows of {stored}; use grouped"
            )
        return self.kv

    def refuse_drafts(self) -> None:
        """For selections that choose what one query reads."""
        if self.run.gamma:
            raise InputError(
                f"{self.parts.selection.name}: its real implementation chooses for one query, and "
                f"drafts are verified together; run it without drafts"
            )

    def refuse_windows(self) -> None:
        """For selections that do not know the positions of what they keep."""
        if self.shape.window:
            raise InputError(
                f"{self.parts.selection.name}: {self.model.name} has sliding windows, which evict "
                f"by themselves; choose a model without them, or another technique"
            )

    def _visible(self, step: Pass) -> Seen:
        return visible(step, step.length, self.shape.window)


class All(LayerCache):
    """What selections do if they do nothing."""

    replays = True
