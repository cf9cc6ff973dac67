"""Packed rows of keys or of values, and views of a cache that attention reads."""

from dataclasses import fields
from typing import Literal, Self

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.validate.kernels.packing import unpack

By = Literal["channel", "token"]
"""What has its own scale: each channel of a group of tokens, or each token's group of channels."""


Levels = Literal["ends", "centres", "grid"]
"""Where the levels of a range lie: from its ends, at the centres of equal intervals of it, or from
the multiple of the scale that is nearest to its lower end."""


@frozen
class Store:
    """Packed rows, one per token, of every sequence and KV head.

    Tables of ``channel`` stores, and factors, have one row per group of tokens; those of
    ``token`` stores one column per group of channels. Equal parts may be expanded views.
    """

    codes: Tensor  # (batch, KV heads, rows, head dim * bits / 8), uint8
    scale: Tensor  # (batch, KV heads, groups, head dim) or (batch, KV heads, rows, groups), fp16
    zero: Tensor  # value of code 0; shaped as ``scale``
    bits: int
    group: int  # rows or channels that share a scale
    by: By
    lower: Tensor | None = None  # four further bits per code (residual plus 8); shaped as ``codes``
    factor: Tensor | None = None  # (batch, KV heads, groups of rows, head dim), fp16
    first: Tensor | None = None  # rows of the first group, if its size differs (batch,)
    factor_group: int = 0  # rows that share a factor

    @property
    def rows(self) -> int:
        """Number of allocated rows."""
        return self.codes.shape[2]

    @property
    def narrow(self) -> Tensor | None:
        """Rows in FP8, which GPUs convert; else None. (batch, KV heads, rows, dim)"""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is stored, expanded views counted once. [B]"""
        tensors = [getattr(self, f.name) for f in fields(self)]
        return sum(_bytes(t) for t in tensors if isinstance(t, Tensor))

    def upper_only(self) -> Self:
        """The same rows without their residual, as drafts read them."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**kept | {"lower": None})

    def sequences(self, part: slice) -> Self:
        """Return the rows of some sequences, without a copy.

        Parameters
        ----------
        part
            Range of sequences of the batch.
        """
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        cut = {name: t[part] for name, t in kept.items() if isinstance(t, Tensor)}
        return type(self)(**kept | cut)

    def numbers(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Dequantise a range of rows.

        Parameters
        ----------
        start, stop
            First row, and the one after the last.

        Returns
        -------
        Tensor
            (batch, KV heads, rows, head dim) in fp32.
        """
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
        """Return rows from ``start`` on, shaped so that group tables broadcast to them."""
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
        """Return the group of each row from ``start`` on, (batch, count)."""
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


KERNEL_BITS = (1, 2, 4, 8)
"""Widths that the Triton kernel unpacks."""


@frozen
class View:
    """Keys and values of cached tokens, as attention kernels read them.

    Token ``n`` of a sequence is row ``n`` of the packed store while ``n`` is below the packed
    count, else row ``n % slots`` of the tail. Keys and values are packed independently. The
    fetched pairs replace those of the tokens that ``index`` lists.

    Attributes
    ----------
    lengths
        Tokens of each sequence, (batch,).
    k, v
        Packed keys and values; None if nothing is packed.
    k_packed, v_packed
        Packed rows of each sequence, (batch,); None without a packed store.
    k_tail, v_tail
        Ring buffers of unpacked recent tokens, (batch, KV heads, slots, head dim).
    index
        Tokens that were fetched, (batch, KV heads, k), int32; below 0 for none.
    k_fetched, v_fetched
        Keys and values of the fetched tokens, (batch, KV heads, k, head dim).
    causal
        Whether the last tokens are the queries' own, so that each query sees up to itself.
    most
        Tokens of the longest sequence, if the host knows it. [tokens]
    """

    lengths: Tensor
    k: Store | None = None
    v: Store | None = None
    k_packed: Tensor | None = None
    v_packed: Tensor | None = None
    k_tail: Tensor | None = None
    v_tail: Tensor | None = None
    index: Tensor | None = None
    k_fetched: Tensor | None = None
    v_fetched: Tensor | None = None
    causal: bool = True
    most: int | None = None

    @property
    def narrow(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values in FP8, if all are. (batch, KV heads, rows, dim) each"""
        if self.k is None or self.v is None or self.k_tail is not None or self.index is not None:
            return None
        keys, values = self.k.narrow, self.v.narrow
        return None if keys is None or values is None else (keys, values)

    def fused(self, scored: bool = False) -> bool:
        """Return whether a Triton kernel can read the view on a GPU.

        Parameters
        ----------
        scored
            Whether the kernel has to return scores.
        """
        if self.narrow is not None:
            return not scored
        return unpacks(self.k) and unpacks(self.v)


@frozen
class PartialAttention:
    """Attention over some of the tokens, in a form that can be merged with that over others.

    Attributes
    ----------
    out
        The output, (batch, heads, queries, head dim), fp32.
    lse
        Log of the sum of the exponentials, (batch, heads, queries), fp32; -inf where a query sees
        nothing.
    scores
        Logits of the last query, (batch, heads, tokens); None if not asked for.
    """

    out: Tensor
    lse: Tensor
    scores: Tensor | None = None


def unpacks(store: Store | None) -> bool:
    """Whether a kernel can unpack these rows: known widths, and contiguous rows per head.

    Parameters
    ----------
    store
        Stored rows; None where nothing is packed.
    """
    if store is None:
        return True
    contiguous = store.codes.stride(2) == store.codes.shape[3]
    return type(store) is Store and store.bits in KERNEL_BITS and contiguous


def score_dtype(queries: Tensor) -> torch.dtype:
    """Return the number format of logits that leave the kernel.

    Parameters
    ----------
    queries
        (batch, heads, queries, head dim).
    """
    return torch.float32 if queries.dtype == torch.float32 else torch.float16


def grouped(numbers: Tensor, group: int, by: By) -> Tensor:
    """Give groups a separate dimension.

    Channel groups give (..., groups, group, channels), token groups (..., tokens, groups, group).

    Parameters
    ----------
    by
        ``channel``: groups of tokens; ``token``: groups of channels.

    Returns
    -------
    Tensor
        (..., groups, group, channels), or (..., tokens, groups, group).

    Raises
    ------
    InputError
        If groups do not divide tokens or channels.
    """
    check_group_size(numbers, group, by)
    dim = -2 if by == "channel" else -1
    shape = list(numbers.shape)
    shape[dim:] = [shape[dim] // group, group, *shape[dim:][1:]]
    return numbers.reshape(shape)


def check_group_size(numbers: Tensor, group: int, by: By) -> None:
    """Check that groups divide tokens or channels.

    Parameters
    ----------
    by
        ``channel``: groups of tokens; ``token``: groups of channels.

    Raises
    ------
    InputError
        If they do not.
    """
    size, what = (
        (numbers.shape[-2], "tokens") if by == "channel" else (numbers.shape[-1], "channels")
    )
    if group < 1 or size % group:
        raise InputError(
            f"quantise: groups of {group} do not divide {size} {what}; choose a group that does"
        )
