"""Attention of a few new tokens over packed rows, a full-precision tail and fetched pairs.

A GPU runs Triton's kernel. ``attend_plainly`` is what it is held to, and what a CPU runs.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from kvsim.validate.kernels.blockwise import products, ranges, weighted
from kvsim.validate.kernels.stores import PartialAttention, View, score_dtype


def attend(queries: Tensor, view: View, scored: bool = False) -> PartialAttention:
    """Compute attention of the latest queries over the cached tokens of a view.

    Triton kernels compute it on a GPU where they can read the view's format, PyTorch's ops
    elsewhere.

    Parameters
    ----------
    queries : (batch, heads, new, head dim).
    view : keys and values of the cached tokens.
    scored : return the logits of each sequence's last query too.

    Returns
    -------
    PartialAttention
        Output and log-sum-exp, with the logits if ``scored``: in fp16 if queries have 16 bits, and
        -inf for tokens that the query does not see.
    """
    if not (queries.is_cuda and view.fused(scored)):
        return attend_plainly(queries, view, scored)
    from kvsim.validate.kernels import attention_triton

    if view.narrow is None:
        return attention_triton.attend(queries, view, scored)
    tokens = view.narrow[0].shape[2] if view.most is None else view.most
    keys, values = (rows[:, :, :tokens] for rows in view.narrow)
    seen = _visible_tokens(view, queries.shape[2], tokens)[:, None]
    return attention_triton.attend_masked(queries, keys, values, seen)


def attend_plainly(queries: Tensor, view: View, scored: bool = False) -> PartialAttention:
    """Compute the same as the kernels with PyTorch's own ops.

    On a CPU some tokens are dequantised at a time, so that they stay in the CPU's cache.

    Parameters
    ----------
    queries, view, scored
        As for :func:`attend`, which has the same result.
    """
    tokens = view.most  # a GPU would have to be waited for
    if tokens is None:
        tokens = int(view.lengths.max()) if len(view.lengths) else 0
    some = view.k.codes if view.k is not None else view.k_tail
    assert some is not None
    batch, heads, new, head_dim = queries.shape
    kv_heads = some.shape[1]
    width = batch * kv_heads * head_dim
    grouped = queries.float().reshape(batch, kv_heads, -1, head_dim) * head_dim**-0.5
    keys = ((part, rows(view, part, "k")) for part in _parts(view, tokens, width, "k"))
    logits = products(grouped, keys, tokens).view(batch, heads, new, tokens)
    seen = _visible_tokens(view, new, tokens)[:, None]
    logits.masked_fill_(~seen, -torch.inf)
    scores = logits[:, :, -1].to(score_dtype(queries), copy=True) if scored else None
    lse = logits.logsumexp(-1)
    weights = logits.sub_(lse.clamp(min=-1e30)[..., None]).exp_()
    values = (
        (part, _mask_missing(view, part, rows(view, part, "v")))
        for part in _parts(view, tokens, width, "v")
    )
    out = weighted(weights.view(*grouped.shape[:3], tokens), values) if tokens else grouped * 0.0
    return PartialAttention(out.view(queries.shape), lse, scores)


def merge(parts: list[PartialAttention]) -> Tensor:
    """Merge attention over several sets of tokens to that over all of them.

    Parameters
    ----------
    parts
        Partial outputs with their log-sum-exp.

    Returns
    -------
    Tensor
        (batch, heads, queries, head dim) in fp32.
    """
    lse = torch.stack([part.lse for part in parts])
    shares = (lse - lse.logsumexp(0).clamp(min=-1e30)).exp()[..., None]
    return (shares * torch.stack([part.out for part in parts])).sum(0)


def rows(view: View, part: slice, which: Literal["k", "v"]) -> Tensor:
    """Dequantise the keys or values of a range of tokens.

    Parameters
    ----------
    part
        Range of tokens, with both ends given.
    which
        ``k`` for keys, ``v`` for values.

    Returns
    -------
    Tensor
        (batch, KV heads, tokens, head dim) in fp32.
    """
    store, count, tail, fetched = {
        "k": (view.k, view.k_packed, view.k_tail, view.k_fetched),
        "v": (view.v, view.v_packed, view.v_tail, view.v_fetched),
    }[which]
    position = torch.arange(part.start, part.stop, device=view.lengths.device)
    least, most = 0, part.stop  # packed rows of a sequence; a GPU would have to be waited for
    if store is None or count is None:
        most = 0
    elif not count.is_cuda:
        least, most = (int(n) for n in count.aminmax())
    wide: Tensor | None = None
    if tail is not None and part.stop > least:
        wide = tail[:, :, position % tail.shape[2]].float()
    if store is not None and count is not None and (part.start < most or wide is None):
        packed = store.numbers(min(part.start, store.rows), min(part.stop, store.rows))
        if (missing := len(position) - packed.shape[2]) > 0:
            packed = torch.nn.functional.pad(packed, (0, 0, 0, missing))
        if wide is not None:
            packed = torch.where((position < count[:, None])[:, None, :, None], packed, wide)
        wide = packed
    if wide is None:
        raise ValueError("a view has a store, a tail or both")
    if view.index is None or fetched is None:
        return wide
    # rows of tokens that are not fetched, or not in this range, go to one row too many
    here = (view.index >= part.start) & (view.index < part.stop)
    target = torch.where(here, view.index - part.start, len(position)).long()
    padded = torch.nn.functional.pad(wide, (0, 0, 0, 1))
    spread = target[..., None].expand(-1, -1, -1, wide.shape[-1])
    return padded.scatter(2, spread, fetched.float())[:, :, : len(position)]


def _parts(view: View, tokens: int, width: int, which: Literal["k", "v"]) -> Iterator[slice]:
    """Yield ranges of tokens to dequantise at once; on a CPU small enough for its cache."""
    store, count = (view.k, view.k_packed) if which == "k" else (view.v, view.v_packed)
    if view.lengths.is_cuda:
        yield slice(0, tokens)
        return
    packed = [0, 0] if store is None or count is None else [int(n) for n in count.aminmax()]
    whole = store.group if store is not None and store.by == "channel" else 1
    for start, stop in pairwise([0, *(min(n, tokens) for n in packed), tokens]):
        for part in ranges(stop - start, width, whole=whole):
            yield slice(start + part.start, start + part.stop)


def _mask_missing(view: View, part: slice, values: Tensor) -> Tensor:
    """Set the values of missing tokens to 0, as 0 times NaN is not 0."""
    if not view.lengths.is_cuda and part.stop <= int(view.lengths.min()):
        return values
    position = torch.arange(part.start, part.stop, device=values.device)
    held = (position < view.lengths[:, None])[:, None, :, None]
    return values.masked_fill(~held, 0.0)  # not in place: unpacked rows are the cache itself


def _visible_tokens(view: View, queries: int, tokens: int) -> Tensor:
    """Return which tokens each query sees, (batch, queries, tokens)."""
    position = torch.arange(tokens, device=view.lengths.device)
    query = torch.arange(queries, device=view.lengths.device)
    own = queries - 1 - query if view.causal else torch.zeros_like(query)
    return position < (view.lengths[:, None] - own)[..., None]
