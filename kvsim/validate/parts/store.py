"""Storage of one layer's keys and values in slots, and the slots of a pass.

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

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Tier
from kvsim.techniques.axes.base import Storage
from kvsim.validate.counter import NullCounter, OpRecord, uncounted
from kvsim.validate.kernels.attention import attend
from kvsim.validate.kernels.stores import PartialAttention, View
from kvsim.validate.model.architecture import rotate
from kvsim.validate.model.attention import Pass, Seen, visible
from kvsim.validate.model.attention import attend as full_attention
from kvsim.validate.parts.scores import KeptQueries
from kvsim.validate.transfer import to_device

Resident = dict[Tier, dict[str, list[Tensor]]]
"""Tensors by tier and by the buffer name that the technique states."""


def join_resident(*parts: Resident) -> Resident:
    """Join the resident tensors of several parts.

    Parameters
    ----------
    *parts
        Tensors of each part, by tier and buffer.
    """
    held: Resident = {"gpu": {}}
    for part in parts:
        for tier, buffers in part.items():
            for name, tensors in buffers.items():
                held.setdefault(tier, {}).setdefault(name, []).extend(tensors)
    return held


def hold_chunk(
    record: OpRecord, held: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, step: Pass
) -> tuple[Tensor, Tensor]:
    """Write a chunk of prompts to the buffers of prompts, and return the prompts so far.

    Parameters
    ----------
    held
        Buffers of keys and values of the whole batch, (batch, KV heads, slots, dim), changed in
        place.

    Returns
    -------
    tuple
        Views of the sequences' keys and values, (sequences, KV heads, tokens, dim).
    """
    for cache, new in zip(held, (keys, values), strict=True):
        cache[step.rows, :, step.starts[0] : step.length] = new
    record.writes(keys, values)
    k, v = (cache[step.rows, :, : step.length] for cache in held)
    return k, v


Made = TypeVar("Made")
Settings = TypeVar("Settings")
Widths = Sequence[tuple[int, torch.dtype]]
"""Numbers of every part of a row, and their formats."""

Turns = Callable[[Tensor], tuple[Tensor, Tensor] | None]
"""Cosine and sine at positions (sequences, tokens); none where keys are not turned."""


def no_turns(positions: Tensor) -> None:
    """Return None, for models without rotary positions.

    Parameters
    ----------
    positions
        (sequences, tokens), not used.
    """


@dataclass
class SharedObjects:
    """Objects that the layers of a run share, created at first use.

    Attributes
    ----------
    made
        The objects so far, by key.
    """

    made: dict[object, object] = field(default_factory=dict)

    def get(self, key: object, make: Callable[[], Made]) -> Made:
        """Return the object of a key; it is created at the first call.

        Parameters
        ----------
        key
            Key of the object.
        make
            Creates the object.
        """
        if key not in self.made:
            self.made[key] = make()
        found: Made = self.made[key]  # type: ignore[assignment]
        return found


Host = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor of that shape in host memory."""


@frozen
class CacheRoom:
    """Sizes, formats and device from which the storage of one layer allocates its tensors.

    Attributes
    ----------
    part
        The technique's settings of the storage.
    slots
        Tokens per sequence to allocate. [tokens]
    counter
        Counter of the FLOPs and bytes of ops.
    sequences, heads, dim
        Number of sequences and of KV heads, and head dimension.
    dtype, device
        Number format and device of tensors.
    turns
        Returns cosine and sine of positions; None without rotary positions.
    prompt
        Tokens of each prompt. [tokens]
    fresh
        New tokens of a pass that yields one token. [tokens]
    common
        Objects that the layers share.
    values
        Allocates host memory for values that are fetched row by row; None if values are on the GPU.
    make_rows
        Allocates rows in another memory than the GPU's; None for rows on the GPU.
    """

    part: Storage
    slots: int
    counter: NullCounter
    sequences: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    turns: Turns = no_turns
    prompt: int = 0
    fresh: int = 1
    common: SharedObjects = field(default_factory=SharedObjects)
    values: Host | None = None
    make_rows: Callable[[int, Widths], list[Tensor]] | None = None

    def rows(self, count: int, widths: Widths) -> list[Tensor]:
        """Allocate rows of several parts. (sequences, KV heads, rows, width) each

        Parameters
        ----------
        widths
            Width and number format of every part of a row.
        """
        if self.make_rows:
            return self.make_rows(count, widths)
        return [self.zeros(count, width, kind) for width, kind in widths]

    def settings(self, kind: type[Settings]) -> Settings:
        """Return the technique's settings of the storage, typed as a class."""
        assert isinstance(self.part, kind)
        return self.part

    def check_group(self, group: int) -> None:
        """Check that groups divide a head.

        Parameters
        ----------
        group
            Number of elements that share a scale.

        Raises
        ------
        InputError
            If the head dimension is not a multiple of ``group``.
        """
        if self.dim % group:
            raise InputError(
                f"{self.part.name}: group={group} does not divide the head dim {self.dim}; choose "
                f"a group that does"
            )

    def zeros(self, slots: int, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate zeros on the GPU. (sequences, KV heads, slots, dim)

        Parameters
        ----------
        dim, dtype
            Width and number format of a row; by default those of the layer's heads.
        """
        shape = (self.sequences, self.heads, slots, self.dim if dim is None else dim)
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def turned(self, keys: Tensor, slots: Tensor, back: bool) -> Tensor:
        """Rotate keys by their positions, or undo it.

        Parameters
        ----------
        slots
            Positions of the keys, (sequences, tokens).
        back
            Whether rotations are undone.

        Returns
        -------
        Tensor
            Keys of the same shape, unchanged where the model does not rotate them.
        """
        turns = self.turns(slots)
        if turns is None:
            return keys
        cos, sin = (table.float() for table in turns)
        if back:  # stretched rotations scale too
            return (rotate(keys.float(), cos, -sin) / (cos**2 + sin**2)).to(keys.dtype)
        return rotate(keys.float(), cos, sin)


@frozen
class SlotRange:
    """Slots of one pass: where new tokens are written, and which slots queries see.

    A query sees the slots of its sequence up to that of its own token.

    Attributes
    ----------
    slots
        Slots of the new tokens, (sequences, new), on the device.
    ends
        Slots in use of each sequence after the pass.
    new
        New tokens per sequence. [tokens]
    first
        Slot of the first new token if it is the same for all sequences, else None.
    draft
        Whether it is a draft pass.
    room
        Number of slots from which tensor shapes follow in a pass that is replayed; else None.
    """

    slots: Tensor
    ends: tuple[int, ...]
    new: int
    first: int | None = None
    draft: bool = False
    room: int | None = None

    @classmethod
    def after_cached(cls, step: Pass, away: int = 0) -> "SlotRange":
        """Return slots for new tokens after the cached ones.

        Parameters
        ----------
        away
            Tokens of each sequence that lie elsewhere or were evicted. [tokens]
        """
        first = step.starts[0] - away if step.uniform else None
        ends = tuple(n - away + step.new for n in step.starts)
        slots = step.positions - away if away else step.positions
        return cls(slots, ends, step.new, first, step.kind == "draft")

    @property
    def longest(self) -> int:
        """Slots in use of the longest sequence, or all slots if a pass is replayed."""
        return max(self.ends) if self.room is None else self.room

    def lengths(self, device: torch.device) -> Tensor:
        """Return the slots in use of every sequence, on the device.

        Parameters
        ----------
        device
            Device of the result.

        Returns
        -------
        Tensor
            (sequences,), int32.
        """
        if self.room is None:
            return lengths_on(device, self.ends)
        return (self.slots[:, -1] + 1).int()

    def visible(self, step: Pass, window: int | None = None) -> Seen:
        """Return which slots each query sees, if slots are in the order of tokens.

        Parameters
        ----------
        window
            Most tokens that a query sees, including itself. [tokens]
        """
        starts = tuple(end - self.new for end in self.ends)
        return visible(replace(step, starts=starts, positions=self.slots), self.longest, window)


class KvStore(ABC):
    """Storage of the keys and values of one layer, by slot; subclasses choose the format."""

    plain = False  # whether keys and values are full-precision numbers in place
    replays = False  # whether a pass may be the same work whatever is cached, see ``branch``
    drops_tokens = True  # whether tokens may be overwritten by the next pass
    keeps_numbers = True  # whether rows hold the numbers that came, each by itself
    by_position = False  # whether a token's slot has to be its position
    divided = False  # whether rows of a token lie in several places
    fetches_values = False  # whether values may be on the host without their keys
    buffers_drafts = False  # whether drafts stay in existing slots until they are verified
    differences: Mapping[str, str] = MappingProxyType({})
    """Ops and buffers that really differ from what is stated, and why."""

    split_differences: Mapping[str, str] = MappingProxyType({})
    """Further ones where rows are kept in two places."""

    last: KeptQueries | None = None  # queries of prompts by which a storage ranks

    def __init__(self, room: CacheRoom) -> None:
        self.part, self.room = room.part, room
        self.slots, self.counter = room.slots, room.counter

    def attend_prompt(
        self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass, seen: Seen
    ) -> Tensor:
        """Attend with a chunk of the prompt to the prompt so far, in full precision.

        The queries in ``last`` are recorded.

        Parameters
        ----------
        queries
            Queries of the chunk, (sequences, heads, chunk, dim).
        keys, values
            Keys and values of the prompt so far, (sequences, KV heads, tokens, dim).
        step
            The pass over the chunk.
        seen
            Which tokens each query sees.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, chunk, dim).
        """
        if self.last:
            self.last.observe(queries, step)
        with self.counter.op("attn") as record:
            return full_attention(record, queries, keys, values, seen)

    def prompt(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the prompts' first tokens during prefill.

        Parameters
        ----------
        tokens
            Number of tokens. [tokens]

        Returns
        -------
        tuple of Tensor
            (sequences, KV heads, tokens, dim) each.
        """
        raise NotImplementedError

    @abstractmethod
    def fill(self, keys: Tensor, values: Tensor, plainly: str = "attn") -> None:
        """Store the tokens of a prompt in the first slots.

        Parameters
        ----------
        keys, values
            Keys and values to store, (sequences, KV heads, tokens, dim).
        plainly
            Name of the op that is charged for storing unpacked keys and values.
        """

    @property
    def reads_all_slots(self) -> bool:
        """Whether attention of a replayed pass reads all slots, under a mask."""
        return True

    def op_shares(self, ends: list[int]) -> Mapping[str, float]:
        """State how much of each op a pass does, over what predictions count per round.

        Predictions spread evenly what a cache does once in several rounds.

        Parameters
        ----------
        ends
            Stored tokens of each sequence after the pass. [tokens]

        Returns
        -------
        Mapping of str to float
            Share of the op by its name, the mean over the sequences; ops that are not listed are
            done as predicted.
        """
        return {}

    def branch(self, ends: list[int]) -> Hashable:
        """Return a key; passes with equal keys do the same work and can share a CUDA graph.

        Parameters
        ----------
        ends
            Tokens of each sequence after the pass. [tokens]
        """
        return ()

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Store the new tokens of a pass in their slots.

        Parameters
        ----------
        keys, values
            Keys and values of the new tokens, (sequences, KV heads, new, dim); keys come with
            their rotary positions.
        span
            Slots of the new tokens.
        """

    @abstractmethod
    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend to the slots in use; called after ``append``.

        Parameters
        ----------
        queries
            Queries of the new tokens, (sequences, heads, new, dim).
        span
            Slots of the new tokens, and slots in use of each sequence.
        seen
            Which slots each query sees.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, new, dim), in the format of the queries.
        """

    def attend_async(self, queries: Tensor, span: SlotRange, seen: Seen) -> Callable[[], Tensor]:
        """Start attention that may run beside that of other stores.

        By default it is computed at once.

        Parameters
        ----------
        queries, span, seen
            As for :meth:`attend`.

        Returns
        -------
        Callable
            Function that waits for the output and returns it.
        """
        out = self.attend(queries, span, seen)
        return lambda: out

    def room_left(self, tokens: int) -> int | None:
        """Return how many more tokens fit before some must be packed or evicted.

        Parameters
        ----------
        tokens
            Tokens that are stored already. [tokens]

        Returns
        -------
        int or None
            Number of new tokens; None if it is unlimited. [tokens]
        """
        return None

    def commit(self, before: list[int], after: list[int]) -> None:  # noqa: B027 - most need not
        """End a round, after which rejected drafts are known.

        Parameters
        ----------
        before, after
            Tokens of each sequence before the round, and after it without rejected drafts. [tokens]
        """

    def rows_in_use(self, ends: tuple[int, ...]) -> list[int]:
        """Count the token rows in use of every tensor that holds keys or values.

        Parameters
        ----------
        ends
            Tokens of each sequence. [tokens]

        Returns
        -------
        list of int
            Rows in use of each tensor, for the longest sequence, in the order of their allocation.
        """
        raise NotImplementedError

    def bind(self, tables: list[Tensor]) -> None:
        """Replace the tensors that hold keys and values by others of the same shapes.

        Parameters
        ----------
        tables
            The new tensors, in the order in which the storage allocated its own.
        """
        raise NotImplementedError

    def gpu_tensors(self) -> list[Tensor]:
        """Return the tensors that stay on the GPU even if the others are in host memory."""
        return []

    @abstractmethod
    def tensors(self) -> dict[str, list[Tensor]]:
        """Return every tensor of the storage, by name of its buffer."""


def attend_packed(
    record: OpRecord,
    queries: Tensor,
    view: View,
    span: SlotRange,
    read: Callable[[], Iterable[Tensor]],
    scored: bool = False,
) -> PartialAttention:
    """Attend to packed slots, and count the bytes that are read.

    Parameters
    ----------
    view
        The slots, as the kernel reads them.
    read
        Function that lists the tensors that the kernel has read.
    scored
        Whether to return the last query's logits too.

    Returns
    -------
    PartialAttention
        The output in fp32, with the logits if they are asked for.
    """
    part = attend(queries, view, scored)
    if record.counting:
        with uncounted():
            record.reads(queries, *read()).writes(part.out.to(queries.dtype))
            # PyTorch's own products are counted as they run
            count_pairs(record, queries, span, queries.is_cuda and view.fused(scored))
    return part


def count_pairs(record: OpRecord, queries: Tensor, span: SlotRange, fused: bool) -> None:
    """Count the query-key pairs that are visible, and those that a kernel computes.

    Kernels compute every sequence up to the end of the longest one, for each new query.

    Parameters
    ----------
    fused
        Whether a fused kernel, whose FLOPs PyTorch does not count, computes them.
    """
    ends, own = torch.tensor(span.ends)[:, None, None], torch.arange(span.new)[:, None]
    seen = torch.arange(max(span.ends)) <= ends - span.new + own
    record.visible(span.new, span.longest, seen)
    if fused:
        record.computes(4 * queries[0, :, 0].numel() * seen.numel())


def shares(part: PartialAttention) -> Tensor:
    """Compute the attention weights of the last query from a kernel's logits.

    Parameters
    ----------
    part
        Result of the kernel, with logits.

    Returns
    -------
    Tensor
        Weights, (sequences, heads, 1, slots).
    """
    assert part.scores is not None
    return (part.scores.float() - part.lse[..., -1:]).exp()[:, :, None]


def lengths_on(device: torch.device, counts: Sequence[int]) -> Tensor:
    """Put one count per sequence on the device, as int32.

    If all counts are equal, the tensor is filled on the device, without a copy from the host.

    Parameters
    ----------
    device
        Device of the result.
    counts
        Count of each sequence.

    Returns
    -------
    Tensor
        The counts, (sequences,), int32.
    """
    if min(counts) == max(counts):
        return torch.full((len(counts),), counts[0], dtype=torch.int32, device=device)
    return to_device(counts, device, torch.int32)
