"""What drafts see of a small cache of their own: attention sinks and a window."""

import torch
from torch import Tensor

from kvsim.techniques.axes.drafting import SINK, DraftCache
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.cells import SlotRange
from kvsim.validate.parts.eviction import RingCache
from kvsim.validate.parts.selecting import LayerContext


class DraftRing(RingCache):
    """A ring with as many idle slots as a round has drafts; keys keep their positions.

    What a rejected draft has overwritten was older than the window.
    """

    sink = SINK

    def __init__(self, place: LayerContext) -> None:
        settings = place.parts.selection
        assert isinstance(settings, DraftCache)
        self.window = int(settings.budget) - SINK  # latest tokens that a draft sees
        self.recent = self.window + settings.idle
        super().__init__(place)

    def observe(self, queries: Tensor, step: Pass) -> None:
        """No query of the prompt is asked."""

    def cut(self, keys: Tensor, values: Tensor) -> None:
        """The prompt's first tokens and its latest."""
        index = self.ring(self._on_device)[:, : self.prompt].clamp_min(0)
        self.keep(keys, values, index[:, None].expand(-1, keys.shape[1], -1))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """A draft's token joins, and sees sinks and window."""
        span, now = self.slot_range(step), step.positions[:, -1:]
        self.cells.append(keys, values, span)
        held = self.ring(now[:, 0] + 1)[:, : span.most]
        slot = torch.arange(held.shape[1], device=held.device)
        seen = (held >= 0) & ((slot < self.sink) | (held > now - self.window))
        return self.cells.attend(queries, span, seen[:, None, None])

    def slot_range(self, step: Pass) -> SlotRange:
        """Where the new tokens of a pass go."""
        ends = tuple(min(n + step.new, self.slots) for n in step.starts)
        return SlotRange(self.slot(step.positions), ends, step.new)
