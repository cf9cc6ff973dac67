"""Explicit attention weights, for techniques that rank tokens by them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsim.validate.counter import NullCounter, OpRecord
from kvsim.validate.kernels.blockwise import BLOCK_NUMBERS, ranges
from kvsim.validate.kernels.stores import PartialAttention
from kvsim.validate.model.attention import Pass, visible

SCORES_ON_GPU = 1 << 24  # numbers


class KeptQueries:
    """Chosen queries of every prompt, collected chunk by chunk in each layer.

    Parameters
    ----------
    positions
        Positions of the queries, which are the same in all prompts, (queries,).
    batch
        Number of prompts.
    """

    def __init__(self, positions: Tensor, batch: int) -> None:
        self.positions, self._batch = positions, batch
        self._held: Tensor | None = None

    @classmethod
    def of_last(
        cls, batch: int, prompt: int, many: int, device: torch.device | None
    ) -> "KeptQueries":
        """Create a collection of the last queries of prompts.

        Parameters
        ----------
        batch
            Number of prompts.
        prompt
            Tokens of each. [tokens]
        many
            Queries to keep of each; all of them if they are fewer.
        """
        return cls(torch.arange(max(0, prompt - many), prompt, device=device), batch)

    def observe(self, queries: Tensor, step: Pass) -> None:
        """Store the queries of a chunk whose positions are chosen."""
        place = self.positions - step.starts[0]
        here = ((place >= 0) & (place < step.new))[:, None]
        found = queries[:, :, place.clamp(0, step.new - 1)]
        if self._held is None:
            self._held = found.new_zeros(self._batch, *found.shape[1:])
        self._held[step.rows] = torch.where(here, found, self._held[step.rows])

    def visible(self, tokens: int) -> Tensor:
        """Return which of the first tokens each query sees, (queries, tokens)."""
        return torch.arange(tokens, device=self.positions.device) <= self.positions[:, None]

    def weights(self, record: OpRecord, keys: Tensor) -> Tensor:
        """Compute the attention weights of the kept queries, and release the queries.

        Parameters
        ----------
        keys
            (batch, KV heads, tokens, dim).

        Returns
        -------
        Tensor
            Weights, (batch, heads, queries, tokens).
        """
        queries = self.take()
        found = scores(queries, keys, self.visible(keys.shape[2])).to(keys.dtype)
        record.reads(queries, keys, found, found)  # softmax, then the sum over queries
        record.writes(found, found)
        return found

    def take(self) -> Tensor:
        """Return the kept queries, (batch, heads, queries, dim), and release them."""
        assert self._held is not None
        queries, self._held = self._held, None
        return queries


def query_ranges(
    queries: int, per_query: int, device: torch.device, most: int | None = None
) -> Iterator[slice]:
    """Split queries into ranges whose attention scores fit in memory together.

    Parameters
    ----------
    per_query
        Number of scores per query; ranges are longer on a GPU.
    most
        Largest number of scores of a range.
    """
    limit = SCORES_ON_GPU if device.type == "cuda" else BLOCK_NUMBERS
    return ranges(queries, per_query, limit if most is None else min(limit, most))


def scores(queries: Tensor, keys: Tensor, seen: Tensor | None = None) -> Tensor:
    """Compute attention weights, the softmax over keys.

    Parameters
    ----------
    queries
        (batch, heads, queries, dim).
    keys
        (batch, KV heads, tokens, dim).
    seen
        True where a query sees a key, of a shape that broadcasts to (batch, heads, queries,
        tokens); None if all see all.

    Returns
    -------
    Tensor
        Weights in fp32, (batch, heads, queries, tokens).
    """
    batch, heads, new, dim = queries.shape
    grouped = queries.reshape(batch, keys.shape[1], -1, dim)  # heads of a group share their keys
    logits = (grouped * dim**-0.5) @ keys.transpose(2, 3)
    logits = logits.view(batch, heads, new, -1).float()
    if seen is not None:
        logits.masked_fill_(~seen, -torch.inf)
    return torch.softmax(logits, dim=-1)


def weigh(weights: Tensor, values: Tensor) -> Tensor:
    """Sum values by attention weights.

    Parameters
    ----------
    weights
        Weights, (batch, heads, queries, tokens).

    Returns
    -------
    Tensor
        Sums in the values' format, (batch, heads, queries, dim).
    """
    batch, heads, queries, tokens = weights.shape
    grouped = weights.to(values.dtype).view(batch, values.shape[1], -1, tokens)
    return (grouped @ values).view(batch, heads, queries, -1)


def attend_part(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, dim: int | None = None
) -> PartialAttention:
    """Attend to a part of the tokens, to be merged with others (``kernels.attention.merge``).

    Parameters
    ----------
    queries
        (batch, heads, queries, width).
    keys, values
        (batch, KV heads, tokens, width) and (batch, KV heads, tokens, dim).
    seen
        True where a query sees a token, (batch or 1, heads or 1, queries, tokens).
    dim
        Dimension of the whole head, by which scores are scaled if only some of its channels are
        given.
    """
    batch, heads, new, width = queries.shape
    grouped = queries.reshape(batch, keys.shape[1], -1, width) * (dim or width) ** -0.5
    logits = (grouped @ keys.mT).view(batch, heads, new, -1).float()
    if seen is not None:
        logits.masked_fill_(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.clamp(min=-1e30)[..., None]).exp().to(values.dtype)
    out = weights.view(batch, keys.shape[1], -1, weights.shape[-1]) @ values
    return PartialAttention(out.view(batch, heads, new, -1).float(), lse)


def by_kv_head(weights: Tensor, kv_heads: int) -> Tensor:
    """Sum attention weights over the query heads that share a KV head.

    Parameters
    ----------
    weights
        (batch, heads, ...).
    kv_heads
        Number of KV heads.

    Returns
    -------
    Tensor
        (batch, KV heads, ...).
    """
    batch, _, *rest = weights.shape
    return weights.reshape(batch, kv_heads, -1, *rest).sum(2)


def attend_and_add(
    counter: NullCounter,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sums: Tensor,
    step: Pass,
    room: int,
) -> Tensor:
    """Attend with a chunk, and add the attention weights of its queries to sums per token.

    Parameters
    ----------
    counter
        Counter of FLOPs and bytes.
    keys, values
        The prompt so far, (batch, KV heads, tokens, dim).
    sums
        Attention that each token has received, (batch, heads, tokens) in fp32; changed in place.
    room
        Largest number of scores that are computed at a time.
    """
    seen = visible(step, torch.arange(keys.shape[2], device=keys.device))
    assert isinstance(seen, Tensor)
    outs, per_query = [], queries.shape[0] * queries.shape[1] * keys.shape[2]
    for some in query_ranges(step.new, per_query, queries.device, room):
        with counter.op("attn") as record:
            weights = scores(queries[:, :, some], keys, seen[:, :, some]).to(queries.dtype)
            outs.append(weigh(weights, values))
            record.visible(weights.shape[2], keys.shape[2], seen[:, :, some])
        with counter.op("scores") as record:
            sums += weights.sum(2, dtype=torch.float32)
            record.reads(weights).writes(weights)
    out = torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]
    with counter.op("attn") as record:
        record.reads(queries, keys, values).writes(out)
    with counter.op("scores") as record:
        record.reads(sums).writes(sums)
    return out
