"""Attention over packed rows on a CPU: block by block, so that what is widened stays in its cache.

The same result as ``attention.attend_plainly``, which widens everything at once and is slower.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from kvsim.validate.kernels.attention import PartialAttention, View, score_dtype
from kvsim.validate.kernels.blockwise import products, weighted
from kvsim.validate.kernels.ranges import ranges


def attend(queries: Tensor, view: View, scored: bool = False) -> PartialAttention:
    """Attention over a view in blocks of tokens; see ``attention.attend``."""
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
            yield part, _with(fetched, view.index, rows, part, wide)
    if packed < length:
        assert tail is not None
        part = slice(packed, length)
        slots = torch.arange(packed, length) % tail.shape[2]
        wide = tail[rows].index_select(2, slots).float()
        yield part, _with(fetched, view.index, rows, part, wide)


def _with(
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
