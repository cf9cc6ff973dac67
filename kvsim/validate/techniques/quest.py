"""Quest: pages chosen by bounds on their keys."""

from dataclasses import replace

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.quest import Quest as Settings
from kvsim.validate.counter import OpRecord
from kvsim.validate.kernels.gather import rows_at
from kvsim.validate.model.attention import Pass, attend
from kvsim.validate.parts.reading import in_pages
from kvsim.validate.parts.rows import TokenRows
from kvsim.validate.parts.selection import LayerCache, LayerContext
from kvsim.validate.parts.store import Resident, SlotRange

SMALL_SETTINGS = ("budget={pages},page=4,dense=1",)  # all of the first layer


class Quest(LayerCache):
    """Cache in which each KV head attends to its best pages, including the newest.

    The minimum and maximum of a page's keys, per channel, bound their product with a query. For
    query heads that share a KV head, the largest bound counts.

    References
    ----------
    .. [1] J. Tang et al., "Quest", ICML 2024, section 3, algorithm 1.
    """

    replays = True

    def __init__(self, place: LayerContext) -> None:
        settings = place.settings(Settings)
        self.page = settings.page_tokens()
        super().__init__(place)
        self.refuse_drafts()
        self.refuse_windows()
        if self.rows.values_on_host:
            raise InputError(
                f"{settings.name}: its real implementation reads pages on the GPU; run it without "
                f"values on the host"
            )
        pages = -(-self.capacity // self.page)  # of the whole text
        self.low, self.high = (self.rows.room.zeros(pages) for _ in "lh")
        self.most = max(int(settings.budget) // self.page, 1)  # pages that a KV head reads

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Summarise the pages from unpacked keys, then store the prompt."""
        self._summarise(keys)
        super().store_prompt(keys, values)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Store the new token, rank the pages, attend to the best of them."""
        span = SlotRange.after_cached(step)
        if step.fixed:  # pages that are not there yet are ranked behind all others
            span = replace(span, room=self.kv.slots)
        self.kv.append(keys, values, span)
        self._update(keys, span)
        chosen = self._choose(queries, span)
        if chosen.shape[2] * self.page >= span.longest:
            return self.kv.attend(queries, span, span.visible(step))
        within = torch.arange(self.page, device=chosen.device)
        index = (chosen[..., None] * self.page + within).flatten(2)
        seen = (index <= step.positions[:, None])[:, :, None]
        index = index.clamp(max=self.capacity - 1)
        with self.counter.op("attn") as record:
            k, v = (self._gather(record, column, index) for column in (self.rows.k, self.rows.v))
            out = attend(OpRecord(), queries, k, v, seen)
            record.reads(queries).writes(out)
        return out

    def buffers(self) -> Resident:
        """Return each page's bounds: the smallest and the largest key value of every channel."""
        return {"gpu": {"page bounds": [self.low, self.high]}}

    def _gather(self, record: OpRecord, column: TokenRows, index: Tensor) -> Tensor:
        """Numbers of rows (batch, KV heads, n), which attention reads where they are."""
        parts = [rows_at(part, index) for part in column.parts]
        record.reads(*parts)
        return column.widened(parts)

    def _choose(self, queries: Tensor, span: SlotRange) -> Tensor:
        """Choose the best pages of every KV head, (batch, KV heads, pages)."""
        pages = -(-span.longest // self.page)
        grouped = queries.reshape(self.batch, self.model.kv_heads, -1, queries.shape[3])
        relevance = self._relevance(grouped, pages)
        with self.counter.op("topk") as record:
            best = relevance.amax(2)
            newest = (span.slots[:, -1] // self.page)[:, None, None]
            page = torch.arange(pages, device=best.device)
            ranked = best.masked_fill(page > newest, -torch.inf)
            ranked = ranked.masked_fill(page == newest, torch.inf)
            record.writes(best).reads(best)
            return ranked.topk(min(self.most, pages), dim=-1).indices.sort(-1).values

    def _summarise(self, keys: Tensor) -> None:
        """Compute the bounds of a prompt's pages."""
        with self.counter.op("page_bounds") as record:
            low, high = (in_pages(keys, self.page, n) for n in (torch.inf, -torch.inf))
            pages = low.shape[2]
            self.low[:, :, :pages], self.high[:, :, :pages] = low.amin(3), high.amax(3)
            record.reads(keys).writes(self.low[:, :, :pages], self.high[:, :, :pages])

    def _update(self, keys: Tensor, span: SlotRange) -> None:
        """Widen the bounds of the newest page to include the new token's key."""
        with self.counter.op("page_bounds") as record:
            pages, fresh = span.slots // self.page, span.slots % self.page == 0
            sequences = torch.arange(self.batch, device=keys.device)[:, None]
            new, first = keys.transpose(1, 2), fresh[..., None, None]
            record.reads(keys)
            for bounds, joined in ((self.low, torch.minimum), (self.high, torch.maximum)):
                old = bounds[sequences, :, pages]
                bounds[sequences, :, pages] = torch.where(first, new, joined(old, new))
                record.reads(old).writes(new)

    def _relevance(self, queries: Tensor, pages: int) -> Tensor:
        """Sum, over channels, the larger product of a query with the two bounds."""
        with self.counter.op("bounds") as record:
            positive, low, high = queries.relu(), self.low[:, :, :pages], self.high[:, :, :pages]
            bounds = positive @ high.mT + (queries - positive) @ low.mT
            record.reads(queries, low, high, bounds).writes(bounds)
        return bounds
