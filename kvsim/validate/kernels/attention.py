"""Attention of a few new tokens over packed rows, a full-precision tail and fetched pairs."""

from typing import Literal

import torch
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.validate.kernels.stores import Store

KERNEL_BITS = (1, 2, 4, 8)
"""Widths that the Triton kernel unpacks."""


@frozen
class View:
    """Keys and values of some cached tokens, as attention finds them.

    Token ``n`` of a sequence is row ``n`` of the packed store while ``n`` is below the packed
    count, else row ``n % slots`` of the tail. Keys and values are packed independently. The
    fetched pairs replace those of the tokens that ``index`` lists.
    """

    lengths: Tensor  # (batch,) tokens
    k: Store | None = None
    v: Store | None = None
    k_packed: Tensor | None = None  # (batch,) packed rows; none without a store
    v_packed: Tensor | None = None
    k_tail: Tensor | None = None  # (batch, KV heads, slots, head dim)
    v_tail: Tensor | None = None
    index: Tensor | None = None  # (batch, KV heads, k), int32; below 0 for none
    k_fetched: Tensor | None = None  # (batch, KV heads, k, head dim)
    v_fetched: Tensor | None = None
    causal: bool = True  # the last tokens are the queries' own
    most: int | None = None  # tokens of the longest sequence, where the host knows them

    @property
    def fused(self) -> bool:
        """Whether the Triton kernel reads it where there is a GPU."""
        return unpacks(self.k) and unpacks(self.v)


@frozen
class PartialAttention:
    """Attention over some tokens: its output and the log of the sum of its exponentials."""

    out: Tensor  # (batch, heads, queries, head dim), fp32
    lse: Tensor  # (batch, heads, queries), fp32; -inf where nothing is seen
    scores: Tensor | None = None  # (batch, heads, tokens): the last query's logits


def attend(queries: Tensor, view: View, scored: bool = False) -> PartialAttention:
    """Attention of (batch, heads, queries, head dim) over the tokens of a view.

    Parameters
    ----------
    scored : give the last query's logits, in fp16 where ``q`` has 16 bits; -inf where it does
        not see a token.
    """
    if queries.is_cuda:
        if not view.fused:
            return attend_plainly(queries, view, scored)
        from kvsim.validate.kernels.attention_triton import attend as fused

        return fused(queries, view, scored)
    from kvsim.validate.kernels.attention_cpu import attend as in_blocks

    return in_blocks(queries, view, scored)


def unpacks(store: Store | None) -> bool:
    """Whether a kernel unpacks these rows: widths it knows, each head's rows one after another."""
    if store is None:
        return True
    contiguous = store.codes.stride(2) == store.codes.shape[3]
    return type(store) is Store and store.bits in KERNEL_BITS and contiguous


def attend_plainly(queries: Tensor, view: View, scored: bool = False) -> PartialAttention:
    """What the kernels compute, written down plainly: their oracle."""
    tokens = view.most  # a GPU would have to be waited for
    if tokens is None:
        tokens = int(view.lengths.max()) if len(view.lengths) else 0
    k = rows(view, tokens, "k")
    # rows beyond a sequence's end may hold anything, and 0 times NaN is not 0
    held = torch.arange(tokens, device=queries.device) < view.lengths[:, None]
    v = rows(view, tokens, "v").masked_fill(~held[:, None, :, None], 0.0)
    batch, heads, new, head_dim = queries.shape
    per_kv = heads // k.shape[1] * new
    grouped = queries.float().reshape(batch, k.shape[1], per_kv, head_dim)
    logits = (grouped @ k.transpose(-1, -2)).view(batch, heads, new, tokens) / head_dim**0.5
    seen = _seen(view, new, tokens)[:, None]
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.clamp(min=-1e30)[..., None]).exp()
    out = weights.reshape(batch, k.shape[1], per_kv, tokens) @ v
    return PartialAttention(
        out.view(queries.shape), lse, logits[:, :, -1].to(score_dtype(queries)) if scored else None
    )


def score_dtype(queries: Tensor) -> torch.dtype:
    """Number format of logits that leave the kernel."""
    return torch.float32 if queries.dtype == torch.float32 else torch.float16


def merge(parts: list[PartialAttention]) -> Tensor:
    """Attention over the union of the parts' tokens, (batch, heads, queries, head dim) in fp32."""
    lse = torch.stack([part.lse for part in parts])
    shares = (lse - lse.logsumexp(0).clamp(min=-1e30)).exp()[..., None]
    return (shares * torch.stack([part.out for part in parts])).sum(0)


def rows(view: View, tokens: int, which: Literal["k", "v"]) -> Tensor:
    """Keys (``k``) or values (``v``) of the first ``tokens`` tokens, widened to fp32."""
    store, count, tail, fetched = {
        "k": (view.k, view.k_packed, view.k_tail, view.k_fetched),
        "v": (view.v, view.v_packed, view.v_tail, view.v_fetched),
    }[which]
    position = torch.arange(tokens, device=view.lengths.device)
    wide: Tensor | None = None
    if tail is not None:
        wide = tail.float()[:, :, position % tail.shape[2]]
    if store is not None and count is not None:
        packed = store.numbers(0, min(tokens, store.rows))
        packed = torch.nn.functional.pad(packed, (0, 0, 0, tokens - packed.shape[2]))
        mask = (position < count[:, None])[:, None, :, None]
        wide = packed if wide is None else torch.where(mask, packed, wide)
    if wide is None:
        raise ValueError("a view has a store, a tail or both")
    if view.index is None or fetched is None:
        return wide
    # rows of tokens that are not fetched, or not there, go to one row too many
    target = torch.where((view.index < 0) | (view.index >= tokens), tokens, view.index).long()
    padded = torch.nn.functional.pad(wide, (0, 0, 0, 1))
    spread = target[..., None].expand(-1, -1, -1, wide.shape[-1])
    return padded.scatter(2, spread, fetched.float())[:, :, :tokens]


def _seen(view: View, queries: int, tokens: int) -> Tensor:
    """Which token each query sees, (batch, queries, tokens)."""
    position = torch.arange(tokens, device=view.lengths.device)
    query = torch.arange(queries, device=view.lengths.device)
    own = queries - 1 - query if view.causal else torch.zeros_like(query)
    return position < (view.lengths[:, None] - own)[..., None]
