"""Packed rows of keys or of values with what is needed to widen them again."""

from dataclasses import fields
from typing import Literal, Self

import torch
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.validate.kernels.packing import unpack

By = Literal["channel", "token"]
"""What has its own scale: each channel of a group of tokens, or each token's group of channels."""


@frozen
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

    def sequences(self, part: slice) -> Self:
        """Those of some sequences, without a copy."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        cut = {name: t[part] for name, t in kept.items() if isinstance(t, Tensor)}
        return type(self)(**kept | cut)

    def numbers(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows ``start`` to ``stop`` widened, (batch, KV heads, rows, head dim) in fp32."""
        stop = self.rows if stop is None else stop
        wide = unpack(self.codes[:, :, start:stop], self.bits).float()
        if self.lower is not None:
            wide += (unpack(self.lower[:, :, start:stop], 4).float() - 8.0) / 16.0
        if self.by == "token":
            parts = wide.view(*wide.shape[:3], wide.shape[3] // self.group, self.group)
            parts *= self.scale[:, :, start:stop, :, None].float()
            parts += self.zero[:, :, start:stop, :, None].float()
        else:
            parts, tables = self._by_group(wide, (self.scale, self.zero), self.group, start)
            parts *= tables[0]
            parts += tables[1]
        if self.factor is not None:
            parts, tables = self._by_group(wide, (self.factor,), self.factor_group, start)
            parts *= tables[0]
        return wide

    def _by_group(
        self, wide: Tensor, tables: tuple[Tensor, ...], group: int, start: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rows from ``start`` on, seen so that the tables of their groups broadcast to them."""
        batch, heads, count, channels = wide.shape
        first, groups = start // group, count // group
        if self.first is None and start % group == 0 and count % group == 0:
            parts = wide.view(batch, heads, groups, group, channels)
            return parts, tuple(t[:, :, first : first + groups, None].float() for t in tables)
        index = self._group_of_row(group, tables[0].shape[2], start, count)
        if index.numel() and (index == index[0, 0]).all():
            one = int(index[0, 0])
            return wide, tuple(t[:, :, one : one + 1].float() for t in tables)
        if (index == index[:1]).all():
            return wide, tuple(t.index_select(2, index[0]).float() for t in tables)
        spread = index[:, None, :, None].expand(-1, heads, -1, channels)
        return wide, tuple(t.float().gather(2, spread) for t in tables)

    def _group_of_row(self, group: int, groups: int, start: int, count: int) -> Tensor:
        """Which group of ``group`` rows each row from ``start`` on is in, (batch, count)."""
        rows = torch.arange(start, start + count, device=self.codes.device)
        if self.first is None:
            index = (rows // group).expand(self.codes.shape[0], -1)
        else:
            beyond = rows - self.first[:, None]
            index = torch.where(beyond < 0, 0, beyond // group + 1)
        return index.clamp(max=groups - 1)


def _bytes(tensor: Tensor) -> int:
    stored = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return int(torch.tensor(stored).prod()) * tensor.element_size()
