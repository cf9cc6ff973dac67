"""KIVI's layout, packed once a step has attended: its own tokens are still in full precision."""

from types import MappingProxyType

from torch import Tensor

from kvsim.techniques.axes.base import Storage
from kvsim.techniques.papers.specache import LateKivi as Settings
from kvsim.validate.counter import NullCounter
from kvsim.validate.kernels.attention import PartialAttention
from kvsim.validate.kernels.quantise import Levels
from kvsim.validate.parts.cells import CacheRoom, SlotRange
from kvsim.validate.parts.packed import Fetched, PackedStore
from kvsim.validate.parts.sides import PackedRing, check_groups, check_residual


class LateKivi(PackedStore):
    """Packed rows behind rings that have room for a step's own tokens beyond the residual.

    References
    ----------
    .. [1] S. Jie et al., "SpeCache", ICML 2025, section 3.3, and equation 3 for one bit.
    """

    drops_tokens = False
    differences = MappingProxyType(
        {"quantise": "keys are packed a residual at a time; the prediction spreads that evenly"}
    )

    def __init__(self, part: Storage, room: CacheRoom, slots: int, counter: NullCounter) -> None:
        super().__init__(part, room, slots, counter)
        assert isinstance(part, Settings)
        self.residual = check_residual("specache", part.residual, part.group)
        check_groups("specache", part.group, room.dim)
        bits, ring = int(part.bits), self.residual + room.fresh
        where: Levels = "centres" if bits == 1 else "ends"
        self.k = PackedRing(room, slots, ring, bits, part.group, "channel", where)
        self.v = PackedRing(room, slots, ring, bits, part.group, "token", where)

    def packed_keys(self, tokens: int) -> int:
        """Tokens whose keys are packed: whole blocks of the residual. [tokens]"""
        return tokens // self.residual * self.residual

    def packed_values(self, tokens: int) -> int:
        """All but the residual."""
        return max(tokens - self.residual, 0)

    def packed_by(self, span: SlotRange) -> tuple[int, ...]:
        """The tokens that were there before the step."""
        return tuple(end - span.new for end in span.ends)

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """New tokens into the rings; ``pack`` follows when they have attended."""
        self.add(keys, values, span)

    def attend_with_pairs(
        self,
        queries: Tensor,
        span: SlotRange,
        fetched: Fetched | None,
        scored: bool,
        name: str = "attn",
    ) -> PartialAttention:
        """Attention with the fetched pairs in place of their packed copies."""
        return self._attend_packed(queries, span, scored, fetched=fetched, name=name)

    def pack(self, span: SlotRange) -> None:
        """The first new token stays: pack the value it pushes out and the block it completes."""
        before, position = self.packed_by(span), span.slots[:, 0]
        full = [i for i, n in enumerate(before) if n >= self.residual]
        if full:
            with self.counter.op("quantise") as record:
                self.v.pack(record, full, position - self.residual, 1)
        whole = [i for i, n in enumerate(before) if (n + 1) % self.residual == 0]
        if whole:
            with self.counter.op("quantise") as record:
                self.k.pack(record, whole, position + 1 - self.residual, self.residual)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Packed rows and the residual; what the rings hold beyond it."""
        sides = self.k, self.v
        return {
            "kv": [t for side in sides for t in side.tensors(self.residual)],
            "new tokens": [side.ring[:, :, self.residual :] for side in sides],
        }
