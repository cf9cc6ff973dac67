"""Keys and values in FP8 with a scale of 1, the default of serving engines."""

import torch
from torch import Tensor

from kvsim.validate.kernels.stores import Store
from kvsim.validate.parts.rows import PACKED_AT_ONCE, Codec, EncodedRows, PerTokenCache
from kvsim.validate.parts.store import Widths

SMALL_SETTINGS = ("",)
FP8_DTYPE = torch.float8_e4m3fn
CONVERTS_FP8 = (8, 9)  # GPUs of this compute capability and above


class Fp8(PerTokenCache):
    """Storage in FP8 with four bits of exponent and three of mantissa (E4M3).

    References
    ----------
    .. [1] P. Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433, table 1.
    """

    differences = PACKED_AT_ONCE

    def codecs(self) -> tuple[Codec, Codec]:
        """Return the codecs of keys and of values, which are the same."""
        return Narrow(), Narrow()


class Narrow(Codec):
    """Codec of 8-bit floating-point values, clamped to their range."""

    def widths(self, dim: int, dtype: torch.dtype) -> Widths:
        """Return width and number format of the only part, which has one byte per element."""
        return [(dim, torch.uint8)]

    def encode(self, numbers: Tensor) -> list[Tensor]:
        """Round values to 8 bits, and view them as bytes. (sequences, KV heads, tokens, dim)"""
        most = torch.finfo(FP8_DTYPE).max
        return [numbers.clamp(-most, most).to(FP8_DTYPE).view(torch.uint8)]

    def store(self, parts: list[Tensor]) -> Store:
        """Arrange the bytes as rows of FP8 values, which GPU kernels convert directly."""
        return _Fp8Rows.from_parts(
            parts, 8, lambda parts: parts[0].contiguous().view(FP8_DTYPE).float()
        )


class _Fp8Rows(EncodedRows):
    @property
    def narrow(self) -> Tensor | None:
        device = self.codes.device
        able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= CONVERTS_FP8
        return self.codes.view(FP8_DTYPE) if able else None
