"""Weights in four bits: symmetric groups along the inputs, two weights per byte."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kvsim.validate.kernels.packing import pack, unpack
from kvsim.validate.kernels.quantise import nearest
from kvsim.validate.kernels.ranges import ranges

GROUP = 128
NUMBERS = 1 << 18  # of a matrix that are packed at once
TILE = 64  # rows that the kernels' tiles divide
CUDA_TILES = 8  # tiles of 16 inputs that a thread of CUDA's kernel reads at once


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
        """Size of the codes and their scales. [B]"""
        return self.codes.nbytes + self.scale.nbytes

    def numbers(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix (outputs, inputs) widened."""
        steps = unpack(self.codes, 4).float() - 8.0
        scale = self.scale.float().repeat_interleave(GROUP, dim=1)[:, : steps.shape[1]]
        return (steps * scale).to(dtype)


@dataclass(frozen=True)
class Int4Matrix:
    """A packed weight matrix that hidden states are multiplied with, as the decoder's own are.

    Parameters
    ----------
    tiled : whether the codes lie as PyTorch's product with 4-bit weights reads them.
    """

    packed: Int4
    bias: Tensor | None
    tiled: bool = False

    def __call__(self, tensor: Tensor) -> Tensor:
        """Hidden states (..., inputs) to (..., outputs)."""
        if not self.tiled:
            return linear(tensor, self.packed.numbers(tensor.dtype), self.bias)
        out = _product(tensor.reshape(-1, tensor.shape[-1]), self.packed).view(
            *tensor.shape[:-1], -1
        )
        return out if self.bias is None else out + self.bias

    def tensors(self) -> tuple[Tensor, ...]:
        """Codes, scales and bias."""
        own = (self.packed.codes, self.packed.scale)
        return own if self.bias is None else (*own, self.bias)


def int4_matrix(weight: Tensor, bias: Tensor | None) -> Int4Matrix:
    """Pack a weight matrix (outputs, inputs) for the fastest product; the bias stays as it is."""
    outputs, inputs = weight.shape
    if inputs % GROUP or outputs % 16:
        return Int4Matrix(int4(weight), bias)
    return Int4Matrix(Int4(*_by_rows(weight, _tiled_rows)), bias, tiled=True)


def _tiled_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of some rows in the order of PyTorch's kernel for their device, and scales."""
    codes, scale = _packed_rows(weight)
    wide = unpack(codes, 4)
    if codes.is_cuda:
        pairs = wide[:, ::2] << 4 | wide[:, 1::2]
        return torch.ops.aten._convert_weight_to_int4pack(pairs, CUDA_TILES), scale
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(wide.int(), 1), scale


def _product(tensor: Tensor, packed: Int4) -> Tensor:
    """(rows, inputs) times tiled codes, which PyTorch's kernels widen as they read them."""
    on_gpu = tensor.is_cuda
    number = torch.bfloat16 if on_gpu else tensor.dtype  # the only one that CUDA's kernel knows
    scale = packed.scale.T.to(number)
    scales_and_zeros = torch.stack((scale, torch.zeros_like(scale)), dim=-1)
    aten = torch.ops.aten
    multiply = aten._weight_int4pack_mm if on_gpu else aten._weight_int4pack_mm_for_cpu
    out: Tensor = multiply(tensor.to(number), packed.codes, GROUP, scales_and_zeros).to(
        tensor.dtype
    )
    return out


def int4(weight: Tensor) -> Int4:
    """Pack a weight matrix (outputs, inputs)."""
    return Int4(*_by_rows(weight, _packed_rows))


def _packed_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of some rows."""
    inputs = weight.shape[1]
    whole = pad(weight.float(), (0, -inputs % GROUP)).reshape(len(weight), -1, GROUP)
    scale = (whole.abs().amax(-1) / 7.5).half()
    step = scale.float().unsqueeze(-1)
    steps = nearest(whole / torch.where(step > 0, step, 1.0)).clamp(-8, 7) + 8
    return pack(steps.flatten(1)[:, :inputs], 4), scale


def _by_rows(matrix: Tensor, change: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What ``change`` makes of a matrix, some tiles of rows at a time: packing needs little memory.

    Its results have as many rows, or a fixed share of them, as they get.
    """
    whole: tuple[Tensor, ...] = ()
    for rows in ranges(len(matrix), matrix.shape[1], NUMBERS, whole=TILE):
        made = change(matrix[rows])
        whole = whole or tuple(
            t.new_empty((len(t) * len(matrix) // rows.stop, *t.shape[1:])) for t in made
        )
        for target, part in zip(whole, made, strict=True):
            begin = rows.start * len(target) // len(matrix)
            target[begin : begin + len(part)] = part
    return whole
