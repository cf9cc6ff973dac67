"""Storages whose vectors are rotated at random: queries are rotated alike, outputs turned back."""

from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.techniques.axes.base import Storage
from kvsim.validate.counter import NullCounter
from kvsim.validate.model.attention import Seen
from kvsim.validate.parts.bytoken import PACKED_AT_ONCE, Host, PerTokenCache
from kvsim.validate.parts.cells import CacheRoom, SlotRange

READ_TWICE = "rows that are kept in two places are rotated apart: the rotation is read twice"
SEED = 2504  # of the rotation, which all layers share


class Rotated(PerTokenCache):
    """Base; subclasses say how rotated numbers are encoded."""

    keeps_numbers = False
    differences = PACKED_AT_ONCE
    split_differences = MappingProxyType(dict.fromkeys(("rotate", "rotate_back"), READ_TWICE))

    def __init__(
        self,
        part: Storage,
        room: CacheRoom,
        slots: int,
        counter: NullCounter,
        values: Host | None = None,
    ) -> None:
        super().__init__(part, room, slots, counter, values)
        self.turn = rotation(room.dim).to(room.device, room.dtype)

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """Rotate the prompt and encode it."""
        most = max(counts)
        turned = self._rotate("rotate", True, keys[:, :, :most], values[:, :, :most])
        super().fill(turned[0], turned[1], counts, plainly)

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Rotate new tokens and encode them."""
        turned = self._rotate("rotate", True, keys, values)
        super().append(turned[0], turned[1], span)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attention among rotated vectors."""
        out = super().attend(self._rotate("rotate", False, queries)[0], span, seen)
        return self._rotate("rotate_back", True, out)[0]

    def attend_with_scores(
        self, queries: Tensor, span: SlotRange, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        """The same with what each slot got."""
        turned = self._rotate("rotate", False, queries)[0]
        out, weights = super().attend_with_scores(turned, span, seen)
        return self._rotate("rotate_back", True, out)[0], weights

    def _rotate(self, name: str, reads: bool, *vectors: Tensor) -> list[Tensor]:
        """Vectors (..., dim) turned there or back; the rotation itself is read once per step."""
        matrix = self.turn.T if name == "rotate" else self.turn
        with self.counter.op(name) as record:
            turned = [some @ matrix for some in vectors]
            record.reads(*vectors, self.turn if reads else None)
            record.writes(*turned)
        return turned


@cache
def rotation(dim: int) -> Tensor:
    """A random orthogonal matrix, always the same one."""
    generator = torch.Generator().manual_seed(SEED)
    made, upper = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    signs: Tensor = upper.diagonal().sign()
    return torch.mul(made, signs)
