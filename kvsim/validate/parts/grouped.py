"""Min-max groups of a token's numbers."""

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Storage
from kvsim.techniques.axes.storage import Grouped as Settings
from kvsim.validate.counter import NullCounter
from kvsim.validate.kernels.quantise import quantise
from kvsim.validate.kernels.stores import Store
from kvsim.validate.parts.bytoken import PACKED_AT_ONCE, Codec, Host, PerTokenCache, Plain
from kvsim.validate.parts.cells import CacheRoom, Widths


class Grouped(PerTokenCache):
    """Every token's keys and values in groups along the head, each side at its own width.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen", ICML 2023, section 4.4.
    """

    differences = PACKED_AT_ONCE

    def __init__(
        self,
        part: Storage,
        room: CacheRoom,
        slots: int,
        counter: NullCounter,
        values: Host | None = None,
    ) -> None:
        assert isinstance(part, Settings)
        if room.dim % part.group:
            raise InputError(
                f"grouped: group={part.group} does not divide the head dim {room.dim}; "
                f"choose a group that does"
            )
        self.settings = part
        super().__init__(part, room, slots, counter, values)

    def codecs(self) -> tuple[Codec, Codec]:
        """By the widths of both sides."""
        stored = self.settings.stored
        keys, values = (codec(bits, self.settings.group) for bits in (stored.bits, stored.v_bits))
        return keys, values


class Groups(Codec):
    """Codes of a few bits, and a scale and zero point per group."""

    def __init__(self, bits: int, group: int) -> None:
        self.bits, self.group = bits, group

    def widths(self, dim: int, dtype: torch.dtype) -> Widths:
        """Codes, scales and zero points."""
        table = (dim // self.group, torch.float16)
        return [(dim * self.bits // 8, torch.uint8), table, table]

    def encode(self, numbers: Tensor) -> list[Tensor]:
        """Quantised token by token."""
        made = quantise(numbers, self.bits, self.group, "token")
        return [made.codes, made.scale, made.zero]

    def store(self, parts: list[Tensor]) -> Store:
        """As kernels unpack it."""
        codes, scale, zero = parts
        return Store(codes, scale, zero, self.bits, self.group, "token")


def codec(bits: float, group: int) -> Codec:
    """Groups, or plain numbers at 16 bits."""
    return Plain() if bits == 16 else Groups(int(bits), group)
