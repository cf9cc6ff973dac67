"""Rows of one precision with channelwise keys and channel-separable values, set by set."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsim.validate.counter import OpRecord
from kvsim.validate.kernels.attention import View
from kvsim.validate.kernels.separable import channelwise, separable
from kvsim.validate.kernels.stores import Store
from kvsim.validate.parts.cells import CacheRoom


class PrecisionRows:
    """What one layer keeps at one precision.

    The first set of rows is of the prompt, the others of one window each.

    Parameters
    ----------
    first : rows of every sequence's prompt.
    more : rows of each window.
    windows : how many there may be.
    """

    def __init__(
        self, room: CacheRoom, bits: int, first: list[int], more: int, windows: int
    ) -> None:
        device = room.device
        self.bits, self.more, self._first = bits, more, first
        self.rows = max(first) + windows * more
        self._firsts = torch.tensor(first, device=device, dtype=torch.int32)
        sets = 1 + windows if self.rows else 0
        self._k_codes = room.zeros(self.rows, room.dim * bits // 8, torch.uint8)
        self._v_codes = torch.zeros_like(self._k_codes)
        shared = torch.zeros(1, room.heads, sets, room.dim, dtype=torch.float16, device=device)
        self._k_scale, self._k_zero, self._factor = (shared.clone() for _ in range(3))
        own = torch.zeros(room.sequences, 1, self.rows, 1, dtype=torch.float16, device=device)
        self._v_scale, self._v_zero = own, own.clone()

    def tensors(self) -> list[Tensor]:
        """Everything that stays in memory."""
        return [
            self._k_codes,
            self._v_codes,
            self._k_scale,
            self._k_zero,
            self._factor,
            self._v_scale,
            self._v_zero,
        ]

    def counts(self, windows: int) -> Tensor:
        """Rows in use of every sequence (batch,) after so many windows."""
        return self._firsts + windows * self.more

    def add(
        self,
        record: OpRecord,
        keys: Tensor,
        values: Tensor,
        order: Tensor,
        start: Tensor,
        time: int,
    ) -> Tensor:
        """Pack a part of some tokens; which one says ``order``, from ``start`` on.

        Parameters
        ----------
        keys, values : (batch, KV heads, tokens, head dim).
        order : (batch, KV heads, tokens), the tokens in the order of parts.
        start : (batch,) where this part begins in it.
        time : 0 for the prompt, then the number of the window.

        Returns
        -------
        How many tokens were packed of every sequence, (batch,).
        """
        counts = torch.full_like(self._firsts, self.more) if time else self._firsts
        most = self.more if time else max(self._first)
        if not most:
            return counts
        row = torch.arange(most, device=keys.device)
        valid = row < counts[:, None]
        place = (start[:, None] + row).clamp(max=order.shape[2] - 1)
        token = order.gather(2, place[:, None].expand(-1, order.shape[1], -1))
        index = token[..., None].expand(-1, -1, -1, keys.shape[3])
        part_keys, part_values = keys.gather(2, index), values.gather(2, index)
        made_k, made_v = (
            channelwise(part_keys, self.bits, valid),
            separable(part_values, self.bits, valid),
        )
        assert made_v.factor is not None
        begins = self.counts(time - 1) if time else torch.zeros_like(self._firsts)
        rows = begins[:, None] + row
        sequences = torch.arange(len(keys), device=keys.device)[:, None]
        for target, source in ((self._k_codes, made_k.codes), (self._v_codes, made_v.codes)):
            target[sequences, :, rows] = source.transpose(1, 2)
        for target, source in ((self._v_scale, made_v.scale), (self._v_zero, made_v.zero)):
            target[sequences, :, rows] = source[:, :1].transpose(1, 2)
        self._k_scale[:, :, time : time + 1] = made_k.scale[:1]
        self._k_zero[:, :, time : time + 1] = made_k.zero[:1]
        self._factor[:, :, time : time + 1] = made_v.factor[:1]
        record.reads(part_keys, part_values)
        record.writes(made_k.codes, made_v.codes, made_v.scale[:, :1], made_v.zero[:, :1])
        record.writes(made_k.scale[:1], made_k.zero[:1], made_v.factor[:1])
        return counts

    def view(
        self, windows: int, fresh: int = 0, keys: Tensor | None = None, values: Tensor | None = None
    ) -> View:
        """These rows as attention finds them, and the window's ``keys`` and ``values`` behind."""
        counts = self.counts(windows)
        if not self.rows:
            return View(counts + fresh, k_tail=keys, v_tail=values)
        batch, heads, _, _ = self._k_codes.shape
        group = max(self.more, 1)
        scale, zero, factor = (
            t.expand(batch, -1, -1, -1) for t in (self._k_scale, self._k_zero, self._factor)
        )
        packed_keys = Store(
            self._k_codes, scale, zero, self.bits, group, "channel", first=self._firsts
        )
        packed_values = Store(
            self._v_codes,
            self._v_scale.expand(-1, heads, -1, -1),
            self._v_zero.expand(-1, heads, -1, -1),
            self.bits,
            factor.shape[3],
            "token",
            factor=factor,
            first=self._firsts,
            factor_group=group,
        )
        return View(counts + fresh, packed_keys, packed_values, counts, counts, keys, values)

    def read(self, windows: int) -> Iterator[Tensor]:
        """What attention reads of them; tables of channels once for the batch."""
        for i, count in enumerate(n + windows * self.more for n in self._first):
            rows = (self._k_codes, self._v_codes, self._v_scale, self._v_zero)
            yield from (t[i, :, :count] for t in rows)
        for table in (self._k_scale, self._k_zero, self._factor):
            yield table[:, :, : windows + 1]
