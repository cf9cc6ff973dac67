"""Levels for normal numbers: what storages share that round to a table instead of even steps."""

from functools import cache

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from kvsim.validate.kernels.packing import pack, unpack


def to_levels(numbers: Tensor, bits: int) -> Tensor:
    """The nearest level of numbers (..., n) of mean 0 and variance 1, packed."""
    borders = torch.tensor(levels(bits)[1], device=numbers.device)
    return pack(torch.bucketize(numbers, borders).to(torch.uint8), bits)


def from_levels(codes: Tensor, bits: int) -> Tensor:
    """Numbers (..., n) in fp32 again."""
    table = torch.tensor(levels(bits)[0], device=codes.device)
    return table[unpack(codes, bits).int()]


def ranges(numbers: Tensor, apart: Tensor) -> Tensor:
    """Mean and deviation (..., 2) of numbers (..., n) without those at the places ``apart``."""
    rest = numbers.scatter(-1, apart, torch.nan)
    middle = rest.nanmean(-1, keepdim=True)
    return torch.cat([middle, (rest - middle).square().nanmean(-1, keepdim=True).sqrt()], -1)


@cache
def levels(bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Levels that round normal numbers with the least squared error, and the borders between them.

    Lloyd's iteration: each level is the mean of what is rounded to it.
    """
    count = 2**bits
    table = norm.ppf((np.arange(count) + 0.5) / count)
    for _ in range(2000):
        borders = (table[1:] + table[:-1]) / 2
        ends = np.concatenate([[-np.inf], borders, [np.inf]])
        table = -np.diff(norm.pdf(ends)) / np.diff(norm.cdf(ends))
    return tuple(table.astype(np.float32).tolist()), tuple(borders.astype(np.float32).tolist())
