"""TurboQuant: vectors rotated at random, then rounded number by number to levels of a normal."""

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Storage
from kvsim.techniques.papers.turboquant import Turboquant as Settings
from kvsim.validate.counter import NullCounter
from kvsim.validate.kernels.stores import Store
from kvsim.validate.parts.base import SmallRun
from kvsim.validate.parts.bytoken import Codec, EncodedRows, Host, Plain
from kvsim.validate.parts.cells import CacheRoom, Widths
from kvsim.validate.parts.normal import from_levels, to_levels
from kvsim.validate.parts.rotated import Rotated
from kvsim.validate.parts.sides import check_groups


class Turboquant(Rotated):
    """A rotated vector's numbers are close to normal with its norm over the root of its length.

    So one table of levels serves them all.

    References
    ----------
    .. [1] A. Zandieh et al., "TurboQuant", arXiv:2504.19874, algorithm 1.
    """

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Vectors that fit the head."""
        return [f"bits=4,group={run.group}"]

    def __init__(
        self,
        part: Storage,
        room: CacheRoom,
        slots: int,
        counter: NullCounter,
        values: Host | None = None,
    ) -> None:
        assert isinstance(part, Settings)
        if part.exact:
            raise InputError("turboquant: bits=16 packs nothing; choose fewer, or technique full")
        check_groups("turboquant", part.group, room.dim)
        self.settings = part
        super().__init__(part, room, slots, counter, values)

    def codecs(self) -> tuple[Codec, Codec]:
        """Both sides by their widths."""
        stored = self.settings.stored
        keys, values = (
            Plain() if bits == 16 else Levels(int(bits), self.settings.group)
            for bits in (stored.bits, stored.v_bits)
        )
        return keys, values


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
        return EncodedRows.of(parts, self.bits, self.widen)

    def widen(self, parts: list[Tensor]) -> Tensor:
        """Levels times norms, in fp32."""
        numbers = self._grouped(from_levels(parts[0], self.bits))
        numbers *= (parts[1].float() / self.group**0.5)[..., None]
        return numbers.flatten(-2)

    def _grouped(self, numbers: Tensor) -> Tensor:
        return numbers.view(*numbers.shape[:-1], -1, self.group)
