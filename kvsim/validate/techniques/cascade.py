"""Cascade attention: a prefix that all sequences share is stored and read once."""

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.cascade import Cascade as Settings
from kvsim.validate.kernels.attention import merge
from kvsim.validate.kernels.stores import PartialAttention
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.scores import attend_part
from kvsim.validate.parts.selection import LayerCache, LayerContext
from kvsim.validate.parts.store import Resident, SlotRange

SMALL_SETTINGS = ("shared={alone}",)  # of one sequence: several would have to share it
SAME = 0.02  # by which keys of one text may differ, of the largest: rounding


class Cascade(LayerCache):
    """Cache that stores a prefix shared by all sequences once, and their other tokens in ``kv``.

    References
    ----------
    .. [1] Z. Ye et al., "Cascade inference", FlashInfer, 2024.
    """

    in_order, direct = False, False

    def __init__(self, place: LayerContext) -> None:
        settings = place.settings(Settings)
        self.shared = min(int(settings.shared), place.run.prompt)
        super().__init__(place)
        self.refuse_windows()
        if not self.kv.plain:
            raise InputError(
                f"cascade: its real implementation reads fp16, and {self.parts.storage.name} packs "
                f"what it stores; run it alone"
            )
        room = (1, *self.rows.k.parts[0].shape[1:2], self.shared, self.model.head_dim)
        self.prefix = [torch.zeros(room, dtype=self.dtype, device=self.device) for _ in "kv"]

    @property
    def slots(self) -> int:
        """Slots per sequence, which exclude the shared prefix. [tokens]"""
        return self.capacity - self.shared

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Store the shared prefix from the first sequence, and the other tokens of every sequence.

        Raises
        ------
        InputError
            If the sequences differ within the prefix.
        """
        for mine, numbers in zip(self.prefix, (keys, values), strict=True):
            mine.copy_(numbers[:1, :, : self.shared])
            apart = (numbers[:, :, : self.shared] - mine).abs().amax() if self.shared else 0
            if self.shared and bool(apart > SAME * mine.abs().amax()):
                raise InputError(
                    f"cascade: the prompts do not share their first {self.shared} tokens; lower "
                    f"shared, or give prompts that do"
                )
        own = [numbers[:, :, self.shared :] for numbers in (keys, values)]
        with self.counter.op("compact") as record:
            record.reads(*self.prefix, *own).writes(*self.prefix)
        self.kv.fill(own[0], own[1], "compact")

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend to the prefix once for all sequences, to each one's own tokens, and merge both."""
        span = SlotRange.after_cached(step, self.shared)
        self.kv.append(keys, values, span)
        batch, heads, new, dim = queries.shape
        together = queries.transpose(0, 1).reshape(1, heads, batch * new, dim)
        own = [side.parts[0][:, :, : span.longest] for side in (self.rows.k, self.rows.v)]
        seen = torch.arange(span.longest, device=queries.device) <= span.slots[..., None]
        parts = []
        with self.counter.op("attn") as record:
            whole = attend_part(together, self.prefix[0], self.prefix[1], None)
            out = whole.out.view(heads, batch, new, dim).transpose(0, 1)
            parts.append(PartialAttention(out, whole.lse.view(heads, batch, new).transpose(0, 1)))
            record.reads(queries, *self.prefix).writes(whole.out, whole.lse)
        with self.counter.op("attn") as record:
            parts.append(attend_part(queries, own[0], own[1], seen[:, None]))
            record.reads(queries, *own).writes(parts[1].out, parts[1].lse)
            record.visible(new, span.longest, seen[:, None])
        with self.counter.op("join") as record:
            joined = merge(parts).to(queries.dtype)
            for part in parts:
                record.reads(part.out, part.lse)
            record.writes(joined)
        return joined

    def stored_tokens(self, tokens: list[int]) -> list[int]:
        """Subtract the shared prefix from the length of each sequence."""
        return [n - self.shared for n in tokens]

    def buffers(self) -> Resident:
        """Return keys and values of the shared prefix, (1, KV heads, shared tokens, dim) each."""
        return {"gpu": {"kv": self.prefix}}
