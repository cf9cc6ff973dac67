"""KIVI: keys packed per channel in blocks, values per token behind the latest ones."""

from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes import Storage
from kvsim.techniques.kivi import Kivi as Settings
from kvsim.validate.impl.base import SmallRun
from kvsim.validate.impl.cells import CacheRoom, Cells, Spot, lengths_on, look_packed, shares
from kvsim.validate.impl.packed import Side, check_groups, check_residual
from kvsim.validate.kernels.attention import PartialAttention, View
from kvsim.validate.model.attention import Seen
from kvsim.validate.tally import Silent


class Kivi(Cells):
    """Asymmetric groups with a residual that rolls over.

    A new token joins the residual, full blocks of keys and surplus values are packed, and then it
    attends.

    References
    ----------
    .. [1] Z. Liu et al., "KIVI", ICML 2024, algorithm 1.
    """

    as_given, takes_back = False, False
    differences = MappingProxyType(
        {"quantise": "keys are packed by whole residuals; the prediction spreads that evenly"}
    )

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Groups that fit the head."""
        return [f"group={run.group},residual={run.group}"]

    def __init__(self, part: Storage, room: CacheRoom, slots: int, tally: Silent) -> None:
        super().__init__(part, room, slots, tally)
        assert isinstance(part, Settings)
        self.residual = check_residual("kivi", part.residual, part.group)
        if part.bits == 16:
            raise InputError("kivi: bits=16 packs nothing; choose fewer bits, or technique full")
        check_groups("kivi", part.group, room.dim)
        bits = int(part.bits)
        self.k = Side(room, slots, self.residual, bits, part.group, "channel")
        self.v = Side(room, slots, self.residual, bits, part.group, "token")

    def packed_keys(self, tokens: int) -> int:
        """Tokens whose keys are packed: whole blocks of the residual. [tokens]"""
        return tokens // self.residual * self.residual

    def packed_values(self, tokens: int) -> int:
        """All but the residual."""
        return max(tokens - self.residual, 0)

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """Pack what leaves the residual."""
        with self.tally.op("quantise") as marks:
            self.k.fill(marks, keys, counts, [self.packed_keys(n) for n in counts])
            self.v.fill(marks, values, counts, [self.packed_values(n) for n in counts])

    def append(self, keys: Tensor, values: Tensor, spot: Spot) -> None:
        """The value that leaves the residual, the new token, and a block of keys it completes."""
        last = spot.slots[:, 0]
        full = [i for i, n in enumerate(spot.ends) if n > self.residual]
        if full:
            with self.tally.op("quantise") as marks:
                self.v.pack(marks, full, last - self.residual, 1)
        with self.tally.op("attn") as marks:
            self.k.append(keys, spot.slots)
            self.v.append(values, spot.slots)
            marks.writes(keys, values)
        whole = [i for i, n in enumerate(spot.ends) if n % self.residual == 0]
        if whole:
            with self.tally.op("quantise") as marks:
                self.k.pack(marks, whole, last + 1 - self.residual, self.residual)

    def look(self, queries: Tensor, spot: Spot, seen: Seen) -> Tensor:
        """Packed rows and residual in one kernel."""
        return self._look(queries, spot).out.to(queries.dtype)

    def look_scored(self, queries: Tensor, spot: Spot, seen: Seen) -> tuple[Tensor, Tensor]:
        """Scores leave the kernel."""
        part = self._look(queries, spot, scored=True)
        return part.out.to(queries.dtype), shares(part).to(queries.dtype)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Packed rows and rings."""
        return {"kv": [*self.k.tensors(), *self.v.tensors()]}

    def rows_in_use(self, ends: tuple[int, ...]) -> list[int]:
        """Packed rows of keys, groups of them, and packed rows of values."""
        keys, values = self.packed_keys(max(ends)), self.packed_values(max(ends))
        groups = keys // self.k.store.group
        return [keys, groups, groups, values, values, values]

    def bind(self, tables: list[Tensor]) -> None:
        """Codes, scales and zero points of keys, then of values."""
        for side, (codes, scale, zero) in ((self.k, tables[:3]), (self.v, tables[3:])):
            side.store = replace(side.store, codes=codes, scale=scale, zero=zero)

    def tails(self) -> list[Tensor]:
        """The latest tokens, which are not packed yet."""
        return [self.k.ring, self.v.ring]

    def _look(self, queries: Tensor, spot: Spot, scored: bool = False) -> PartialAttention:
        keys = [self.packed_keys(n) for n in spot.ends]
        values = [self.packed_values(n) for n in spot.ends]
        ends, k, v = list(spot.ends), self.k, self.v
        device = self.room.device
        view = View(
            lengths_on(device, ends), k.store, v.store, lengths_on(device, keys),
            lengths_on(device, values), k.ring, v.ring,
        )  # fmt: skip
        with self.tally.op("attn") as marks:
            return look_packed(
                marks, queries, view, spot,
                lambda: [*k.read(keys, ends), *v.read(values, ends)], scored,
            )  # fmt: skip
