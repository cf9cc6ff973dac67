"""What whole techniques over packed rows share: every layer's sides, and attention to them."""

from abc import abstractmethod

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.base import Technique
from kvsim.validate.impl.base import Implementation, Resident
from kvsim.validate.impl.cells import lengths_on, on_the_gpu
from kvsim.validate.impl.sides import Side, check_groups
from kvsim.validate.kernels.attention import PartialAttention, View, attend
from kvsim.validate.kernels.quantise import Levels
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.tally import Marks, uncounted


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
