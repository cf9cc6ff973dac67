"""What selections share that drop tokens: slots for those that stay.

The first tokens have slots of their own, the latest share a ring: token i lies in slot i while
there is room, and afterwards takes the place of the token that leaves the window.
"""

from typing import TypeVar

import torch
from torch import Tensor

from kvsim.techniques.axes.selection import PromptCut
from kvsim.validate.model.attention import Pass, Seen, visible
from kvsim.validate.parts.selection import LayerCache, LayerContext
from kvsim.validate.parts.store import KvStore, SlotRange

Positions = TypeVar("Positions", int, Tensor)


class EvictingCache(LayerCache):
    """A selection that cuts the prompt to ``budget`` tokens."""

    in_order = False

    @property
    def budget(self) -> int:
        """Tokens of the prompt that stay at most."""
        raise NotImplementedError

    @property
    def direct(self) -> bool:
        """Where nothing of any prompt is dropped."""
        return self.kv.plain and self.prompt <= self.budget

    def keep(self, keys: Tensor, values: Tensor, index: Tensor, kv: KvStore | None = None) -> None:
        """Store chosen tokens of the prompt.

        Parameters
        ----------
        index
            Tokens to store, (batch, KV heads, slots).
        kv
            Where to store them; the layer's own storage if not given.
        """
        into = kv or self.kv
        rows = index[..., None].expand(-1, -1, -1, keys.shape[-1])
        counts = [min(n, index.shape[2]) for n in self.lengths]
        with self.counter.op("compact") as record:
            kept = [prompt.gather(2, rows) for prompt in (keys, values)]
            record.reads(*kept)  # as many of the prompt's
            if not into.plain:  # packed from here
                record.writes(*kept)
        into.fill(kept[0], kept[1], counts, "compact")


class RingCache(EvictingCache):
    """A cache of ``budget`` tokens per sequence, of which the first ``sink`` are no ring."""

    sink: int
    recent: int

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        self.replays = min(self.lengths) >= self.budget  # every round evicts

    @property
    def budget(self) -> int:
        """Sinks and ring together."""
        return self.sink + self.recent

    @property
    def slots(self) -> int:
        """The budget, or fewer where the text is shorter."""
        return min(self.budget, self.capacity)

    def ring(self, lengths: Tensor) -> Tensor:
        """Compute which token is in every slot, where the first ones never leave.

        Returns
        -------
        Tensor
            Positions, (batch, slots); below 0 for an empty slot.
        """
        slots = torch.arange(self.slots, device=lengths.device)
        last = lengths[:, None] - 1
        latest = last - (last - slots) % max(1, self.recent)
        held = torch.where(slots < self.sink, slots, latest)
        return torch.where(slots <= last, held, -1)

    def slot(self, positions: Positions) -> Positions:
        """Compute the slots of tokens.

        Parameters
        ----------
        positions
            Positions of the tokens, as a number or a tensor.

        Returns
        -------
        int or Tensor
            Their slots, in the form of the positions.
        """
        turn = self.sink + (positions - self.sink) % max(1, self.recent)
        return positions * (positions < self.sink) + turn * (positions >= self.sink)

    def visible_nearby(self, step: Pass) -> Seen:
        """State what queries of the prompt see of the first tokens and the window alone."""
        if step.length <= self.budget:
            return visible(step, step.length)
        keys = torch.arange(step.length, device=step.positions.device)
        asking = step.positions[:, None, :, None]
        return (keys <= asking) & ((keys < self.sink) | (keys > asking - self.recent))

    def slot_range(self, step: Pass) -> SlotRange:
        """Place one new token per sequence.

        Returns
        -------
        SlotRange
            Slots of the new tokens, and the slots in use after them.
        """
        first = self.slot(step.starts[0]) if step.uniform else None
        ends = tuple(min(n + 1, self.slots) for n in step.starts)
        return SlotRange(self.slot(step.positions), ends, 1, first)


class CutCache(EvictingCache):
    """A prompt of which every KV head keeps the best tokens, in their order, and all that follow.

    A technique scores the prompt's tokens in ``score``.
    """

    replays = True

    def __init__(self, place: LayerContext) -> None:
        settings = place.parts.selection
        assert isinstance(settings, PromptCut)
        self._budget = int(settings.budget)
        super().__init__(place)
        self.refuse_windows()
        self.evicted = [max(0, n - self.budget) for n in self.lengths]
        self._moved = torch.tensor(self.evicted, device=self.device)[:, None]

    def score(self, keys: Tensor, values: Tensor, there: Tensor) -> Tensor:
        """Score the prompt's tokens; the highest stay.

        Parameters
        ----------
        there
            Which tokens are a sequence's own, (batch, tokens).

        Returns
        -------
        Tensor
            (batch, KV heads, tokens), or 1 in place of the heads where all keep the same.
        """
        raise NotImplementedError

    @property
    def budget(self) -> int:
        """Tokens of the prompt that stay."""
        return self._budget

    @property
    def slots(self) -> int:
        """What stays of the prompt, and all that follows."""
        return min(self.budget, self.context.run.prompt) + self.context.run.beyond

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Score all tokens, keep the best."""
        if self.prompt <= self.budget:
            super().store_prompt(keys, values)
        else:
            self.cut(keys, values)

    def cut(self, keys: Tensor, values: Tensor) -> None:
        """Keep the best tokens of a prompt, or all where all have room."""
        first = torch.arange(min(self.budget, self.prompt), device=keys.device)
        if self.prompt <= self.budget:
            self.keep(keys, values, first.expand(self.batch, keys.shape[1], -1))
            return
        lengths, tokens = self._on_device[:, None], torch.arange(self.prompt, device=keys.device)
        there = tokens < lengths
        scored = self.score(keys, values, there).expand(-1, keys.shape[1], -1).to(keys.dtype)
        with self.counter.op("select") as record:
            ranked = scored.masked_fill(~there[:, None], -torch.inf)
            index = ranked.topk(self.budget, dim=-1).indices.sort(-1).values
            record.reads(scored)
            record.writes(scored)
        index = torch.where((lengths > self.budget)[..., None], index, first)
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
