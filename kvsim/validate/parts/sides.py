"""Keys or values of one layer as packed rows behind a ring of full-precision tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.validate.counter import OpRecord
from kvsim.validate.kernels.quantise import Levels, quantise
from kvsim.validate.kernels.stores import By, Store
from kvsim.validate.parts.cells import CacheRoom
from kvsim.validate.transfer import to_device


class PackedRing:
    """Keys or values of one layer.

    Token n is packed in row n, or still in slot ``n % slots`` of the ring.
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
        """Everything that stays in memory, or so many slots of the ring alone."""
        return [self.ring[:, :, :slots], *_held(self.store)]

    def fill(self, record: OpRecord, prompt: Tensor, lengths: list[int], packed: list[int]) -> None:
        """Pack the first tokens of a prompt (batch, KV heads, tokens, head dim), keep the rest."""
        most = max(packed)
        if most:
            self._write(record, prompt[:, :, :most], self._all, torch.zeros_like(self._all))
        slots = self.ring.shape[2]
        ends = torch.tensor(lengths, device=prompt.device)[:, None] - 1
        latest = ends - (ends - torch.arange(slots, device=prompt.device)) % slots
        index = latest.clamp(min=0)[:, None, :, None].expand_as(self.ring)
        self.ring.copy_(prompt.gather(2, index))

    def append(self, new: Tensor, positions: Tensor) -> None:
        """Put new tokens (batch, KV heads, new, head dim) at (batch, new) in the ring."""
        slots = positions % self.ring.shape[2]
        self.ring[self._all[:, None], :, slots] = new.transpose(1, 2)

    def pack(self, record: OpRecord, sequences: list[int], begins: Tensor, count: int) -> None:
        """Move ``count`` tokens of some sequences, from ``begins`` (batch,) on, out of the ring."""
        whole = len(sequences) == len(self._all)
        chosen = self._all if whole else to_device(sequences, self._all.device)
        start = begins if whole else begins[chosen]
        rows = start[:, None] + torch.arange(count, device=start.device)
        numbers = self.ring[chosen[:, None], :, rows % self.ring.shape[2]].transpose(1, 2)
        self._write(record, numbers, chosen, start)

    def read(self, packed: list[int], lengths: list[int], upper: bool = False) -> Iterator[Tensor]:
        """What attention reads of a layer with so many packed rows and tokens per sequence."""
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
        record.reads(numbers)
        record.writes(*_held(made))
        whole = len(sequences) == len(self._all)
        alike = whole and not begins.is_cuda and bool((begins == begins[0]).all())
        for target, source in zip(_held(into), _held(made), strict=True):
            count = source.shape[2]
            first = begins if count == made.rows else begins // into.group
            if alike:  # a GPU would wait to know it
                start = int(first[0])
                target[:, :, start : start + count] = source
            else:
                place = first[:, None] + torch.arange(count, device=begins.device)
                target[sequences[:, None], :, place] = source.transpose(1, 2)


def _held(store: Store) -> list[Tensor]:
    return [t for t in (store.codes, store.lower, store.scale, store.zero) if t is not None]


def check_groups(name: str, group: int, head_dim: int) -> None:
    """Refuse groups that do not divide a head.

    Raises
    ------
    InputError
        If they do not.
    """
    if head_dim % group:
        raise InputError(
            f"{name}: group={group} does not divide the head dim {head_dim}; choose a group that "
            f"does"
        )


def check_residual(name: str, residual: int, group: int) -> int:
    """The residual, if blocks of it hold whole groups of keys.

    Raises
    ------
    InputError
        If they do not.
    """
    if residual < 1 or residual % group:
        raise InputError(
            f"{name}: residual={residual} is not a multiple of group={group}, so that blocks of "
            f"keys would not fill groups; choose one that is"
        )
    return residual
