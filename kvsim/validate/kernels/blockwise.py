"""Attention's two products, block by block: what is widened for them stays in a CPU's cache."""

from collections.abc import Iterable

from torch import Tensor

Blocks = Iterable[tuple[slice, Tensor]]
"""Tokens, and their keys or values (batch, KV heads, tokens, dim) in the queries' number format."""


def products(queries: Tensor, keys: Blocks, tokens: int) -> Tensor:
    """Queries (batch, KV heads, queries, dim) times keys, (batch, KV heads, queries, tokens)."""
    out: Tensor = queries.new_empty(*queries.shape[:3], tokens)
    for part, some in keys:
        out[..., part] = queries @ some.mT
    return out


def weighted(weights: Tensor, values: Blocks) -> Tensor:
    """Values summed by weights (batch, KV heads, queries, tokens) of at least one block."""
    sums = (weights[..., part] @ some for part, some in values)
    out = next(sums)
    for more in sums:
        out += more
    return out
