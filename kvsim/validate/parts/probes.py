"""Queries whose attention says which tokens matter: of the prompt, and of every window after it."""

import torch
from torch import Tensor

from kvsim.validate.counter import OpRecord
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.base import query_ranges


class Probes:
    """Some queries of every prompt, collected chunk by chunk, layer after layer.

    Parameters
    ----------
    positions : (batch, probes), below 0 for none.
    """

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self._q: Tensor | None = None

    def take(self, queries: Tensor, step: Pass) -> None:
        """Keep the probes among a chunk's queries (sequences, heads, new, head dim)."""
        if self._q is None:
            batch, probes = self.positions.shape
            self._q = queries.new_zeros(batch, queries.shape[1], probes, queries.shape[3])
        mine, place = self._q[step.rows], self.positions[step.rows] - step.starts[0]
        inside = ((place >= 0) & (place < step.new))[:, None, :, None]
        index = place.clamp(0, step.new - 1)[:, None, :, None].expand_as(mine)
        torch.where(inside, queries.gather(2, index), mine, out=mine)

    def votes(self, record: OpRecord, keys: Tensor) -> Tensor:
        """Attention that a prompt's tokens (batch, KV heads, tokens, head dim) get from the probes.

        Scores leave the chip before and after the softmax. They are summed over the probes, nothing
        for one that is none, and averaged over the heads of a KV head: (batch, KV heads, tokens).
        """
        assert self._q is not None
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
            record.reads(logits, shares)
            record.writes(logits, shares)
        record.reads(self._q, keys)
        return votes

    def seen(self, tokens: int) -> Tensor:
        """Which tokens a probe sees, (batch, probes, tokens)."""
        return torch.arange(tokens, device=self.positions.device) <= self.positions[..., None]


class Probing:
    """Which queries probe, of the prompts and of the new tokens; all layers ask the same ones.

    Parameters
    ----------
    share : of queries that probe; half of them are the latest, half are drawn.
    window : new tokens that are packed together.
    lengths : of the prompts. [tokens]
    """

    def __init__(self, share: float, window: int, lengths: list[int], device: torch.device) -> None:
        self.share, self.window = share, window
        self._random = torch.Generator().manual_seed(0)
        self.prompt = Probes(self._of_prompts(lengths).to(device))
        self.seen = torch.zeros(window, device=device)  # probes that saw each token of the window
        self._latest, self._now, self._probed = -1, False, 0  # token; whether it probes; how many

    def probes(self, token: int) -> bool:
        """Whether the new token of that number, from 0, probes.

        The last ones of a window do, but for the very last, and some others by chance; the very
        last does if no other has, or nothing would rank the window.
        """
        if token == self._latest:
            return self._now
        place, self._latest = token % self.window, token
        if not place:
            self.seen.zero_()
            self._probed = 0
        recent = round(self.share / 2 * self.window)
        lucky = float(torch.rand(1, generator=self._random)) < self.share / 2
        last = place + 1 == self.window
        self._now = not self._probed if last else place >= self.window - recent or lucky
        if self._now:
            self._probed += 1
            self.seen[: place + 1] += 1
        return self._now

    def _of_prompts(self, lengths: list[int]) -> Tensor:
        chosen = []
        for length in lengths:
            recent = min(max(round(self.share / 2 * length), self.share > 0), length)
            drawn = max(round(self.share * length) - recent, 0)
            others = torch.randperm(length - recent, generator=self._random)[:drawn]
            chosen.append(torch.cat([others, torch.arange(length - recent, length)]))
        return torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1)
