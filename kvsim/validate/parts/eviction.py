"""Base classes of selections that evict tokens.

The first tokens have slots of their own, the latest share a ring: token i lies in slot i while
there is room, and afterwards takes the place of the token that leaves the window.
"""

from typing import TypeVar

import torch
from torch import Tensor

from kvsim.techniques.axes.selection import PromptCut
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.scores import KeptQueries
from kvsim.validate.parts.selection import LayerCache, LayerContext
from kvsim.validate.parts.store import KvStore, SlotRange

Positions = TypeVar("Positions", int, Tensor)


class EvictingCache(LayerCache):
    """Base of caches that keep at most ``budget`` tokens of each prompt."""

    in_order = False

    @property
    def budget(self) -> int:
        """Most tokens of a prompt that stay in the cache. [tokens]"""
        raise NotImplementedError

    @property
    def direct(self) -> bool:
        """Whether prompts are stored chunk by chunk, because no token is evicted."""
        return self.kv.plain and self.prompt <= self.budget

    def watch(self, many: int) -> None:
        """Record the prompts' last queries, if any token is evicted.

        Parameters
        ----------
        many
            Queries of each prompt.
        """
        if self.prompt > self.budget:
            self.last = KeptQueries.of_last(self.batch, self.prompt, many, self.device)

    def keep(self, keys: Tensor, values: Tensor, index: Tensor, kv: KvStore | None = None) -> None:
        """Store chosen tokens of the prompts.

        Parameters
        ----------
        keys, values
            (batch, KV heads, prompt, dim).
        index
            Positions of the tokens to store, (batch, KV heads, slots).
        kv
            Storage to write to; None for the layer's own.
        """
        into = kv or self.kv
        rows = index[..., None].expand(-1, -1, -1, keys.shape[-1])
        with self.counter.op("compact") as record:
            kept = [prompt.gather(2, rows) for prompt in (keys, values)]
            record.reads(*kept)  # as many of the prompt's
            if not into.plain:  # packed from here
                record.writes(*kept)
        into.fill(kept[0], kept[1], "compact")


class RingCache(EvictingCache):
    """A cache of the first ``sink`` tokens of a sequence and its ``recent`` latest ones.

    The latest tokens are in a ring: a new token overwrites the oldest one.

    Attributes
    ----------
    sink
        Number of first tokens, which are never evicted. [tokens]
    recent
        Number of latest tokens. [tokens]
    """

    sink: int
    recent: int

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        self.replays = self.prompt >= self.budget  # every round evicts

    @property
    def budget(self) -> int:
        """Tokens that a full cache holds, ``sink + recent``. [tokens]"""
        return self.sink + self.recent

    @property
    def slots(self) -> int:
        """Allocated slots per sequence: the budget, or fewer for short texts. [tokens]"""
        return min(self.budget, self.capacity)

    def ring(self, lengths: Tensor) -> Tensor:
        """Compute which token each slot holds.

        Parameters
        ----------
        lengths
            Tokens of each sequence so far, (batch,). [tokens]

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

    def prompt_ring(self) -> Tensor:
        """Compute which prompt token each slot holds; 0 for an empty slot. (slots,)"""
        return self.ring(torch.tensor([self.prompt], device=self.device))[0].clamp_min(0)

    def slot(self, positions: Positions) -> Positions:
        """Compute the slots in which tokens are stored; shaped as the positions.

        Parameters
        ----------
        positions
            Positions of the tokens, as a number or a tensor.
        """
        turn = self.sink + (positions - self.sink) % max(1, self.recent)
        return positions * (positions < self.sink) + turn * (positions >= self.sink)

    def slot_range(self, step: Pass) -> SlotRange:
        """Return the slots for one new token per sequence."""
        first = self.slot(step.starts[0]) if step.uniform else None
        ends = tuple(min(n + 1, self.slots) for n in step.starts)
        return SlotRange(self.slot(step.positions), ends, 1, first)


class CutCache(EvictingCache):
    """A cache of the best tokens of each prompt, chosen per KV head, and of all generated tokens.

    Subclasses score the prompt's tokens in ``score``. Tokens stay in the order of their positions.
    """

    replays = True

    def __init__(self, place: LayerContext) -> None:
        settings = place.settings(PromptCut)
        self._budget = int(settings.budget)
        super().__init__(place)
        self.refuse_windows()
        self.evicted = max(0, self.prompt - self.budget)

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        """Score the prompt's tokens; those with the highest scores stay in the cache.

        Parameters
        ----------
        keys, values
            The prompts, (batch, KV heads, prompt, dim).

        Returns
        -------
        Tensor
            Scores, (batch, KV heads, tokens); (batch, 1, tokens) if all heads keep the same tokens.
        """
        raise NotImplementedError

    def observed(self, keys: Tensor) -> Tensor:
        """Compute the attention weights of the recorded queries.

        Returns
        -------
        Tensor
            (batch, heads, queries, tokens).
        """
        assert self.last is not None
        with self.counter.op("observe") as record:
            return self.last.weights(record, keys)

    @property
    def budget(self) -> int:
        """Most tokens of a prompt that stay in the cache. [tokens]"""
        return self._budget

    @property
    def slots(self) -> int:
        """Allocated slots per sequence: kept prompt tokens and all generated ones. [tokens]"""
        return min(self.budget, self.context.run.prompt) + self.context.run.beyond

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Store the best tokens of each prompt by their scores, or all that fit in the budget."""
        if self.prompt <= self.budget:
            super().store_prompt(keys, values)
        else:
            self.cut(keys, values)

    def cut(self, keys: Tensor, values: Tensor) -> None:
        """Score the prompts' tokens and store the best, or all if they fit in the budget.

        Parameters
        ----------
        keys, values
            (batch, KV heads, prompt, dim).
        """
        if self.prompt <= self.budget:
            first = torch.arange(self.prompt, device=keys.device)
            self.keep(keys, values, first.expand(self.batch, keys.shape[1], -1))
            return
        scored = self.score(keys, values).expand(-1, keys.shape[1], -1).to(keys.dtype)
        with self.counter.op("select") as record:
            index = scored.topk(self.budget, dim=-1).indices.sort(-1).values
            record.reads(scored).writes(scored)
        self.keep(keys, values, index)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Store generated tokens after the kept prompt tokens, and attend to all of them."""
        return self.attend_behind(queries, keys, values, step, self.slot_range(step))

    def stored_tokens(self, tokens: list[int]) -> list[int]:
        """Subtract the evicted prompt tokens from the length of each sequence."""
        return [n - self.evicted for n in tokens]

    def slot_range(self, step: Pass) -> SlotRange:
        """Return the slots of new tokens, after the kept tokens of every prompt."""
        return SlotRange.after_cached(step, self.evicted)
