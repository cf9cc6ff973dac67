"""Ada-KV: heads of a layer keep unequal numbers of tokens, according to their scores."""

from dataclasses import replace

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.selection import LayerContext
from kvsim.validate.parts.store import Resident, SlotRange
from kvsim.validate.techniques.snapkv import Snapkv

SMALL_SETTINGS = ("budget={half},window=8",)
OWN = 0.2  # of an even share of the budget, which every head keeps for itself


class AdaKv(Snapkv):
    """A cache whose KV heads keep different numbers of prompt tokens.

    The heads of a layer share one budget, which is divided among them by the tokens' scores [1]_.
    All heads of a sequence share one array of slots: first the kept prompt tokens, head after
    head, then the generated tokens, with one slot per head for each. A mask restricts every query
    to the slots of its own KV head.

    References
    ----------
    .. [1] Y. Feng et al., "Ada-KV", NeurIPS 2025, section 3.3, algorithm 1.
    """

    def __init__(self, place: LayerContext) -> None:
        self.heads = place.run.model.kv_heads
        settings = place.parts.selection
        self.uneven = place.run.prompt > settings.settings["budget"]
        super().__init__(replace(place, heads=1) if self.uneven else place)
        shape = (self.batch, self.heads * self.uneven)
        self.ends = torch.zeros(shape, dtype=torch.int32, device=self.device)
        if self.uneven and not self.kv.plain:
            raise InputError(
                f"ada-kv: its real implementation has heads of unequal length, and "
                f"{self.parts.storage.name} packs them together; run it over fp16"
            )

    @property
    def slots(self) -> int:
        """Slots to allocate per sequence, for all KV heads together if the prompt is cut."""
        return super().slots * (self.heads if self.uneven else 1)

    def cut(self, keys: Tensor, values: Tensor) -> None:
        """Score the prompts' tokens and store the best.

        Every KV head keeps its best tokens up to a fifth (``OWN``) of ``budget``. The rest of the
        layer's budget, ``budget`` times the number of KV heads, goes to the highest scores of all
        heads. Prompts that fit in the budget are stored in full.
        """
        scored = self.score(keys, values).to(keys.dtype)
        with self.counter.op("select") as record:
            own = scored.topk(int(OWN * self.budget), dim=-1).indices
            ranked = scored.scatter(-1, own, torch.inf).flatten(1)
            cells = ranked.topk(self.heads * self.budget, dim=-1).indices.sort(-1).values
            head = torch.arange(self.heads, device=keys.device)[:, None]
            self.ends.copy_((cells[:, None] // self.prompt <= head).sum(-1))
            record.reads(scored).writes(scored)
        self.keep(keys.flatten(1, 2)[:, None], values.flatten(1, 2)[:, None], cells[:, None])

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Store the new tokens of all KV heads; each query attends to its own head's tokens."""
        if not self.uneven:
            return super().attend(queries, keys, values, step)
        span, many = self.slot_range(step), self.heads
        room = self.kv.slots if step.fixed else None
        own = torch.arange(many, device=queries.device)
        slots = (span.slots[..., None] * many + own).flatten(1)
        first = None if span.first is None else span.first * many
        ends = tuple(end * many for end in span.ends)
        flat = SlotRange(slots, ends, many, first, room=room)
        k, v = (numbers.transpose(1, 2).flatten(1, 2)[:, None] for numbers in (keys, values))
        self.kv.append(k, v, flat)
        cells = torch.arange(flat.longest, device=queries.device)
        kept = (cells[:, None] >= self.ends[:, None]).sum(-1)
        owner = torch.where(cells < self.ends[:, -1:], kept, cells % many)
        asking = own.repeat_interleave(queries.shape[1] // many)
        seen = (owner[:, None] == asking[:, None]) & (cells <= slots[:, None, -1:])
        return self.kv.attend(queries.transpose(1, 2), flat, seen[:, None]).transpose(1, 2)

    def buffers(self) -> Resident:
        """Return the index of the slot after the last kept prompt token of each KV head."""
        return {"gpu": {"head ends": [self.ends]}}
