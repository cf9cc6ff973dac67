"""KVQuant: keys packed per channel before rotary embedding, outliers separately.

C. Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache
Quantization", NeurIPS 2024, sections 3.1 to 3.4, https://arxiv.org/abs/2401.18079.
"""

import torch
from torch import Tensor

from kvsim.techniques.papers.kvquant import Kvquant as Settings
from kvsim.validate.counter import OpRecord
from kvsim.validate.model.attention import Seen, attend
from kvsim.validate.parts.normal import from_levels, to_levels
from kvsim.validate.parts.rows import PACKED_AT_ONCE
from kvsim.validate.parts.store import CacheRoom, KvStore, SlotRange

SMALL_SETTINGS = ("bits=4,outliers=0.0625",)  # a whole number of outliers


WHOLE_OUTLIERS = (
    "every token has the same whole number of outliers; the prediction takes the exact share"
)


class Kvquant(KvStore):
    """Storage with the levels of normal values, scaled by each key channel's mean and deviation.

    Levels are not calibrated, as there is no calibration set. The first token is packed like the
    others.
    """

    keeps_numbers, by_position = False, True
    differences = PACKED_AT_ONCE

    def __init__(self, room: CacheRoom) -> None:
        super().__init__(room)
        part = room.settings(Settings)
        self.width = room.heads * room.dim  # numbers of a token's keys
        self.bits, share = int(part.bits), float(part.outliers) * self.width
        self.many = round(share)
        if share != self.many:
            self.differences = dict.fromkeys(("attn", "outliers"), WHOLE_OUTLIERS)
        packed = self.width * self.bits // 8, torch.uint8
        apart = (self.many, torch.float16), (self.many, torch.int16)
        self.codes = [self._table(*packed) for _ in "kv"]
        self.apart_from = [self._table(*one) for _ in "kv" for one in apart]
        self.spread = self._table(2, torch.float16)  # mean and deviation of a token's values
        self.channels = torch.zeros(2, self.width, device=room.device)  # a table of the model

    def fill(self, keys: Tensor, values: Tensor, plainly: str = "attn") -> None:
        """Compute each key channel's mean and deviation, then pack the prompts."""
        most = keys.shape[2]
        slots = torch.arange(most, device=keys.device)[None]
        rows = self._rows(self.room.turned(keys, slots, back=True))
        spread = rows.float().std((0, 1), correction=0)
        self.channels = torch.stack([rows.float().mean((0, 1)), spread.clamp(min=1e-6)])
        self._store(rows, self._rows(values), SlotRange(slots, (most,) * len(keys), most, 0))

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Undo the rotary embedding of the new keys, then pack keys and values into their slots."""
        before = self.room.turned(keys, span.slots, back=True)
        self._store(self._rows(before), self._rows(values), span)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Dequantise all cached keys and values, rotate the keys by their positions, then attend.

        Only the packed tensors are counted as read, as if a single kernel did all of it.
        """
        with self.counter.op("attn") as record:
            keys, values = (self._heads(rows) for rows in self.widen(span.longest))
            slots = torch.arange(span.longest, device=keys.device)[None]
            keys = self.room.turned(keys, slots, back=False).to(queries.dtype)
            out = attend(OpRecord(), queries, keys, values.to(queries.dtype), seen)
            record.visible(queries.shape[2], span.longest, seen)
            read = (table[i, :end] for i, end in enumerate(span.ends) for table in self._tables())
            record.reads(queries, *read).writes(out)
            return out

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the packed numbers, and the outliers with each token's value statistics."""
        return {"kv": self.codes, "outliers": [*self.apart_from, self.spread]}

    def _store(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Find the outliers and pack the rest; both are (sequences, tokens, width)."""
        with self.counter.op("outliers") as record:
            even = (keys - self.channels[0]) / self.channels[1]
            away = values.float() - values.float().mean(-1, True)
            far, far_values = (x.abs().topk(self.many).indices for x in (even, away))
            spread = _mean_and_deviation(values.float(), far_values).half()
            found = keys.gather(-1, far), far, values.gather(-1, far_values), far_values
            made = [new.to(old.dtype) for new, old in zip(found, self.apart_from, strict=True)]
            record.reads(keys, values).writes(*made, spread)
        with self.counter.op("quantise") as record:
            close = (values - spread[..., :1]) / spread[..., 1:].float().clamp(min=1e-6)
            codes = to_levels(even, self.bits), to_levels(close, self.bits)
            record.reads(keys, values).writes(*codes)
        for table, new in zip(self._tables(), (*codes, *made, spread), strict=True):
            _put(table, new, span)

    def _tables(self) -> list[Tensor]:
        """Return all tables of tokens, (sequences, slots, ...)."""
        return [*self.codes, *self.apart_from, self.spread]

    def widen(self, most: int) -> tuple[Tensor, Tensor]:
        """Dequantise keys and values of the first slots and put their outliers back.

        Parameters
        ----------
        most
            Number of first slots of each sequence. [tokens]

        Returns
        -------
        tuple of Tensor
            Keys before the rotary embedding and values, (sequences, tokens, KV heads x dim), fp32.
        """
        k, v, far_k, at_k, far_v, at_v, spread = (t[:, :most] for t in self._tables())
        middle, width = self.channels
        keys = from_levels(k, self.bits) * width + middle
        values = from_levels(v, self.bits) * spread[..., 1:].float() + spread[..., :1].float()
        keys.scatter_(-1, at_k.long(), far_k.float())
        return keys, values.scatter_(-1, at_v.long(), far_v.float())

    def _table(self, width: int, dtype: torch.dtype) -> Tensor:
        shape = (self.room.sequences, self.slots, width)
        return torch.zeros(shape, dtype=dtype, device=self.room.device)

    def _rows(self, numbers: Tensor) -> Tensor:
        return numbers.transpose(1, 2).flatten(2)

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:2], self.room.heads, self.room.dim).transpose(1, 2)


def _mean_and_deviation(numbers: Tensor, apart: Tensor) -> Tensor:
    """Mean and deviation (..., 2) of numbers (..., n), without those at ``apart`` (..., count)."""
    rest = numbers.scatter(-1, apart, torch.nan)
    middle = rest.nanmean(-1, keepdim=True)
    return torch.cat([middle, (rest - middle).square().nanmean(-1, keepdim=True).sqrt()], -1)


def _put(table: Tensor, new: Tensor, span: SlotRange) -> None:
    """Write new tokens to a table, (sequences, slots, width)."""
    if span.first is not None:
        table[:, span.first : span.first + span.new] = new
    else:
        sequences = torch.arange(len(table), device=table.device)[:, None]
        table[sequences, span.slots] = new
