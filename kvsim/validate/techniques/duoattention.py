"""DuoAttention: some KV heads keep every token, the others sinks and a window."""

from dataclasses import replace

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.duoattention import Duoattention as Settings
from kvsim.validate.model.attention import Pass, Seen, attend, visible
from kvsim.validate.parts.eviction import RingCache
from kvsim.validate.parts.selection import LayerContext
from kvsim.validate.parts.store import Resident, SlotRange, join_resident

SMALL_SETTINGS = ("retrieval={one_head},sink=4,recent={half}",)
Three = tuple[Tensor, Tensor, Tensor]


class Duoattention(RingCache):
    """Cache whose first KV heads keep all tokens, and whose others keep sinks and a window.

    References
    ----------
    .. [1] G. Xiao et al., "DuoAttention", ICLR 2025, section 2.4: heads are put in this order.
    """

    divided = True

    def __init__(self, place: LayerContext) -> None:
        settings, heads = place.settings(Settings), place.run.model.kv_heads
        kept = float(settings.retrieval) * heads
        self.many = round(kept)
        if abs(kept - self.many) > 1e-9 or not 0 < self.many < heads:
            raise InputError(
                f"duoattention: {kept:g} of {heads} heads; choose a multiple of 1/{heads} below 1"
            )
        self.sink, self.recent = int(settings.sink), int(settings.recent)
        super().__init__(replace(place, heads=heads - self.many))
        self.refuse_windows()
        self.differences = self.kv.split_differences
        self.whole = self.run.make_store(replace(place, heads=self.many), self.capacity)

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend in full with retrieval heads, and to sinks and window with streaming heads."""
        outs, seen = [], (visible(step, step.length), self._visible_nearby(step))
        for numbers, where in zip(self._kinds(queries, keys, values), seen, strict=True):
            with self.counter.op("attn") as record:
                outs.append(attend(record, *numbers, where))
        return torch.cat(outs, 1)

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Store all tokens for retrieval heads, and sinks and recent tokens for streaming heads."""
        every = torch.arange(self.prompt, device=keys.device)
        far, near = self._kinds(keys, keys, values)
        for kv, (_, k, v), index in ((self.whole, far, every), (self.kv, near, self.prompt_ring())):
            if self.prompt <= self.budget:
                kv.fill(k, v)
            else:
                self.keep(k, v, index.expand(*k.shape[:2], -1), kv)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Store new tokens and attend; in streaming heads they replace the oldest recent ones."""
        return self.attend_behind(queries, keys, values, step, self.slot_range(step))

    def attend_behind(
        self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass, span: SlotRange
    ) -> Tensor:
        """Store new tokens for both kinds of heads, and attend with each over its own cache."""
        every = SlotRange.after_cached(step)
        if step.fixed:
            every = replace(every, room=self.whole.slots)
        outs, places = [], ((self.whole, every), (self.kv, span))
        kinds = self._kinds(queries, keys, values)
        for (asking, k, v), (kv, where) in zip(kinds, places, strict=True):
            kv.append(k, v, where)
            outs.append(kv.attend(asking, where, visible(step, where.longest)))
        return torch.cat(outs, 1)

    def resident(self) -> Resident:
        """Return the tensors of both kinds of heads."""
        return join_resident(super().resident(), {"gpu": self.whole.tensors()})

    def _visible_nearby(self, step: Pass) -> Seen:
        """What prompt queries see in streaming heads: the first tokens and their latest ones."""
        if step.length <= self.budget:
            return visible(step, step.length)
        keys = torch.arange(step.length, device=step.positions.device)
        asking = step.positions[:, None, :, None]
        return (keys <= asking) & ((keys < self.sink) | (keys > asking - self.recent))

    def _kinds(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Three, Three]:
        """Split queries, keys and values into those of retrieval and of streaming heads."""
        m, n = self.many, self.many * queries.shape[1] // keys.shape[1]
        near = queries[:, n:], keys[:, m:], values[:, m:]
        return (queries[:, :n], keys[:, :m], values[:, :m]), near
