"""Storages whose vectors are rotated at random: queries are rotated alike, outputs turned back."""

from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.techniques.axes import Storage
from kvsim.validate.model.attention import Seen
from kvsim.validate.parts.bytoken import PACKED_AT_ONCE, ByToken, Host
from kvsim.validate.parts.cells import CacheRoom, Spot
from kvsim.validate.tally import Silent

READ_TWICE = "rows that are kept in two places are rotated apart: the rotation is read twice"
SEED = 2504  # of the rotation, which all layers share


class Rotated(ByToken):
    """Base; subclasses say how rotated numbers are encoded."""

    as_given = False
    differences = PACKED_AT_ONCE
    apart = MappingProxyType(dict.fromkeys(("rotate", "rotate_back"), READ_TWICE))

    def __init__(
        self, part: Storage, room: CacheRoom, slots: int, tally: Silent, values: Host | None = None
    ) -> None:
        super().__init__(part, room, slots, tally, values)
        self.turn = rotation(room.dim).to(room.device, room.dtype)

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """Rotate the prompt and encode it."""
        most = max(counts)
        turned = self._rotate("rotate", True, keys[:, :, :most], values[:, :, :most])
        super().fill(turned[0], turned[1], counts, plainly)

    def append(self, keys: Tensor, values: Tensor, spot: Spot) -> None:
        """Rotate new tokens and encode them."""
        turned = self._rotate("rotate", True, keys, values)
        super().append(turned[0], turned[1], spot)

    def look(self, queries: Tensor, spot: Spot, seen: Seen) -> Tensor:
        """Attention among rotated vectors."""
        out = super().look(self._rotate("rotate", False, queries)[0], spot, seen)
        return self._rotate("rotate_back", True, out)[0]

    def look_scored(self, queries: Tensor, spot: Spot, seen: Seen) -> tuple[Tensor, Tensor]:
        """The same with what each slot got."""
        turned = self._rotate("rotate", False, queries)[0]
        out, weights = super().look_scored(turned, spot, seen)
        return self._rotate("rotate_back", True, out)[0], weights

    def _rotate(self, name: str, reads: bool, *vectors: Tensor) -> list[Tensor]:
        """Vectors (..., dim) turned there or back; the rotation itself is read once per step."""
        matrix = self.turn.T if name == "rotate" else self.turn
        with self.tally.op(name) as marks:
            turned = [some @ matrix for some in vectors]
            marks.reads(*vectors, self.turn if reads else None)
            marks.writes(*turned)
        return turned


@cache
def rotation(dim: int) -> Tensor:
    """A random orthogonal matrix, always the same one."""
    generator = torch.Generator().manual_seed(SEED)
    made, upper = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    signs: Tensor = upper.diagonal().sign()
    return torch.mul(made, signs)
