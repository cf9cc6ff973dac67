"""Weights in four bits: symmetric groups along the inputs, two weights per byte."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kvsim.validate.kernels.packing import pack, unpack
from kvsim.validate.kernels.quantise import nearest

GROUP = 128


@dataclass(frozen=True)
class Int4:
    """A weight matrix (outputs, inputs) as codes and fp16 scales.

    Rounded to nearest without calibration data; the last group may be short.

    References
    ----------
    .. [1] R. Tiwari et al., "QuantSpec", ICML 2025: the draft's weights are INT4; its code reads
       symmetric groups of 128.
    """

    codes: Tensor  # (outputs, inputs / 2), uint8: code 8 stands for 0
    scale: Tensor  # (outputs, groups), fp16

    @property
    def nbytes(self) -> int:
        """Stored size. [B]"""
        return self.codes.nbytes + self.scale.nbytes

    def numbers(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix (outputs, inputs) widened."""
        steps = unpack(self.codes, 4).float() - 8.0
        scale = self.scale.float().repeat_interleave(GROUP, dim=1)[:, : steps.shape[1]]
        return (steps * scale).to(dtype)


@dataclass(frozen=True)
class Int4Matrix:
    """A packed weight matrix that hidden states are multiplied with, as the decoder's own are."""

    packed: Int4
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states (..., inputs) to (..., outputs)."""
        return linear(x, self.packed.numbers(x.dtype), self.bias)

    def tensors(self) -> tuple[Tensor, ...]:
        """Codes, scales and bias."""
        own = (self.packed.codes, self.packed.scale)
        return own if self.bias is None else (*own, self.bias)


def int4_matrix(weight: Tensor, bias: Tensor | None) -> Int4Matrix:
    """Pack a weight matrix (outputs, inputs); the bias stays as it is."""
    return Int4Matrix(int4(weight), bias)


def int4(weight: Tensor) -> Int4:
    """Pack a weight matrix (outputs, inputs)."""
    inputs = weight.shape[1]
    whole = pad(weight.float(), (0, -inputs % GROUP)).reshape(len(weight), -1, GROUP)
    scale = (whole.abs().amax(-1) / 7.5).half()
    step = scale.float().unsqueeze(-1)
    steps = nearest(whole / torch.where(step > 0, step, 1.0)).clamp(-8, 7) + 8
    return Int4(pack(steps.flatten(1)[:, :inputs], 4), scale)
