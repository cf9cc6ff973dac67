"""KIVI: keys packed per channel in blocks, values per token behind the latest ones."""

from collections.abc import Hashable, Mapping
from statistics import fmean
from types import MappingProxyType

from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Storage
from kvsim.techniques.papers.kivi import Kivi as Settings
from kvsim.validate.counter import NullCounter
from kvsim.validate.parts.packed import PackedRing, PackedStore, check_groups, check_residual
from kvsim.validate.parts.store import CacheRoom, SlotRange

SMALL_SETTINGS = ("group={group},residual={group}",)


class Kivi(PackedStore):
    """Asymmetric groups with a residual that rolls over.

    A new token joins the residual, full blocks of keys and surplus values are packed, and then it
    attends.

    References
    ----------
    .. [1] Z. Liu et al., "KIVI", ICML 2024, algorithm 1.
    """

    drops_tokens, replays = False, True
    differences = MappingProxyType(
        {"quantise": "keys are packed by whole residuals; the prediction spreads that evenly"}
    )

    def __init__(self, part: Storage, room: CacheRoom, slots: int, counter: NullCounter) -> None:
        super().__init__(part, room, slots, counter)
        assert isinstance(part, Settings)
        self.residual = check_residual("kivi", part.residual, part.group)
        if part.bits == 16:
            raise InputError("kivi: bits=16 packs nothing; choose fewer bits, or technique full")
        check_groups("kivi", part.group, room.dim)
        bits = int(part.bits)
        self.k = PackedRing(room, slots, self.residual, bits, part.group, "channel")
        self.v = PackedRing(room, slots, self.residual, bits, part.group, "token")

    def packed_keys(self, tokens: int) -> int:
        """Tokens whose keys are packed: whole blocks of the residual. [tokens]"""
        return tokens // self.residual * self.residual

    def packed_values(self, tokens: int) -> int:
        """All but the residual."""
        return max(tokens - self.residual, 0)

    def packed_there(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The same of lengths on the device."""
        keys = lengths // self.residual * self.residual
        return keys, (lengths - self.residual).clamp(min=0)

    def op_shares(self, ends: list[int]) -> Mapping[str, float]:
        """Packing of a value that leaves the residual, and of a block of keys where it is full."""
        part = self.part.stored
        keys, values = part.packing(self.room.dim, 0), part.packing(0, self.room.dim)
        done = [
            values * (n > self.residual) + keys * self.residual * (n % self.residual == 0)
            for n in ends
        ]
        return {"quantise": fmean(done) / (keys + values)}

    def branch(self, ends: list[int]) -> Hashable:
        """Whether values leave the residual, and whether keys fill it: in all sequences or none."""
        packs = [n > self.residual for n in ends], [n % self.residual == 0 for n in ends]
        alike = all(all(some) or not any(some) for some in packs)
        return tuple(some[0] for some in packs) if alike else None

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """The value that leaves the residual, the new token, and a block of keys it completes."""
        last = span.slots[:, 0]
        full = [i for i, n in enumerate(span.ends) if n > self.residual]
        if full:
            with self.counter.op("quantise") as record:
                self.v.pack(record, full, last - self.residual, 1)
        self.add(keys, values, span)
        whole = [i for i, n in enumerate(span.ends) if n % self.residual == 0]
        if whole:
            with self.counter.op("quantise") as record:
                self.k.pack(record, whole, last + 1 - self.residual, self.residual)
