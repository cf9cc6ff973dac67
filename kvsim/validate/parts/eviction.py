"""What selections share that drop tokens: slots for those that stay.

The first tokens have slots of their own, the latest share a ring: token i lies in slot i while
there is room, and afterwards takes the place of the token that leaves the window.
"""

from typing import TypeVar

import torch
from torch import Tensor

from kvsim.validate.model.attention import Pass, Seen, visible
from kvsim.validate.parts.selection import LayerCache
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
        keys, values
            Those of the prompt, (batch, KV heads, tokens, dim).
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

        Parameters
        ----------
        lengths
            Tokens of each sequence so far, (batch,).

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
        """State what queries of the prompt see of the first tokens and the window alone.

        Parameters
        ----------
        step
            The pass.

        Returns
        -------
        Seen
            A mask, or the name of a usual pattern.
        """
        if step.length <= self.budget:
            return visible(step, step.length)
        keys = torch.arange(step.length, device=step.positions.device)
        asking = step.positions[:, None, :, None]
        return (keys <= asking) & ((keys < self.sink) | (keys > asking - self.recent))

    def slot_range(self, step: Pass) -> SlotRange:
        """Place one new token per sequence.

        Parameters
        ----------
        step
            The pass that appends them.

        Returns
        -------
        SlotRange
            Slots of the new tokens, and the slots in use after them.
        """
        first = self.slot(step.starts[0]) if step.uniform else None
        ends = tuple(min(n + 1, self.slots) for n in step.starts)
        return SlotRange(self.slot(step.positions), ends, 1, first)
