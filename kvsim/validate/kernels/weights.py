"""Weights in four bits: symmetric groups along the inputs, two weights per byte."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kvsim.frozen import frozen
from kvsim.validate.kernels.blockwise import ranges
from kvsim.validate.kernels.packing import pack, unpack
from kvsim.validate.kernels.quantise import round_half_up

WEIGHT_GROUP = 128
PACKED_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 22}  # of a matrix that are packed at once
TILE = 64  # rows that the kernels' tiles divide
CUDA_TILES = 8  # tiles of 16 inputs that a thread of CUDA's kernel reads at once


@frozen
class Int4:
    """A weight matrix (outputs, inputs) as codes and fp16 scales.

    Rounded to nearest without calibration data; the last group may be short.

    References
    ----------
    .. [1] R. Tiwari et al., "QuantSpec", ICML 2025: the draft's weights are INT4; its code reads
       symmetric groups of 128.
    """

    codes: Tensor  # (outputs, inputs / 2), uint8: code 8 stands for 0
    scale: Tensor  # (outputs, groups), in 16 bits

    @property
    def nbytes(self) -> int:
        """Size of the codes and their scales. [B]"""
        return self.codes.nbytes + self.scale.nbytes

    def numbers(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix (outputs, inputs) widened."""
        steps = unpack(self.codes, 4).float() - 8.0
        scale = self.scale.float().repeat_interleave(WEIGHT_GROUP, dim=1)[:, : steps.shape[1]]
        return (steps * scale).to(dtype)


@frozen
class Int4Matrix:
    """A packed weight matrix that hidden states are multiplied with, as the decoder's own are.

    Parameters
    ----------
    tiled : whether the codes lie as PyTorch's product with 4-bit weights reads them.
    table : scales and zero points (groups, outputs, 2) as CUDA's product reads them; the scales of
        ``packed`` are a view of it.
    """

    packed: Int4
    bias: Tensor | None
    tiled: bool = False
    table: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Hidden states (..., inputs) to (..., outputs)."""
        if not self.tiled:
            return linear(tensor, self.packed.numbers(tensor.dtype), self.bias)
        rows = tensor.reshape(-1, tensor.shape[-1])
        product = self._on_cpu(rows) if self.table is None else self._on_gpu(rows, self.table)
        out = product.view(*tensor.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    def tensors(self) -> tuple[Tensor, ...]:
        """Codes, scales and bias."""
        own = (self.packed.codes, self.packed.scale)
        return own if self.bias is None else (*own, self.bias)

    def _on_gpu(self, rows: Tensor, table: Tensor) -> Tensor:
        """(rows, inputs) times tiled codes, in the only format that CUDA's kernel knows."""
        multiply = torch.ops.aten._weight_int4pack_mm
        out: Tensor = multiply(rows.to(torch.bfloat16), self.packed.codes, WEIGHT_GROUP, table)
        return out.to(rows.dtype)

    def _on_cpu(self, rows: Tensor) -> Tensor:
        """(rows, inputs) times tiled codes, widened as they are read."""
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        table = scales_and_zeros(self.packed.scale.to(rows.dtype))
        out: Tensor = multiply(rows, self.packed.codes, WEIGHT_GROUP, table)
        return out


def int4_matrix(weight: Tensor, bias: Tensor | None) -> Int4Matrix:
    """Pack a weight matrix for the fastest product in four bits.

    Parameters
    ----------
    bias
        Its bias, which stays as it is.

    Returns
    -------
    Int4Matrix
        The packed matrix, tiled for PyTorch's kernels where its size allows it.
    """
    outputs, inputs = weight.shape
    if inputs % WEIGHT_GROUP or outputs % 16:
        return Int4Matrix(int4(weight), bias)
    codes, scale = _by_rows(weight, _tiled_rows)
    if not codes.is_cuda:
        return Int4Matrix(Int4(codes, scale), bias, tiled=True)
    table = scales_and_zeros(scale.to(torch.bfloat16))  # once: a product would make it each time
    return Int4Matrix(Int4(codes, table[..., 0].T), bias, tiled=True, table=table)


def _tiled_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of some rows in the order of PyTorch's kernel for their device, and scales."""
    codes, scale = _packed_rows(weight)
    wide = unpack(codes, 4)
    if codes.is_cuda:
        pairs = wide[:, ::2] << 4 | wide[:, 1::2]
        return torch.ops.aten._convert_weight_to_int4pack(pairs, CUDA_TILES), scale
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(wide.int(), 1), scale


def scales_and_zeros(scale: Tensor) -> Tensor:
    """Arrange scales as PyTorch's products with 4-bit weights read them.

    Parameters
    ----------
    scale
        Scales, (outputs, groups).

    Returns
    -------
    Tensor
        Scales and zero points, (groups, outputs, 2); zero points are 0.
    """
    scale = scale.T
    return torch.stack((scale, torch.zeros_like(scale)), dim=-1)


def int4(weight: Tensor) -> Int4:
    """Pack a weight matrix in four bits."""
    return Int4(*_by_rows(weight, _packed_rows))


def _packed_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of some rows."""
    inputs = weight.shape[1]
    whole = pad(weight.float(), (0, -inputs % WEIGHT_GROUP)).reshape(len(weight), -1, WEIGHT_GROUP)
    scale = (whole.abs().amax(-1) / 7.5).half()
    step = scale.float().unsqueeze(-1)
    steps = round_half_up(whole / torch.where(step > 0, step, 1.0)).clamp(-8, 7) + 8
    return pack(steps.flatten(1)[:, :inputs], 4), scale


def _by_rows(matrix: Tensor, change: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What ``change`` makes of a matrix, some tiles of rows at a time: packing needs little memory.

    Its results have as many rows, or a fixed share of them, as they get.
    """
    whole: tuple[Tensor, ...] = ()
    most = PACKED_NUMBERS.get(matrix.device.type, PACKED_NUMBERS["cpu"])
    for rows in ranges(len(matrix), matrix.shape[1], most, whole=TILE):
        made = change(matrix[rows])
        whole = whole or tuple(
            t.new_empty((len(t) * len(matrix) // rows.stop, *t.shape[1:])) for t in made
        )
        for target, part in zip(whole, made, strict=True):
            begin = rows.start * len(target) // len(matrix)
            target[begin : begin + len(part)] = part
    return whole
