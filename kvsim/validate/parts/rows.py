"""Storages that encode each token separately, as one row per slot."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.techniques.axes.storage import Grouped as Settings
from kvsim.validate.counter import OpRecord
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
    """Encoding of one token's key or value per KV head as a row of one or more parts."""

    @abstractmethod
    def widths(self, dim: int, dtype: torch.dtype) -> Widths:
        """List the parts of a row.

        Parameters
        ----------
        dtype
            Number format before encoding.

        Returns
        -------
        sequence of (int, dtype)
            Number of elements of each part of a row, and their format.
        """

    @abstractmethod
    def encode(self, numbers: Tensor) -> list[Tensor]:
        """Encode keys or values as the parts of rows.

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
        """Arrange encoded parts as attention kernels read them.

        Parameters
        ----------
        parts
            (sequences, KV heads, tokens, width) each, as ``encode`` returned them.
        """


class Plain(Codec):
    """Codec of 16-bit keys or values, which are stored unchanged."""

    def widths(self, dim: int, dtype: torch.dtype) -> Widths:
        """Return the size and number format of the only part."""
        return [(dim, dtype)]

    def encode(self, numbers: Tensor) -> list[Tensor]:
        """Return the values unchanged, as the only part. (sequences, KV heads, tokens, dim)"""
        return [numbers]

    def store(self, parts: list[Tensor]) -> Store:
        """Arrange the values as rows of 16 bits that need no unpacking."""
        return EncodedRows.from_parts(parts, 16, lambda parts: parts[0].float())


@frozen
class EncodedRows(Store):
    """Packed rows that a Python function dequantises, for formats without a fused attention kernel.

    Attributes
    ----------
    widen
        Function that dequantises the parts of rows to fp32, (sequences, KV heads, tokens, dim).
    more
        Parts of a row after the first, which is ``codes``.
    """

    fused: ClassVar[bool] = False
    widen: Callable[[list[Tensor]], Tensor] | None = None
    more: tuple[Tensor, ...] = ()

    @classmethod
    def from_parts(
        cls, parts: list[Tensor], bits: int, widen: Callable[[list[Tensor]], Tensor]
    ) -> Self:
        """Create a store of parts that a function dequantises.

        Parameters
        ----------
        parts
            (sequences, KV heads, tokens, width) each.
        widen
            Function that dequantises the parts to fp32, (sequences, KV heads, tokens, dim).
        """
        first, none = parts[0], parts[0][..., :0]
        return cls(first, none, none, bits, 1, "token", widen=widen, more=tuple(parts[1:]))

    def sequences(self, part: slice) -> Self:
        """Select some sequences, without a copy."""
        assert self.widen is not None
        return self.from_parts([t[part] for t in (self.codes, *self.more)], self.bits, self.widen)

    def numbers(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Dequantise a range of tokens. (sequences, KV heads, tokens, dim)"""
        assert self.widen is not None
        return self.widen([t[:, :, start:stop] for t in (self.codes, *self.more)])


class TokenRows:
    """Keys or values of a layer, with one encoded row per slot, sequence and KV head.

    Parameters
    ----------
    host
        Allocates host memory for rows that are not on the GPU: one record per slot with all parts,
        (slots, sequences, KV heads, width). None for rows on the GPU.
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
        """Split records of host memory into the parts of rows, without a copy.

        Parameters
        ----------
        record
            One record per slot with all parts of a row, (slots, sequences, KV heads, width).

        Returns
        -------
        list of Tensor
            Parts, (sequences, KV heads, slots, width) each.
        """
        return self.cut(record.permute(1, 2, 0, 3))

    def cut(self, rows: Tensor) -> list[Tensor]:
        """Split the last axis into the parts of a row, such as codes and scales, without a copy.

        Parameters
        ----------
        rows
            Records with all parts of a row, (..., width).

        Returns
        -------
        list of Tensor
            Parts, (..., width of the part) each, in the part's own format.
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
        """Encode the prompts' keys or values in the first rows.

        Parameters
        ----------
        numbers
            (sequences, KV heads, tokens, dim).
        """
        self._note(record, numbers, made := self.codec.encode(numbers))
        for mine, new in zip(self.parts, made, strict=True):
            mine[:, :, : new.shape[2]] = new

    def write(self, record: OpRecord, numbers: Tensor, span: SlotRange) -> None:
        """Encode the new tokens of a pass, and write them to their slots.

        Parameters
        ----------
        numbers
            Keys or values, (sequences, KV heads, new, dim).
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
            record.reads(rows).writes(rows)

    def widened(self, parts: list[Tensor]) -> Tensor:
        """Decode the parts of rows.

        Returns
        -------
        Tensor
            Keys or values in the layer's format, (sequences, KV heads, n, dim).
        """
        if self.plain:
            return parts[0]
        return self.codec.store(parts).numbers().to(self.dtype)

    def store(self) -> Store:
        """Arrange all rows as attention kernels read them."""
        return self.codec.store(self.parts)

    def read(self, ends: tuple[int, ...]) -> list[Tensor]:
        """Return the rows in use of every sequence.

        Parameters
        ----------
        ends
            Slots in use of each sequence.

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
    """Base of storages that encode each token by itself; subclasses choose the codecs."""

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
        """Return the codec of keys and that of values."""

    def fill(self, keys: Tensor, values: Tensor, plainly: str = "attn") -> None:
        """Encode the tokens of a prompt in the first slots."""
        for column, numbers in ((self.k, keys), (self.v, values)):
            with self.counter.op(plainly if column.plain else "quantise") as record:
                column.fill(record, numbers)

    def prompt(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first tokens, if they are not packed."""
        return self.k.parts[0][:, :, :tokens], self.v.parts[0][:, :, :tokens]

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Encode the new tokens of a pass and write them to their slots."""
        for column, numbers in ((self.k, keys), (self.v, values)):
            with self.counter.op("attn" if column.plain else "quantise") as record:
                column.write(record, numbers, span)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend to the slots in use; packed rows are unpacked by the kernel that reads them."""
        with self.counter.op("attn") as record:
            if self.plain:
                keys, values = (side.parts[0][:, :, : span.longest] for side in (self.k, self.v))
                return attend(record, queries, keys, values, seen)
            part = attend_packed(record, queries, self._view(span), span, lambda: self._read(span))
            return part.out.to(queries.dtype)

    def attend_with_scores(
        self, queries: Tensor, span: SlotRange, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        """Attend with one query per sequence, and return the attention weight of each slot too.

        Returns
        -------
        tuple of Tensor
            The output, (sequences, heads, 1, dim), and the weights, (sequences, heads, 1, slots).
        """
        with self.counter.op("attn") as record:
            if not self.plain:
                view = self._view(span)
                part = attend_packed(record, queries, view, span, lambda: self._read(span), True)
                return part.out.to(queries.dtype), shares(part).to(queries.dtype)
            keys, values = (side.parts[0][:, :, : span.longest] for side in (self.k, self.v))
            weights = self.weights(queries, span, seen)
            out = weigh(weights, values)
            record.visible(queries.shape[2], keys.shape[2], seen)
            record.reads(queries, keys, values).writes(out)
            return out, weights

    def weights(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Compute the attention weights of the slots in use. (sequences, heads, new, slots)"""
        if self.plain:
            keys = self.k.parts[0][:, :, : span.longest]
        else:
            keys = self.k.widened([part[:, :, : span.longest] for part in self.k.parts])
        return scores(queries, keys, seen if isinstance(seen, Tensor) else None).to(queries.dtype)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the parts of all rows on the GPU, under the buffer name ``kv``."""
        return {"kv": [*self.k.parts, *(() if self.values_on_host else self.v.parts)]}

    @property
    def reads_all_slots(self) -> bool:
        """Whether attention of a replayed pass reads all slots; False for packed rows."""
        return self.plain or not (unpacks(self.k.store()) and unpacks(self.v.store()))

    def rows_in_use(self, ends: tuple[int, ...]) -> list[int]:
        """Count the rows in use: one per token, in every part of keys and values."""
        return [max(ends)] * (len(self.k.parts) + len(self.v.parts))

    def bind(self, tables: list[Tensor]) -> None:
        """Replace the tensors of keys and values by others of the same shapes."""
        count = len(self.k.parts)
        self.k.parts, self.v.parts = tables[:count], tables[count:]

    def _view(self, span: SlotRange) -> View:
        ends = span.lengths(self.room.device)
        return View(ends, self.k.store(), self.v.store(), ends, ends, most=span.longest)

    def _read(self, span: SlotRange) -> list[Tensor]:
        return [*self.k.read(span.ends), *self.v.read(span.ends)]


class Fp16(PerTokenCache):
    """Storage of keys and values in the model's 16-bit format."""

    def codecs(self) -> tuple[Codec, Codec]:
        """Return the codecs of keys and values, neither of which packs."""
        return Plain(), Plain()


class Grouped(PerTokenCache):
    """Storage that quantises each token in groups along the head, keys and values separately [1]_.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen", ICML 2023, section 4.4, https://arxiv.org/abs/2303.06865
    """

    differences = PACKED_AT_ONCE

    def codecs(self) -> tuple[Codec, Codec]:
        """Return the codecs of keys and of values, which may differ in width."""
        part = self.room.settings(Settings)
        self.room.check_group(part.group)
        keys, values = (codec(bits, part.group) for bits in (part.stored.bits, part.stored.v_bits))
        return keys, values


class Groups(Codec):
    """Codec of low-bit codes, with a scale and a zero point per group of elements."""

    def __init__(self, bits: int, group: int) -> None:
        self.bits, self.group = bits, group

    def widths(self, dim: int, dtype: torch.dtype) -> Widths:
        """Return size and number format of a row's codes, scales and zero points."""
        table = (dim // self.group, torch.float16)
        return [(dim * self.bits // 8, torch.uint8), table, table]

    def encode(self, numbers: Tensor) -> list[Tensor]:
        """Quantise each token in groups. Codes, scales, zero points: (..., tokens, width)."""
        made = quantise(numbers, self.bits, self.group, "token")
        return [made.codes, made.scale, made.zero]

    def store(self, parts: list[Tensor]) -> Store:
        """Arrange the parts as the unpacking kernels read them."""
        codes, scale, zero = parts
        return Store(codes, scale, zero, self.bits, self.group, "token")


def codec(bits: float, group: int) -> Codec:
    """Return the codec of a width.

    Parameters
    ----------
    bits
        Width of a code; 16 for unpacked values. [bit]
    group
        Number of elements that share a scale and a zero point.
    """
    return Plain() if bits == 16 else Groups(int(bits), group)
