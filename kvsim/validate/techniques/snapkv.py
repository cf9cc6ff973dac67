"""A prompt cut to what its last queries attend to."""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.techniques.papers.snapkv import Snapkv as Settings
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.base import SmallRun
from kvsim.validate.parts.eviction import EvictingCache
from kvsim.validate.parts.scores import by_kv_head, scores
from kvsim.validate.parts.selection import LayerContext
from kvsim.validate.parts.store import SlotRange

POOL = 5  # neighbouring tokens whose scores are averaged, so that what is kept hangs together


class Snapkv(EvictingCache):
    """The prompt's kept tokens in their order, and behind them all that is generated.

    Kept are the observing queries' own tokens and those with the highest scores, by KV head.

    References
    ----------
    .. [1] Y. Li et al., "SnapKV", NeurIPS 2024, section 4 and listing 1.
    """

    replays = True

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Half of the prompt stays."""
        return [f"budget={2 * max(1, run.prompt // 4)},window=8"]

    def __init__(self, place: LayerContext) -> None:
        settings = place.parts.selection
        assert isinstance(settings, Settings)
        self._budget, self.window = int(settings.budget), int(settings.window)
        super().__init__(place)
        self.refuse_windows()
        self.evicted = [max(0, n - self.budget) for n in self.lengths]
        self._moved = torch.tensor(self.evicted, device=self.device)[:, None]
        self._queries: Tensor | None = None  # of the prompts' last tokens

    @property
    def budget(self) -> int:
        """The budget as the settings give it."""
        return self._budget

    @property
    def slots(self) -> int:
        """What stays of the prompt, and all that follows."""
        return min(self.budget, self.context.run.prompt) + self.context.run.beyond

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """In full; the last queries are kept."""
        self.observe(queries, step)
        return super().attend_prompt(queries, keys, values, step)

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Score all tokens by the last queries, keep the best."""
        if self._queries is None:
            super().store_prompt(keys, values)
        else:
            self.cut(keys, values)

    def cut(self, keys: Tensor, values: Tensor) -> None:
        """Keep what the last queries attend to, or all where all has room."""
        if self._queries is None:
            first = torch.arange(min(self.budget, self.prompt), device=keys.device)
            self.keep(keys, values, first.expand(self.batch, keys.shape[1], -1))
            return
        lengths = self._on_device[:, None]
        tokens, asking = torch.arange(self.prompt, device=keys.device), self._asking(keys.device)
        with self.counter.op("observe") as record:
            seen = (tokens <= asking[..., None])[:, None]
            weights = scores(self._queries, keys, seen).to(keys.dtype)
            record.reads(
                self._queries, keys, weights, weights
            )  # softmax, then the sum over queries
            record.writes(weights, weights)
            total = by_kv_head(weights.float(), keys.shape[1]).sum(2)
        with self.counter.op("select") as record:
            own = tokens >= lengths - min(self.window, self.budget)
            prefix = total.masked_fill(own[:, None], 0.0)
            pooled = F.avg_pool1d(prefix, POOL, 1, POOL // 2, count_include_pad=False).to(
                keys.dtype
            )
            ranked = pooled.masked_fill(own[:, None], torch.inf)
            ranked = ranked.masked_fill((tokens >= lengths)[:, None], -torch.inf)
            index = ranked.topk(self.budget, dim=-1).indices.sort(-1).values
            record.reads(pooled)
            record.writes(pooled)
        first = torch.arange(self.budget, device=keys.device)
        index = torch.where((lengths > self.budget)[:, None], index, first)
        self._queries = None
        self.keep(keys, values, index)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Generated tokens follow what is kept."""
        return self.attend_behind(queries, keys, values, step, self.slot_range(step))

    def stored_tokens(self, tokens: list[int]) -> list[int]:
        """All but those that were cut from the prompts."""
        return [n - away for n, away in zip(tokens, self.evicted, strict=True)]

    def slot_range(self, step: Pass) -> SlotRange:
        """Behind what is kept of every prompt."""
        return SlotRange.after_cached(step, self.evicted, self._moved)

    def _asking(self, device: torch.device) -> Tensor:
        """Positions of the observing queries, (batch, window); below 0 for short prompts."""
        many = min(self.window, self.prompt)
        return self._on_device[:, None] - many + torch.arange(many, device=device)

    def observe(self, queries: Tensor, step: Pass) -> None:
        """Collect the observing queries that are in this chunk, if they choose anything."""
        if self.prompt <= self.budget:
            return
        asking = self._asking(queries.device)[step.rows]
        place = asking - step.starts[0]
        here = (place >= 0) & (place < step.new)
        rows = place.clamp(0, step.new - 1)[:, None, :, None].expand(
            -1, queries.shape[1], -1, queries.shape[3]
        )
        found = queries.gather(2, rows)
        here = here[:, None, :, None]
        if len(found) == self.batch:
            old = torch.zeros_like(found) if self._queries is None else self._queries
            self._queries = torch.where(here, found, old)
            return
        if self._queries is None:
            self._queries = found.new_zeros(self.batch, *found.shape[1:])
        mine = self._queries[step.rows]
        mine.copy_(torch.where(here, found, mine))
