"""The cache of one layer: a selection over a storage. The default keeps and reads every token."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.models.model import LayerShape, Model
from kvsim.techniques.layers import Parts
from kvsim.validate.model.attention import Pass, Seen, attend, visible
from kvsim.validate.parts.base import Resident, put, together
from kvsim.validate.parts.bytoken import ByToken
from kvsim.validate.parts.cells import Cells, Made, Spot
from kvsim.validate.tally import Silent

if TYPE_CHECKING:
    from kvsim.validate.parts.composed import Composed

NONE: Mapping[str, str] = MappingProxyType({})


@dataclass
class Where:
    """Which layer of which run a cache is of."""

    run: "Composed"
    layer: int
    parts: Parts  # what the technique says of the layer
    heads: int = 0  # KV heads that the cells hold; 0 for all of the model's
    rows: slice = field(default_factory=lambda: slice(0, None))  # one part of the batch

    @property
    def lengths(self) -> list[int]:
        """Prompts of these sequences. [tokens]"""
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
        """What layers share for this part of the batch: made when first asked for."""
        return self.run.common_of(self.rows).get(key, make)


class Selecting:
    """What one layer keeps and reads; subclasses are named as the selection they do.

    A selection says how many slots it needs, what stays of the prompt, where new tokens go, and
    attends. It stores numbers through ``cells`` alone.
    """

    in_order = True  # whether a token's slot is its position
    replays = False  # whether what it does follows from nothing but the number of slots
    guesses = False  # whether it expects a guess of the next token behind the newest one
    differences: Mapping[str, str] = NONE
    """Ops and buffers that really differ from what is stated, and why."""

    def __init__(self, place: Where) -> None:
        run = place.run
        self.place, self.parts, self.layer = place, place.parts, place.layer
        self.run = run
        self.lengths, self.batch, self.prompt = place.lengths, place.batch, run.prompt
        self.capacity, self.generate = run.capacity, run.generate
        self.shape: LayerShape = run.shapes[place.layer]
        self.model: Model = run.model
        self.device, self.dtype = run.decoder.device, run.decoder.dtype
        self._on_device = torch.tensor(self.lengths, device=self.device)
        self.cells: Cells = self.make(self.slots)
        if self.shape.window and not self.cells.plain:
            raise InputError(
                f"{self.parts.storage.name}: {self.model.name} has sliding windows, which its "
                f"packed cache does not roll over; choose a model that attends to every token"
            )
        if self.cells.by_position and not self.in_order:
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
        return self.cells.plain and self.slots >= self.prompt

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attention of a chunk over the prompt so far, (batch, KV heads, tokens, dim)."""
        return self.cells.attend_prompt(queries, keys, values, step, self._seen(step))

    def attend_from(
        self, held: tuple[Tensor, Tensor], queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Attention of a chunk of the prompt that goes to where its prompt is held until it leaves.

        Parameters
        ----------
        held : room for the prompt's keys and values.
        """
        with self.tally.op("attn") as marks:
            for cache, new in zip(held, (keys, values), strict=True):
                put(cache, new, step)
            marks.writes(keys, values)
            k, v = (cache[step.rows, :, : step.length] for cache in held)
            return attend(marks, queries, k, v, self._seen(step))

    def filled(self, keys: Tensor, values: Tensor) -> None:
        """The prompt is read: store what stays of it."""
        self.cells.fill(keys, values, self.lengths)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Store new tokens, attend."""
        return self.attend_behind(queries, keys, values, step, Spot.behind(step))

    def prompt_read(self) -> None:
        """Every layer has read the prompt."""

    def buffers(self) -> Resident:
        """What the selection keeps besides the cells."""
        return {}

    def leaving(self) -> list[Tensor]:
        """Copies of the prompt that are on their way to the host, beside that of the run."""
        return []

    def held(self, tokens: list[int]) -> list[int]:
        """Of so many tokens of every sequence, those that the cells hold."""
        return tokens

    # what they share

    @property
    def tally(self) -> Silent:
        """Where ops are counted."""
        return self.run.tally

    def make(self, slots: int) -> Cells:
        """The storage's cells where the placement wants them."""
        return self.run.cells(self.place, slots)

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """A chunk straight into its slots."""
        if len(step.starts) < self.batch:
            held = self.cells.prompt(self.slots)
            return self.attend_from(held, queries, keys, values, step)
        return self.attend_behind(queries, keys, values, step, Spot.behind(step))

    def attend_behind(
        self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass, spot: Spot
    ) -> Tensor:
        """New tokens behind the others, and attention to all."""
        if step.fixed:
            spot = replace(spot, room=self.cells.slots)
        self.cells.append(keys, values, spot)
        return self.cells.look(queries, spot, spot.visible(step, self.shape.window))

    def resident(self) -> Resident:
        """Every tensor that the layer keeps."""
        return together({"gpu": self.cells.tensors()}, self.buffers())

    @property
    def rows(self) -> ByToken:
        """The cells, for selections that read or write single rows.

        Raises
        ------
        InputError
            If the storage packs tokens together, or keeps rotated ones.
        """
        if not isinstance(self.cells, ByToken) or not self.cells.as_given:
            chosen, stored = self.parts.selection.name, self.parts.storage.name
            raise InputError(
                f"{chosen}: no real implementation works on single rows of {stored}; use grouped"
            )
        return self.cells

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
                f"by themselves; choose a model without, or another technique"
            )

    def _seen(self, step: Pass) -> Seen:
        return visible(step, step.length, self.shape.window)


def refuse_taking_back(layers: list[Selecting], guesses: bool, drafts: bool) -> None:
    """For layers that would have to drop guessed or drafted tokens and cannot.

    Raises
    ------
    InputError
        Naming the first of them.
    """
    for layer in layers:
        chosen, stored = layer.parts.selection.name, layer.parts.storage.name
        takes_back = layer.cells.takes_back
        if guesses and not layer.guesses and not (chosen == "all" and takes_back):
            raise InputError(
                f"{chosen} over {stored}: its real implementation cannot drop a guessed token; "
                f"use specache:speculative=false beside it"
            )
        if drafts and not takes_back:
            raise InputError(
                f"{stored}: no real implementation takes drafts back from its latest tokens"
            )
