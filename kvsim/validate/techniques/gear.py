"""GEAR: a packed cache, and the error of every packed block as a product of low rank."""

from collections.abc import Mapping
from itertools import pairwise
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
        # the prompt's block, if it has one, and those that fill up after it
        blocks = (room.prompt >= part.residual) + slots // part.residual
        blocks -= room.prompt // part.residual
        # a row for every packed token, and for every channel of every block
        self.rows = [room.zeros(self.packed_keys(slots), self.rank) for _ in "kv"]
        self.channels = [room.zeros(blocks * room.dim, self.rank) for _ in "kv"]
        self.first = 0  # tokens of the first block

    def packed_values(self, tokens: int) -> int:
        """Return how many tokens have packed values: as many as have packed keys. [tokens]"""
        return self.packed_keys(tokens)

    def op_shares(self, ends: list[int]) -> Mapping[str, float]:
        """Return the share of packing and of power iterations: those of the blocks that fill up."""
        share = float(self.residual * (ends[0] % self.residual == 0))
        return {"quantise": share, "power_iteration": share}

    def fill(self, keys: Tensor, values: Tensor, plainly: str = "attn") -> None:
        """Pack the prompt's blocks together, and factorise their quantisation error."""
        super().fill(keys, values, plainly)
        self.first = self.packed_keys(keys.shape[2])
        self._correct(0, 0, keys[:, :, : self.first], values[:, :, : self.first])

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Write new tokens to the rings; pack blocks that they complete, and factorise errors."""
        self.add(keys, values, span)
        if span.ends[0] % self.residual:
            return
        start = span.ends[0] - self.residual
        for side in (self.k, self.v):
            self.pack(side, span.slots[:, 0] - self.residual + 1, self.residual)
        number = (self.first > 0) + (start - self.first) // self.residual
        self._correct(number, start, self.k.ring, self.v.ring)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend to the packed cache, with scores and outputs corrected by the low-rank factors."""
        end = span.ends[0]
        packed = self.packed_keys(end)
        grouped = queries.reshape(len(queries), self.room.heads, -1, self.room.dim)
        with self.counter.op("attn") as record:
            keys, values = (self._numbers(side, packed, end) for side in (self.k, self.v))
            logits = grouped @ keys.transpose(2, 3)
            record.visible(span.new, end, "all")
        self._add_correction(logits, grouped, packed, keys=True)
        with self.counter.op("attn") as record:
            shares = (logits.float() / self.room.dim**0.5).softmax(-1).to(queries.dtype)
            out: Tensor = shares @ values
            record.visible(span.new, end, "all")
        self._add_correction(out, shares, packed, keys=False)
        out = out.view_as(queries)
        with self.counter.op("attn") as record:
            ends, rows = list(span.ends), [packed] * len(queries)
            record.reads(queries, *self.k.read(rows, ends), *self.v.read(rows, ends)).writes(out)
        return out

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return KIVI's cache, and the low-rank factors of its quantisation error."""
        return super().tensors() | {"factors": [*self.rows, *self.channels]}

    def _correct(self, number: int, start: int, *block: Tensor) -> None:
        """Factorise the error of a block's keys and values, (sequences, KV heads, tokens, dim)."""
        count, dim = block[0].shape[2], self.room.dim
        if not self.rank or not count:
            return
        with self.counter.op("power_iteration") as record:
            for i, (side, numbers) in enumerate(zip((self.k, self.v), block, strict=True)):
                error = numbers - side.store.numbers(start, start + count).to(numbers.dtype)
                record.writes(error)
                rows, channels = _power_iteration(record, error, self.rank)
                self.rows[i][:, :, start : start + count] = rows
                self.channels[i][:, :, number * dim : (number + 1) * dim] = channels

    def _add_correction(self, found: Tensor, given: Tensor, packed: int, keys: bool) -> None:
        """Add the low-rank correction to scores or to outputs."""
        if not self.rank or not packed:
            return
        borders = [*([0] if self.first else []), *range(self.first, packed + 1, self.residual)]
        side, dim = 0 if keys else 1, self.room.dim
        with self.counter.op("correct") as record:
            rows = self.rows[side][:, :, :packed]
            record.reads(rows)
            for number, (start, stop) in enumerate(pairwise(borders)):
                own = self.channels[side][:, :, number * dim : (number + 1) * dim]
                if keys:
                    added = (given @ own) @ rows[:, :, start:stop].transpose(2, 3)
                    found[..., start:stop] += added
                else:
                    added = (given[..., start:stop] @ rows[:, :, start:stop]) @ own.transpose(2, 3)
                    found += added
                record.reads(own)
            changed = found[..., :packed] if keys else found
            record.reads(changed).writes(changed)

    def _numbers(self, side: PackedRing, packed: int, end: int) -> Tensor:
        """Return dequantised rows followed by the ring, (sequences, KV heads, tokens, dim)."""
        wide = side.store.numbers(0, packed).to(self.room.dtype)
        return torch.cat([wide, side.ring[:, :, : end - packed]], 2)


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
