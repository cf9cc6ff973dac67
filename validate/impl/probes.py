"""Queries of the prompt whose attention says which tokens matter."""

import torch
from torch import Tensor

from kvsim.validate.attention import Step
from kvsim.validate.impl.base import Implementation
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

    def take(self, q: Tensor, step: Step) -> None:
        """Keep the probes among a chunk's queries (batch, heads, new, head dim)."""
        place = self.positions - step.starts[0]
        inside = ((place >= 0) & (place < step.new))[:, None, :, None]
        index = place.clamp(0, step.new - 1)[:, None, :, None].expand_as(self._q)
        self._q = torch.where(inside, q.gather(2, index), self._q)

    def attention(self, marks: Marks, k: Tensor) -> Tensor:
        """Attention of the probes over a prompt (batch, KV heads, tokens, head dim).

        Scores leave the chip before and after the softmax; (batch, KV heads, heads per KV head,
        probes, tokens), nothing for a probe that is none.
        """
        batch, kv_heads, tokens, head_dim = k.shape
        probes = self.positions.shape[1]
        per_kv = self._q.shape[1] // kv_heads
        q = self._q.view(batch, kv_heads, per_kv * probes, head_dim)
        logits = (q @ k.mT / head_dim**0.5).view(batch, kv_heads, per_kv, probes, tokens)
        seen = self.seen(tokens)[:, None, None]
        shares: Tensor = logits.float().masked_fill(~seen, -1e30).softmax(-1).to(k.dtype) * seen
        marks.reads(self._q, k, logits, shares)
        marks.writes(logits, shares)
        return shares

    def seen(self, tokens: int) -> Tensor:
        """Which tokens a probe sees, (batch, probes, tokens)."""
        return torch.arange(tokens, device=self.positions.device) <= self.positions[..., None]
