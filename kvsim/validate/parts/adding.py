"""Attention of a prompt whose scores are added up, token by token and head by head."""

import torch
from torch import Tensor

from kvsim.validate.counter import NullCounter
from kvsim.validate.model.attention import Pass, visible
from kvsim.validate.parts.base import query_ranges
from kvsim.validate.parts.weights import scores, weigh


def attend_and_add(
    counter: NullCounter,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sums: Tensor,
    step: Pass,
    counts: Tensor,
    room: int,
) -> Tensor:
    """Attention of a chunk, whose scores are added to the sums in place.

    Parameters
    ----------
    keys, values : the prompt so far, (batch, KV heads, tokens, dim).
    sums : what every token was given, (batch, heads, tokens) in fp32.
    counts : which queries are added, (batch, new).
    room : numbers that the scores of a part may have.
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
            weights *= counts[:, None, some, None]
            sums += weights.sum(2, dtype=torch.float32)
            record.reads(weights)
            record.writes(weights)
    out = torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]
    with counter.op("attn") as record:
        record.reads(queries, keys, values)
        record.writes(out)
    with counter.op("scores") as record:
        record.reads(sums)
        record.writes(sums)
    return out
