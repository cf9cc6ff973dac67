"""Cells of which some rows are always on the GPU, some visit it, some the CPU attends to.

A row is a KV head of a sequence. Those that live in host memory are stored token by token, (tokens,
rows, width), so that a range of tokens is one contiguous copy.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.techniques.axes.base import Storage
from kvsim.validate.counter import NullCounter
from kvsim.validate.model.attention import Seen
from kvsim.validate.parts.cells import CacheRoom, KvStore, SlotRange, Widths, on_the_gpu

Made = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes room in host memory."""


@frozen
class CpuRows:
    """So many of a layer's rows that the CPU attends to, and what makes their cells."""

    rows: int
    cells: Callable[[Storage, CacheRoom, int, NullCounter], KvStore]


@frozen
class BatchRows:
    """Some rows of a batch, and how a pass looks to them."""

    batch: int
    heads: int  # KV heads
    part: slice  # of batch x KV heads

    def of(self, numbers: Tensor) -> Tensor:
        """Of numbers (batch x KV heads, ...) these rows, (rows, 1, ...)."""
        return numbers[self.part][:, None]

    def asking(self, queries: Tensor) -> Tensor:
        """Of queries (batch x KV heads, heads of a group, new, dim) those of these rows."""
        return queries[self.part]

    def span(self, span: SlotRange) -> SlotRange:
        """Where the new tokens of these rows go."""
        rows = self.part.stop - self.part.start
        if span.first is None:
            slots = span.slots.repeat_interleave(self.heads, 0)[self.part]
        else:
            slots = span.slots[:1].expand(rows, -1)
        ends = [end for end in span.ends for _ in range(self.heads)][self.part]
        return replace(span, slots=slots, ends=tuple(ends))

    def counts(self, counts: list[int]) -> list[int]:
        """Tokens of the sequence of every row."""
        return [n for n in counts for _ in range(self.heads)][self.part]

    def seen(self, seen: Seen, most: int) -> Seen:
        """What the queries of these rows see of their first ``most`` slots."""
        if isinstance(seen, str):
            return seen
        wide = seen[..., :most].expand(self.batch, self.heads, -1, -1)
        return wide.flatten(0, 1)[self.part][:, None]


class TieredStore(KvStore):
    """The first rows are copied from host memory, the last the CPU attends to; others stay.

    Parameters
    ----------
    kind : how all of them are stored.
    away : rows in host memory that visit the GPU.
    cpu : rows in host memory that the CPU attends to.
    """

    def __init__(
        self,
        kind: type[KvStore],
        part: Storage,
        room: CacheRoom,
        slots: int,
        counter: NullCounter,
        away: int,
        host: Made,
        cpu: CpuRows | None = None,
    ) -> None:
        super().__init__(part, room, slots, counter)
        count = room.sequences * room.heads
        stay = count - (cpu.rows if cpu else 0)
        self.homes: list[Tensor] = []  # (tokens, rows, width) in host memory

        def at_home(rows: int, widths: Widths) -> list[Tensor]:
            made = [host((rows, away, width), dtype) for width, dtype in widths]
            self.homes += made
            return [visiting(home) for home in made]

        def rows_of(part: slice) -> BatchRows:
            return BatchRows(room.sequences, room.heads, part)

        self.groups: list[tuple[BatchRows, KvStore]] = []
        self.away: KvStore | None = None
        self.here: KvStore | None = None
        self.cpu: KvStore | None = None
        if away:
            own = replace(room, sequences=away, heads=1, rows=at_home)
            self.away = kind(part, own, slots, counter)
            self.groups.append((rows_of(slice(0, away)), self.away))
        if away < stay:
            here = on_the_gpu(stay - away, 1, room.dim, room.dtype, room.device)
            self.here = kind(part, here, slots, counter)
            self.groups.append((rows_of(slice(away, stay)), self.here))
        if cpu:
            beside = on_the_gpu(cpu.rows, 1, room.dim, room.dtype, room.device)
            self.cpu = cpu.cells(part, beside, slots, counter)
            self.groups.append((rows_of(slice(stay, count)), self.cpu))
        first = self.groups[0][1]
        self.plain, self.keeps_numbers = first.plain, False
        self.drops_tokens = first.drops_tokens
        self.differences = {
            **first.differences,
            **(first.split_differences if len(self.groups) > 1 else {}),
        }
        self.ends: tuple[int, ...] = (0,)  # tokens of every row of the first group
        self.begins = 0  # the first slot that the latest pass has written

    def visit(self, buffers: list[Tensor]) -> None:
        """From here on the rows that are away lie in these buffers, shaped as their homes."""
        assert self.away is not None
        self.away.bind([visiting(buffer) for buffer in buffers])

    def rows_of(self, tokens: int) -> list[int]:
        """Of every home, the first rows that so many tokens of some sequence fill."""
        assert self.away is not None
        return self.away.rows_in_use((tokens,))

    @property
    def most(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.ends)

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """A prompt, some rows here and some there."""
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        for rows, cells in self.groups:
            cells.fill(rows.of(keys), rows.of(values), rows.counts(counts), plainly)
        self.ends = tuple(self.groups[0][0].counts(counts))

    def prompt(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Put together from all rows."""
        parts = zip(*(cells.prompt(tokens) for _, cells in self.groups), strict=True)
        shape = (self.room.sequences, self.room.heads, tokens, self.room.dim)
        keys, values = (torch.cat(side).view(shape) for side in parts)
        return keys, values

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """New tokens, some rows here and some there."""
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        for rows, cells in self.groups:
            cells.append(rows.of(keys), rows.of(values), rows.span(span))
        self.ends = self.groups[0][0].span(span).ends
        self.begins = min(self.ends) - span.new

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attention of all rows, side by side; the CPU starts first."""
        shape = queries.shape
        queries = queries.reshape(self.room.sequences * self.room.heads, -1, *shape[2:])
        asked = []
        for rows, cells in reversed(self.groups):
            own = rows.span(span)
            asked.append(cells.attend_async(rows.asking(queries), own, rows.seen(seen, own.most)))
        outs = [answer() for answer in reversed(asked)]
        return (torch.cat(outs) if len(outs) > 1 else outs[0]).reshape(shape)

    def commit(self, before: list[int], after: list[int]) -> None:
        """So many tokens of every sequence stay."""
        for rows, cells in self.groups:
            cells.commit(rows.counts(before), rows.counts(after))
        self.ends = tuple(self.groups[0][0].counts(after))

    def attend_with_scores(
        self, queries: Tensor, span: SlotRange, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        """No technique asks for the scores of rows that are in host memory."""
        raise NotImplementedError

    def tensors(self) -> dict[str, list[Tensor]]:
        """Rows that are always here, and what never leaves of the others."""
        here = self.here.tensors()["kv"] if self.here is not None else []
        return {"kv": [*here, *(self.away.gpu_tensors() if self.away is not None else [])]}


def visiting(home: Tensor) -> Tensor:
    """A home (tokens, rows, width) as cells see it, (rows, 1, tokens, width)."""
    return home.transpose(0, 1)[:, None]
