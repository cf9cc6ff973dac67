"""Heavy hitters by accumulated attention scores, and recent tokens."""

from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.techniques.papers.h2o import H2o as Settings
from kvsim.validate.model.attention import Pass, visible
from kvsim.validate.parts.eviction import RingCache
from kvsim.validate.parts.rows import PerTokenCache
from kvsim.validate.parts.scores import attend_and_add, by_kv_head
from kvsim.validate.parts.selection import LayerContext
from kvsim.validate.parts.store import Resident

SMALL_SETTINGS = ("heavy={quarter},recent={quarter}",)


class H2o(RingCache):
    """Cache with slots for heavy hitters and a ring of recent tokens, chosen per KV head.

    The token that leaves the ring replaces the heavy hitter with the lowest summed attention, if
    its own sum is higher. Sums are kept per query head and added over the heads of a group.

    References
    ----------
    .. [1] Z. Zhang et al., "H2O", NeurIPS 2023, algorithm 1.
    """

    differences = MappingProxyType(
        {"graduate": "the token that leaves the ring moves to a slot of the heavy hitters"}
    )

    def __init__(self, place: LayerContext) -> None:
        settings = place.settings(Settings)
        self.sink, self.recent = int(settings.heavy), int(settings.recent)
        super().__init__(place)
        self.refuse_windows()
        self.ranked = self.capacity > self.budget  # otherwise nothing is ever evicted
        self.sums = self._sums(self.slots if self.ranked else 0)
        self._prompt_sums: Tensor | None = None

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend in full; if any token is evicted, add each one's attention weights to its sum.

        Scores of a chunk take no more memory than the MLP's activations, which are not there yet.
        """
        if not self.ranked:
            return super().attend_prompt(queries, keys, values, step)
        if self._prompt_sums is None:
            self._prompt_sums = self._sums(self.prompt)
        room = len(queries) * step.new * self.model.ffn // 4
        sums = self._prompt_sums[step.rows, :, : step.length]
        return attend_and_add(self.counter, queries, keys, values, sums, step, room)

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Store each sequence's recent tokens, and the older ones of largest summed weight."""
        sums, self._prompt_sums = self._prompt_sums, None
        if sums is None or self.prompt <= self.budget:
            super().store_prompt(keys, values)
            if sums is not None:
                self.sums[:, :, : self.prompt] = sums
            return
        held = self.prompt_ring().repeat(self.batch, keys.shape[1], 1)
        with self.counter.op("select") as record:
            by_head = by_kv_head(sums, keys.shape[1])
            old = by_head[..., : self.prompt - self.recent]
            held[:, :, : self.sink] = old.topk(self.sink, dim=-1).indices
            record.reads(by_head)
        self.keep(keys, values, held)
        per_head = held.repeat_interleave(self.model.queries_per_kv, dim=1)
        self.sums.copy_(sums.gather(2, per_head))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Evict a token if the cache is full, store the new one, attend, and update the sums."""
        if not self.ranked:
            return super().attend(queries, keys, values, step)
        span = self.slot_range(step)
        if step.length > self.budget:
            full = step.positions[:, 0] >= self.budget
            if self.sink:
                self._graduate(span.slots[:, 0], full)
            self.sums.scatter_(2, span.slots[:, :1, None].expand(-1, self.model.heads, 1), 0.0)
        assert isinstance(self.kv, PerTokenCache)
        self.kv.append(keys, values, span)
        seen = visible(step, torch.arange(span.longest, device=queries.device))
        out, weights = self.kv.attend_with_scores(queries, span, seen)
        with self.counter.op("scores") as record:
            sums = self.sums[:, :, : span.longest]
            sums += weights.sum(2, dtype=torch.float32)
            record.reads(weights, sums).writes(weights, sums)
        return out

    def buffers(self) -> Resident:
        """Return the summed attention weights of the cached tokens, (batch, heads, slots)."""
        return {"gpu": {"scores": [self.sums]}}

    def _sums(self, tokens: int) -> Tensor:
        """Allocate accumulated scores, (batch, heads, tokens)."""
        return torch.zeros(self.batch, self.model.heads, tokens, device=self.device)

    def _graduate(self, slots: Tensor, full: Tensor) -> None:
        """Move the token that leaves the ring to the slot of the lowest heavy hitter, or drop it.

        ``slots`` (batch,) are where the ring is written next; only ``full`` sequences evict.
        """
        sums, kv_heads = self.sums, self.model.kv_heads
        with self.counter.op("lowest") as record:
            leaving = slots[:, None, None].expand(-1, self.model.heads, 1)
            own = sums.gather(2, leaving)
            lowest = by_kv_head(sums[:, :, : self.sink], kv_heads).min(-1)
            better = lowest.values < by_kv_head(own, kv_heads)[..., 0]
            place = torch.where(better & full[:, None], lowest.indices, slots[:, None])
            record.reads(sums[:, :, : self.sink], own)
        with self.counter.op("graduate") as record:
            target = place[:, :, None]
            source = slots[:, None, None].expand(-1, kv_heads, 1)
            assert isinstance(self.kv, PerTokenCache)
            for column in (self.kv.k, self.kv.v):
                column.move(record, source, target)
            sums.scatter_(2, target.repeat_interleave(self.model.queries_per_kv, 1), own)
