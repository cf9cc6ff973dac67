"""Quest: pages chosen by bounds on their keys."""

import torch
from torch import Tensor

from kvsim.techniques.quest import Quest as Settings
from kvsim.validate.impl.base import Resident, SmallRun
from kvsim.validate.impl.cells import Spot
from kvsim.validate.impl.selecting import Selecting, Where
from kvsim.validate.model.attention import Pass, attend
from kvsim.validate.tally import Marks


class Quest(Selecting):
    """Every KV head attends to its best pages, of which the newest is always one.

    A page's least and greatest key bound the product of any of its keys with a query, channel by
    channel; heads that share a KV head go by the greatest of their bounds.

    References
    ----------
    .. [1] J. Tang et al., "Quest", ICML 2024, section 3, algorithm 1.
    """

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Half of the prompt in pages of 4, all of it in the first layer."""
        return [f"budget={4 * max(1, run.prompt // 8)},page=4,dense=1"]

    def __init__(self, place: Where) -> None:
        settings = place.parts.selection
        assert isinstance(settings, Settings)
        self.page, self.pages = settings.page, max(int(settings.budget) // settings.page, 1)
        super().__init__(place)
        self.refuse_drafts()
        self.refuse_windows()
        every = -(-self.capacity // self.page)
        self.low, self.high = (self.rows.room.zeros(every) for _ in "lh")

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """The bounds follow when the prompt is whole."""
        out = super().prefill(queries, keys, values, step)
        if step.length == self.prompt:
            self._bound(self.rows.k.parts[0][:, :, : self.prompt])
        return out

    def filled(self, keys: Tensor, values: Tensor) -> None:
        """Bounds are those of keys that are not packed yet."""
        self._bound(keys)
        super().filled(keys, values)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Store the new token, bound the pages, attend to the best of them."""
        spot = Spot.behind(step)
        self.cells.append(keys, values, spot)
        self._widen(keys, spot)
        chosen = self._choose(queries, spot)
        if chosen.shape[2] * self.page >= spot.most:
            return self.cells.look(queries, spot, spot.visible(step))
        within = torch.arange(self.page, device=chosen.device)
        index = (chosen[..., None] * self.page + within).flatten(2)
        seen = (index <= step.positions[:, None])[:, :, None]
        index = index.clamp(max=self.capacity - 1)
        with self.tally.op("attn") as marks:
            k, v = (column.gathered(marks, index) for column in (self.rows.k, self.rows.v))
            out = attend(Marks(), queries, k, v, seen)
            marks.reads(queries)
            marks.writes(out)
        return out

    def buffers(self) -> Resident:
        """Two keys per page."""
        return {"gpu": {"page bounds": [self.low, self.high]}}

    def _bound(self, keys: Tensor) -> None:
        """Bounds of a prompt's pages; rows beyond a sequence's end count for none."""
        tokens = keys.shape[2]
        pages = -(-tokens // self.page)
        with self.tally.op("page_bounds") as marks:
            there = torch.arange(tokens, device=keys.device) < self._on_device[:, None]
            for bounds, none in ((self.low, torch.inf), (self.high, -torch.inf)):
                known = keys.masked_fill(~there[:, None, :, None], none)
                rest = (0, 0, 0, pages * self.page - tokens)
                paged = torch.nn.functional.pad(known, rest, value=none)
                paged = paged.view(*keys.shape[:2], pages, self.page, -1)
                bounds[:, :, :pages] = paged.amin(3) if none > 0 else paged.amax(3)
            marks.reads(keys)
            marks.writes(self.low[:, :, :pages], self.high[:, :, :pages])

    def _widen(self, keys: Tensor, spot: Spot) -> None:
        """The new token's key is within the bounds of its page."""
        with self.tally.op("page_bounds") as marks:
            pages, fresh = spot.slots // self.page, spot.slots % self.page == 0
            sequences = torch.arange(self.batch, device=keys.device)[:, None]
            new, first = keys.transpose(1, 2), fresh[..., None, None]
            marks.reads(keys)
            for bounds, joined in ((self.low, torch.minimum), (self.high, torch.maximum)):
                old = bounds[sequences, :, pages]
                bounds[sequences, :, pages] = torch.where(first, new, joined(old, new))
                marks.reads(old)
                marks.writes(new)

    def _choose(self, queries: Tensor, spot: Spot) -> Tensor:
        """The best pages of every KV head, (batch, KV heads, pages)."""
        pages = -(-spot.most // self.page)
        with self.tally.op("bounds") as marks:
            grouped = queries.reshape(self.batch, self.model.kv_heads, -1, queries.shape[3])
            positive, low, high = grouped.relu(), self.low[:, :, :pages], self.high[:, :, :pages]
            bounds = positive @ high.mT + (grouped - positive) @ low.mT
            marks.reads(queries, low, high, bounds)
            marks.writes(bounds)
        with self.tally.op("topk") as marks:
            best = bounds.amax(2)
            newest = (spot.slots[:, -1] // self.page)[:, None, None]
            page = torch.arange(pages, device=best.device)
            ranked = best.masked_fill(page > newest, -torch.inf)
            ranked = ranked.masked_fill(page == newest, torch.inf)
            marks.writes(best)
            marks.reads(best)
            return ranked.topk(min(self.pages, pages), dim=-1).indices.sort(-1).values
