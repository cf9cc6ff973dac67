"""Rows in host memory that visit the GPU: layer by layer, and part by part of the batch.

Two buffers take turns: while one layer is attended to, the next one arrives in the other.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsim.validate.counter import NullCounter
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.recomputing import Recomputing
from kvsim.validate.parts.selecting import LayerContext
from kvsim.validate.parts.split import Made, TieredStore
from kvsim.validate.parts.tokenwise import Tokenwise
from kvsim.validate.transfer import Mark, Transfers, copy_all

if TYPE_CHECKING:
    from kvsim.validate.parts.composed import Composed


@dataclass
class HostRows:
    """The rows of one layer and one part of the batch that live in host memory."""

    where: LayerContext
    cells: TieredStore
    homes: list[Tensor]  # (rows, ...) each
    packing: Tokenwise | None = None  # of keys and of values, where only homes are packed
    inputs: Recomputing | None = None
    first: int = 0  # token of the first row at home: those before are recomputed in every step
    stored: Mark | None = None  # when homes took their last tokens

    def rows(self, tokens: int) -> list[int]:
        """Of every table, the first rows that so many tokens fill."""
        return [tokens] * len(self.homes) if self.packing else self.cells.rows_of(tokens)


@dataclass
class Arrival:
    """What is on its way to a buffer: when it is there, what counts, and which tokens it brings."""

    record: list[Mark]
    note: NullCounter
    part: slice


def host_rows(
    where: LayerContext,
    slots: int,
    lanes: Transfers,
    inputs: Recomputing | None,
    make: Callable[[Made], TieredStore],
) -> HostRows:
    """One layer and part, whose cells are made with their room in host memory."""
    first, stored = inputs.add(where) if inputs else 0, where.parts.storage

    def at_home(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return lanes.host((shape[0] - first, *shape[1:]), dtype)

    if stored.read == stored.stored:
        cells = make(at_home)
        return HostRows(where, cells, cells.homes, None, inputs, first)
    cells = make(_nowhere)
    packing = Tokenwise(stored.stored, cells.homes[0][0].numel(), where.run.decoder.dtype)
    sides = [packing.tables(lanes.host, slots - first) for _ in "kv"]
    homes = [table for side in sides for table in side]
    return HostRows(where, cells, homes, packing, inputs, first)


@dataclass
class PrefetchBuffers:
    """All that is stored alike and so shares buffers, in the order of layers and parts."""

    run: "Composed"
    lanes: Transfers
    visitors: dict[tuple[int, int], HostRows] = field(default_factory=dict)
    buffers: list[list[Tensor]] = field(default_factory=list)  # as homes
    wide: list[list[Tensor]] = field(default_factory=list)  # where attention reads, if elsewhere
    _turn: int = 0  # visits so far: even ones use the first buffer
    _free: list[tuple[Mark, ...]] = field(default_factory=lambda: [(), ()])
    _coming: Arrival | None = None

    def ready(self) -> None:
        """Buffers that have room for the largest layer."""
        every, device = list(self.visitors.values()), self.run.decoder.device
        tables = range(len(every[0].homes))
        most = [max(len(v.homes[i]) + v.first for v in every) for i in tables]

        def zeros(rows: int, like: Tensor) -> Tensor:
            return torch.zeros((rows, *like.shape[1:]), dtype=like.dtype, device=device)

        one = every[0]
        self.buffers = [list(map(zeros, most, one.homes)) for _ in "12"]
        if one.packing:  # one layer is recomputed while another is attended to
            turns = 2 if any(v.inputs for v in every) else 1
            self.wide = [[zeros(most[0], t) for t in one.cells.homes] for _ in range(turns)]

    def begin(self, where: LayerContext, step: Pass) -> None:
        """Ask for the next visit, wait for this one."""
        visitor = self.visitors[where.visit]
        visitor.cells.visit(self._tables(self._turn))
        if step.kind == "prefill":
            if not step.starts[0]:
                for mark in self._free[self._turn % 2]:
                    mark.wait()
            return
        coming, following = self._coming, self._after(visitor)
        if following is not visitor and not self._verifies_last(step, following):
            self._request(following, self._turn + 1)
        if coming:
            for mark in coming.record:
                mark.wait()
            self.run.counter.merge(coming.note)
            self._widen(visitor, coming.part)

    def read(self, where: LayerContext, tensor: Tensor, step: Pass) -> None:
        """A chunk of the prompt has reached a layer as x."""
        if inputs := self.visitors[where.visit].inputs:
            inputs.read(where, tensor, step, self._turn)

    def end(self, where: LayerContext, step: Pass) -> None:
        """Send home what is new; the buffer is free when attention and copies are done."""
        visitor, prompt = self.visitors[where.visit], step.kind == "prefill"
        if prompt:
            if step.length < self.run.prompt:
                return
            visitor.cells.begins = 0  # all of it
        self._store(visitor)
        self._turn += 1
        following = self._after(visitor)
        needs = following is (self._first if prompt else visitor)  # what has just been stored
        if needs and not self._verifies_last(step, following):
            self._request(following, self._turn)

    def round_done(self) -> None:
        """It is known which drafts stay: the first visitor is asked for."""
        self._request(self._first, self._turn)

    def homes(self) -> list[Tensor]:
        """Tables in host memory."""
        return [home for visitor in self.visitors.values() for home in visitor.homes]

    # how it is done

    def _tables(self, turn: int) -> list[Tensor]:
        """Where attention reads in a turn."""
        return self.wide[turn % len(self.wide)] if self.wide else self.buffers[turn % 2]

    @property
    def _first(self) -> HostRows:
        return next(iter(self.visitors.values()))

    def _verifies_last(self, step: Pass, following: HostRows) -> bool:
        """Whether the next visit waits until it is known which drafts stay."""
        return step.kind == "verify" and following is self._first

    def _after(self, visitor: HostRows) -> HostRows:
        """The next one, from the last one the first."""
        every = list(self.visitors.values())
        return every[(every.index(visitor) + 1) % len(every)]

    def _request(self, visitor: HostRows, turn: int) -> None:
        """Queue what brings a visitor's tokens to the buffer of a turn."""
        note, tokens, split = self.run.counter.separate(), visitor.cells.most, 0
        assert visitor.stored is not None
        after, record = (*self._free[turn % 2], visitor.stored), []
        if inputs := visitor.inputs:
            split = inputs.split(visitor.where.layer, tokens)
            record = inputs.fetch(visitor.where, turn, split, note, after, self._tables(turn))
        pairs = self._pairs(visitor, turn, split, tokens)
        note.copy("load_kv", "h2d", [home for home, _ in pairs])
        brought = [(buffer, home) for home, buffer in pairs]
        record.append(self.lanes.h2d(lambda: copy_all(brought), *after))
        self._coming = Arrival(record, note, slice(split, tokens))

    def _store(self, visitor: HostRows) -> None:
        """Queue the copy home of what this visit has added."""
        part = slice(visitor.cells.begins, visitor.cells.most)
        if visitor.packing:
            tables = _halves(self.buffers[self._turn % 2])
            with self.run.counter.op("quantise") as record:
                for some, wide in zip(tables, self._tables(self._turn), strict=True):
                    visitor.packing.put(record, wide[part], some, part)
        pairs = self._pairs(visitor, self._turn, part.start, part.stop)
        self.run.counter.copy("store_kv", "d2h", [home for home, _ in pairs])
        visitor.stored = self.lanes.d2h(lambda: copy_all(pairs), self.lanes.mark())
        self._free[self._turn % 2] = (self.lanes.mark(), visitor.stored)

    def _pairs(
        self, visitor: HostRows, turn: int, start: int, stop: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Homes and buffers of what the tokens from start to stop have changed."""
        first, found = visitor.first, []
        tables = zip(visitor.homes, self.buffers[turn % 2], strict=True)
        rows = zip(visitor.rows(start), visitor.rows(stop), strict=True)
        for (home, buffer), (low, high) in zip(tables, rows, strict=True):
            begin = max(low, first)
            if begin < high:
                found.append((home[begin - first : high - first], buffer[begin:high]))
        return found

    def _widen(self, visitor: HostRows, part: slice) -> None:
        """Loaded tokens to full precision."""
        if visitor.packing and part.start < part.stop:
            tables = _halves(self.buffers[self._turn % 2])
            with self.run.counter.op("dequantise") as record:
                for some, wide in zip(tables, self._tables(self._turn), strict=True):
                    numbers = visitor.packing.widened(record, some, part)
                    wide[part].copy_(numbers.view(wide[part].shape))


def _halves(tables: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those of keys and those of values."""
    half = len(tables) // 2
    return tables[:half], tables[half:]


def _nowhere(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The shape of a home alone: a buffer is bound before it is used."""
    return torch.empty(shape, dtype=dtype, device="meta")
