"""Quest: pages of the cache chosen by bounds on their keys, for every query."""

from bisect import bisect_left

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Launches, LayerPass, Selection
from kvsim.techniques.axes.selection import Chosen
from kvsim.techniques.axes.settings import Budget, param


@frozen
class Quest(Chosen):
    """Reads only the pages whose key bounds match the query; drops nothing.

    The minimum and maximum of a page's keys, per channel, bound its scores. The first layers are
    dense; each KV head chooses its own pages.

    References
    ----------
    .. [1] J. Tang et al., "Quest: query-aware sparsity for efficient long-context LLM inference",
       ICML 2024, section 3, algorithm 1; pages of 16, two dense layers.
    """

    name = "quest"
    launches = Launches(
        prefill={"page_bounds": 6}, decode={"attn": 9, "page_bounds": 12, "bounds": 5, "topk": 9}
    )

    budget: Number = param(1024, "tokens attended to [tokens]", low=1, high=1e7, share=True)
    page: int = param(16, "tokens per page", low=1, high=1e4)
    dense: int = param(2, "first layers that attend to everything", high=1000)

    candidates = ({"budget": Budget((0.0625, 0.125, 0.25), least=16)},)  # a page at least

    def boundaries(self, deployment: Deployment) -> tuple[int, ...]:
        """Return the first sparse layer."""
        caches = deployment.model.caches
        return caches[self.dense : self.dense + 1] if self.dense else ()

    def for_layer(self, index: int, deployment: Deployment) -> Selection:  # type: ignore[override]
        """Return the selection of one layer; the first layers read all tokens."""
        return self if bisect_left(deployment.model.caches, index) >= self.dense else Selection()

    def tokens(self, at: LayerPass) -> Number:
        """Return the tokens read per KV head: whole pages within the budget. [tokens]"""
        return np.maximum(np.floor(self.budget / self.page), 1.0) * self.page

    def page_tokens(self) -> int:
        """Return the tokens of a page, which are stored and read together. [tokens]"""
        return self.page

    def _bounds(self, at: LayerPass, tokens: Number) -> Number:
        """Return the size of the bounds of some tokens' pages: two keys per page. [B]"""
        return 2 * ops.FP16_BYTES * at.d.shard.k_width * at.p.batch * np.ceil(tokens / self.page)

    def estimate(self, at: LayerPass) -> list[Op]:
        """Return the op that scores every page by its bounds.

        The score is the sum over channels of the larger product of the query with the two bounds.
        """
        m, p = at.d.shard, at.p
        pages = np.ceil(at.kept_tokens / self.page)
        flops = 4.0 * p.tokens * m.heads * m.head_dim * pages
        scores = 2 * ops.FP16_BYTES * p.tokens * m.heads * pages  # written, then compared
        moved = (
            self._bounds(at, at.kept_tokens)
            + ops.FP16_BYTES * p.tokens * m.heads * m.head_dim
            + scores
        )
        return [Op("bounds", kernel="attention", flops=flops, bytes={"hbm": moved}, size=p.new)]

    def summarise(self, at: LayerPass) -> list[Op]:
        """Return the op that finds the bounds of new pages; in decoding it updates one page."""
        m, p = at.d.shard, at.p
        read = ops.FP16_BYTES * m.k_width * p.tokens
        written = self._bounds(at, p.new if p.prefill else 1.0)
        old = 0.0 if p.prefill else written
        return [Op("page_bounds", bytes={"hbm": read + old + written})]

    def resident(self, at: LayerPass) -> Buffers:
        """Return the memory of the bounds of all pages. [B]"""
        return {"gpu": {"page bounds": self._bounds(at, at.cached)}}
