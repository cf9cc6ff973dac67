"""Attention weights in the open, for those who choose by them."""

import torch
from torch import Tensor


def scores(queries: Tensor, keys: Tensor, seen: Tensor | None = None) -> Tensor:
    """Softmax over keys, (batch, heads, queries, tokens) in fp32.

    ``seen`` is true where a query sees a key, (batch or 1, 1, queries, tokens).
    """
    batch, heads, new, dim = queries.shape
    grouped = queries.reshape(batch, keys.shape[1], -1, dim)  # heads of a group share their keys
    logits = (grouped * dim**-0.5) @ keys.transpose(2, 3)
    logits = logits.view(batch, heads, new, -1).float()
    if seen is not None:
        logits.masked_fill_(~seen, -torch.inf)
    return torch.softmax(logits, dim=-1)


def weigh(weights: Tensor, values: Tensor) -> Tensor:
    """Values (batch, KV heads, tokens, dim) summed by weights (batch, heads, queries, tokens)."""
    batch, heads, queries, tokens = weights.shape
    grouped = weights.to(values.dtype).view(batch, values.shape[1], -1, tokens)
    return (grouped @ values).view(batch, heads, queries, -1)


def by_kv_head(weights: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, ...) summed over the query heads that share a KV head."""
    batch, _, *rest = weights.shape
    return weights.reshape(batch, kv_heads, -1, *rest).sum(2)
