"""Storages that keep a row per slot: each token's numbers by themselves, plain or packed."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.techniques.axes.storage import Grouped as Settings
from kvsim.validate.counter import OpRecord
from kvsim.validate.kernels.gather import rows_at
from kvsim.validate.kernels.quantise import quantise
from kvsim.validate.kernels.stores import Store, View, unpacks
from kvsim.validate.model.attention import Seen, attend
from kvsim.validate.parts.scores import scores, weigh
from kvsim.validate.parts.store import (
    CacheRoom,
    Host,
    KvStore,
    SlotRange,
    Widths,
    attend_packed,
    shares,
)

PACKED_AT_ONCE = {
    "attn": "new keys and values are packed as they come; the prediction also writes them in fp16"
}
"""What storages without full-precision tokens differ by."""


class Codec(ABC):
    """How the numbers of one token and KV head become the parts of a row."""

    @abstractmethod
    def widths(self, dim: int, dtype: torch.dtype) -> Widths:
        """List the parts of a row.

        Parameters
        ----------
        dtype
            Their format before they are encoded.

        Returns
        -------
        sequence of (int, dtype)
            Numbers of each part of a row, and their format.
        """

    @abstractmethod
    def encode(self, numbers: Tensor) -> list[Tensor]:
        """Encode numbers as the parts of rows.

        Parameters
        ----------
        numbers
            (sequences, KV heads, tokens, dim).

        Returns
        -------
        list of Tensor
            Parts, (sequences, KV heads, tokens, width) each.
        """

    @abstractmethod
    def store(self, parts: list[Tensor]) -> Store:
        """Arrange parts as attention reads them.

        Parameters
        ----------
        parts
            (sequences, KV heads, tokens, width) each, as ``encode`` made them.
        """


class Plain(Codec):
    """Numbers as they are."""

    def widths(self, dim: int, dtype: torch.dtype) -> Widths:
        """One part, which has all of them."""
        return [(dim, dtype)]

    def encode(self, numbers: Tensor) -> list[Tensor]:
        """They stay as they are."""
        return [numbers]

    def store(self, parts: list[Tensor]) -> Store:
        """As rows of 16 bits."""
        return EncodedRows.from_parts(parts, 16, lambda parts: parts[0].float())


@frozen
class EncodedRows(Store):
    """Rows that a function widens; kernels that unpack by themselves do not know them.

    Attributes
    ----------
    more
        Further parts of a row.
    """

    fused: ClassVar[bool] = False
    widen: Callable[[list[Tensor]], Tensor] | None = None
    more: tuple[Tensor, ...] = ()

    @classmethod
    def from_parts(
        cls, parts: list[Tensor], bits: int, widen: Callable[[list[Tensor]], Tensor]
    ) -> Self:
        """Make a store of parts that a function widens.

        Parameters
        ----------
        parts
            (sequences, KV heads, tokens, width) each.
        widen
            Makes fp32 numbers (sequences, KV heads, tokens, dim) of the parts.
        """
        first, none = parts[0], parts[0][..., :0]
        return cls(first, none, none, bits, 1, "token", widen=widen, more=tuple(parts[1:]))

    def sequences(self, part: slice) -> Self:
        """Those of some sequences, without a copy."""
        assert self.widen is not None
        return self.from_parts([t[part] for t in (self.codes, *self.more)], self.bits, self.widen)

    def numbers(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows ``start`` to ``stop`` widened, in fp32."""
        assert self.widen is not None
        return self.widen([t[:, :, start:stop] for t in (self.codes, *self.more)])


class TokenRows:
    """Keys or values of a layer, a row per slot.

    Parameters
    ----------
    host
        Makes room in host memory, for a record of each slot with all of its parts,
        (slots, sequences, KV heads, width); otherwise rows are where the room makes them.
    """

    def __init__(self, codec: Codec, room: CacheRoom, slots: int, host: Host | None = None) -> None:
        self.codec, self.dtype = codec, room.dtype
        self.plain = isinstance(codec, Plain)
        self.widths = codec.widths(room.dim, room.dtype)
        if host is None:
            self.parts = room.rows(slots, self.widths)
            return
        alone = len(self.widths) == 1
        kind = self.widths[0][1] if alone else torch.uint8
        width = self.widths[0][0] if alone else sum(n * size.itemsize for n, size in self.widths)
        self.record = host((slots, room.sequences, room.heads, width), kind)
        self.parts = self.split(self.record)

    def split(self, record: Tensor) -> list[Tensor]:
        """Split records into the parts of rows, without a copy.

        Parameters
        ----------
        record
            Records, (slots, sequences, KV heads, width).

        Returns
        -------
        list of Tensor
            Parts, (sequences, KV heads, slots, width) each.
        """
        return self.cut(record.permute(1, 2, 0, 3))

    def cut(self, rows: Tensor) -> list[Tensor]:
        """Cut records into the parts of rows, without a copy.

        Parameters
        ----------
        rows
            Records, (..., width).
        """
        if len(self.widths) == 1:
            return [rows]
        found, start = [], 0
        for count, kind in self.widths:
            stop = start + count * kind.itemsize
            found.append(rows[..., start:stop].view(kind))
            start = stop
        return found

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Join the parts of rows as records. (sequences, KV heads, tokens, width)

        Parameters
        ----------
        parts
            Parts, (sequences, KV heads, tokens, width) each.
        """
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)

    def fill(self, record: OpRecord, numbers: Tensor) -> None:
        """Encode a prompt in the first rows.

        Parameters
        ----------
        numbers
            (sequences, KV heads, tokens, dim).
        """
        self._note(record, numbers, made := self.codec.encode(numbers))
        for mine, new in zip(self.parts, made, strict=True):
            mine[:, :, : new.shape[2]] = new

    def write(self, record: OpRecord, numbers: Tensor, span: SlotRange) -> None:
        """Encode new tokens in their slots.

        Parameters
        ----------
        numbers
            (sequences, KV heads, new, dim).
        """
        self._note(record, numbers, made := self.codec.encode(numbers))
        self.put(made, span)

    def put(self, made: list[Tensor], span: SlotRange) -> None:
        """Store the encoded parts of new tokens in their slots.

        Parameters
        ----------
        made
            Parts, (sequences, KV heads, new, width) each.
        """
        for mine, new in zip(self.parts, made, strict=True):
            if span.first is not None:
                mine[:, :, span.first : span.first + span.new] = new
            else:
                sequences = torch.arange(len(span.ends), device=mine.device)[:, None]
                mine[sequences, :, span.slots] = new.transpose(1, 2)

    def move(self, record: OpRecord, source: Tensor, target: Tensor) -> None:
        """Move a row of every sequence and KV head from one slot to another.

        Parameters
        ----------
        source, target
            The slots, (sequences, KV heads, 1) each.
        """
        for part in self.parts:
            rows = part.gather(2, source[..., None].expand(-1, -1, -1, part.shape[3]))
            part.scatter_(2, target[..., None].expand(-1, -1, -1, part.shape[3]), rows)
            record.reads(rows)
            record.writes(rows)

    def gathered(self, record: OpRecord, index: Tensor) -> Tensor:
        """Read rows by index, and count them as what attention reads.

        Parameters
        ----------
        index
            Slots to read, (sequences, KV heads, n).

        Returns
        -------
        Tensor
            Their numbers, (sequences, KV heads, n, dim).
        """
        parts = [rows_at(part, index) for part in self.parts]
        record.reads(*parts)
        return self.widened(parts)

    def widened(self, parts: list[Tensor]) -> Tensor:
        """Widen the parts of rows to numbers.

        Returns
        -------
        Tensor
            Their numbers, in the layer's format.
        """
        if self.plain:
            return parts[0]
        return self.codec.store(parts).numbers().to(self.dtype)

    def store(self) -> Store:
        """All rows as attention reads them."""
        return self.codec.store(self.parts)

    def read(self, ends: tuple[int, ...]) -> list[Tensor]:
        """Return the rows in use of every sequence.

        Parameters
        ----------
        ends
            Slots in use of each.

        Returns
        -------
        list of Tensor
            (KV heads, slots, width) by sequence and part.
        """
        return [part[i, :, :end] for i, end in enumerate(ends) for part in self.parts]

    def _note(self, record: OpRecord, numbers: Tensor, made: list[Tensor]) -> None:
        if not self.plain:
            record.reads(numbers)
        record.writes(*made)


class PerTokenCache(KvStore):
    """Keys and values in rows of their own; subclasses say how they are encoded."""

    fetches_values, replays = True, True

    def __init__(self, room: CacheRoom) -> None:
        super().__init__(room)
        keys, values = self.codecs()
        self.values_on_host = room.values is not None
        self.k = TokenRows(keys, room, room.slots)
        self.v = TokenRows(values, room, room.slots, room.values)
        self.plain = self.k.plain and self.v.plain

    @abstractmethod
    def codecs(self) -> tuple[Codec, Codec]:
        """Of keys and of values."""

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """Encode the tokens of a prompt."""
        most = max(counts)
        for column, numbers in ((self.k, keys), (self.v, values)):
            with self.counter.op(plainly if column.plain else "quantise") as record:
                column.fill(record, numbers[:, :, :most])

    def prompt(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Plain rows as they are."""
        return self.k.parts[0][:, :, :tokens], self.v.parts[0][:, :, :tokens]

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Encode the tokens of a pass."""
        for column, numbers in ((self.k, keys), (self.v, values)):
            with self.counter.op("attn" if column.plain else "quantise") as record:
                column.write(record, numbers, span)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Fused where numbers are plain; otherwise rows are widened on their way."""
        with self.counter.op("attn") as record:
            if self.plain:
                keys, values = (side.parts[0][:, :, : span.longest] for side in (self.k, self.v))
                return attend(record, queries, keys, values, seen)
            part = attend_packed(record, queries, self._view(span), span, lambda: self._read(span))
            return part.out.to(queries.dtype)

    def attend_with_scores(
        self, queries: Tensor, span: SlotRange, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        """Scores leave the kernel."""
        with self.counter.op("attn") as record:
            if not self.plain:
                view = self._view(span)
                part = attend_packed(record, queries, view, span, lambda: self._read(span), True)
                return part.out.to(queries.dtype), shares(part).to(queries.dtype)
            keys, values = (side.parts[0][:, :, : span.longest] for side in (self.k, self.v))
            weights = self.weights(queries, span, seen)
            out = weigh(weights, values)
            record.visible(queries.shape[2], keys.shape[2], seen)
            record.reads(queries, keys, values)
            record.writes(out)
            return out, weights

    def weights(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Compute the attention that every slot in use gets.

        Returns
        -------
        Tensor
            Weights in the queries' format, (sequences, heads, queries, slots).
        """
        if self.plain:
            keys = self.k.parts[0][:, :, : span.longest]
        else:
            keys = self.k.widened([part[:, :, : span.longest] for part in self.k.parts])
        return scores(queries, keys, seen if isinstance(seen, Tensor) else None).to(queries.dtype)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Every part of every row that is on the GPU."""
        return {"kv": [*self.k.parts, *(() if self.values_on_host else self.v.parts)]}

    @property
    def reads_all_slots(self) -> bool:
        """But where a kernel unpacks the rows: it reads up to each sequence's own end."""
        return self.plain or not (unpacks(self.k.store()) and unpacks(self.v.store()))

    def rows_in_use(self, ends: tuple[int, ...]) -> list[int]:
        """A row per token."""
        return [max(ends)] * (len(self.k.parts) + len(self.v.parts))

    def bind(self, tables: list[Tensor]) -> None:
        """Keys' parts, then values'."""
        count = len(self.k.parts)
        self.k.parts, self.v.parts = tables[:count], tables[count:]

    def _view(self, span: SlotRange) -> View:
        ends = span.lengths(self.room.device)
        return View(ends, self.k.store(), self.v.store(), ends, ends, most=span.longest)

    def _read(self, span: SlotRange) -> list[Tensor]:
        return [*self.k.read(span.ends), *self.v.read(span.ends)]


class Fp16(PerTokenCache):
    """Keys and values stay as they come."""

    def codecs(self) -> tuple[Codec, Codec]:
        """They stay as they are."""
        return Plain(), Plain()


class Grouped(PerTokenCache):
    """Every token's keys and values in groups along the head, each side at its own width.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen", ICML 2023, section 4.4.
    """

    differences = PACKED_AT_ONCE

    def codecs(self) -> tuple[Codec, Codec]:
        """By the widths of both sides."""
        part = self.part
        assert isinstance(part, Settings)
        self.room.check_group(part.group)
        keys, values = (codec(bits, part.group) for bits in (part.stored.bits, part.stored.v_bits))
        return keys, values


class Groups(Codec):
    """Codes of a few bits, and a scale and zero point per group."""

    def __init__(self, bits: int, group: int) -> None:
        self.bits, self.group = bits, group

    def widths(self, dim: int, dtype: torch.dtype) -> Widths:
        """Codes, scales and zero points."""
        table = (dim // self.group, torch.float16)
        return [(dim * self.bits // 8, torch.uint8), table, table]

    def encode(self, numbers: Tensor) -> list[Tensor]:
        """Quantised token by token."""
        made = quantise(numbers, self.bits, self.group, "token")
        return [made.codes, made.scale, made.zero]

    def store(self, parts: list[Tensor]) -> Store:
        """As kernels unpack it."""
        codes, scale, zero = parts
        return Store(codes, scale, zero, self.bits, self.group, "token")


def codec(bits: float, group: int) -> Codec:
    """Choose how numbers are encoded.

    Parameters
    ----------
    bits
        Width of a code; 16 for plain numbers. [bit]
    group
        Numbers that share a scale and a zero point.
    """
    return Plain() if bits == 16 else Groups(int(bits), group)
