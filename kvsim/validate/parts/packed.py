"""Keys or values of one layer as packed rows behind a ring of full-precision tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.validate.counter import OpRecord
from kvsim.validate.kernels.quantise import quantise
from kvsim.validate.kernels.stores import By, Levels, PartialAttention, Store, View
from kvsim.validate.model.attention import Seen
from kvsim.validate.parts.store import (
    CacheRoom,
    KvStore,
    SlotRange,
    attend_packed,
    lengths_on,
)
from kvsim.validate.transfer import to_device


class PackedRing:
    """Keys or values of one layer: packed rows, and a ring of recent tokens in full precision.

    Token n is either packed in row n, or still in slot ``n % slots`` of the ring.
    """

    def __init__(
        self,
        room: CacheRoom,
        rows: int,
        slots: int,
        bits: int,
        group: int,
        by: By,
        where: Levels = "ends",
        hierarchical: bool = False,
    ) -> None:
        self.ring = room.zeros(slots)
        by_token = by == "token"
        # keys are packed by whole groups: a last one that cannot fill has no scales
        table, width = (rows, room.dim // group) if by_token else (rows // group, room.dim)
        code = (room.dim * bits // 8, torch.uint8)
        codes, *more = room.rows(rows, [code, code] if hierarchical else [code])
        scale, zero = room.rows(table, [(width, torch.float16)] * 2)
        self.store = Store(codes, scale, zero, bits, group, by, lower=more[0] if more else None)
        self._where = where
        self._all = torch.arange(room.sequences, device=room.device)

    def tensors(self, slots: int | None = None) -> list[Tensor]:
        """List the tensors that stay in memory.

        Parameters
        ----------
        slots
            Slots of the ring to list; all of them if not given.
        """
        return [self.ring[:, :, :slots], *_tables(self.store)]

    def fill(self, record: OpRecord, prompt: Tensor, packed: int) -> None:
        """Pack the first tokens of a prompt, and keep the rest in the ring.

        Parameters
        ----------
        prompt
            Keys or values of the prompt, (batch, KV heads, tokens, head dim).
        packed
            Tokens of each sequence to pack. [tokens]
        """
        if packed:
            self._write(record, prompt[:, :, :packed], self._all, torch.zeros_like(self._all))
        slots, last = self.ring.shape[2], prompt.shape[2] - 1
        latest = last - (last - torch.arange(slots, device=prompt.device)) % slots
        self.ring.copy_(prompt[:, :, latest.clamp(min=0)])

    def append(self, new: Tensor, positions: Tensor) -> None:
        """Put new tokens in the ring.

        Parameters
        ----------
        new
            Keys or values, (batch, KV heads, new, head dim).
        positions
            Positions of the tokens, (batch, new).
        """
        slots = positions % self.ring.shape[2]
        self.ring[self._all[:, None], :, slots] = new.transpose(1, 2)

    def pack(
        self, record: OpRecord, begins: Tensor, count: int, sequences: list[int] | None = None
    ) -> None:
        """Pack tokens out of the ring.

        Parameters
        ----------
        begins
            Position of the first token to pack in every sequence, (batch,).
        count
            Tokens to pack per sequence. [tokens]
        sequences
            Indices of the sequences; None for all.
        """
        chosen = self._all if sequences is None else to_device(sequences, self._all.device)
        start = begins[chosen]
        rows = start[:, None] + torch.arange(count, device=start.device)
        numbers = self.ring[chosen[:, None], :, rows % self.ring.shape[2]].transpose(1, 2)
        self._write(record, numbers, chosen, start)

    def read(self, packed: list[int], lengths: list[int], upper: bool = False) -> Iterator[Tensor]:
        """Yield the tensors that attention reads.

        Parameters
        ----------
        packed
            Packed tokens of each sequence. [tokens]
        lengths
            Tokens of each sequence. [tokens]
        upper
            Whether the lower halves of hierarchical codes are left out.
        """
        store = self.store
        for i, (rows, length) in enumerate(zip(packed, lengths, strict=True)):
            groups = rows if store.by == "token" else -(-rows // store.group)
            yield store.codes[i, :, :rows]
            if store.lower is not None and not upper:
                yield store.lower[i, :, :rows]
            yield store.scale[i, :, :groups]
            yield store.zero[i, :, :groups]
            yield self.ring[i, :, : length - rows]

    def _write(self, record: OpRecord, numbers: Tensor, sequences: Tensor, begins: Tensor) -> None:
        into = self.store
        made = quantise(
            numbers, into.bits, into.group, into.by, self._where, into.lower is not None
        )
        record.reads(numbers).writes(*_tables(made))
        whole = len(sequences) == len(self._all)
        alike = whole and not begins.is_cuda and bool((begins == begins[0]).all())
        for target, source in zip(_tables(into), _tables(made), strict=True):
            count = source.shape[2]
            first = begins if count == made.rows else begins // into.group
            if alike:  # a GPU would wait to know it
                start = int(first[0])
                target[:, :, start : start + count] = source
            else:
                place = first[:, None] + torch.arange(count, device=begins.device)
                target[sequences[:, None], :, place] = source.transpose(1, 2)


def _tables(store: Store) -> list[Tensor]:
    return [t for t in (store.codes, store.lower, store.scale, store.zero) if t is not None]


@frozen
class Fetched:
    """Tokens whose keys and values replace their packed ones.

    Attributes
    ----------
    index
        (sequences, KV heads, pairs), below 0 for none.
    keys
        (sequences, KV heads, pairs, dim).
    """

    index: Tensor
    keys: Tensor
    values: Tensor


class PackedStore(KvStore):
    """Storage of packed keys and values with rings of recent tokens, by default as KIVI.

    Parameters
    ----------
    residual
        Tokens of a block of keys, and recent values that are not packed. [tokens]
    ring
        Slots of the rings, if more than ``residual``. [tokens]
    where
        Position of the quantisation levels in the range of a group; see ``kernels.stores.Levels``.
    hierarchical
        Whether rows are packed in two halves.
    """

    keeps_numbers = False

    def __init__(
        self,
        room: CacheRoom,
        residual: int,
        bits: int,
        group: int,
        ring: int | None = None,
        where: Levels = "ends",
        hierarchical: bool = False,
    ) -> None:
        super().__init__(room)
        name = room.part.name
        room.check_group(group)
        if residual < 1 or residual % group:
            raise InputError(
                f"{name}: residual={residual} is not a multiple of group={group}, so that blocks "
                f"of keys would not fill groups; choose one that is"
            )
        self.residual = residual
        settings = room, room.slots, ring or residual, bits, group
        self.k = PackedRing(*settings, "channel", where, hierarchical)
        self.v = PackedRing(*settings, "token", where, hierarchical)

    def packed_keys(self, tokens: int) -> int:
        """Return how many tokens have packed keys: whole blocks of ``residual``.

        Parameters
        ----------
        tokens
            Cached tokens of a sequence. [tokens]
        """
        return tokens // self.residual * self.residual

    def packed_values(self, tokens: int) -> int:
        """Return how many tokens have packed values: all but the latest ``residual``.

        Parameters
        ----------
        tokens
            Cached tokens of a sequence. [tokens]
        """
        return max(tokens - self.residual, 0)

    def pack(
        self, side: PackedRing, begins: Tensor, count: int, sequences: list[int] | None = None
    ) -> None:
        """Pack tokens of keys or of values, ``side``, out of its ring; see ``PackedRing.pack``."""
        with self.counter.op("quantise") as record:
            side.pack(record, begins, count, sequences)

    def packed_there(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Count packed rows on the device.

        Parameters
        ----------
        lengths
            Cached tokens of each sequence, (batch,).

        Returns
        -------
        keys, values
            Packed rows, (batch,) each.
        """
        raise NotImplementedError

    @property
    def reads_all_slots(self) -> bool:
        """False: the kernel reads each sequence up to its own end."""
        return False

    def packed_by(self, span: SlotRange) -> tuple[int, ...]:
        """Return the lengths of sequences from which the numbers of packed rows follow. [tokens]"""
        return span.ends

    def op_shares(self, ends: list[int]) -> Mapping[str, float]:
        """Return the share of packing that a pass does, with blocks of keys and single values.

        A value is packed when it leaves the residual, and keys when they fill a block.
        """
        part, tokens = self.part.stored, ends[0]
        keys, values = part.packing(self.room.dim, 0), part.packing(0, self.room.dim)
        done = values * (tokens > self.residual)
        done += keys * self.residual * (tokens % self.residual == 0)
        return {"quantise": done / (keys + values)}

    def fill(self, keys: Tensor, values: Tensor, plainly: str = "attn") -> None:
        """Pack a prompt's older tokens, and write the recent ones to the rings."""
        with self.counter.op("quantise") as record:
            self.k.fill(record, keys, self.packed_keys(keys.shape[2]))
            self.v.fill(record, values, self.packed_values(keys.shape[2]))

    def add(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Write new tokens to the rings."""
        with self.counter.op("attn") as record:
            self.k.append(keys, span.slots)
            self.v.append(values, span.slots)
            record.writes(keys, values)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend to packed rows and rings in one kernel. (sequences, heads, new, dim)"""
        return self._attend_packed(queries, span).out.to(queries.dtype)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return packed rows and rings of keys and values, under the buffer name ``kv``."""
        return {"kv": [*self.k.tensors(), *self.v.tensors()]}

    def rows_in_use(self, ends: tuple[int, ...]) -> list[int]:
        """Count the packed rows and groups in use, in every tensor of keys and then of values."""
        keys, values = self.packed_keys(max(ends)), self.packed_values(max(ends))
        groups = keys // self.k.store.group
        codes = 1 if self.k.store.lower is None else 2
        return [keys] * codes + [groups] * 2 + [values] * (codes + 2)

    def bind(self, tables: list[Tensor]) -> None:
        """Replace the packed tensors by others of the same shapes."""
        half = len(tables) // 2
        for side, (codes, *lower, scale, zero) in (
            (self.k, tables[:half]),
            (self.v, tables[half:]),
        ):
            more = lower[0] if lower else None
            side.store = replace(side.store, codes=codes, lower=more, scale=scale, zero=zero)

    def gpu_tensors(self) -> list[Tensor]:
        """Return the rings, which stay on the GPU if the packed rows are in host memory."""
        return [self.k.ring, self.v.ring]

    def _attend_packed(
        self,
        queries: Tensor,
        span: SlotRange,
        scored: bool = False,
        upper: bool = False,
        fetched: Fetched | None = None,
        name: str = "attn",
    ) -> PartialAttention:
        """Attend to the packed rows, or only to the upper halves of hierarchical ones."""
        tokens, ends = self.packed_by(span), list(span.ends)
        keys, values = (
            [count(n) for n in tokens] for count in (self.packed_keys, self.packed_values)
        )
        device, k, v = self.room.device, self.k, self.v
        lengths = span.lengths(device)
        if span.room is None:
            packed = lengths_on(device, keys), lengths_on(device, values)
        else:
            packed = self.packed_there(lengths)
        pairs = (fetched.index, fetched.keys, fetched.values) if fetched else (None,) * 3
        view = View(
            lengths,
            k.store.upper_only() if upper else k.store,
            v.store.upper_only() if upper else v.store,
            *packed,
            k.ring,
            v.ring,
            *pairs,
        )
        known = min(fetched.index.shape[2], *tokens) if fetched else 0
        with self.counter.op(name) as record:
            return attend_packed(
                record,
                queries,
                view,
                span,
                lambda: [
                    *k.read(keys, ends, upper),
                    *v.read(values, ends, upper),
                    *(pair[:, :, :known] for pair in pairs[1:] if pair is not None),
                ],
                scored,
            )
