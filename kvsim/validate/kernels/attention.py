"""Attention of a few new tokens over packed rows, a full-precision tail and fetched pairs.

A GPU runs Triton's kernel; a CPU works block by block, so that what is widened stays in its cache.
``attend_plainly`` is what both are held to.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from kvsim.validate.kernels.blockwise import products, ranges, weighted
from kvsim.validate.kernels.stores import PartialAttention, View, score_dtype


def attend(queries: Tensor, view: View, scored: bool = False) -> PartialAttention:
    """Attention of (batch, heads, queries, head dim) over the tokens of a view.

    Parameters
    ----------
    scored : give the last query's logits, in fp16 where ``q`` has 16 bits; -inf where it does
        not see a token.
    """
    if queries.is_cuda:
        if not view.fused(scored):
            return attend_plainly(queries, view, scored)
        from kvsim.validate.kernels import attention_triton

        if view.narrow is None:
            return attention_triton.attend(queries, view, scored)
        tokens = view.narrow[0].shape[2] if view.most is None else view.most
        keys, values = (rows[:, :, :tokens] for rows in view.narrow)
        seen = _visible_tokens(view, queries.shape[2], tokens)[:, None]
        return attention_triton.attend_masked(queries, keys, values, seen)
    return attend_in_blocks(queries, view, scored)


def attend_plainly(queries: Tensor, view: View, scored: bool = False) -> PartialAttention:
    """Compute what the kernels compute, written down plainly: their oracle.

    Parameters
    ----------
    scored
        Whether the logits of the last query are returned too.
    """
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
    seen = _visible_tokens(view, new, tokens)[:, None]
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.clamp(min=-1e30)[..., None]).exp()
    out = weights.reshape(batch, k.shape[1], per_kv, tokens) @ v
    return PartialAttention(
        out.view(queries.shape), lse, logits[:, :, -1].to(score_dtype(queries)) if scored else None
    )


def merge(parts: list[PartialAttention]) -> Tensor:
    """Merge attention over several sets of tokens to that over all of them.

    Parameters
    ----------
    parts
        Outputs with the logarithm of their sums of exponentials.

    Returns
    -------
    Tensor
        (batch, heads, queries, head dim) in fp32.
    """
    lse = torch.stack([part.lse for part in parts])
    shares = (lse - lse.logsumexp(0).clamp(min=-1e30)).exp()[..., None]
    return (shares * torch.stack([part.out for part in parts])).sum(0)


def rows(view: View, tokens: int, which: Literal["k", "v"]) -> Tensor:
    """Return the keys or values of the first tokens.

    Parameters
    ----------
    tokens
        How many. [tokens]
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


def _visible_tokens(view: View, queries: int, tokens: int) -> Tensor:
    """Which token each query sees, (batch, queries, tokens)."""
    position = torch.arange(tokens, device=view.lengths.device)
    query = torch.arange(queries, device=view.lengths.device)
    own = queries - 1 - query if view.causal else torch.zeros_like(query)
    return position < (view.lengths[:, None] - own)[..., None]


def attend_in_blocks(queries: Tensor, view: View, scored: bool = False) -> PartialAttention:
    """Attend to a view in blocks of tokens; see ``attend``.

    Parameters
    ----------
    scored
        Whether the logits of the last query are returned too.
    """
    counts = [_counts(n, len(queries)) for n in (view.lengths, view.k_packed, view.v_packed)]
    cases = list(zip(*counts, strict=True))
    tokens = max(counts[0], default=0)
    out = torch.empty(queries.shape, device=queries.device)
    lse = torch.empty(queries.shape[:3], device=queries.device)
    shape = (*queries.shape[:2], tokens)
    scores = torch.full(shape, -torch.inf, dtype=score_dtype(queries)) if scored else None
    alike = len(set(cases)) == 1
    parts = [slice(0, len(queries))] if alike else [slice(i, i + 1) for i in range(len(queries))]
    for rows, (length, k_packed, v_packed) in zip(parts, cases, strict=False):
        if not length:
            out[rows], lse[rows] = 0.0, -torch.inf
            continue
        logits = _logits(queries[rows], view, rows, length, min(k_packed, length))
        _hide(logits, view, queries.shape[2])
        by_head = logits.view(-1, *queries.shape[1:3], length)
        lse[rows] = by_head.logsumexp(-1)
        if scores is not None:
            scores[rows, :, :length] = by_head[:, :, -1].to(scores.dtype)
        floor = lse[rows].clamp(min=-1e30).reshape(*logits.shape[:3], 1)
        weights = logits.sub_(floor).exp_()
        values = _blocks(view, "v", rows, length, min(v_packed, length))
        out[rows] = weighted(weights, values).view(-1, *queries.shape[1:])
    return PartialAttention(out, lse, scores)


def _counts(counts: Tensor | None, batch: int) -> list[int]:
    return [0] * batch if counts is None else [int(n) for n in counts]


def _logits(q: Tensor, view: View, rows: slice, length: int, packed: int) -> Tensor:
    """Logits (batch, KV heads, queries of their heads, tokens)."""
    some = view.k.codes if view.k is not None else view.k_tail
    assert some is not None
    kv_heads = some.shape[1]
    batch, heads, queries, head_dim = q.shape
    grouped = q.float().reshape(batch, kv_heads, heads // kv_heads * queries, head_dim)
    grouped = grouped * head_dim**-0.5
    return products(grouped, _blocks(view, "k", rows, length, packed), length)


def _hide(logits: Tensor, view: View, queries: int) -> None:
    """The earlier queries do not see the tokens of the later ones."""
    if not view.causal:
        return
    batch, kv_heads, _, length = logits.shape
    by_query = logits.view(batch, kv_heads, -1, queries, length)
    for query in range(queries - 1):
        by_query[:, :, :, query, max(0, length - (queries - 1 - query)) :] = -torch.inf


def _blocks(
    view: View, which: Literal["k", "v"], rows: slice, length: int, packed: int
) -> Iterator[tuple[slice, Tensor]]:
    """Keys or values in fp32, fetched ones in place, and the tokens that they belong to."""
    store, tail, fetched = {
        "k": (view.k, view.k_tail, view.k_fetched),
        "v": (view.v, view.v_tail, view.v_fetched),
    }[which]
    if store is not None and packed:
        here = store.sequences(rows)
        batch, heads, _, width = here.codes.shape
        numbers = batch * heads * width * 8 // here.bits
        for part in ranges(packed, numbers, whole=here.group if here.by == "channel" else 1):
            wide = here.numbers(part.start, part.stop)
            yield part, _with_fetched(fetched, view.index, rows, part, wide)
    if packed < length:
        assert tail is not None
        part = slice(packed, length)
        slots = torch.arange(packed, length) % tail.shape[2]
        wide = tail[rows].index_select(2, slots).float()
        yield part, _with_fetched(fetched, view.index, rows, part, wide)


def _with_fetched(
    fetched: Tensor | None, index: Tensor | None, rows: slice, part: slice, wide: Tensor
) -> Tensor:
    """Write the fetched rows of a block's tokens over the widened ones."""
    if fetched is None or index is None:
        return wide
    index = index[rows]
    sequences, heads, places = torch.where((index >= part.start) & (index < part.stop))
    tokens = index[sequences, heads, places].long() - part.start
    wide[sequences, heads, tokens] = fetched[rows][sequences, heads, places].float()
    return wide
