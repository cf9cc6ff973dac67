"""Quest: pages chosen by bounds on their keys."""

import torch
from torch import Tensor

from kvsim.techniques.papers.quest import Quest as Settings
from kvsim.validate.parts.reading import PagedCache, in_pages
from kvsim.validate.parts.selection import LayerContext
from kvsim.validate.parts.store import Resident, SlotRange

SMALL_SETTINGS = ("budget={pages},page=4,dense=1",)  # all of the first layer


class Quest(PagedCache):
    """A page's least and greatest key bound the product of any of its keys with a query.

    References
    ----------
    .. [1] J. Tang et al., "Quest", ICML 2024, section 3, algorithm 1.
    """

    replays = True

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        self.low, self.high = (self.rows.room.zeros(self.pages) for _ in "lh")

    @property
    def pages_read(self) -> int:
        """Whole pages within the budget."""
        assert isinstance(self.parts.selection, Settings)
        return max(int(self.parts.selection.budget) // self.page, 1)

    def summarise(self, keys: Tensor) -> None:
        """Bounds of a prompt's pages; rows beyond a sequence's end count for none."""
        with self.counter.op("page_bounds") as record:
            ends = self._on_device
            low, high = (in_pages(keys, ends, self.page, n) for n in (torch.inf, -torch.inf))
            pages = low.shape[2]
            self.low[:, :, :pages], self.high[:, :, :pages] = low.amin(3), high.amax(3)
            record.reads(keys)
            record.writes(self.low[:, :, :pages], self.high[:, :, :pages])

    def update(self, keys: Tensor, span: SlotRange) -> None:
        """The new token's key is within the bounds of its page."""
        with self.counter.op("page_bounds") as record:
            pages, fresh = span.slots // self.page, span.slots % self.page == 0
            sequences = torch.arange(self.batch, device=keys.device)[:, None]
            new, first = keys.transpose(1, 2), fresh[..., None, None]
            record.reads(keys)
            for bounds, joined in ((self.low, torch.minimum), (self.high, torch.maximum)):
                old = bounds[sequences, :, pages]
                bounds[sequences, :, pages] = torch.where(first, new, joined(old, new))
                record.reads(old)
                record.writes(new)

    def relevance(self, queries: Tensor, pages: int) -> Tensor:
        """Channel by channel the greater of a query's products with both bounds."""
        with self.counter.op("bounds") as record:
            positive, low, high = queries.relu(), self.low[:, :, :pages], self.high[:, :, :pages]
            bounds = positive @ high.mT + (queries - positive) @ low.mT
            record.reads(queries, low, high, bounds)
            record.writes(bounds)
        return bounds

    def buffers(self) -> Resident:
        """Two keys per page."""
        return {"gpu": {"page bounds": [self.low, self.high]}}
