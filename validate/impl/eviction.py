"""What techniques share that keep some tokens: full attention to the prompt, slots for the rest.

The first tokens have slots of their own, the latest share a ring: token i lies in slot i while
there is room, and afterwards takes the place of the token that leaves the window.
"""

from typing import TypeVar

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.base import Technique
from kvsim.validate.impl.base import Implementation, Resident, put
from kvsim.validate.model.attention import Pass, attend, visible
from kvsim.validate.model.decoder import Decoder

Positions = TypeVar("Positions", int, Tensor)


class Evicting(Implementation):
    """A cache of ``budget`` tokens per sequence, of which the first ``sink`` are no ring."""

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int,
        sink: int, recent: int,
    ) -> None:  # fmt: skip
        super().__init__(technique, decoder, lengths, generate)
        self.sink, self.recent, self.budget = sink, recent, sink + recent
        self.slots = min(self.budget, self.capacity)
        one = self.empty(self.slots)
        self.all_k = one.new_zeros(len(self.shapes), *one.shape)
        self.k, self.v = list(self.all_k), list(torch.zeros_like(self.all_k))  # by layer

    def prefill(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Straight into the cache if the whole prompt has room there."""
        if self.prompt > self.budget:
            return super().prefill(layer, tensor, queries, keys, values, step)
        return self.attend_slots(layer, queries, keys, values, step)

    def attend_slots(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Append where slots and positions are the same, and attend."""
        with self.tally.op("attn") as marks:
            put(self.k[layer], keys, step)
            put(self.v[layer], values, step)
            marks.writes(keys, values)
            cached_keys, cached_values = (
                c[:, :, : step.length] for c in (self.k[layer], self.v[layer])
            )
            seen = visible(step, step.length, self.shapes[layer].window)
            return attend(marks, queries, cached_keys, cached_values, seen)

    def keep(self, layer: int, keys: Tensor, values: Tensor, index: Tensor) -> None:
        """Gather the prompt's tokens ``index`` (batch, KV heads, slots) into the cache."""
        rows = index[..., None].expand(-1, -1, -1, keys.shape[-1])
        with self.tally.op("compact") as marks:
            for cache, prompt in ((self.k[layer], keys), (self.v[layer], values)):
                kept = cache[:, :, : index.shape[2]]
                kept.copy_(prompt.gather(2, rows))
                marks.reads(kept)  # as many of the prompt's
                marks.writes(kept)

    def ring(self, lengths: Tensor) -> Tensor:
        """Position of the token in every slot, where the first ones never leave.

        ``lengths`` (batch,) count the tokens so far; (batch, slots), below 0 for an empty slot.
        """
        slots = torch.arange(self.slots, device=lengths.device)
        last = lengths[:, None] - 1
        latest = last - (last - slots) % max(1, self.recent)
        held = torch.where(slots < self.sink, slots, latest)
        return torch.where(slots <= last, held, -1)

    def slot(self, positions: Positions) -> Positions:
        """Where tokens at these positions are put."""
        turn = self.sink + (positions - self.sink) % max(1, self.recent)
        return positions * (positions < self.sink) + turn * (positions >= self.sink)

    def append(self, cache: Tensor, new: Tensor, step: Pass) -> None:
        """Write one new token per sequence (batch, KV heads, 1, dim) at its slot."""
        if step.uniform:
            cache[:, :, self.slot(step.starts[0])] = new[:, :, 0]
        else:
            slots = self.slot(step.positions[:, 0])
            cache[torch.arange(self.batch, device=slots.device), :, slots] = new[:, :, 0]

    def resident(self) -> Resident:
        """The slots of every layer, in use or not."""
        return {"gpu": {"kv": [*self.k, *self.v]}}

    def refuse_windows(self) -> None:
        """For techniques that do not know the positions of what they keep."""
        if any(shape.window for shape in self.shapes):
            raise InputError(
                f"{self.technique.name}: {self.model.name} has sliding windows, which evict by "
                f"themselves; choose a model without, or another technique"
            )


def scores(queries: Tensor, keys: Tensor, seen: Tensor | None = None) -> Tensor:
    """Softmax over keys, (batch, heads, queries, tokens) in fp32.

    ``seen`` is true where a query sees a key, (batch or 1, 1, queries, tokens).
    """
    batch, heads, new, dim = queries.shape
    grouped = queries.reshape(
        batch, keys.shape[1], -1, dim
    )  # the heads of a group share their keys
    logits = (grouped * dim**-0.5) @ keys.transpose(2, 3)
    logits = logits.view(batch, heads, new, -1).float()
    if seen is not None:
        logits.masked_fill_(~seen, -torch.inf)
    return torch.softmax(logits, dim=-1)


def weigh(weights: Tensor, values: Tensor) -> Tensor:
    """Values (batch, KV heads, tokens, dim) summed by weights (batch, heads, queries, tokens)."""
    batch, heads, queries, tokens = weights.shape
    grouped = weights.to(values.dtype).view(batch, values.shape[1], -1, tokens)
    return (grouped @ values).view(batch, heads, queries, -1)


def by_kv_head(weights: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, ...) summed over the query heads that share a KV head."""
    batch, _, *rest = weights.shape
    return weights.reshape(batch, kv_heads, -1, *rest).sum(2)
