"""Storages whose rows have a token's numbers of all heads, keys before their positions.

Slot and position are the same: keys are turned back when they come and forth when they are read.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from kvsim.validate.counter import OpRecord
from kvsim.validate.model.attention import Seen, attend
from kvsim.validate.model.rope import rotate
from kvsim.validate.parts.cells import CacheRoom, KvStore, SlotRange


class WholeTokenRows(KvStore):
    """Base; subclasses say how rows (sequences, tokens, width of all heads) are stored."""

    keeps_numbers, by_position = False, True

    @abstractmethod
    def learn(self, keys: Tensor) -> None:
        """Look at the prompt's keys (tokens, width) before they are stored."""

    @abstractmethod
    def store(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Store the rows of new tokens."""

    @abstractmethod
    def tables(self) -> list[Tensor]:
        """What is kept of every token, (sequences, slots, ...)."""

    @abstractmethod
    def wide(self, most: int) -> tuple[Tensor, Tensor]:
        """The rows of the first slots, in fp32."""

    @property
    def width(self) -> int:
        """Numbers of a token's keys."""
        return self.room.heads * self.room.dim

    def table(self, width: int, dtype: torch.dtype) -> Tensor:
        """Room for so many numbers of every token."""
        shape = (self.room.sequences, self.slots, width)
        return torch.zeros(shape, dtype=dtype, device=self.room.device)

    def put(self, table: Tensor, new: Tensor, span: SlotRange) -> None:
        """New tokens' part of a table."""
        if span.first is not None:
            table[:, span.first : span.first + span.new] = new
        else:
            sequences = torch.arange(len(table), device=table.device)[:, None]
            table[sequences, span.slots] = new

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """The prompt from the first slot on."""
        most = max(counts)
        slots = torch.arange(most, device=keys.device).expand(len(keys), -1)
        rows = self._rows(turned(self.room, keys[:, :, :most], slots, back=True))
        self.learn(torch.cat([row[:n] for row, n in zip(rows, counts, strict=True)]))
        self.store(rows, self._rows(values[:, :, :most]), SlotRange(slots, tuple(counts), most, 0))

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """New tokens to their slots."""
        before = turned(self.room, keys, span.slots, back=True)
        self.store(self._rows(before), self._rows(values), span)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Rows are widened, keys turned, on their way."""
        with self.counter.op("attn") as record:
            keys, values = (self._heads(rows) for rows in self.wide(span.most))
            slots = torch.arange(span.most, device=keys.device)[None]
            keys = turned(self.room, keys, slots, back=False).to(queries.dtype)
            out = attend(OpRecord(), queries, keys, values.to(queries.dtype), seen)
            record.visible(queries.shape[2], span.most, seen)
            read = (table[i, :end] for i, end in enumerate(span.ends) for table in self.tables())
            record.reads(queries, *read)
            record.writes(out)
            return out

    def attend_with_scores(
        self, queries: Tensor, span: SlotRange, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        """Selections that ask for scores keep tokens in other slots."""
        raise NotImplementedError

    def _rows(self, numbers: Tensor) -> Tensor:
        return numbers.transpose(1, 2).flatten(2)

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:2], self.room.heads, self.room.dim).transpose(1, 2)


def turned(room: CacheRoom, keys: Tensor, slots: Tensor, back: bool) -> Tensor:
    """Keys (sequences, heads, tokens, dim) without their positions, or with them again."""
    turns = room.turns(slots)
    if turns is None:
        return keys
    cos, sin = (table.float() for table in turns)
    if back:  # stretched rotations scale too
        return (rotate(keys.float(), cos, -sin) / (cos**2 + sin**2)).to(keys.dtype)
    return rotate(keys.float(), cos, sin)
