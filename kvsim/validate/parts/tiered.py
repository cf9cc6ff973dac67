"""Storage whose rows are divided between the GPU, host memory and the CPU.

A row is a KV head of a sequence. Those that live in host memory are stored token by token, (tokens,
rows, width), so that a range of tokens is one contiguous copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.validate.model.attention import Seen, attend
from kvsim.validate.parts.store import CacheRoom, Host, KvStore, SlotRange, Widths
from kvsim.validate.transfer import Transfers


@frozen
class BatchRows:
    """A range of rows of a batch; a row is one KV head of one sequence.

    Tensors of the whole batch have the shape (batch x KV heads, ...), those of rows (rows, 1, ...).

    Attributes
    ----------
    batch
        Sequences of the batch.
    heads
        KV heads.
    part
        Range of rows, of batch x KV heads in total.
    """

    batch: int
    heads: int
    part: slice

    def select(self, numbers: Tensor) -> Tensor:
        """Select these rows of a tensor.

        Parameters
        ----------
        numbers
            (batch x KV heads, ...).

        Returns
        -------
        Tensor
            (rows, 1, ...).
        """
        return numbers[self.part][:, None]

    def span(self, span: SlotRange) -> SlotRange:
        """Return the slots of new tokens in these rows.

        Parameters
        ----------
        span
            Slots of the batch, by sequence.
        """
        rows = self.part.stop - self.part.start
        if span.first is None:
            slots = span.slots.repeat_interleave(self.heads, 0)[self.part]
        else:
            slots = span.slots[:1].expand(rows, -1)
        return replace(span, slots=slots, ends=tuple(self.counts(span.ends)))

    def counts(self, counts: Sequence[int]) -> list[int]:
        """Repeat a count of every sequence for each of these rows of the sequence.

        Parameters
        ----------
        counts
            Tokens of each sequence. [tokens]

        Returns
        -------
        list of int
            Tokens of each row. [tokens]
        """
        return [n for n in counts for _ in range(self.heads)][self.part]

    def select_mask(self, seen: Seen, most: int) -> Seen:
        """Return which slots the queries of these rows see.

        Parameters
        ----------
        seen
            Which slots the queries of the batch see.
        most
            Slots to keep of a mask, from the first.
        """
        if isinstance(seen, str):
            return seen
        wide = seen[..., :most].expand(self.batch, self.heads, -1, -1)
        return wide.flatten(0, 1)[self.part][:, None]


class TieredStore(KvStore):
    """Storage whose rows are divided over host memory and the GPU.

    The first rows are in host memory and are copied to the GPU for attention, the last are in host
    memory and the CPU attends to them, and those in between stay on the GPU.

    Parameters
    ----------
    kind
        Class of the storage of all rows.
    away
        Number of rows that are copied to the GPU.
    cpu
        Number of rows that the CPU attends to.
    host
        Allocates host memory for the rows that are copied.
    """

    divided = True

    def __init__(
        self,
        kind: type[KvStore],
        room: CacheRoom,
        away: int,
        cpu: int,
        host: Host,
        lanes: Transfers,
    ) -> None:
        super().__init__(room)
        count = room.sequences * room.heads
        stay = count - cpu
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
        self.cpu: CpuStore | None = None
        if away:
            self.away = kind(replace(room, sequences=away, heads=1, make_rows=at_home))
            self.groups.append((rows_of(slice(0, away)), self.away))
        if away < stay:
            self.here = kind(replace(room, sequences=stay - away, heads=1))
            self.groups.append((rows_of(slice(away, stay)), self.here))
        if cpu:
            self.cpu = CpuStore(replace(room, sequences=cpu, heads=1), lanes)
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
        """Use GPU buffers as copies of the rows in host memory, from now on.

        Parameters
        ----------
        buffers
            GPU copies of the rows, (tokens, rows, width) each.
        """
        assert self.away is not None
        self.away.bind([visiting(buffer) for buffer in buffers])

    def rows_of(self, tokens: int) -> list[int]:
        """Count the token rows in use of every tensor in host memory.

        Parameters
        ----------
        tokens
            Tokens of the longest sequence. [tokens]
        """
        assert self.away is not None
        return self.away.rows_in_use((tokens,))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence. [tokens]"""
        return max(self.ends)

    def fill(self, keys: Tensor, values: Tensor, plainly: str = "attn") -> None:
        """Store the prompts' tokens, divided between GPU and host rows."""
        self.ends = (keys.shape[2],)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        for rows, kv in self.groups:
            kv.fill(rows.select(keys), rows.select(values), plainly)

    def prompt(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Join keys and values of the prompt's first tokens from all rows."""
        parts = zip(*(kv.prompt(tokens) for _, kv in self.groups), strict=True)
        shape = (self.room.sequences, self.room.heads, tokens, self.room.dim)
        keys, values = (torch.cat(side).view(shape) for side in parts)
        return keys, values

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Store the new tokens of a pass, divided between GPU and host rows."""
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        for rows, kv in self.groups:
            kv.append(rows.select(keys), rows.select(values), rows.span(span))
        self.ends = self.groups[0][0].span(span).ends
        self.begins = min(self.ends) - span.new

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend on the CPU and the GPU side by side. (sequences, heads, new, dim)"""
        shape = queries.shape
        queries = queries.reshape(self.room.sequences * self.room.heads, -1, *shape[2:])
        asked = []
        for rows, kv in reversed(self.groups):
            own = rows.span(span)
            asked.append(
                kv.attend_async(queries[rows.part], own, rows.select_mask(seen, own.longest))
            )
        outs = [answer() for answer in reversed(asked)]
        return (torch.cat(outs) if len(outs) > 1 else outs[0]).reshape(shape)

    def commit(self, before: list[int], after: list[int]) -> None:
        """End a round, after which rejected drafts are known."""
        for rows, kv in self.groups:
            kv.commit(rows.counts(before), rows.counts(after))
        self.ends = tuple(self.groups[0][0].counts(after))

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the rows on the GPU, and the GPU part of those in host memory."""
        here = self.here.tensors()["kv"] if self.here is not None else []
        return {"kv": [*here, *(self.away.gpu_tensors() if self.away is not None else [])]}


def visiting(home: Tensor) -> Tensor:
    """View tables of host memory in the layout of stores.

    Parameters
    ----------
    home
        Table in host memory, (tokens, rows, width).

    Returns
    -------
    Tensor
        (rows, 1, tokens, width).
    """
    return home.transpose(0, 1)[:, None]


class CpuStore(KvStore):
    """Storage of unpacked keys and values in host memory, to which the CPU attends.

    Tensors have the shape (sequences, KV heads, slots, dim). During prefill, prompts are in a GPU
    buffer that layers use in turn. In decoding, queries and new tokens are sent to the host and
    the output of attention comes back.
    """

    plain = True

    def __init__(self, room: CacheRoom, lanes: Transfers, returns: bool = True) -> None:
        super().__init__(room)
        shape = (room.sequences, room.heads, room.slots, room.dim)
        self.returns = returns  # the answer to the GPU; otherwise who waits for it does that
        self.lanes, self.homes = lanes, [lanes.host(shape, room.dtype) for _ in "kv"]
        self.buffers: list[Tensor] = []  # of the prompt, while it is read
        self.filled = 0  # tokens of a prompt that a selection has kept; 0 for all
        self._new: list[Tensor] = []

    def fill(self, keys: Tensor, values: Tensor, plainly: str = "attn") -> None:
        """Write the tokens of a prompt to GPU buffers that are copied to host memory later."""
        self.filled = keys.shape[2]
        with self.counter.op(plainly) as record:
            for buffer, kept in zip(self.buffers, (keys, values), strict=True):
                buffer[:, :, : self.filled] = kept
            record.writes(keys, values)

    def prompt(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the GPU buffers of the prompt's first tokens."""
        keys, values = (buffer[:, :, :tokens] for buffer in self.buffers)
        return keys, values

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Write new tokens to the GPU buffers; in decoding, keep them to send with the queries."""
        if not self.buffers:
            self._new = [keys, values]
            return
        assert span.first is not None
        with self.counter.op("attn") as record:
            for buffer, new in zip(self.buffers, (keys, values), strict=True):
                buffer[:, :, span.first : span.first + span.new] = new
            record.writes(keys, values)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend on the GPU while prompts are read, and on the CPU afterwards."""
        if self.buffers:
            with self.counter.op("attn") as record:
                keys, values = (buffer[:, :, : span.longest] for buffer in self.buffers)
                return attend(record, queries, keys, values, seen)
        out = self._on_the_cpu(queries, span, seen, "attn")()
        return out.to(queries.device) if self.returns else out

    def attend_async(self, queries: Tensor, span: SlotRange, seen: Seen) -> Callable[[], Tensor]:
        """Start attention on the CPU, beside that of the GPU."""
        if self.buffers:
            return super().attend_async(queries, span, seen)
        answer = self.lanes.submit(self._on_the_cpu(queries, span, seen, "attn_cpu"))
        return lambda: answer().to(queries.device)

    def _on_the_cpu(
        self, queries: Tensor, span: SlotRange, seen: Seen, name: str
    ) -> Callable[[], Tensor]:
        """Send queries and new tokens to the host; return a function that computes attention."""
        self.counter.copy("send_qkv", "d2h", [queries, *self._new])
        asked, *new = (numbers.cpu() for numbers in (queries, *self._new))
        slots = span.slots.cpu()
        sequences = torch.arange(len(span.ends))[:, None]
        for home, numbers in zip(self.homes, new, strict=True):
            home[sequences, :, slots] = numbers.transpose(1, 2)
        own = seen.cpu() if isinstance(seen, Tensor) else seen

        def attended() -> Tensor:
            with self.counter.op(name, "dram") as record:
                keys, values = (home[:, :, : span.longest] for home in self.homes)
                out = attend(record, asked, keys, values, own)
            self.counter.copy("return_out", "h2d", [out])
            return out

        return attended

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return no tensors, as none stays on the GPU."""
        return {"kv": []}


MakeStore = Callable[[Host], TieredStore]
"""Makes a layer's store, given what makes room in host memory."""
