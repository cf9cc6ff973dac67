"""What one layer keeps in slots: the storage of a composition, and how a pass finds it.

A storage stores keys and values of the tokens that a selection keeps, which need not be the text's:
slot ``n`` of a sequence holds whatever the selection put there. Where it lives is the placement's
business, which hands out the tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.techniques.axes.base import Storage
from kvsim.validate.counter import NullCounter, OpRecord, uncounted
from kvsim.validate.kernels.attention import attend
from kvsim.validate.kernels.stores import PartialAttention, View
from kvsim.validate.model.architecture import rotate
from kvsim.validate.model.attention import Pass, Seen, visible
from kvsim.validate.model.attention import attend as full_attention
from kvsim.validate.transfer import to_device

Made = TypeVar("Made")
Widths = Sequence[tuple[int, torch.dtype]]
"""Numbers of every part of a row, and their formats."""

Turns = Callable[[Tensor], tuple[Tensor, Tensor] | None]
"""Cosine and sine at positions (sequences, tokens); none where keys are not turned."""


def no_turns(positions: Tensor) -> None:
    """Positions are not in the keys."""


@dataclass
class SharedObjects:
    """What the layers of a run have in common: made when first asked for."""

    made: dict[object, object] = field(default_factory=dict)

    def get(self, key: object, make: Callable[[], Made]) -> Made:
        """What goes by that key."""
        if key not in self.made:
            self.made[key] = make()
        found: Made = self.made[key]  # type: ignore[assignment]
        return found


@frozen
class CacheRoom:
    """Where a layer's tensors are made: for so many sequences and KV heads.

    Parameters
    ----------
    rows : room for rows of several parts, (sequences, KV heads, rows, width) each; it may be in
        host memory, or be a buffer that layers use in turn.
    """

    sequences: int
    heads: int
    dim: int  # of a head
    dtype: torch.dtype
    device: torch.device
    rows: Callable[[int, Widths], list[Tensor]]
    turns: Turns = no_turns
    prompts: list[int] = field(default_factory=list)  # of every sequence [tokens]
    fresh: int = 1  # new tokens of a pass that yields one token
    common: SharedObjects = field(default_factory=SharedObjects)

    def zeros(self, slots: int, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Room on the GPU, (sequences, KV heads, slots, dim)."""
        shape = (self.sequences, self.heads, slots, self.dim if dim is None else dim)
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def turned(self, keys: Tensor, slots: Tensor, back: bool) -> Tensor:
        """Keys (sequences, heads, tokens, dim) with their positions turned in, or without them."""
        turns = self.turns(slots)
        if turns is None:
            return keys
        cos, sin = (table.float() for table in turns)
        if back:  # stretched rotations scale too
            return (rotate(keys.float(), cos, -sin) / (cos**2 + sin**2)).to(keys.dtype)
        return rotate(keys.float(), cos, sin)


def on_the_gpu(
    sequences: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> CacheRoom:
    """Room that is all the layer's own."""

    def rows(count: int, widths: Widths) -> list[Tensor]:
        shape = (sequences, heads, count)
        return [torch.zeros(*shape, width, dtype=kind, device=device) for width, kind in widths]

    return CacheRoom(sequences, heads, dim, dtype, device, rows)


@frozen
class SlotRange:
    """The slots of one pass: where new tokens go, and which slots its queries see.

    Sequences see their first ``ends`` slots, each new token those up to its own.
    """

    slots: Tensor  # (sequences, new), on the device
    ends: tuple[int, ...]  # slots in use of each sequence after the pass
    new: int
    first: int | None = None  # slot of the first new token, where all sequences' are the same
    draft: bool = False  # whether the pass drafts
    room: int | None = None  # slots that shapes follow from where the pass is replayed later

    @classmethod
    def after_cached(
        cls, step: Pass, away: Sequence[int] = (), moved: Tensor | int = 0
    ) -> "SlotRange":
        """New tokens behind the cached ones, of which ``away`` are no longer in the cache."""
        gone = away or [0] * len(step.starts)
        starts = tuple(n - m for n, m in zip(step.starts, gone, strict=True))
        alike = not step.fixed and min(starts) == max(starts)
        first = starts[0] if alike else None
        ends = tuple(n + step.new for n in starts)
        slots = step.positions if isinstance(moved, int) and not moved else step.positions - moved
        return cls(slots, ends, step.new, first, step.kind == "draft")

    @property
    def longest(self) -> int:
        """Slots in use of the longest sequence, or all that there are."""
        return max(self.ends) if self.room is None else self.room

    def lengths(self, device: torch.device) -> Tensor:
        """Slots in use of every sequence, on the device."""
        if self.room is None:
            return lengths_on(device, self.ends)
        return (self.slots[:, -1] + 1).int()

    def visible(self, step: Pass, window: int | None = None) -> Seen:
        """What each query sees of the slots in use, which are in the order of tokens."""
        starts = tuple(end - self.new for end in self.ends)
        return visible(replace(step, starts=starts, positions=self.slots), self.longest, window)


class KvStore(ABC):
    """Keys and values of one layer in slots, as a storage keeps them.

    Parameters
    ----------
    part : what the technique says of it.
    slots : tokens there is room for.
    """

    plain = False  # whether keys and values are full-precision numbers in place
    replays = False  # whether a pass may be the same work whatever is cached, see ``branch``
    drops_tokens = True  # whether tokens may be overwritten by the next pass
    keeps_numbers = True  # whether rows hold the numbers that came, each by itself
    by_position = False  # whether a token's slot has to be its position
    fetches_values = False  # whether values may be on the host without their keys
    buffers_drafts = (
        False  # whether drafts stay in room that is there anyhow until they are settled
    )
    differences: Mapping[str, str] = MappingProxyType({})
    """Ops and buffers that really differ from what is stated, and why."""

    split_differences: Mapping[str, str] = MappingProxyType({})
    """Further ones where rows are kept in two places."""

    op_periods: Mapping[str, int] = MappingProxyType({})
    """Ops done whenever a cache has grown by so many tokens; the prediction spreads them."""

    def __init__(self, part: Storage, room: CacheRoom, slots: int, counter: NullCounter) -> None:
        self.part, self.room, self.slots, self.counter = part, room, slots, counter

    def attend_prompt(
        self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass, seen: Seen
    ) -> Tensor:
        """Attention of a chunk over the prompt so far, in full precision.

        Storages that rank tokens by attention look at it here.
        """
        with self.counter.op("attn") as record:
            return full_attention(record, queries, keys, values, seen)

    def prompt(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the prompt's first tokens, while it is read straight into its slots.

        (sequences, KV heads, tokens, dim) each.
        """
        raise NotImplementedError

    @abstractmethod
    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """Store a prompt's tokens (sequences, KV heads, tokens, dim) in the first slots.

        Parameters
        ----------
        plainly : the op that writes them where nothing is packed.
        """

    @property
    def reads_all_slots(self) -> bool:
        """Whether attention of a pass that is replayed reads all slots, under a mask."""
        return True

    def op_shares(self, ends: list[int]) -> Mapping[str, float]:
        """How much of ops a pass with these slots in use after it does; a prediction takes 1."""
        return {}

    def branch(self, ends: list[int]) -> Hashable:
        """Passes with these slots in use after them do the same where this is; none for no pass."""
        return ()

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Store new tokens (sequences, KV heads, new, dim) in their slots."""

    @abstractmethod
    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attention to the slots in use."""

    def attend_async(self, queries: Tensor, span: SlotRange, seen: Seen) -> Callable[[], Tensor]:
        """Attention that may go on beside that of other cells, until it is asked for."""
        out = self.attend(queries, span, seen)
        return lambda: out

    @abstractmethod
    def attend_with_scores(
        self, queries: Tensor, span: SlotRange, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        """The same of one query, and what it gave each slot, (sequences, heads, 1, slots)."""

    def room_left(self, tokens: int) -> int | None:
        """New tokens that fit behind so many until some have to be settled; none for no limit."""
        return None

    def commit(self, before: list[int], after: list[int]) -> None:  # noqa: B027 - most need not
        """A round is over: so many tokens of every sequence stay, where there were so many."""

    def rows_in_use(self, ends: tuple[int, ...]) -> list[int]:
        """Rows of every table that tokens up to these ends fill, in the order they were made."""
        raise NotImplementedError

    def bind(self, tables: list[Tensor]) -> None:
        """Use these tables from here on, in the order they were made."""
        raise NotImplementedError

    def gpu_tensors(self) -> list[Tensor]:
        """What stays on the GPU wherever the tables are."""
        return []

    @abstractmethod
    def tensors(self) -> dict[str, list[Tensor]]:
        """Everything that stays in memory, by the name of its buffer."""


def attend_packed(
    record: OpRecord,
    queries: Tensor,
    view: View,
    span: SlotRange,
    read: Callable[[], Iterable[Tensor]],
    scored: bool = False,
) -> PartialAttention:
    """Attention over packed slots; ``read`` gives what it has read of them."""
    part = attend(queries, view, scored)
    if record.counting:
        with uncounted():
            record.reads(queries, *read())
            record.writes(part.out.to(queries.dtype))
            # PyTorch's own products are counted as they run
            count_pairs(record, queries, span, queries.is_cuda and view.fused)
    return part


def count_pairs(record: OpRecord, queries: Tensor, span: SlotRange, fused: bool) -> None:
    """Say how many pairs of a query and a token are seen, and of a fused kernel's were computed.

    Every sequence is computed up to its own end, by each of its new queries.
    """
    own = torch.arange(span.new)
    pairs = [torch.arange(end) <= (end - span.new + own)[:, None] for end in span.ends]
    seen = torch.cat([p.flatten() for p in pairs])
    record.visible(span.new, span.longest, seen)
    if fused:
        record.computes(4 * queries[0, :, 0].numel() * seen.numel())


def shares(part: PartialAttention) -> Tensor:
    """What the last query gave each slot, (sequences, heads, 1, slots)."""
    assert part.scores is not None
    return (part.scores.float() - part.lse[..., -1:]).exp()[:, :, None]


def lengths_on(device: torch.device, counts: Sequence[int]) -> Tensor:
    """Counts of every sequence on the device, made there where all are equal."""
    if min(counts) == max(counts):
        return torch.full((len(counts),), counts[0], dtype=torch.int32, device=device)
    return to_device(counts, device, torch.int32)
