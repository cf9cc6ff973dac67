"""Selections that read a part of a cache they keep whole, chosen once the query is known."""

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes import Selection
from kvsim.techniques.layers import LayerPass, Parts, attend


@frozen
class Chosen(Selection):
    """Base: an estimate of every page's relevance, the best pages, attention to them.

    What lives on the host is fetched after the choice, so that nothing hides the copy.
    """

    name = "chosen pages"
    chooses = True
    per_head = True

    def tokens(self, at: LayerPass) -> Number:
        """Tokens read per KV head. [tokens]"""
        raise NotImplementedError

    def away(self, at: LayerPass) -> Number:
        """Those of them that are fetched where they live on the host: by default all. [tokens]"""
        return np.minimum(self.tokens(at), at.kept)

    def run(self) -> int:
        """Tokens that lie together wherever one of them is chosen. [tokens]"""
        raise NotImplementedError

    def pages(self, at: LayerPass) -> Number:
        """Pages that are ranked: of every token kept."""
        return np.ceil(at.kept / self.run())

    def estimate(self, at: LayerPass) -> list[Op]:
        """Relevance of every page to the queries."""
        raise NotImplementedError

    def summarise(self, at: LayerPass) -> list[Op]:
        """What describes the pages of the tokens that the pass adds."""
        raise NotImplementedError

    def ready(self, at: LayerPass) -> list[Op]:
        """What remains to be done to the chosen tokens before attention."""
        return []

    def refuses(self, deployment: Deployment, beside: Parts) -> str:
        """Pages are read alone, on the GPU."""
        place, storage = beside.placement, beside.storage
        if deployment.shard.latent:
            return f"{self.name} compares pages by keys of heads, and a latent cache has none"
        if not storage.by_token:
            return f"{self.name} reads pages alone, and {storage.name} packs tokens together"
        if place.recomputes or np.any(place.on_cpu):
            return f"{self.name} chooses what it reads once the query is known, on the GPU"
        return ""

    def limit(self, at: LayerPass) -> Number:
        """Tokens that the query chooses. [tokens]"""
        return self.tokens(at)

    def attend(self, at: LayerPass) -> list[Op]:
        """Summaries of new pages; in decoding estimate, choice, fetch and attention."""
        storage, place, p = at.storage, at.placement, at.p
        new = [*storage.arrive(at), *place.store(at), *self.summarise(at)]
        if p.prefill:
            done = [*storage.after(at), *at.drafting.after_prompt(at)]
            return [*place.runtime(at), *new, *attend(at), *done]
        ranked = p.tokens * at.d.shard.cached_heads * self.pages(at)
        choice = ops.top_k("topk", ranked, sync=at.d.stack.selection.gather_sync)
        fetched = self._fetch(at)
        waits = ("fetch",) if fetched else ()
        return [
            *place.runtime(at), *new, *self.estimate(at), choice, *fetched, *self.ready(at),
            *attend(at, waits), *storage.after(at),
        ]  # fmt: skip

    def borrow(self, at: LayerPass) -> list[Op]:
        """Pages of the earlier layer's cache, by its summaries and this layer's queries."""
        kept = {op.name for op in self.summarise(at)} | {"quantise", "store_kv"}
        if at.p.prefill:
            return attend(at)
        return [op for op in self.attend(at) if op.name not in kept]

    def _fetch(self, at: LayerPass) -> list[Op]:
        """The host's share of the chosen pages."""
        k_share, v_share = at.placement.k_host, at.placement.v_host
        if not np.any(np.asarray(v_share) > 0):
            return []
        tokens = self.away(at)
        k, v = at.storage.moved(at, tokens)
        sides = (np.asarray(k_share) > 0) * 1.0 + 1.0
        rows = sides * at.p.batch * at.d.shard.cached_heads * v_share * tokens / self.run()
        return [ops.copy("fetch", "h2d", k_share * k + v_share * v, rows=rows, after=("topk",))]

    def once(self, at: LayerPass) -> Buffers:
        """Room for the fetched pages."""
        place = at.placement
        if not np.any(np.asarray(place.v_host) > 0):
            return {}
        if at.p.prefill:  # a layer's tokens on their way out
            k, v = at.storage.moved(at, at.p.new)
            return {"gpu": {"kv on the way out": 2 * (place.k_host * k + place.v_host * v)}}
        k, v = at.storage.moved(at, self.away(at))
        return {"gpu": {"fetched pages": place.k_host * k + place.v_host * v}}
