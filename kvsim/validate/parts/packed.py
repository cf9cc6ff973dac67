"""Storages with packed rows behind rings of full-precision tokens."""

from abc import abstractmethod
from dataclasses import replace

from torch import Tensor

from kvsim.frozen import frozen
from kvsim.validate.kernels.attention import PartialAttention, View
from kvsim.validate.model.attention import Seen
from kvsim.validate.parts.cells import KvStore, SlotRange, attend_packed, lengths_on, shares
from kvsim.validate.parts.sides import PackedRing


@frozen
class Fetched:
    """Tokens whose keys and values replace their packed ones."""

    index: Tensor  # (sequences, KV heads, pairs), below 0 for none
    keys: Tensor  # (sequences, KV heads, pairs, dim)
    values: Tensor


class PackedStore(KvStore):
    """Cells of keys and values behind rings; subclasses say how many tokens are packed."""

    k: PackedRing
    v: PackedRing
    keeps_numbers = False

    @abstractmethod
    def packed_keys(self, tokens: int) -> int:
        """Packed rows of keys with so many cached tokens."""

    @abstractmethod
    def packed_values(self, tokens: int) -> int:
        """Packed rows of values with so many cached tokens."""

    def packed_there(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Packed rows of keys and of values by cached tokens that the device knows, (batch,)."""
        raise NotImplementedError

    @property
    def reads_all_slots(self) -> bool:
        """The kernel reads up to each sequence's own end."""
        return False

    def packed_by(self, span: SlotRange) -> tuple[int, ...]:
        """The tokens of every sequence that packed counts of a pass go by."""
        return span.ends

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """Pack what leaves the rings."""
        with self.counter.op("quantise") as record:
            self.k.fill(record, keys, counts, [self.packed_keys(n) for n in counts])
            self.v.fill(record, values, counts, [self.packed_values(n) for n in counts])

    def add(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """New tokens into the rings."""
        with self.counter.op("attn") as record:
            self.k.append(keys, span.slots)
            self.v.append(values, span.slots)
            record.writes(keys, values)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Packed rows and rings in one kernel."""
        return self._attend_packed(queries, span).out.to(queries.dtype)

    def attend_with_scores(
        self, queries: Tensor, span: SlotRange, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        """Scores leave the kernel."""
        part = self._attend_packed(queries, span, scored=True)
        return part.out.to(queries.dtype), shares(part).to(queries.dtype)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Packed rows and rings."""
        return {"kv": [*self.k.tensors(), *self.v.tensors()]}

    def rows_in_use(self, ends: tuple[int, ...]) -> list[int]:
        """Of keys and of values packed rows, and groups of them."""
        keys, values = self.packed_keys(max(ends)), self.packed_values(max(ends))
        groups = keys // self.k.store.group
        codes = 1 if self.k.store.lower is None else 2
        return [keys] * codes + [groups] * 2 + [values] * (codes + 2)

    def bind(self, tables: list[Tensor]) -> None:
        """Codes, scales and zero points of keys, then of values."""
        half = len(tables) // 2
        for side, (codes, *lower, scale, zero) in (
            (self.k, tables[:half]),
            (self.v, tables[half:]),
        ):
            more = lower[0] if lower else None
            side.store = replace(side.store, codes=codes, lower=more, scale=scale, zero=zero)

    def gpu_tensors(self) -> list[Tensor]:
        """The latest tokens, which are not packed yet."""
        return [self.k.ring, self.v.ring]

    def _attend_packed(
        self,
        queries: Tensor,
        span: SlotRange,
        scored: bool = False,
        upper: bool = False,
        fetched: Fetched | None = None,
        name: str = "attn",
    ) -> PartialAttention:
        """Attention, of hierarchical cells over their upper halves alone if asked for."""
        tokens, ends = self.packed_by(span), list(span.ends)
        keys, values = (
            [count(n) for n in tokens] for count in (self.packed_keys, self.packed_values)
        )
        device, k, v = self.room.device, self.k, self.v
        lengths = span.lengths(device)
        if span.room is None:
            packed = lengths_on(device, keys), lengths_on(device, values)
        else:
            packed = self.packed_there(lengths)
        pairs = (fetched.index, fetched.keys, fetched.values) if fetched else (None,) * 3
        view = View(
            lengths,
            k.store.upper_only() if upper else k.store,
            v.store.upper_only() if upper else v.store,
            *packed,
            k.ring,
            v.ring,
            *pairs,
        )
        known = min(fetched.index.shape[2], *tokens) if fetched else 0
        with self.counter.op(name) as record:
            return attend_packed(
                record,
                queries,
                view,
                span,
                lambda: [
                    *k.read(keys, ends, upper),
                    *v.read(values, ends, upper),
                    *(pair[:, :, :known] for pair in pairs[1:] if pair is not None),
                ],
                scored,
            )
