"""Queries of the prompt whose attention says which tokens matter."""

import torch
from torch import Tensor

from kvsim.validate.impl.base import Implementation, query_ranges
from kvsim.validate.model.attention import Pass
from kvsim.validate.tally import Marks


class Probes:
    """Some queries of every prompt, collected chunk by chunk, layer after layer.

    Parameters
    ----------
    positions : (batch, probes), below 0 for none.
    """

    def __init__(self, impl: Implementation, positions: Tensor) -> None:
        m, where = impl.model, impl.decoder
        self.positions = positions.to(where.device)
        shape = (len(positions), m.heads, positions.shape[1], m.head_dim)
        self._q = torch.zeros(shape, dtype=where.dtype, device=where.device)

    def take(self, queries: Tensor, step: Pass) -> None:
        """Keep the probes among a chunk's queries (batch, heads, new, head dim)."""
        place = self.positions - step.starts[0]
        inside = ((place >= 0) & (place < step.new))[:, None, :, None]
        index = place.clamp(0, step.new - 1)[:, None, :, None].expand_as(self._q)
        self._q = torch.where(inside, queries.gather(2, index), self._q)

    def votes(self, marks: Marks, keys: Tensor) -> Tensor:
        """Attention that a prompt's tokens (batch, KV heads, tokens, head dim) get from the probes.

        Scores leave the chip before and after the softmax. They are summed over the probes, nothing
        for one that is none, and averaged over the heads of a KV head: (batch, KV heads, tokens).
        """
        batch, kv_heads, tokens, head_dim = keys.shape
        heads, probes = self._q.shape[1:3]
        every = self.seen(tokens)[:, None, None]
        votes = torch.zeros((batch, kv_heads, tokens), device=keys.device)
        for some in query_ranges(probes, batch * heads * tokens, keys.device):
            q = self._q[:, :, some].reshape(batch, kv_heads, -1, head_dim)
            logits = (q @ keys.mT / head_dim**0.5).view(
                batch, kv_heads, heads // kv_heads, -1, tokens
            )
            seen = every[:, :, :, some]
            shares = logits.float().masked_fill(~seen, -1e30).softmax(-1).to(keys.dtype) * seen
            votes += shares.float().sum(3).mean(2)
            marks.reads(logits, shares)
            marks.writes(logits, shares)
        marks.reads(self._q, keys)
        return votes

    def seen(self, tokens: int) -> Tensor:
        """Which tokens a probe sees, (batch, probes, tokens)."""
        return torch.arange(tokens, device=self.positions.device) <= self.positions[..., None]
