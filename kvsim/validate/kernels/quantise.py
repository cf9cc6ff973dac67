"""Quantisers: packed codes with scales and zero points.

Arithmetic is in fp32 with the fp16 scales and zero points that are stored, so that widening gives
back what the quantiser meant. A number half-way between two codes takes the upper one.
"""

import torch
from torch import Tensor

from kvsim.validate.kernels.blockwise import ranges
from kvsim.validate.kernels.packing import pack
from kvsim.validate.kernels.stores import By, Levels, Store, check_group_size, grouped


def levels(low: Tensor, high: Tensor, bits: int, where: Levels = "ends") -> tuple[Tensor, Tensor]:
    """Compute the scale and zero point of ranges.

    Parameters
    ----------
    where
        Position of the levels in a range.

    Returns
    -------
    scale, zero
        Distance between levels, and value of code 0, in fp16; shaped as ``low``.

    References
    ----------
    .. [1] Z. Liu et al., "KIVI", ICML 2024, section 3: zero point min, scale range / (2^B - 1).
    .. [2] S. Jie et al., "SpeCache", 2025, equation 3: at one bit (3 min + max) / 4 and range / 2,
       the centres of the two halves.
    .. [3] Y. He et al., "ZipCache", NeurIPS 2024, equation 5: scale as [1], a whole zero point.
    """
    low, high = low.float(), high.float()
    if where == "centres":
        step = (high - low) / 2**bits
        return step.half(), (low + step / 2).half()
    scale = ((high - low) / (2**bits - 1)).half()
    if where == "grid":
        step = scale.float()
        low = torch.where(
            step > 0, round_half_up(low / torch.where(step > 0, step, 1.0)) * step, low
        )
    return scale, low.half()


def encode(numbers: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Encode values at given levels; all codes of a range without width are 0.

    Parameters
    ----------
    scale, zero
        Scales and zero points as ``levels`` returns them, of shapes that broadcast to the values.
    """
    step = scale.float()
    steps = numbers.float() - zero.float()
    steps /= torch.where(step > 0, step, 1.0)
    return (steps + 0.5).floor_().clamp_(0, 2**bits - 1).to(torch.uint8)


def residual(numbers: Tensor, scale: Tensor, zero: Tensor, upper: Tensor) -> Tensor:
    """Encode the error of 4-bit codes with four further bits, in sixteenths of the scale, plus 8.

    Parameters
    ----------
    numbers
        Values with a separate dimension for groups, as ``grouped`` returns them.
    scale, zero
        Scale and zero point of each group, of shapes that broadcast to the values.
    upper
        Codes of the upper four bits, uint8, shaped as the values.

    Returns
    -------
    Tensor
        Codes 0 to 15, uint8, shaped as the values.

    References
    ----------
    .. [1] R. Tiwari et al., "QuantSpec", ICML 2025, section 4.2: the error is symmetric, so its
       code is in [-8, 7] without a zero point, at 1/16 of the upper scale.
    """
    step = scale.float()
    missed = numbers.float() - (upper.float() * step + zero.float())
    steps = missed / torch.where(step > 0, step / 16, 1.0)
    return (round_half_up(steps).clamp(-8, 7) + 8).to(torch.uint8)


def round_half_up(steps: Tensor) -> Tensor:
    """Round to the nearest integer, halves up. (any shape)

    Parameters
    ----------
    steps
        Values, (...,).
    """
    return torch.floor(steps + 0.5)


def quantise(
    numbers: Tensor,
    bits: int,
    group: int,
    by: By,
    where: Levels = "ends",
    hierarchical: bool = False,
) -> Store:
    """Pack keys or values in groups of tokens or of channels.

    Parameters
    ----------
    group
        Tokens or channels that share a scale.
    by
        ``channel`` for keys, whose groups are ``group`` tokens of one channel; ``token`` for
        values, whose groups are ``group`` channels of one token.
    where
        Position of the levels; ``centres`` is used by SpeCache at one bit.
    hierarchical
        Whether to store QuantSpec's four lower bits too.

    Raises
    ------
    InputError
        If groups do not divide the tokens or channels.
    """
    if numbers.is_cuda and where != "grid":
        from kvsim.validate.kernels.rows_triton import quantise as fused

        return fused(numbers, bits, group, by, where, hierarchical)
    check_group_size(numbers, group, by)
    rows = numbers.shape[2]
    width, whole = numbers.numel() // max(rows, 1), group if by == "channel" else 1
    some = list(ranges(rows, width, whole=whole))
    if len(some) <= 1:
        return quantise_plainly(numbers, bits, group, by, where, hierarchical)
    parts = [
        quantise_plainly(numbers[:, :, part], bits, group, by, where, hierarchical) for part in some
    ]

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts], 2)

    lower = joined("lower") if hierarchical else None
    codes, scale, zero = (joined(name) for name in ("codes", "scale", "zero"))
    return Store(codes, scale, zero, bits, group, by, lower=lower)


def quantise_plainly(
    numbers: Tensor,
    bits: int,
    group: int,
    by: By,
    where: Levels = "ends",
    hierarchical: bool = False,
) -> Store:
    """Quantise numbers with PyTorch's own ops, as the kernels do; they are tested against it.

    Parameters
    ----------
    numbers
        Keys or values, (batch, KV heads, tokens, head dim).
    bits
        Bits per code.
    group
        Tokens or channels that share a scale.
    by
        Whether scales are per ``channel`` (and group of tokens) or per ``token``.
    where
        Where levels lie: at the ``ends`` or ``centres`` of steps, or from a multiple of the scale
        (``grid``).
    hierarchical
        Whether to store four more bits of the error of each code.
    """
    parts = grouped(numbers, group, by)
    along = -2 if by == "channel" else -1
    low, high = parts.amin(along), parts.amax(along)
    scale, zero = levels(low, high, bits, where)
    step, base = scale.unsqueeze(along), zero.unsqueeze(along)
    upper = encode(parts, step, base, bits)
    lower = None
    if hierarchical:
        lower = pack(residual(parts, step, base, upper).reshape(numbers.shape), 4)
    return Store(
        pack(upper.reshape(numbers.shape), bits), scale, zero, bits, group, by, lower=lower
    )
