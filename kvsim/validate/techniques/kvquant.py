"""KVQuant: keys packed per channel before their positions are turned in, outliers apart."""

import torch
from torch import Tensor

from kvsim.techniques.axes.base import Storage
from kvsim.techniques.papers.kvquant import Kvquant as Settings
from kvsim.validate.counter import NullCounter
from kvsim.validate.parts.base import SmallRun
from kvsim.validate.parts.bytoken import PACKED_AT_ONCE
from kvsim.validate.parts.cells import CacheRoom, SlotRange
from kvsim.validate.parts.normal import from_levels, ranges, to_levels
from kvsim.validate.parts.wholetoken import WholeTokenRows

WHOLE = "every token has the same whole number of outliers; the prediction takes the exact share"


class Kvquant(WholeTokenRows):
    """Levels of normal numbers, with each channel's mean and deviation in the prompt for keys.

    No calibration set is at hand that would give other levels. The first token is packed like the
    others.

    References
    ----------
    .. [1] C. Hooper et al., "KVQuant", NeurIPS 2024, sections 3.1 to 3.4.
    """

    differences = PACKED_AT_ONCE

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """A whole number of outliers."""
        return ["bits=4,outliers=0.0625"]

    def __init__(self, part: Storage, room: CacheRoom, slots: int, counter: NullCounter) -> None:
        assert isinstance(part, Settings)
        super().__init__(part, room, slots, counter)
        self.bits, share = int(part.bits), float(part.outliers) * self.width
        self.many = round(share)
        if share != self.many:
            self.differences = dict.fromkeys(("attn", "outliers"), WHOLE)
        packed = self.width * self.bits // 8, torch.uint8
        apart = (self.many, torch.float16), (self.many, torch.int16)
        self.codes = [self.table(*packed) for _ in "kv"]
        self.apart_from = [self.table(*one) for _ in "kv" for one in apart]
        self.spread = self.table(2, torch.float16)  # mean and deviation of a token's values
        self.channels = torch.zeros(2, self.width, device=room.device)  # a table of the model

    def learn(self, keys: Tensor) -> None:
        """Mean and deviation of every channel, of keys (tokens, width)."""
        spread = keys.float().std(0, correction=0)
        self.channels = torch.stack([keys.float().mean(0), spread.clamp(min=1e-6)])

    def store(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Find the outliers, pack the rest; both as (sequences, tokens, width)."""
        with self.counter.op("outliers") as record:
            even = (keys - self.channels[0]) / self.channels[1]
            away = values.float() - values.float().mean(-1, True)
            far, far_values = (x.abs().topk(self.many).indices for x in (even, away))
            spread = ranges(values.float(), far_values).half()
            found = keys.gather(-1, far), far, values.gather(-1, far_values), far_values
            made = [new.to(old.dtype) for new, old in zip(found, self.apart_from, strict=True)]
            record.reads(keys, values)
            record.writes(*made, spread)
        with self.counter.op("quantise") as record:
            close = (values - spread[..., :1]) / spread[..., 1:].float().clamp(min=1e-6)
            codes = to_levels(even, self.bits), to_levels(close, self.bits)
            record.reads(keys, values)
            record.writes(*codes)
        for table, new in zip(self.tables(), (*codes, *made, spread), strict=True):
            self.put(table, new, span)

    def tables(self) -> list[Tensor]:
        """Everything of a token, (sequences, slots, ...)."""
        return [*self.codes, *self.apart_from, self.spread]

    def wide(self, most: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first slots, (sequences, tokens, width)."""
        k, v, far_k, at_k, far_v, at_v, spread = (t[:, :most] for t in self.tables())
        middle, width = self.channels
        keys = from_levels(k, self.bits) * width + middle
        values = from_levels(v, self.bits) * spread[..., 1:].float() + spread[..., :1].float()
        keys.scatter_(-1, at_k.long(), far_k.float())
        return keys, values.scatter_(-1, at_v.long(), far_v.float())

    def tensors(self) -> dict[str, list[Tensor]]:
        """Packed numbers, and what is kept beside them."""
        return {"kv": self.codes, "outliers": [*self.apart_from, self.spread]}
