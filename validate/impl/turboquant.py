"""TurboQuant: vectors rotated at random, then rounded number by number to levels of a normal."""

from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes import Storage
from kvsim.techniques.turboquant import Turboquant as Settings
from kvsim.validate.impl.base import SmallRun
from kvsim.validate.impl.bytoken import PACKED_AT_ONCE, ByToken, Codec, Coded, Host, Plain
from kvsim.validate.impl.cells import CacheRoom, Spot, Widths
from kvsim.validate.impl.normal import from_levels, to_levels
from kvsim.validate.impl.packed import check_groups
from kvsim.validate.kernels.stores import Store
from kvsim.validate.model.attention import Seen
from kvsim.validate.tally import Silent

READ_TWICE = "rows that are kept in two places are rotated apart: the rotation is read twice"
SEED = 2504  # of the rotation, which all layers share


class Turboquant(ByToken):
    """Keys and values are stored rotated, and queries rotated alike; outputs are turned back.

    A rotated vector's numbers are close to normal with its norm over the root of its length, so
    that one table of levels serves them all.

    References
    ----------
    .. [1] A. Zandieh et al., "TurboQuant", arXiv:2504.19874, algorithm 1.
    """

    as_given = False
    differences = PACKED_AT_ONCE
    apart = MappingProxyType(dict.fromkeys(("rotate", "rotate_back"), READ_TWICE))

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Vectors that fit the head."""
        return [f"bits=4,group={run.group}"]

    def __init__(
        self, part: Storage, room: CacheRoom, slots: int, tally: Silent, values: Host | None = None
    ) -> None:
        assert isinstance(part, Settings)
        if part.exact:
            raise InputError("turboquant: bits=16 packs nothing; choose fewer, or technique full")
        check_groups("turboquant", part.group, room.dim)
        self.settings = part
        super().__init__(part, room, slots, tally, values)
        self.turn = rotation(room.dim).to(room.device, room.dtype)

    def codecs(self) -> tuple[Codec, Codec]:
        """Both sides by their widths."""
        stored = self.settings.stored
        keys, values = (
            Plain() if bits == 16 else Levels(int(bits), self.settings.group)
            for bits in (stored.bits, stored.v_bits)
        )
        return keys, values

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


class Levels(Codec):
    """The norm of a group of numbers, and each number's level beside it."""

    def __init__(self, bits: int, group: int) -> None:
        self.bits, self.group = bits, group

    def widths(self, dim: int, dtype: torch.dtype) -> Widths:
        """Codes, and a norm per group."""
        return [(dim * self.bits // 8, torch.uint8), (dim // self.group, torch.float16)]

    def encode(self, numbers: Tensor) -> list[Tensor]:
        """The nearest level of every number."""
        parts = self._grouped(numbers.float())
        norms = parts.norm(dim=-1).half()
        scale = norms.float()[..., None] / self.group**0.5
        even = parts / torch.where(scale > 0, scale, 1.0)
        return [to_levels(even.flatten(-2), self.bits), norms]

    def store(self, parts: list[Tensor]) -> Store:
        """As rows that are looked up in the table."""
        return Coded.of(parts, self.bits, self.widen)

    def widen(self, parts: list[Tensor]) -> Tensor:
        """Levels times norms, in fp32."""
        codes, norms = parts
        numbers = self._grouped(from_levels(codes, self.bits))
        numbers *= (norms.float() / self.group**0.5)[..., None]
        return numbers.flatten(-2)

    def _grouped(self, numbers: Tensor) -> Tensor:
        return numbers.view(*numbers.shape[:-1], -1, self.group)


@cache
def rotation(dim: int) -> Tensor:
    """A random orthogonal matrix, always the same one."""
    generator = torch.Generator().manual_seed(SEED)
    made, upper = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    signs: Tensor = upper.diagonal().sign()
    return torch.mul(made, signs)
