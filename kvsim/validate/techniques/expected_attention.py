"""Expected Attention: tokens are scored by the expected attention of future queries."""

import torch
from torch import Tensor

from kvsim.validate.model.architecture import rotate
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.eviction import CutCache
from kvsim.validate.parts.scores import by_kv_head
from kvsim.validate.parts.selection import LayerContext

SMALL_SETTINGS = ("budget={half}",)
FUTURE = 512  # positions behind the prompt that queries are expected at
SINKS = 4  # first tokens, which do not count among the queries and always stay
LEAST = 0.02  # weight that every token has, so that its value counts


class ExpectedAttention(CutCache):
    """Cache that scores tokens by the queries' mean and covariance, rotated to future positions.

    References
    ----------
    .. [1] A. Devoto et al., "Expected Attention", 2025, section 3; as in kvpress.
    """

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        heads, dim = self.model.heads, self.model.head_dim
        self._sum = torch.zeros(self.batch, heads, dim, device=self.device)
        self._square = torch.zeros(self.batch, heads, dim, dim, device=self.device)

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend in full, and add up the unrotated queries and their products for ``score``.

        The sums are taken only if the prompt is longer than the budget, and leave out the first
        ``SINKS`` tokens.
        """
        if self.prompt > self.budget:
            with self.counter.op("query_spread") as record:
                turn = self.run.decoder.turns(step.positions)
                plain = queries if turn is None else rotate(queries, turn[0], -turn[1])
                plain = plain.float() * (step.positions >= SINKS)[:, None, :, None]
                self._sum[step.rows] += plain.sum(2)
                self._square[step.rows] += plain.mT @ plain
                record.reads(queries).writes(queries)
        return super().attend_prompt(queries, keys, values, step)

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        """Score each token by its expected attention weight times the norm of its value.

        The first ``SINKS`` tokens are always kept.
        """
        dim, many = keys.shape[-1], self.prompt - SINKS
        mean = self._sum / many
        spread = self._square / many - mean[..., None] * mean[..., None, :]
        turn = self._turning()
        mean, spread = mean @ turn, turn.mT @ spread @ turn
        with self.counter.op("expect") as record:
            wide = keys.float().repeat_interleave(self.model.queries_per_kv, 1)
            logits = (wide @ mean[..., None])[..., 0] / dim**0.5
            logits = logits + ((wide @ spread) * wide).sum(-1) / dim / 2
            weights = logits.softmax(-1)
            shared = by_kv_head(weights, keys.shape[1])
            shared = shared / self.model.queries_per_kv
            scored = (shared + LEAST) * values.float().norm(dim=-1)
            record.reads(keys, values, weights.to(keys.dtype)).writes(weights.to(keys.dtype))
        first = torch.arange(SINKS, device=keys.device)
        found: Tensor = scored.index_fill(-1, first, torch.inf)
        return found

    def _turning(self) -> Tensor:
        """Return the mean rotation to future positions, transposed.

        The identity with learned positions.
        """
        last = min(self.prompt + FUTURE, max(self.capacity, self.prompt + 1))
        ahead = torch.arange(self.prompt, last, device=self.device)[None]
        turn, eye = (
            self.run.decoder.turns(ahead),
            torch.eye(self.model.head_dim, device=self.device),
        )
        if turn is None:
            return eye
        cos, sin = (table.float().mean(2, keepdim=True) for table in turn)
        return rotate(eye[None, None], cos, sin)[0, 0]
