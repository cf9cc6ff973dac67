"""ThinK: the prompt's keys without the channels that matter least to its last queries."""

from dataclasses import replace

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Storage
from kvsim.techniques.papers.think import Think as Settings
from kvsim.validate.kernels.attention import merge
from kvsim.validate.model.attention import Pass, Seen
from kvsim.validate.parts.rows import Fp16
from kvsim.validate.parts.scores import KeptQueries, attend_part
from kvsim.validate.parts.store import CacheRoom, KvStore, SlotRange

SMALL_SETTINGS = ("ratio=0.4,window=6", "ratio=0.5,window=6")


class Think(KvStore):
    """Storage that ranks each key channel by the norms of its queries' and its keys' columns.

    References
    ----------
    .. [1] Y. Xu et al., "ThinK", ICLR 2025, section 3, equation 4.
    """

    replays, keeps_numbers, by_position = True, False, True

    def __init__(self, room: CacheRoom) -> None:
        super().__init__(room)
        part = room.settings(Settings)
        if not room.prompts or len(room.prompts) != room.sequences:
            raise InputError("think: its real implementation is for the GPU only; run it alone")
        prompt, width = max(room.prompts), room.dim - int(part.ratio * room.dim)
        self.lengths = torch.tensor(room.prompts, device=room.device)
        self.last = KeptQueries.of_last(self.lengths, min(part.window, prompt))
        self.thin, self.values = room.zeros(prompt, width), room.zeros(prompt)
        self.which = torch.zeros(
            room.sequences, room.heads, width, dtype=torch.int32, device=room.device
        )
        self.later = Fp16(replace(room, part=Storage(), slots=room.slots - prompt))

    def attend_prompt(
        self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass, seen: Seen
    ) -> Tensor:
        """Attend in full, and record the prompts' last queries, by which channels are ranked.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, chunk, dim).
        """
        self.last.observe(queries, step)
        return super().attend_prompt(queries, keys, values, step, seen)

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """Rank the channels of every head, and copy the best ones into a contiguous cache."""
        there = torch.arange(keys.shape[2], device=keys.device) < self.lengths[:, None]
        with self.counter.op("channels") as record:
            queries = self.last.take()
            asked = queries.float().reshape(*keys.shape[:2], -1, keys.shape[3]).norm(dim=2)
            held = (keys.float() * there[:, None, :, None]).norm(dim=2)
            scored = (asked * held).to(keys.dtype)
            best = scored.topk(self.thin.shape[3], dim=-1).indices.sort(-1).values
            record.reads(queries, keys).writes(scored)
        with self.counter.op("thin") as record:
            self.which.copy_(best)
            self.thin.copy_(keys.gather(3, best[:, :, None].expand(-1, -1, keys.shape[2], -1)))
            self.values.copy_(values)
            record.reads(self.thin, self.values).writes(self.thin, self.values)

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Store generated keys with all channels, separately from the prompt's."""
        self.later.append(keys, values, self._after_prompt(span))

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend to the prompt by kept channels and to later tokens by all, and merge both.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, new, dim).
        """
        dim, own = queries.shape[3], self._after_prompt(span)
        grouped = queries.reshape(*self.which.shape[:2], -1, dim)
        index = self.which.long()[:, :, None].expand(-1, -1, grouped.shape[2], -1)
        thin = grouped.gather(3, index).view(*queries.shape[:3], -1)
        keys, values = (side.parts[0][:, :, : own.longest] for side in (self.later.k, self.later.v))
        cells = torch.arange(own.longest, device=queries.device)
        there = torch.arange(self.thin.shape[2], device=queries.device) < self.lengths[:, None]
        parts = []
        for asking, k, v, visible in (
            (thin, self.thin, self.values, there[:, None, None].expand(-1, -1, span.new, -1)),
            (queries, keys, values, (cells <= own.slots[..., None])[:, None]),
        ):
            with self.counter.op("attn") as record:
                parts.append(attend_part(asking, k, v, visible, dim))
                record.reads(k, v)
                record.visible(span.new, k.shape[2], visible)
        with self.counter.op("attn") as record:
            out = merge(parts).to(queries.dtype)
            record.reads(queries).writes(out)
        return out

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return pruned keys, values, later tokens, and the indices of kept channels."""
        later = [*self.later.k.parts, *self.later.v.parts]
        return {"kv": [self.thin, self.values, *later], "kept channels": [self.which]}

    def _after_prompt(self, span: SlotRange) -> SlotRange:
        """Return the tokens with positions counted from the end of their prompts."""
        counts = self.room.prompts
        ends = tuple(end - n for end, n in zip(span.ends, counts, strict=True))
        alike = span.first is not None and min(counts) == max(counts)
        first = span.first - counts[0] if alike and span.first is not None else None
        room = None if span.room is None else self.later.slots
        slots = span.slots - self.lengths[:, None]
        return replace(span, slots=slots, ends=ends, first=first, room=room)
