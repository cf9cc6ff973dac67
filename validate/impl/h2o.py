"""Heavy hitters by accumulated attention scores, and recent tokens."""

from typing import ClassVar

import torch
from torch import Tensor

from kvsim.techniques.base import Technique
from kvsim.validate.impl.base import Resident, SmallRun, put, query_ranges
from kvsim.validate.impl.eviction import Evicting, by_kv_head, scores, weigh
from kvsim.validate.model.attention import Pass, visible
from kvsim.validate.model.decoder import Decoder


class H2o(Evicting):
    """Slots of heavy hitters and a ring of recent tokens, chosen by every KV head for itself.

    When a token comes in, the one that leaves the ring takes the place of the heavy hitter with
    the lowest sum, if its own is higher. Sums are kept per query head; those of a group are added.
    """

    differences: ClassVar[dict[str, str]] = {
        "graduate": "the token that leaves the ring moves to a slot of the heavy hitters"
    }

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """A quarter of the prompt by score, a quarter of the latest."""
        part = max(1, run.prompt // 4)
        return [f"heavy={part},recent={part}"]

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        settings = technique.settings
        heavy, recent = int(settings["heavy"]), int(settings["recent"])
        super().__init__(technique, decoder, lengths, generate, heavy, recent)
        self.refuse_windows()
        self.ranked = self.capacity > self.budget  # otherwise nothing is ever evicted
        self.sums = [self._sums(self.slots) for _ in self.shapes if self.ranked]
        self._prompt_sums: Tensor | None = None
        self._lengths = torch.tensor(lengths, device=decoder.device)

    def attend_slots(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """With scores, where some token will be evicted."""
        if not self.ranked:
            return super().attend_slots(layer, queries, keys, values, step)
        with self.tally.op("attn") as marks:
            put(self.k[layer], keys, step)
            put(self.v[layer], values, step)
            marks.writes(keys, values)
        cached_keys, cached_values = (
            c[:, :, : step.length] for c in (self.k[layer], self.v[layer])
        )
        return self._attend(
            queries, cached_keys, cached_values, self.sums[layer][:, :, : step.length], step
        )

    def attend_prompt(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Scores of all queries are added up, token by token."""
        if not step.starts[0]:
            self._prompt_sums = self._sums(self.prompt)
        assert self._prompt_sums is not None
        return self._attend(queries, keys, values, self._prompt_sums[:, :, : step.length], step)

    def filled(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """The heaviest of a sequence's older tokens, and its latest."""
        assert self._prompt_sums is not None
        lengths = self._lengths
        tokens = torch.arange(self.prompt, device=keys.device)
        with self.tally.op("select") as marks:
            sums = by_kv_head(self._prompt_sums, keys.shape[1])
            old = tokens < (lengths - self.recent)[:, None]
            ranked = sums.masked_fill(~old[:, None], -torch.inf)
            heavy = ranked.topk(self.sink, dim=-1).indices
            marks.reads(sums)
        held = self.ring(lengths)[:, None].clamp_min(0).repeat(1, keys.shape[1], 1)
        crowded = (lengths > self.budget)[:, None, None]
        held[:, :, : self.sink] = torch.where(crowded, heavy, held[:, :, : self.sink])
        self.keep(layer, keys, values, held)
        per_head = held.repeat_interleave(self.model.queries_per_kv, dim=1)
        self.sums[layer].copy_(self._prompt_sums.gather(2, per_head))

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Evict where the cache is full, append, attend, add up the scores."""
        if step.length <= self.budget:
            return self.attend_slots(layer, queries, keys, values, step)
        slots = self.slot(step.positions[:, 0])
        full = step.positions[:, 0] >= self.budget
        if self.sink:
            self._graduate(layer, slots, full)
        sequences = torch.arange(self.batch, device=slots.device)
        self.sums[layer][sequences, :, slots] = 0.0
        with self.tally.op("attn") as marks:
            self.append(self.k[layer], keys, step)
            self.append(self.v[layer], values, step)
            marks.writes(keys, values)
        return self._attend(queries, self.k[layer], self.v[layer], self.sums[layer], step)

    def resident(self) -> Resident:
        """What is kept, and its sums."""
        return {"gpu": {"kv": [*self.k, *self.v], "scores": self.sums}}

    def _sums(self, tokens: int) -> Tensor:
        """Room for accumulated scores, (batch, heads, tokens)."""
        shape = (self.batch, self.model.heads, tokens)
        return torch.zeros(shape, device=self.decoder.device)

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, sums: Tensor, step: Pass
    ) -> Tensor:
        """Attention whose scores leave the kernel and are added to the sums, in place.

        They take no more memory than the MLP's activations, which are not there yet.
        """
        seen = visible(step, torch.arange(keys.shape[2], device=keys.device))
        assert isinstance(seen, Tensor)
        given = step.positions < self._lengths[:, None]
        counts = given if step.kind == "prefill" else torch.ones_like(given)
        per_query = self.batch * self.model.heads * keys.shape[2]
        room = self.batch * step.new * self.model.ffn // 4
        outs = [
            self._attend_some(
                queries[:, :, some], keys, values, sums, seen[:, :, some], counts[:, some]
            )
            for some in query_ranges(step.new, per_query, queries.device, room)
        ]
        out = torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]
        with self.tally.op("attn") as marks:
            marks.reads(queries, keys, values)
            marks.writes(out)
        with self.tally.op("scores") as marks:
            marks.reads(sums)
            marks.writes(sums)
        return out

    def _attend_some(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        sums: Tensor,
        seen: Tensor,
        counts: Tensor,
    ) -> Tensor:
        """Attention of some queries; those that ``counts`` (batch, queries) are added up."""
        with self.tally.op("attn") as marks:
            weights = scores(queries, keys, seen).to(queries.dtype)
            out = weigh(weights, values)
            marks.visible(queries.shape[2], keys.shape[2], seen)
        with self.tally.op("scores") as marks:
            weights *= counts[:, None, :, None]
            sums += weights.sum(2, dtype=torch.float32)
            marks.reads(weights)
            marks.writes(weights)
        return out

    def _graduate(self, layer: int, slots: Tensor, full: Tensor) -> None:
        """What leaves the ring takes the slot of the lowest heavy hitter, or is dropped.

        ``slots`` (batch,) are where the ring is written next; only ``full`` sequences evict.
        """
        sums, kv_heads = self.sums[layer], self.model.kv_heads
        with self.tally.op("lowest") as marks:
            leaving = slots[:, None, None].expand(-1, self.model.heads, 1)
            own = sums.gather(2, leaving)
            lowest = by_kv_head(sums[:, :, : self.sink], kv_heads).min(-1)
            better = lowest.values < by_kv_head(own, kv_heads)[..., 0]
            place = torch.where(better & full[:, None], lowest.indices, slots[:, None])
            marks.reads(sums[:, :, : self.sink], own)
        with self.tally.op("graduate") as marks:
            target = place[:, :, None]
            wide = (-1, -1, -1, self.model.head_dim)
            for cache in (self.k[layer], self.v[layer]):
                rows = slots[:, None, None, None].expand(-1, kv_heads, 1, self.model.head_dim)
                moved = cache.gather(2, rows)
                cache.scatter_(2, target[..., None].expand(*wide), moved)
                marks.reads(moved)
                marks.writes(moved)
            sums.scatter_(2, target.repeat_interleave(self.model.queries_per_kv, 1), own)
