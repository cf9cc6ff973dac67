"""ThinK: the prompt's keys without the channels that matter least to its last queries."""

from dataclasses import replace

import torch
from torch import Tensor

from kvsim.techniques.axes.base import Storage
from kvsim.techniques.papers.think import Think as Settings
from kvsim.validate.kernels.attention import merge
from kvsim.validate.model.attention import Seen
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
        prompt, width = room.prompt, room.dim - int(part.ratio * room.dim)
        self.last = KeptQueries.of_last(room.sequences, prompt, part.window, room.device)
        self.thin, self.values = room.zeros(prompt, width), room.zeros(prompt)
        self.which = torch.zeros(
            room.sequences, room.heads, width, dtype=torch.int32, device=room.device
        )
        self.later = Fp16(replace(room, part=Storage(), slots=room.slots - prompt))

    def fill(self, keys: Tensor, values: Tensor, plainly: str = "attn") -> None:
        """Rank the channels of every head, and copy the best ones into a contiguous cache."""
        assert self.last is not None
        with self.counter.op("channels") as record:
            queries = self.last.take()
            asked = queries.float().reshape(*keys.shape[:2], -1, keys.shape[3]).norm(dim=2)
            scored = (asked * keys.float().norm(dim=2)).to(keys.dtype)
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
        """Attend to the prompt by kept channels and to later tokens by all, and merge both."""
        dim, own = queries.shape[3], self._after_prompt(span)
        grouped = queries.reshape(*self.which.shape[:2], -1, dim)
        index = self.which.long()[:, :, None].expand(-1, -1, grouped.shape[2], -1)
        thin = grouped.gather(3, index).view(*queries.shape[:3], -1)
        keys, values = (side.parts[0][:, :, : own.longest] for side in (self.later.k, self.later.v))
        cells = torch.arange(own.longest, device=queries.device)
        parts = []
        for asking, k, v, visible in (
            (thin, self.thin, self.values, None),
            (queries, keys, values, (cells <= own.slots[..., None])[:, None]),
        ):
            with self.counter.op("attn") as record:
                parts.append(attend_part(asking, k, v, visible, dim))
                record.reads(k, v)
                record.visible(span.new, k.shape[2], "all" if visible is None else visible)
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
        before = self.room.prompt
        ends = tuple(end - before for end in span.ends)
        first = None if span.first is None else span.first - before
        room = None if span.room is None else self.later.slots
        return replace(span, slots=span.slots - before, ends=ends, first=first, room=room)
