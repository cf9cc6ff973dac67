"""Packed rows of keys or of values with what is needed to widen them again."""

from dataclasses import dataclass, fields
from typing import Literal, Self

import torch
from torch import Tensor

from kvsim.validate.kernels.packing import unpack

By = Literal["channel", "token"]
"""What has its own scale: each channel of a group of tokens, or each token's group of channels."""


@dataclass(frozen=True)
class Store:
    """Packed rows, one per token, of every sequence and KV head.

    Tables of ``channel`` stores, and factors, have one row per group of tokens; those of
    ``token`` stores one column per group of channels. Equal parts may be expanded views.
    """

    codes: Tensor  # (batch, KV heads, rows, head dim * bits / 8), uint8
    scale: Tensor  # (batch, KV heads, groups, head dim) or (batch, KV heads, rows, groups), fp16
    zero: Tensor  # as scale: what code 0 stands for
    bits: int
    group: int  # rows or channels that share a scale
    by: By
    lower: Tensor | None = None  # as codes: four more bits, the residual of the upper ones plus 8
    factor: Tensor | None = None  # (batch, KV heads, groups of rows, head dim), fp16
    first: Tensor | None = None  # (batch,) rows of the first group, if its size differs
    factor_group: int = 0  # rows that share a factor

    @property
    def rows(self) -> int:
        """Rows there is room for."""
        return self.codes.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is stored, expanded views counted once. [B]"""
        tensors = [getattr(self, f.name) for f in fields(self)]
        return sum(_bytes(t) for t in tensors if isinstance(t, Tensor))

    def upper_only(self) -> Self:
        """The same rows without their residual: what a draft reads."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**kept | {"lower": None})

    def first_rows(self, rows: int) -> Self:
        """The first ``rows`` rows, without a copy."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        per_row = ["codes", "lower"] + (["scale", "zero"] if self.by == "token" else [])
        cut = {n: kept[n][:, :, :rows] for n in per_row if kept[n] is not None}
        return type(self)(**kept | cut)

    def numbers(self) -> Tensor:
        """All rows widened, (batch, KV heads, rows, head dim) in fp32."""
        codes = unpack(self.codes, self.bits).float()
        if self.lower is not None:
            codes = codes + (unpack(self.lower, 4).float() - 8.0) / 16.0
        scale, zero = self._spread(self.scale), self._spread(self.zero)
        wide = codes * scale + zero
        if self.factor is not None:
            groups = self.group_of_row(self.factor_group, self.factor.shape[2])
            wide = wide * _rows(self.factor, groups)
        return wide

    def group_of_row(self, group: int, groups: int) -> Tensor:
        """Which group of ``group`` rows each row is in, (batch, rows)."""
        rows = torch.arange(self.rows, device=self.codes.device)
        if self.first is None:
            index = (rows // group).expand(self.codes.shape[0], -1)
        else:
            beyond = rows - self.first[:, None]
            index = torch.where(beyond < 0, 0, beyond // group + 1)
        return index.clamp(max=groups - 1)

    def _spread(self, table: Tensor) -> Tensor:
        if self.by == "token":
            return table.float().repeat_interleave(self.group, dim=-1)
        return _rows(table, self.group_of_row(self.group, table.shape[2]))


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table (batch, heads, groups, channels) by an index (batch, rows), in fp32."""
    wide = index[:, None, :, None].expand(-1, table.shape[1], -1, table.shape[3])
    return table.float().gather(2, wide)


def _bytes(tensor: Tensor) -> int:
    stored = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return int(torch.tensor(stored).prod()) * tensor.element_size()
