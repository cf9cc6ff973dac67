"""Numbers of tokens, plain or packed, in tables whose first axis are tokens."""

import torch
from torch import Tensor

from kvsim.engine.formats import Format
from kvsim.frozen import frozen
from kvsim.validate.counter import OpRecord
from kvsim.validate.kernels.quantise import quantise
from kvsim.validate.kernels.stores import Store
from kvsim.validate.parts.split import Made


@frozen
class Tokenwise:
    """``width`` numbers per token; packed ones share scales in groups along the width.

    A range of tokens is contiguous in every table.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen", ICML 2023, section 4.4.
    """

    stored: Format
    width: int
    dtype: torch.dtype  # of plain numbers

    def tables(self, make: Made, tokens: int) -> list[Tensor]:
        """Room for so many tokens: numbers, or codes with scales and zero points."""
        if not self.stored.packs:
            return [make((tokens, self.width), self.dtype)]
        groups = self.width // int(self.stored.group)
        codes = make((tokens, self.width * int(self.stored.bits) // 8), torch.uint8)
        return [codes, *(make((tokens, groups), torch.float16) for _ in "sz")]

    def put(self, record: OpRecord, numbers: Tensor, tables: list[Tensor], part: slice) -> None:
        """Keep the numbers (tokens, ...) of a range of tokens."""
        flat = numbers.flatten(1)
        made = [flat]
        if self.stored.packs:
            packed = quantise(
                flat[None, None], int(self.stored.bits), int(self.stored.group), "token"
            )
            made = [part[0, 0] for part in (packed.codes, packed.scale, packed.zero)]
            record.reads(flat)
            record.writes(*made)
        for table, new in zip(tables, made, strict=True):
            table[part].copy_(new)

    def widened(self, record: OpRecord, tables: list[Tensor], part: slice) -> Tensor:
        """A range of tokens as numbers (tokens, width); plain ones are not copied."""
        found = [table[part] for table in tables]
        if not self.stored.packs:
            return found[0]
        codes, scale, zero = (table[None, None] for table in found)
        bits, group = int(self.stored.bits), int(self.stored.group)
        wide = Store(codes, scale, zero, bits, group, "token").numbers()[0, 0].to(self.dtype)
        record.reads(*found)
        record.writes(wide)
        return wide
