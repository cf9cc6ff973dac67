"""MagicDec: self-speculative decoding whose drafts read a small cache of their own.

R. Sadhukhan et al., "MagicDec", ICLR 2025, section 4, https://arxiv.org/abs/2408.11049.

Drafts are passes of the model itself over a cache of ``budget`` tokens per sequence, in full
precision: attention sinks and a window (``DraftRing``), or what SnapKV keeps of the prompt and all
since (``DraftSnapkv``). Verification reads the whole cache and writes its keys and values into both
caches, so that a draft never attends to what an earlier draft made of accepted tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.models.model import LayerShape
from kvsim.techniques.axes.base import Drafting, Parts, Placement, Selection, Storage
from kvsim.techniques.axes.drafting import SINK, WINDOW, DraftCache
from kvsim.techniques.axes.drafting import Selfdraft as Settings
from kvsim.techniques.papers.snapkv import Snapkv as Observing
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.drafting import SelfDrafter, Visit
from kvsim.validate.parts.eviction import RingCache
from kvsim.validate.parts.selection import LayerContext, LayeredRun
from kvsim.validate.parts.store import Resident, SlotRange, join_resident
from kvsim.validate.techniques.snapkv import Snapkv

SMALL_SETTINGS = ("budget={half},gamma=2",)


class Magicdec(SelfDrafter):
    """Drafter that drafts with the model's layers over small draft caches."""

    def __init__(self, run: LayeredRun, part: Drafting) -> None:
        super().__init__(run, part)
        assert isinstance(part, Settings)
        always = SINK if part.reads == "streamingllm" else WINDOW
        if part.budget <= always:
            raise InputError(
                f"selfdraft: budget={part.budget:g} leaves no room beside the {always} tokens that "
                f"drafts over {part.reads} always keep; choose a larger budget"
            )
        self.selection: Selection = Observing(part.budget, WINDOW)
        if part.reads == "streamingllm":
            self.selection = DraftCache(part.budget, part.gamma)
        self.caches: dict[Visit, DraftRing | DraftSnapkv] = {}

    def ready(self) -> None:
        """Create a small draft cache for every layer."""
        kind = DraftRing if isinstance(self.selection, DraftCache) else DraftSnapkv
        own = Parts(self.selection, Storage(), Placement(), Drafting())
        contexts = [replace(layer.context, parts=own) for layer in self.run.layers]
        self.caches = {context.visit: kind(context) for context in contexts}

    def observe(self, visit: Visit, queries: Tensor, step: Pass) -> None:
        """Pass a chunk's queries to the layer's draft cache, which may choose tokens by them."""
        self.caches[visit].observe(queries, step)

    def store_prompt(self, visit: Visit, keys: Tensor, values: Tensor) -> None:
        """Store the tokens of the prompts that the layer's draft cache keeps."""
        self.caches[visit].cut(keys, values)

    def store_verified(self, visit: Visit, keys: Tensor, values: Tensor, step: Pass) -> None:
        """Store the tokens that are being verified in the draft cache too."""
        cache = self.caches[visit]
        cache.kv.append(keys, values, cache.slot_range(step))

    def attend(
        self, visit: Visit, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor | None:
        """Attend to the layer's draft cache instead of the full one."""
        return self.caches[visit].attend(queries, keys, values, step)

    def resident(self) -> Resident:
        """Return the draft caches, and MLPs of four bits if there are any."""
        kept = [t for cache in self.caches.values() for t in cache.kv.tensors()["kv"]]
        return join_resident({"gpu": {"draft kv": kept}}, super().resident())


class DraftRing(RingCache):
    """Draft cache of sinks and a ring, which has one idle slot per draft of a round.

    Rejected drafts have only overwritten tokens older than the window.
    """

    sink = SINK

    def __init__(self, place: LayerContext) -> None:
        settings = place.settings(DraftCache)
        self.window = int(settings.budget) - SINK  # latest tokens that a draft sees
        self.recent = self.window + settings.idle
        super().__init__(place)

    def cut(self, keys: Tensor, values: Tensor) -> None:
        """Store the first and the latest tokens of each prompt."""
        index = self.prompt_ring()[: self.prompt]
        self.keep(keys, values, index.expand(*keys.shape[:2], -1))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Store the drafted token, and attend to sinks and window. (sequences, heads, new, dim)"""
        span, now = self.slot_range(step), step.positions[:, -1:]
        self.kv.append(keys, values, span)
        held = self.ring(now[:, 0] + 1)[:, : span.longest]
        slot = torch.arange(held.shape[1], device=held.device)
        seen = (held >= 0) & ((slot < self.sink) | (held > now - self.window))
        return self.kv.attend(queries, span, seen[:, None, None])

    def slot_range(self, step: Pass) -> SlotRange:
        """Return the slots of the new tokens, which replace the oldest recent ones."""
        ends = tuple(min(n + step.new, self.slots) for n in step.starts)
        return SlotRange(self.slot(step.positions), ends, step.new)


class DraftSnapkv(Snapkv):
    """Cache of drafts that keeps the prompt tokens that SnapKV chooses.

    Drafts are verified, so that sliding windows of the model need not be kept.
    """

    def refuse_windows(self) -> None:
        """Ignore the layer's sliding window: drafts see all tokens that are kept."""
        self.shape = LayerShape()
