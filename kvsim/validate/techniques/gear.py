"""GEAR: a packed cache, and the error of every packed block as a product of low rank."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.gear import LOOPS
from kvsim.techniques.papers.gear import Gear as Settings
from kvsim.validate.counter import OpRecord
from kvsim.validate.model.attention import Seen
from kvsim.validate.parts.packed import PackedRing, PackedStore
from kvsim.validate.parts.store import CacheRoom, SlotRange

SMALL_SETTINGS = ("group={group},residual={group}",)
PACKED_BLOCKS = (
    "values are packed by whole blocks too; the prediction packs them one by one, as KIVI does"
)
PROMPT_BLOCK = "a prompt without a whole block has no factors; the prediction gives it some"
ITERATION_SEED = 2403  # of the vectors that iterations begin with


class Gear(PackedStore):
    """Storage in packed blocks of ``residual`` tokens with low-rank corrections; the prompt is one
    block.

    Scores are corrected before the softmax and outputs after it, by two thin products each.

    References
    ----------
    .. [1] H. Kang et al., "GEAR", 2024, section 3, algorithm 2: power iteration.
    """

    drops_tokens, by_position = False, True
    differences = MappingProxyType(
        {"attn": PACKED_BLOCKS, "quantise": PACKED_BLOCKS, "power_iteration": PROMPT_BLOCK}
    )

    def __init__(self, room: CacheRoom) -> None:
        part, slots = room.settings(Settings), room.slots
        if float(part.outliers):
            raise InputError("gear: its real implementation keeps no outliers; set outliers=0")
        super().__init__(room, part.residual, int(part.bits), part.group)
        if part.rank > (most := min(room.dim, part.residual)):
            raise InputError(
                f"gear: rank={part.rank} is more than a block's error of {part.residual} tokens "
                f"x {room.dim} numbers can have; choose at most {most}"
            )
        self.rank = part.rank
        more = slots - max(room.prompts)  # tokens behind every prompt
        blocks = 1 + max((n + more) // self.residual - n // self.residual for n in room.prompts)
        if max(room.prompts) < self.residual:
            blocks -= 1  # no prompt has a block of its own
        # a row for every packed token, and for every channel of every block
        self.rows = [room.zeros(self.packed_keys(slots), self.rank) for _ in "kv"]
        self.channels = [room.zeros(blocks * room.dim, self.rank) for _ in "kv"]
        self.first: list[int] = []  # tokens of each sequence's first block

    def packed_values(self, tokens: int) -> int:
        """Return how many tokens have packed values: as many as have packed keys. [tokens]"""
        return self.packed_keys(tokens)

    def op_shares(self, ends: list[int]) -> Mapping[str, float]:
        """Return the share of packing and of power iterations: those of the blocks that fill up."""
        share = self.residual * fmean(n % self.residual == 0 for n in ends)
        return {"quantise": share, "power_iteration": share}

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """Pack the prompt's blocks together, and factorise their quantisation error."""
        super().fill(keys, values, counts, plainly)
        self.first = [self.packed_keys(n) for n in counts]
        for some, packed in self._by_length(self.first):
            self._correct(some, 0, 0, keys[some, :, :packed], values[some, :, :packed])

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Write new tokens to the rings; pack blocks that they complete, and factorise errors."""
        self.add(keys, values, span)
        for some, end in self._by_length(list(span.ends)):
            if end % self.residual:
                continue
            start = end - self.residual
            inside = torch.arange(start, end, device=self.room.device) % self.residual
            block = [side.ring[some][:, :, inside] for side in (self.k, self.v)]
            rows = range(len(span.ends))[some]
            begins = torch.full((len(span.ends),), start, device=self.room.device)
            for side in (self.k, self.v):
                self.pack(side, list(rows), begins, self.residual)
            first = self.first[rows[0]]
            number = (first > 0) + (start - first) // self.residual
            self._correct(some, number, start, *block)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend to the packed cache, with scores and outputs corrected by the low-rank factors.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, new, dim).
        """
        return self._weigh(queries, span)[0]

    def attend_with_scores(
        self, queries: Tensor, span: SlotRange, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        """Attend as :meth:`attend`, and return the corrected attention weights too.

        Returns
        -------
        tuple of Tensor
            Output, (sequences, heads, 1, dim), and attention weights, (sequences, heads, 1, slots).
        """
        return self._weigh(queries, span)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return KIVI's cache, and the low-rank factors of its quantisation error."""
        return super().tensors() | {"factors": [*self.rows, *self.channels]}

    def _by_length(self, tokens: list[int]) -> Iterator[tuple[slice, int]]:
        """Yield groups of sequences of equal length."""
        if min(tokens) == max(tokens):
            yield slice(0, len(tokens)), tokens[0]
        else:
            for i, count in enumerate(tokens):
                yield slice(i, i + 1), count

    def _correct(self, some: slice, number: int, start: int, *block: Tensor) -> None:
        """Factorise the error of a block's keys and values, (sequences, KV heads, tokens, dim)."""
        count, dim = block[0].shape[2], self.room.dim
        if not self.rank or not count:
            return
        with self.counter.op("power_iteration") as record:
            for i, (side, numbers) in enumerate(zip((self.k, self.v), block, strict=True)):
                packed = side.store.sequences(some).numbers(start, start + count)
                error = numbers - packed.to(numbers.dtype)
                record.writes(error)
                rows, channels = _power_iteration(record, error, self.rank)
                self.rows[i][some, :, start : start + count] = rows
                self.channels[i][some, :, number * dim : (number + 1) * dim] = channels

    def _weigh(self, queries: Tensor, span: SlotRange) -> tuple[Tensor, Tensor]:
        """Return the output of attention and the weights, (sequences, heads, new, slots)."""
        outs, weights = (
            torch.zeros_like(queries),
            queries.new_zeros(*queries.shape[:3], span.longest),
        )
        for some, end in self._by_length(list(span.ends)):
            asked = queries[some]
            grouped = asked.reshape(len(asked), self.room.heads, -1, self.room.dim)
            with self.counter.op("attn") as record:
                keys, values = (self._numbers(side, some, end) for side in (self.k, self.v))
                logits = grouped @ keys.transpose(2, 3)
                record.visible(span.new, end, "all")
            self._add_correction(logits, grouped, some, end, keys=True)
            with self.counter.op("attn") as record:
                shares = (logits.float() / self.room.dim**0.5).softmax(-1).to(queries.dtype)
                out = shares @ values
                record.visible(span.new, end, "all")
            self._add_correction(out, shares, some, end, keys=False)
            outs[some] = out.view_as(asked)
            weights[some, :, :, :end] = shares.view(*asked.shape[:3], end)
        ends, packed = list(span.ends), [self.packed_keys(n) for n in span.ends]
        with self.counter.op("attn") as record:
            record.reads(queries, *self.k.read(packed, ends), *self.v.read(packed, ends))
            record.writes(outs)
        return outs, weights

    def _add_correction(
        self, found: Tensor, given: Tensor, some: slice, end: int, keys: bool
    ) -> None:
        """Add the low-rank correction to scores or to outputs."""
        packed, dim = self.packed_keys(end), self.room.dim
        if not self.rank or not packed:
            return
        first = self.first[some.start]
        borders = [*([0] if first else []), *range(first, packed + 1, self.residual)]
        side = 0 if keys else 1
        with self.counter.op("correct") as record:
            rows = self.rows[side][some, :, :packed]
            channels = self.channels[side][some]
            record.reads(rows)
            for number, (start, stop) in enumerate(pairwise(borders)):
                own = channels[:, :, number * dim : (number + 1) * dim]
                if keys:
                    added = (given @ own) @ rows[:, :, start:stop].transpose(2, 3)
                    found[..., start:stop] += added
                else:
                    added = (given[..., start:stop] @ rows[:, :, start:stop]) @ own.transpose(2, 3)
                    found += added
                record.reads(own)
            changed = found[..., :packed] if keys else found
            record.reads(changed).writes(changed)

    def _numbers(self, side: PackedRing, some: slice, end: int) -> Tensor:
        """Return dequantised rows followed by the ring, (sequences, KV heads, tokens, dim)."""
        packed = self.packed_keys(end)
        wide = side.store.sequences(some).numbers(0, packed).to(self.room.dtype)
        return torch.cat([wide, side.ring[some, :, : end - packed]], 2)


def _power_iteration(record: OpRecord, error: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Approximate an error by factors (..., tokens, rank) and (..., dim, rank)."""
    generator = torch.Generator().manual_seed(ITERATION_SEED)
    begin = torch.randn(error.shape[-1], rank, generator=generator).to(error.device)
    channels, wide = begin.expand(*error.shape[:2], -1, -1), error.float()
    rows = channels
    for loop in range(LOOPS):
        last = loop == LOOPS - 1
        channels = torch.linalg.qr(channels).Q if last else channels
        rows = wide @ channels
        rows = torch.linalg.qr(rows).Q if last else rows
        channels = wide.transpose(2, 3) @ rows
        record.reads(error, error)
    return rows.to(error.dtype), channels.to(error.dtype)
