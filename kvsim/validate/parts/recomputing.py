"""Layer inputs in host memory, from which keys and values of the first tokens are recomputed."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.graph import Array, Point
from kvsim.models.model import LayerShape
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.papers.kvpr import Place as Settings
from kvsim.techniques.papers.kvpr import choose_split
from kvsim.validate.counter import NullCounter, OpRecord
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.selecting import LayerContext
from kvsim.validate.parts.tokenwise import Tokenwise
from kvsim.validate.transfer import Mark, Transfers, copy_all

if TYPE_CHECKING:
    from kvsim.validate.parts.composed import Composed


class Recomputing:
    """The split of every step is the one that the placement states for its context.

    Keys and values of the first tokens are recomputed on a stream of their own, while those of
    the others are still being copied.

    References
    ----------
    .. [1] C. Jiang et al., "KVPR", ACL Findings 2025, section 3.
    """

    def __init__(self, run: "Composed", lanes: Transfers, place: Settings) -> None:
        if place.split == "auto" and run.decoder.deployment is None:
            raise InputError("kvpr: the split rests on a machine; give one with --gpu")
        self.run, self.lanes, self.place = run, lanes, place
        self.homes: dict[tuple[int, int], list[Tensor]] = {}  # by layer and part
        self.buffers: list[list[Tensor]] = []
        self._kinds: dict[tuple[int, int], Tokenwise] = {}
        self._splits: dict[LayerShape, Array] = {}
        self._turns: tuple[Tensor, Tensor] | None = None

    def add(self, where: LayerContext) -> int:
        """One more layer and part; the tokens that every step recomputes."""
        fewest, most = self._span(where.layer)
        stored, run = where.parts.storage.stored, self.run
        kind = Tokenwise(stored, where.batch * run.model.hidden, run.decoder.dtype)
        self._kinds[where.visit] = kind
        self.homes[where.visit] = kind.tables(self.lanes.host, most)
        return fewest

    def ready(self) -> None:
        """Two buffers that take turns, and the positions of what is recomputed."""
        device = self.run.decoder.device
        largest = max(self.homes.values(), key=lambda tables: len(tables[0]))
        self.buffers = [[torch.zeros_like(t, device=device) for t in largest] for _ in "12"]
        self._turns = self.run.decoder.turns(torch.arange(len(largest[0]), device=device)[None])

    def tensors(self) -> list[Tensor]:
        """Inputs of every layer in host memory."""
        return [table for tables in self.homes.values() for table in tables]

    def split(self, layer: int, cached: int) -> int:
        """Tokens recomputed in a step that finds so many in the cache. [tokens]"""
        splits = self._of(layer)
        return int(splits[min(cached - self._shortest, len(splits) - 1)])

    def read(self, where: LayerContext, tensor: Tensor, step: Pass, turn: int) -> None:
        """Send home the inputs (sequences, new, hidden) that some step will recompute from."""
        part = slice(step.starts[0], min(step.length, self._span(where.layer)[1]))
        if part.start >= part.stop:
            return
        kind, buffer = self._kinds[where.visit], self.buffers[turn % 2]
        numbers = tensor[:, : part.stop - part.start].transpose(0, 1)
        if kind.stored.packs:
            with self.run.counter.op("quantise_inputs") as record:
                kind.put(record, numbers, buffer, part)
        else:
            kind.put(OpRecord(), numbers, buffer, part)
        pairs = [
            (home[part], new[part])
            for home, new in zip(self.homes[where.visit], buffer, strict=True)
        ]
        self.run.counter.copy("store_inputs", "d2h", [home for home, _ in pairs])
        self.lanes.d2h(lambda: copy_all(pairs), self.lanes.mark())

    def fetch(
        self,
        where: LayerContext,
        turn: int,
        split: int,
        note: NullCounter,
        after: tuple[Mark, ...],
        tables: list[Tensor],
    ) -> list[Mark]:
        """Queue the copy of inputs, and the recomputation into tables (tokens, rows, dim)."""
        if not split:
            return []
        buffer = self.buffers[turn % 2]
        pairs = [
            (new[:split], home[:split])
            for home, new in zip(self.homes[where.visit], buffer, strict=True)
        ]
        note.copy("load_inputs", "h2d", [home for _, home in pairs])
        arrived = self.lanes.h2d(lambda: copy_all(pairs), *after)
        return [
            self.lanes.side(
                lambda: self._recompute(where, buffer, split, tables, note), arrived, *after
            )
        ]

    def _recompute(
        self,
        where: LayerContext,
        buffer: list[Tensor],
        split: int,
        tables: list[Tensor],
        note: NullCounter,
    ) -> None:
        """Keys and values of the first tokens of every sequence."""
        kind, decoder, part = self._kinds[where.visit], self.run.decoder, slice(0, split)
        if kind.stored.packs:
            with note.op("dequantise_inputs") as record:
                numbers = kind.widened(record, buffer, part)
        else:
            numbers = buffer[0][part]
        x = numbers.view(split, where.batch, self.run.model.hidden).transpose(0, 1)
        turns = None
        if self._turns:
            turns = (self._turns[0][:, :, :split], self._turns[1][:, :, :split])
        with note.op("recompute") as record:
            both = decoder.keys_values(where.layer, x, turns)
            matrix = decoder.weights.layers[where.layer].qkv.rows(-self.run.model.kv_width)
            record.reads(x, *matrix.tensors())
            record.writes(*both)
            if turns:
                record.reads(both[0])
                record.writes(both[0])
            for table, new in zip(tables, both, strict=True):
                table[part] = new.flatten(0, 1).transpose(0, 1)

    def _span(self, layer: int) -> tuple[int, int]:
        """Fewest and most tokens that some step recomputes. [tokens]"""
        splits = self._of(layer)
        return int(splits.min()), int(splits.max())

    def _of(self, layer: int) -> Array:
        """The split of every step, by the tokens it finds beyond the shortest part's prompt."""
        run, shape = self.run, self.run.shapes[layer]
        if shape not in self._splits:
            cached = np.arange(self._shortest, run.capacity, dtype=float)
            each = float(run.batch // self.place.tiles)
            p = Point(each, cached, 1.0, float(run.prompt), float(run.capacity))
            at = LayerPass(run.deployment, p, shape, run.parts[layer])
            known = min(run.lengths)  # beyond, a shorter prompt has no inputs
            splits = np.broadcast_to(np.asarray(choose_split(self.place, at)), cached.shape)
            self._splits[shape] = np.minimum(splits, known)
        return self._splits[shape]

    @property
    def _shortest(self) -> int:
        """Longest prompt of the part whose longest is shortest. [tokens]"""
        run, each = self.run, self.run.batch // self.place.tiles
        return min(max(run.lengths[i : i + each]) for i in range(0, run.batch, each))
