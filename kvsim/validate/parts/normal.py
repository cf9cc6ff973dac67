"""Quantisation levels for normally distributed values, shared by several storages."""

from functools import cache

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from kvsim.validate.kernels.packing import pack, unpack


def to_levels(numbers: Tensor, bits: int) -> Tensor:
    """Quantise values to the levels of a standard normal distribution, and pack the codes.

    Parameters
    ----------
    numbers
        Values of mean 0 and variance 1, (..., n).

    Returns
    -------
    Tensor
        Packed codes, (..., n * bits / 8).
    """
    _, borders = tables(bits, numbers.device)
    return pack(torch.bucketize(numbers, borders).to(torch.uint8), bits)


def from_levels(codes: Tensor, bits: int) -> Tensor:
    """Unpack codes, and return the level of each.

    Parameters
    ----------
    codes
        Packed codes, (..., n * bits / 8).

    Returns
    -------
    Tensor
        Levels in fp32, (..., n).
    """
    table, _ = tables(bits, codes.device)
    return table[unpack(codes, bits).int()]


@cache
def tables(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the quantisation levels of normal numbers, and the borders between them.

    They are created once per device, as a copy from the host would wait for the GPU.

    Parameters
    ----------
    bits
        Bits per code.
    device
        Device of the tables.

    Returns
    -------
    tuple of Tensor
        Levels, (2 ** bits,), and borders, (2 ** bits - 1,).
    """
    table, borders = (torch.tensor(numbers, device=device) for numbers in levels(bits))
    return table, borders


@cache
def levels(bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute the levels that quantise normal values with the least squared error.

    Lloyd's iteration: each level is the mean of the values that are rounded to it.

    Returns
    -------
    levels, borders
        The levels in ascending order, and the borders between them.

    References
    ----------
    .. [1] S. P. Lloyd, "Least squares quantization in PCM", IEEE Transactions on Information
       Theory 28 (2), 1982, https://doi.org/10.1109/TIT.1982.1056489.
    """
    count = 2**bits
    table = norm.ppf((np.arange(count) + 0.5) / count)
    for _ in range(2000):
        borders = (table[1:] + table[:-1]) / 2
        ends = np.concatenate([[-np.inf], borders, [np.inf]])
        table = -np.diff(norm.pdf(ends)) / np.diff(norm.cdf(ends))
    return tuple(table.astype(np.float32).tolist()), tuple(borders.astype(np.float32).tolist())
