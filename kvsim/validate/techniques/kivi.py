"""KIVI: keys packed per channel in blocks, values per token behind the latest ones."""

from collections.abc import Hashable

from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.kivi import Kivi as Settings
from kvsim.validate.parts.packed import PackedStore
from kvsim.validate.parts.store import CacheRoom, SlotRange

SMALL_SETTINGS = ("group={group},residual={group}",)


class Kivi(PackedStore):
    """Storage with asymmetric groups, and a residual of recent tokens in full precision.

    A new token is added to the residual and full blocks of keys and surplus values are packed
    before attention.

    References
    ----------
    .. [1] Z. Liu et al., "KIVI", ICML 2024, algorithm 1.
    """

    drops_tokens, replays = False, True

    def __init__(self, room: CacheRoom) -> None:
        part = room.settings(Settings)
        if part.bits == 16:
            raise InputError("kivi: bits=16 packs nothing; choose fewer bits, or technique full")
        super().__init__(room, part.residual, int(part.bits), part.group)

    def packed_there(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of packed keys and of packed values of each sequence. (batch,) each"""
        keys = lengths // self.residual * self.residual
        return keys, (lengths - self.residual).clamp(min=0)

    def branch(self, ends: list[int]) -> Hashable:
        """Return whether values leave the residual, and whether keys fill it."""
        return ends[0] > self.residual, ends[0] % self.residual == 0

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Pack the value that leaves the residual, store new tokens, and pack full key blocks."""
        last, tokens = span.slots[:, 0], span.ends[0]
        if tokens > self.residual:
            self.pack(self.v, last - self.residual, 1)
        self.add(keys, values, span)
        if tokens % self.residual == 0:
            self.pack(self.k, last - self.residual + 1, self.residual)
