"""Cached numbers token by token, plain or packed, in host or GPU memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvsim.engine.formats import Format
from kvsim.validate.kernels.quantise import quantise
from kvsim.validate.kernels.stores import Store

Make = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Allocates a tensor of a shape and number format."""


class Rows:
    """Room for the tokens ``first`` to ``last``, ``width`` numbers each.

    Packed numbers share scales in groups along the width (FlexGen, ICML 2023, section 4.4). A range
    of tokens is contiguous in every part.
    """

    def __init__(
        self, make: Make, first: int, last: int, width: int, stored: Format, dtype: torch.dtype
    ) -> None:
        self.first, self.dtype = first, dtype
        self.bits = int(stored.bits)
        tokens = max(0, last - first)
        if self.bits == 16:
            self.parts = [make((tokens, width), dtype)]
            return
        self.group = int(stored.group)
        groups = width // self.group
        self.parts = [
            make((tokens, width * self.bits // 8), torch.uint8),
            make((tokens, groups), torch.float16),
            make((tokens, groups), torch.float16),
        ]

    def __getitem__(self, tokens: slice) -> list[Tensor]:
        """The parts of a range of tokens; no copy."""
        start, stop = max(tokens.start, self.first) - self.first, tokens.stop - self.first
        return [part[start : max(start, stop)] for part in self.parts]

    def take(self, other: "Rows", tokens: slice) -> None:
        """Copy those of a range of tokens that both have, from host to GPU or back."""
        held = slice(max(tokens.start, self.first, other.first), tokens.stop)
        for mine, theirs in zip(self[held], other[held], strict=True):
            mine.copy_(theirs, non_blocking=True)

    def pack(self, numbers: Tensor, tokens: slice) -> None:
        """Quantise the numbers (tokens, width) of a range and keep them."""
        packed = quantise(numbers[None, None], self.bits, self.group, "token")
        for mine, new in zip(self[tokens], (packed.codes, packed.scale, packed.zero), strict=True):
            mine.copy_(new[0, 0])

    def widen(self, tokens: slice, out: Tensor) -> None:
        """A range of tokens as numbers again, into out (tokens, width)."""
        codes, scale, zero = (part[None, None] for part in self[tokens])
        out.copy_(Store(codes, scale, zero, self.bits, self.group, "token").numbers()[0, 0])
