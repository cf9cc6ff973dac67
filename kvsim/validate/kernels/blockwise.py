"""Blockwise computation within a CPU's cache: ranges of rows, attention's two products."""

from collections.abc import Iterable, Iterator

from torch import Tensor

BLOCK_NUMBERS = 1 << 17  # half a MiB in fp32


def ranges(rows: int, width: int, most: int | None = None, whole: int = 1) -> Iterator[slice]:
    """Divide rows of ``width`` elements into ranges of limited size, of at least one row each.

    Parameters
    ----------
    most : largest number of elements of a range; by default as many as fit in a core's cache.
    whole : ranges except the last are multiples of it, rounded up. [rows]
    """
    each = max(1, (BLOCK_NUMBERS if most is None else most) // max(width, 1))
    each = -(-each // whole) * whole
    for start in range(0, rows, each):
        yield slice(start, min(start + each, rows))


Blocks = Iterable[tuple[slice, Tensor]]
"""Tokens, and their keys or values (batch, KV heads, tokens, dim) in the queries' number format."""


def products(queries: Tensor, keys: Blocks, tokens: int) -> Tensor:
    """Multiply queries with keys, block by block. (batch, KV heads, queries, tokens)

    Parameters
    ----------
    keys
        Blocks of keys and the tokens that they belong to.
    tokens
        Tokens of all blocks. [tokens]
    """
    out: Tensor = queries.new_empty(*queries.shape[:3], tokens)
    for part, some in keys:
        out[..., part] = queries @ some.mT
    return out


def weighted(weights: Tensor, values: Blocks) -> Tensor:
    """Sum values by weights, block by block. (batch, KV heads, queries, dim)

    Parameters
    ----------
    weights
        Weights of the tokens, (batch, KV heads, queries, tokens).
    values
        Blocks of values and the tokens that they belong to; at least one.
    """
    sums = (weights[..., part] @ some for part, some in values)
    out = next(sums)
    for more in sums:
        out += more
    return out
