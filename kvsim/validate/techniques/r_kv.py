"""R-KV: whenever a buffer is full, keeps the important and non-redundant tokens."""

from collections.abc import Mapping
from statistics import fmean
from types import MappingProxyType

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.techniques.papers.r_kv import RKv as Settings
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.eviction import EvictingCache
from kvsim.validate.parts.scores import KeptQueries, query_ranges, scores
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
        self.last = KeptQueries.of_last(self._on_device, min(self.window, self.prompt))
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

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend in full, and record the prompts' last queries for a cut of the prompts."""
        if self.prompt > self.kept:
            self.last.observe(queries, step)
        return super().attend_prompt(queries, keys, values, step)

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Store the tokens of each prompt that the first cut leaves."""
        if self.prompt <= self.kept:
            super().store_prompt(keys, values)
            return
        asking, ends = self.last.positions, self._on_device
        index = self._choose(self.last.take(), asking, keys, ends)
        first = torch.arange(self.kept, device=keys.device)
        self.keep(keys, values, torch.where((ends > self.kept)[:, None, None], index, first))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Store the new token, attend, and evict tokens when the cache is full.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, new, dim).
        """
        held = self.stored_tokens(list(step.starts))
        slots = torch.tensor(held, device=queries.device)[:, None]
        alike = held[0] if min(held) == max(held) else None
        span = SlotRange(slots, tuple(n + 1 for n in held), 1, alike)
        out = self.attend_behind(queries, keys, values, step, span)
        sequences = torch.arange(self.batch, device=queries.device)
        turn = step.positions[:, 0] % self.window
        self.latest[sequences, :, turn] = queries[:, :, 0]
        if self.kept + self.buffer in span.ends:
            age = (turn[:, None] - torch.arange(self.window, device=turn.device)) % self.window
            self._cut(slots - age, slots[:, 0] + 1)
        return out

    def _cut(self, asking: Tensor, ends: Tensor) -> None:
        """Move the best rows of full sequences to the front; those of others stay."""
        columns = (self.rows.k, self.rows.v)
        keys = columns[0].widened(columns[0].parts)[:, :, : int(ends.max())]
        index = self._choose(self.latest, asking, keys, ends)
        first = torch.arange(self.kept, device=keys.device).expand_as(index)
        full = (ends == self.kept + self.buffer)[:, None, None]
        with self.counter.op("compact") as record:
            for column in columns:
                column.move(record, torch.where(full, index, first), first)

    def stored_tokens(self, tokens: list[int]) -> list[int]:
        """Return the number of tokens of each sequence that remain after evictions. [tokens]"""
        made = [
            min(prompt, self.kept) + n - prompt
            for n, prompt in zip(tokens, self.lengths, strict=True)
        ]
        return [n if n < self.kept else self.kept + (n - self.kept) % self.buffer for n in made]

    def op_shares(self, cached: list[int]) -> Mapping[str, float]:
        """Return the shares of a cut, which waits for a full buffer, and of the tokens read."""
        ends = [n + 1 for n in self.stored_tokens(cached)]
        cut = self.buffer * fmean(n == self.kept + self.buffer for n in ends)
        spread = fmean(min(n + 1, self.kept + (self.buffer + 1) / 2) for n in cached)
        return {"redundancy": cut, "select": cut, "compact": cut, "attn": fmean(ends) / spread}

    def buffers(self) -> Resident:
        """Return the latest queries, by whose attention the next eviction ranks tokens."""
        return {"gpu": {"latest queries": [self.latest]}}

    def _choose(self, queries: Tensor, asking: Tensor, keys: Tensor, ends: Tensor) -> Tensor:
        """Tokens to keep, (batch, KV heads, kept), of the first ``ends`` keys, in their order.

        ``asking`` (batch, window) are the queries' own places among the keys.
        """
        tokens = torch.arange(keys.shape[2], device=keys.device)
        there = tokens < ends[:, None]
        with self.counter.op("redundancy") as record:
            seen = (tokens <= asking[..., None])[:, None]
            weights = scores(queries, keys, seen).to(keys.dtype)
            compared = keys if self.redundancy == "each" else keys[:1]
            record.reads(queries, keys, compared, weights, weights).writes(weights, weights)
            mean = weights.float().nan_to_num().mean(2)
            mean = F.max_pool1d(mean, POOL, 1, POOL // 2)
            important = mean.view(len(mean), keys.shape[1], -1, mean.shape[2]).amax(2)
            alike = torch.zeros_like(important[: len(compared)])
            unit = F.normalize(compared.float(), dim=-1).to(keys.dtype)
            directions = unit * there[: len(compared), None, :, None]
            per_row = compared.shape[0] * keys.shape[1] * keys.shape[2]
            for some in query_ranges(keys.shape[2], per_row, keys.device):
                cosines = directions[:, :, some] @ directions.mT
                cosines.masked_fill_(tokens[some, None] == tokens, 0.0)
                latest = ((cosines > ALIKE) * tokens).amax(-1, keepdim=True)
                alike += cosines.scatter(-1, latest, 0.0).sum(2, dtype=torch.float32)
                record.reads(cosines).writes(cosines)
            mean = (alike / ends[:, None, None]).masked_fill(~there[:, None], -torch.inf)
            joint = IMPORTANCE * important - (1 - IMPORTANCE) * mean.softmax(-1)
        with self.counter.op("select") as record:
            own = there & (tokens >= ends[:, None] - self.window)
            scored = joint.masked_fill(own[:, None], torch.inf).to(keys.dtype)
            ranked = scored.masked_fill(~there[:, None], -torch.inf)
            record.reads(scored).writes(scored)
            best: Tensor = ranked.topk(self.kept, dim=-1).indices.sort(-1).values
        return best
