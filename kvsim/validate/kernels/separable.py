"""ZipCache's quantisers: keys by channel, values by token after each channel is scaled.

Ranges of channels are shared by the sequences of a batch, which is how the paper counts them.
"""

import torch
from torch import Tensor

from kvsim.validate.kernels.packing import pack
from kvsim.validate.kernels.quantise import encode, levels
from kvsim.validate.kernels.stores import Store


def channelwise(numbers: Tensor, bits: int, valid: Tensor) -> Store:
    """Keys (batch, KV heads, tokens, head dim), one scale and zero point per channel.

    Parameters
    ----------
    valid : rows that hold a token, (batch, tokens); the others are packed, but set no range.

    References
    ----------
    .. [1] Y. He et al., "ZipCache", NeurIPS 2024, section 4.1 and table 1: 2 hd parameters.
    """
    low, high = _range(numbers, valid, (0, 2))
    scale, zero = levels(low, high, bits, "grid")
    codes = pack(encode(numbers, scale, zero, bits), bits)
    sequences = len(numbers)
    return Store(
        codes,
        scale.expand(sequences, -1, -1, -1),
        zero.expand(sequences, -1, -1, -1),
        bits,
        max(numbers.shape[2], 1),
        "channel",
    )


def separable(numbers: Tensor, bits: int, valid: Tensor) -> Store:
    """Values (batch, KV heads, tokens, head dim), normalised by channel, packed by token.

    References
    ----------
    .. [1] Y. He et al., "ZipCache", NeurIPS 2024, equation 6 and algorithm 1 (CSTQuant): divisor
       sqrt(max |x|) per channel, then one scale and zero point per token over all heads.
    """
    low, high = _range(numbers, valid, (0, 2))
    peak = torch.maximum(low.abs(), high.abs())
    factor = peak.sqrt().half()
    divisor = factor.float()
    even = numbers.float() / torch.where(divisor > 0, divisor, 1.0)
    rows = torch.ones_like(valid)
    scale, zero = levels(*_range(even, rows, (1, 3)), bits, "grid")
    codes = pack(encode(even, scale, zero, bits), bits)
    sequences, heads, tokens, head_dim = numbers.shape
    return Store(
        codes,
        scale.expand(-1, heads, -1, -1),
        zero.expand(-1, heads, -1, -1),
        bits,
        head_dim,
        "token",
        factor=factor.expand(sequences, -1, -1, -1),
        factor_group=max(tokens, 1),
    )


def _range(numbers: Tensor, valid: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Smallest and largest number of valid rows along some dimensions, which are kept.

    Without a valid row both are 0.
    """
    counts = valid[:, None, :, None]
    low = torch.where(counts, numbers.float(), torch.inf).amin(dims, keepdim=True)
    high = torch.where(counts, numbers.float(), -torch.inf).amax(dims, keepdim=True)
    empty = low > high
    return low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
