"""What packed caches share: packed rows behind a ring of full-precision tokens."""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.base import Technique
from kvsim.validate.impl.base import Implementation, Resident
from kvsim.validate.impl.cells import CacheRoom, lengths_on, on_the_gpu
from kvsim.validate.kernels.attention import PartialAttention, View, attend
from kvsim.validate.kernels.quantise import Levels, quantise
from kvsim.validate.kernels.stores import By, Store
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.tally import Marks, uncounted
from kvsim.validate.transfer import to_device


class Side:
    """Keys or values of one layer.

    Token n is packed in row n, or still in slot ``n % slots`` of the ring.
    """

    def __init__(
        self, room: CacheRoom, rows: int, slots: int, bits: int, group: int, by: By,
        where: Levels = "ends", hierarchical: bool = False,
    ) -> None:  # fmt: skip
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

    def fill(self, marks: Marks, prompt: Tensor, lengths: list[int], packed: list[int]) -> None:
        """Pack the first tokens of a prompt (batch, KV heads, tokens, head dim), keep the rest."""
        most = max(packed)
        if most:
            self._write(marks, prompt[:, :, :most], self._all, torch.zeros_like(self._all))
        slots = self.ring.shape[2]
        ends = torch.tensor(lengths, device=prompt.device)[:, None] - 1
        latest = ends - (ends - torch.arange(slots, device=prompt.device)) % slots
        index = latest.clamp(min=0)[:, None, :, None].expand_as(self.ring)
        self.ring.copy_(prompt.gather(2, index))

    def append(self, new: Tensor, positions: Tensor) -> None:
        """Put new tokens (batch, KV heads, new, head dim) at (batch, new) in the ring."""
        slots = positions % self.ring.shape[2]
        self.ring[self._all[:, None], :, slots] = new.transpose(1, 2)

    def pack(self, marks: Marks, sequences: list[int], begins: Tensor, count: int) -> None:
        """Move ``count`` tokens of some sequences, from ``begins`` (batch,) on, out of the ring."""
        whole = len(sequences) == len(self._all)
        chosen = self._all if whole else to_device(sequences, self._all.device)
        start = begins if whole else begins[chosen]
        rows = start[:, None] + torch.arange(count, device=start.device)
        numbers = self.ring[chosen[:, None], :, rows % self.ring.shape[2]].transpose(1, 2)
        self._write(marks, numbers, chosen, start)

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

    def _write(self, marks: Marks, numbers: Tensor, sequences: Tensor, begins: Tensor) -> None:
        into = self.store
        made = quantise(
            numbers, into.bits, into.group, into.by, self._where, into.lower is not None
        )
        marks.reads(numbers)
        marks.writes(*_held(made))
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


class Packed(Implementation):
    """An implementation whose layers keep packed rows and rings."""

    k: list[Side]
    v: list[Side]

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        super().__init__(technique, decoder, lengths, generate)
        if any(shape.window for shape in self.shapes):
            raise InputError(
                f"{technique.name}: {self.model.name} has sliding windows, which its packed cache "
                f"does not roll over; choose a model that attends to every token"
            )

    def sides(
        self,
        slots: int,
        bits: int,
        group: int,
        where: Levels = "ends",
        hierarchical: bool = False,
    ) -> None:
        """Make every layer's keys, grouped by channel, and values, grouped by token.

        Raises
        ------
        InputError
            If groups do not divide a head.
        """
        m, layers = self.model, range(self.model.layers)
        check_groups(self.technique.name, group, m.head_dim)
        room = on_the_gpu(
            self.batch, m.kv_heads, m.head_dim, self.decoder.dtype, self.decoder.device
        )
        made = (room, self.capacity - self.slack, slots, bits, group)
        self.k = [Side(*made, "channel", where, hierarchical) for _ in layers]
        self.v = [Side(*made, "token", where, hierarchical) for _ in layers]

    @abstractmethod
    def packed_keys(self, tokens: int) -> int:
        """Packed rows of keys with so many cached tokens."""

    @abstractmethod
    def packed_values(self, tokens: int) -> int:
        """Packed rows of values with so many cached tokens."""

    def filled(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Pack the part of every prompt that the format packs."""
        with self.tally.op("quantise") as marks:
            for side, prompt, count in (
                (self.k[layer], keys, self.packed_keys),
                (self.v[layer], values, self.packed_values),
            ):
                side.fill(marks, prompt, self.lengths, [count(n) for n in self.lengths])

    def look(
        self,
        marks: Marks,
        layer: int,
        queries: Tensor,
        step: Pass,
        cached: list[int],
        *,
        upper: bool = False,
        index: Tensor | None = None,
        fetched: tuple[Tensor, Tensor] | None = None,
        scored: bool = False,
    ) -> PartialAttention:
        """Attention of new tokens over a layer, once they are appended.

        Parameters
        ----------
        cached : tokens of every sequence that the packed counts go by. [tokens]
        upper : read the upper bits of a hierarchical store alone.
        index, fetched : tokens whose keys and values replace their packed ones, and these.
        scored : give the logits of the last query.
        """
        k, v = self.k[layer], self.v[layer]
        keys = [self.packed_keys(n) for n in cached]
        values = [self.packed_values(n) for n in cached]
        ends = step.positions[:, -1].int() + 1
        pair = fetched or (None, None)
        view = View(
            ends,
            k.store.upper_only() if upper else k.store,
            v.store.upper_only() if upper else v.store,
            lengths_on(self.decoder.device, keys),
            lengths_on(self.decoder.device, values),
            k.ring,
            v.ring,
            index,
            *pair,
        )
        part = attend(queries, view, scored)
        if marks.counting:
            with uncounted():
                lengths = [n + step.new for n in step.starts]
                known = 0 if index is None else min(index.shape[2], *step.starts)
                marks.reads(queries, *(None if t is None else t[:, :, :known] for t in pair))
                marks.reads(*k.read(keys, lengths, upper), *v.read(values, lengths, upper))
                marks.writes(part.out.to(queries.dtype))
                count_pairs(marks, queries, step)
        return part

    def resident(self) -> Resident:
        """Packed rows and rings."""
        return {"gpu": {"kv": [t for s in (*self.k, *self.v) for t in s.tensors()]}}


def count_pairs(marks: Marks, queries: Tensor, step: Pass) -> None:
    """Say how many pairs of a query and a token are seen, and on a GPU how many were computed.

    Every sequence is computed up to its own end, by each of its new queries.
    """
    ends = [start + step.new for start in step.starts]
    pairs = [
        (torch.arange(end) <= positions[:, None]).flatten()
        for end, positions in zip(ends, step.positions.cpu(), strict=True)
    ]
    seen = torch.cat(pairs)
    marks.visible(step.new, max(ends), seen)
    if queries.is_cuda:
        marks.computes(4 * queries[0, :, 0].numel() * seen.numel())


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


def pack_values(impl: Packed, layer: int, tokens: tuple[int, ...] | list[int], at: Tensor) -> None:
    """Pack the value that leaves the residual of ``tokens`` cached ones, where it is full.

    Parameters
    ----------
    at : (batch,) its position.
    """
    room = impl.v[layer].ring.shape[2]
    full = [i for i, n in enumerate(tokens) if impl.packed_values(n + 1) > impl.packed_values(n)]
    if full and room:
        with impl.tally.op("quantise") as marks:
            impl.v[layer].pack(marks, full, at, 1)


def pack_keys(impl: Packed, layer: int, tokens: list[int], begins: Tensor) -> None:
    """Pack a block of keys where ``tokens`` cached ones complete it.

    Parameters
    ----------
    begins : (batch,) the position of its first token.
    """
    full = [i for i, n in enumerate(tokens) if impl.packed_keys(n) > impl.packed_keys(n - 1)]
    if full:
        block = impl.packed_keys(tokens[full[0]]) - impl.packed_keys(tokens[full[0]] - 1)
        with impl.tally.op("quantise") as marks:
            impl.k[layer].pack(marks, full, begins, block)
