"""Eight bits in two halves behind a double full-precision buffer."""

from types import MappingProxyType

from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Storage
from kvsim.techniques.papers.quantspec import Hierarchical as Settings
from kvsim.validate.counter import NullCounter
from kvsim.validate.model.attention import Seen
from kvsim.validate.parts.cells import CacheRoom, SlotRange
from kvsim.validate.parts.packed import PackedStore
from kvsim.validate.parts.sides import PackedRing, check_groups
from kvsim.validate.transfer import to_device

BY_HALVES = "half a buffer is packed at once; the prediction spreads it over the rounds"


class Hierarchical(PackedStore):
    """The buffer holds 2 G tokens, G of them always.

    A round adds no more than fit in it; once it is full when the round is over, its first half is
    packed. So a token's cache is the same however the rounds fall.

    References
    ----------
    .. [1] R. Tiwari et al., "QuantSpec", ICML 2025, section 4.2.
    """

    buffers_drafts = True
    differences = MappingProxyType({"quantise": BY_HALVES})

    def __init__(self, part: Storage, room: CacheRoom, slots: int, counter: NullCounter) -> None:
        super().__init__(part, room, slots, counter)
        assert isinstance(part, Settings)
        check_groups(part.name, part.group, room.dim)
        self.half = part.residual // 2
        if part.residual % 2 or self.half % part.group:
            raise InputError(
                f"{part.name}: residual={part.residual} is not twice a multiple of "
                f"group={part.group}, so that its halves would not fill groups of keys; "
                f"choose one that is"
            )
        self.k, self.v = (
            PackedRing(room, slots, 2 * self.half, 4, part.group, by, hierarchical=True)
            for by in ("channel", "token")
        )
        self.drafts_read_upper = False

    def packed_keys(self, tokens: int) -> int:
        """All halves but the one that is always in full precision."""
        return max(tokens // self.half - 1, 0) * self.half

    def packed_values(self, tokens: int) -> int:
        """As many as of keys. [tokens]"""
        return self.packed_keys(tokens)

    def packed_by(self, span: SlotRange) -> tuple[int, ...]:
        """Those before the pass: nothing is packed until its round is over."""
        return tuple(end - span.new for end in span.ends)

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """New tokens wait in the buffer until their round is over."""
        self.add(keys, values, span)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """A draft may read the upper halves alone."""
        upper = span.draft and self.drafts_read_upper
        return self._attend_packed(queries, span, upper=upper).out.to(queries.dtype)

    def room_left(self, tokens: int) -> int:
        """What the buffer takes until it has to be packed. [tokens]"""
        return 2 * self.half - (tokens - self.packed_keys(tokens))

    def commit(self, before: list[int], after: list[int]) -> None:
        """Pack the first half of full buffers."""
        counts = enumerate(zip(before, after, strict=True))
        full = [i for i, (old, new) in counts if self.packed_keys(new) > self.packed_keys(old)]
        if full:
            begins = to_device([self.packed_keys(n) for n in before], self.room.device)
            with self.counter.op("quantise") as record:
                for side in (self.k, self.v):
                    side.pack(record, full, begins, self.half)
