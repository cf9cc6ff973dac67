"""What a quantiser may do on any processor: adopted where it is within rounding of a boundary.

A naive cache computes the same numbers as the implementation it checks, but for rounding. A number
that lies half-way between two codes may so get the one here and the other there, and a scale may
be rounded to either neighbour in fp16. ``Adopted`` looks at what the implementation stored: each
code, scale and zero point must be one that the naive cache's own number allows, and is then used
in its place, so that logits are compared given equal codes. Those that differ are counted.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsim.validate.kernels.packing import unpack
from kvsim.validate.kernels.stores import Store

ROUNDING = 1e-5
"""Of numbers around 1, how far two processors may be apart: ten times of what is seen."""
MOST = 1e-3
"""Share of codes that may be ties, besides a few."""
FEW = 3


@dataclass
class Adopted:
    """The codes of finished runs, and how many of them were ties."""

    ties: dict[object, tuple[int, int]] = field(default_factory=dict)  # and codes, by place

    def widened(self, place: object, x: Tensor, store: Store, sequence: int, head: int) -> Tensor:
        """The first rows of a head as they were packed, checked against ``x`` (rows, channels)."""
        rows, by_channel = len(x), store.by == "channel"

        def grouped(numbers: Tensor) -> Tensor:  # each group along the last axis
            if by_channel:
                return numbers.T.reshape(numbers.shape[1], -1, store.group)
            return numbers.reshape(rows, -1, store.group)

        tables = rows // store.group if by_channel else rows
        scale, zero = (
            (t[sequence, head, :tables].T if by_channel else t[sequence, head, :tables])
            .float()
            .unsqueeze(-1)
            for t in (store.scale, store.zero)
        )
        codes = grouped(unpack(store.codes[sequence, head, :rows], store.bits).float())
        numbers = grouped(x)
        steps = 2**store.bits - 1
        _check_levels(numbers, scale, zero, steps)
        step = torch.where(scale > 0, scale, 1.0)
        off = ROUNDING * numbers.abs().clamp(min=1.0) / step
        ties = _check_codes((numbers - zero) / step, codes, 0, steps, off)
        wide = codes * scale + zero
        if store.lower is not None:
            lower = grouped(unpack(store.lower[sequence, head, :rows], 4).float()) - 8
            ties += _check_codes((numbers - wide) / (step / 16), lower, -8, 7, 16 * off)
            wide = wide + lower * scale / 16
        self.ties[place] = ties, codes.numel()
        return wide.reshape(x.shape[1], rows).T if by_channel else wide.reshape(x.shape)

    def assert_few(self) -> None:
        """Ties are rare, or something other than rounding moves the codes."""
        ties, codes = (sum(counts) for counts in zip(*self.ties.values(), strict=True))
        assert codes > 0, "nothing was packed"
        assert ties <= MOST * codes + FEW, f"{ties} of {codes} codes are ties"


def _check_levels(numbers: Tensor, scale: Tensor, zero: Tensor, steps: int) -> None:
    """Scales and zero points are the numbers' own in fp16, to one of the two neighbours."""
    low, high = numbers.amin(-1, keepdim=True), numbers.amax(-1, keepdim=True)
    for stored, own in ((scale, (high - low) / steps), (zero, low)):
        unit = torch.nextafter(own.abs().half(), torch.tensor(torch.inf).half()).float()
        unit -= own.abs().half().float()
        off = (stored - own).abs() - 0.5 * unit
        assert (off <= ROUNDING * own.abs().clamp(min=1.0)).all(), "a scale or zero point is wrong"


def _check_codes(exact: Tensor, codes: Tensor, low: int, high: int, off: Tensor) -> int:
    """Every code is the nearest one, but for rounding; how many are not the nearest."""
    exact = exact.clamp(low, high)
    wrong = (exact - codes).abs() > 0.5 + off
    assert not wrong.any(), f"{int(wrong.sum())} codes are not within rounding of their numbers"
    return int(((exact + 0.5).floor().clamp(low, high) != codes).sum())
