"""R-KV: whenever a buffer is full, keeps the important and non-redundant tokens."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.techniques.papers.r_kv import RKv as Settings
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.eviction import EvictingCache
from kvsim.validate.parts.scores import query_ranges, scores
from kvsim.validate.parts.selection import LayerContext
from kvsim.validate.parts.store import Resident, SlotRange

SMALL_SETTINGS = ("kept={least},buffer=5,window=3",)
IMPORTANCE = 0.1  # weight of attention beside redundancy
ALIKE = 0.5  # cosine beyond which two keys say the same
POOL = 7  # neighbouring tokens of which the greatest weight counts


BETWEEN_CUTS = "a round reads what its buffer holds; the prediction reads the mean of a full turn"


class RKv(EvictingCache):
    """Cache that scores tokens by their attention minus the similarity of their keys to others.

    References
    ----------
    .. [1] Z. Cai et al., "R-KV", NeurIPS 2025, section 3, equations 2 to 6.
    """

    differences = MappingProxyType({"attn": BETWEEN_CUTS})

    def __init__(self, place: LayerContext) -> None:
        settings = place.settings(Settings)
        self.kept, self.buffer = int(settings.kept), settings.buffer
        self.window, self.redundancy = settings.window, settings.redundancy
        super().__init__(place)
        self.refuse_windows()
        self.refuse_drafts()
        self.watch(self.window)
        shape = (self.batch, self.model.heads, self.window, self.model.head_dim)
        self.latest = torch.zeros(shape, dtype=self.dtype, device=self.device)

    @property
    def budget(self) -> int:
        """Most tokens of a prompt that stay in the cache. [tokens]"""
        return self.kept

    @property
    def slots(self) -> int:
        """Slots per sequence: kept tokens, and those added until the next eviction. [tokens]"""
        return min(self.kept + self.buffer, self.capacity)

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Store the tokens of each prompt that the first cut leaves."""
        if self.last is None:
            super().store_prompt(keys, values)
        else:
            self.keep(keys, values, self._choose(self.last.take(), self.last.positions, keys))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Store the new token, attend, and evict tokens when the cache is full."""
        span = SlotRange.after_cached(step, step.starts[0] - self._held(step.starts[0]))
        out = self.attend_behind(queries, keys, values, step, span)
        turn = step.starts[0] % self.window
        self.latest[:, :, turn] = queries[:, :, 0]
        if span.longest == self.kept + self.buffer:
            age = (turn - torch.arange(self.window, device=queries.device)) % self.window
            self._cut(span.longest - 1 - age)
        return out

    def _cut(self, asking: Tensor) -> None:
        """Move the best rows of a full cache to the front."""
        columns = (self.rows.k, self.rows.v)
        index = self._choose(self.latest, asking, columns[0].widened(columns[0].parts))
        first = torch.arange(self.kept, device=index.device).expand_as(index)
        with self.counter.op("compact") as record:
            for column in columns:
                column.move(record, index, first)

    def stored_tokens(self, tokens: list[int]) -> list[int]:
        """Return the number of tokens of each sequence that remain after evictions. [tokens]"""
        return [self._held(n) for n in tokens]

    def _held(self, tokens: int) -> int:
        """Return how many of a sequence's tokens remain after evictions. [tokens]"""
        made = min(self.prompt, self.kept) + tokens - self.prompt
        return made if made < self.kept else self.kept + (made - self.kept) % self.buffer

    def op_shares(self, cached: list[int]) -> Mapping[str, float]:
        """Return the shares of a cut, which waits for a full buffer, and of the tokens read."""
        end = self._held(cached[0]) + 1
        cut = float(self.buffer * (end == self.kept + self.buffer))
        spread = min(cached[0] + 1, self.kept + (self.buffer + 1) / 2)
        return {"redundancy": cut, "select": cut, "compact": cut, "attn": end / spread}

    def buffers(self) -> Resident:
        """Return the latest queries, by whose attention the next eviction ranks tokens."""
        return {"gpu": {"latest queries": [self.latest]}}

    def _choose(self, queries: Tensor, asking: Tensor, keys: Tensor) -> Tensor:
        """Tokens to keep, (batch, KV heads, kept), in their order.

        ``asking`` (window,) are the queries' own places among the keys.
        """
        tokens = torch.arange(keys.shape[2], device=keys.device)
        with self.counter.op("redundancy") as record:
            weights = scores(queries, keys, tokens <= asking[:, None]).to(keys.dtype)
            compared = keys if self.redundancy == "each" else keys[:1]
            record.reads(queries, keys, compared, weights, weights).writes(weights, weights)
            mean = weights.float().nan_to_num().mean(2)
            mean = F.max_pool1d(mean, POOL, 1, POOL // 2)
            important = mean.view(len(mean), keys.shape[1], -1, mean.shape[2]).amax(2)
            alike = torch.zeros_like(important[: len(compared)])
            directions = F.normalize(compared.float(), dim=-1).to(keys.dtype)
            per_row = compared.shape[0] * keys.shape[1] * keys.shape[2]
            for some in query_ranges(keys.shape[2], per_row, keys.device):
                cosines = directions[:, :, some] @ directions.mT
                cosines.masked_fill_(tokens[some, None] == tokens, 0.0)
                latest = ((cosines > ALIKE) * tokens).amax(-1, keepdim=True)
                alike += cosines.scatter(-1, latest, 0.0).sum(2, dtype=torch.float32)
                record.reads(cosines).writes(cosines)
            redundant = (alike / len(tokens)).softmax(-1)
            joint = IMPORTANCE * important - (1 - IMPORTANCE) * redundant
            joint[..., -self.window :] = torch.inf
        with self.counter.op("select") as record:
            scored = joint.to(keys.dtype)
            record.reads(scored).writes(scored)
            best: Tensor = scored.topk(self.kept, dim=-1).indices.sort(-1).values
        return best
