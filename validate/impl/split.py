"""Cells of which some rows are always on the GPU and the others visit it layer by layer.

A row is a KV head of a sequence. Those that live in host memory are stored token by token, (tokens,
rows, width), so that a range of tokens is one contiguous copy.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsim.techniques.axes import Storage
from kvsim.validate.impl.cells import CacheRoom, Cells, Spot, Widths, on_the_gpu
from kvsim.validate.model.attention import Seen
from kvsim.validate.tally import Silent

Made = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes room in host memory."""


@dataclass(frozen=True)
class BatchRows:
    """Some rows of a batch, and how a pass looks to them."""

    batch: int
    heads: int  # KV heads
    part: slice  # of batch x KV heads

    def of(self, numbers: Tensor) -> Tensor:
        """Numbers (batch, KV heads, ...) of these rows, (rows, 1, ...)."""
        return numbers.flatten(0, 1)[self.part][:, None]

    def asking(self, queries: Tensor) -> Tensor:
        """Queries (batch, heads, new, dim) of these rows, (rows, heads of a group, new, dim)."""
        grouped = queries.reshape(self.batch * self.heads, -1, *queries.shape[2:])
        return grouped[self.part]

    def spot(self, spot: Spot) -> Spot:
        """Where the new tokens of these rows go."""
        slots = spot.slots.repeat_interleave(self.heads, 0)[self.part]
        ends = [end for end in spot.ends for _ in range(self.heads)][self.part]
        return replace(spot, slots=slots, ends=tuple(ends))

    def counts(self, counts: list[int]) -> list[int]:
        """Tokens of the sequence of every row."""
        return [n for n in counts for _ in range(self.heads)][self.part]

    def seen(self, seen: Seen, most: int) -> Seen:
        """What the queries of these rows see of their first ``most`` slots."""
        if isinstance(seen, str):
            return seen
        wide = seen[..., :most].expand(self.batch, self.heads, -1, -1)
        return wide.flatten(0, 1)[self.part][:, None]


class SplitCells(Cells):
    """The first rows in host memory, the others on the GPU.

    Parameters
    ----------
    kind : how both are stored.
    away : rows in host memory.
    """

    def __init__(
        self, kind: type[Cells], part: Storage, room: CacheRoom, slots: int, tally: Silent,
        away: int, host: Made,
    ) -> None:  # fmt: skip
        super().__init__(part, room, slots, tally)
        count = room.sequences * room.heads
        self.homes: list[Tensor] = []  # (tokens, rows, width) in host memory

        def at_home(rows: int, widths: Widths) -> list[Tensor]:
            made = [host((rows, away, width), dtype) for width, dtype in widths]
            self.homes += made
            return [visiting(home) for home in made]

        self.away_rows = BatchRows(room.sequences, room.heads, slice(0, away))
        self.here_rows = BatchRows(room.sequences, room.heads, slice(away, count))
        self.away = kind(part, replace(room, sequences=away, heads=1, rows=at_home), slots, tally)
        here = on_the_gpu(count - away, 1, room.dim, room.dtype, room.device)
        self.here = kind(part, here, slots, tally) if away < count else None
        self.plain, self.as_given = self.away.plain, False
        self.differences = {**self.away.differences, **(self.away.apart if self.here else {})}
        self.ends: tuple[int, ...] = (0,)  # tokens of every row that is away
        self.begins = 0  # the first slot that the latest pass has written

    def parts(self) -> Iterator[tuple[BatchRows, Cells]]:
        """Both kinds of rows, with their cells."""
        yield self.away_rows, self.away
        if self.here is not None:
            yield self.here_rows, self.here

    def visit(self, buffers: list[Tensor]) -> None:
        """From here on the rows that are away lie in these buffers, shaped as their homes."""
        self.away.bind([visiting(buffer) for buffer in buffers])

    def in_use(self) -> list[int]:
        """Of every home, the first rows that hold something of some sequence."""
        return self.away.rows_in_use((max(self.ends),))

    def untouched(self) -> list[int]:
        """The first rows that this pass has left as they were."""
        return self.away.rows_in_use((self.begins,))

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """A prompt, some rows here and some there."""
        for rows, cells in self.parts():
            cells.fill(rows.of(keys), rows.of(values), rows.counts(counts), plainly)
        self.ends = tuple(self.away_rows.counts(counts))

    def append(self, keys: Tensor, values: Tensor, spot: Spot) -> None:
        """New tokens, some rows here and some there."""
        for rows, cells in self.parts():
            cells.append(rows.of(keys), rows.of(values), rows.spot(spot))
        self.ends = self.away_rows.spot(spot).ends
        self.begins = min(self.ends) - spot.new

    def look(self, queries: Tensor, spot: Spot, seen: Seen) -> Tensor:
        """Attention of both kinds of rows, side by side."""
        outs = [
            cells.look(rows.asking(queries), own := rows.spot(spot), rows.seen(seen, own.most))
            for rows, cells in self.parts()
        ]
        return (torch.cat(outs) if len(outs) > 1 else outs[0]).reshape(queries.shape)

    def look_scored(self, queries: Tensor, spot: Spot, seen: Seen) -> tuple[Tensor, Tensor]:
        """No technique asks for the scores of rows that are in host memory."""
        raise NotImplementedError

    def tensors(self) -> dict[str, list[Tensor]]:
        """Rows that are always here, and what never leaves of the others."""
        here = self.here.tensors()["kv"] if self.here is not None else []
        return {"kv": [*here, *self.away.tails()]}


def visiting(home: Tensor) -> Tensor:
    """A home (tokens, rows, width) as cells see it, (rows, 1, tokens, width)."""
    return home.transpose(0, 1)[:, None]
