"""Packing of low-bit codes in bytes: neighbours in the last dimension, lowest bits first.

Three bits are two planes: the lower two of all numbers, then the upper one of all.
"""

import torch
from torch import Tensor

from kvsim.errors import InputError

PACKED_BITS = (1, 2, 3, 4, 8)


def per_byte(bits: int, count: int) -> int:
    """Return the number of codes per byte, or per smallest whole number of bytes.

    Parameters
    ----------
    bits
        Width of a code: 1, 2, 3, 4 or 8. [bit]

    Returns
    -------
    int
        Codes per byte; 8 at three bits, which fill three bytes.

    Raises
    ------
    InputError
        For other widths, and if ``count`` codes do not fill whole bytes.
    """
    if bits not in PACKED_BITS:
        raise InputError(
            f"packing: {bits} bits; expected one of {', '.join(map(str, PACKED_BITS))}"
        )
    numbers = 8 if bits == 3 else 8 // bits
    if count % numbers:
        raise InputError(
            f"packing: {count} numbers of {bits} bits do not fill whole bytes; "
            f"expected a multiple of {numbers}"
        )
    return numbers


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of few bits into bytes. (..., n * bits / 8), uint8

    Parameters
    ----------
    codes
        Whole numbers below 2**bits, (..., n).
    """
    numbers = per_byte(bits, codes.shape[-1])
    if bits == 3:
        return torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], dim=-1)
    shape = (*codes.shape[:-1], codes.shape[-1] // numbers, numbers)
    parts = codes.to(torch.uint8).reshape(shape)
    packed = parts[..., 0].clone()
    for place in range(1, numbers):
        packed |= parts[..., place] << (place * bits)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes into codes of few bits. (..., n), uint8

    Parameters
    ----------
    packed
        Bytes as ``pack`` makes them, (..., n * bits / 8).
    """
    if bits == 3:
        lower = packed.shape[-1] * 2 // 3
        return unpack(packed[..., :lower], 2) | unpack(packed[..., lower:], 1) << 2
    numbers = per_byte(bits, 8)
    parts = [(packed >> (place * bits)) & ((1 << bits) - 1) for place in range(numbers)]
    return torch.stack(parts, dim=-1).flatten(-2)
