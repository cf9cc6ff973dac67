"""ShadowKV's selection: chunks chosen by the mean of their keys."""

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.chosen import Chosen
from kvsim.techniques.layers import LayerPass
from kvsim.techniques.settings import param


@frozen
class Landmarks(Chosen):
    """The best chunks by the mean of their keys; chunks that their mean describes badly stay.

    References
    ----------
    .. [1] H. Sun et al., "ShadowKV", ICML 2025, section 4.2, algorithms 1 and 2.
    """

    name = "landmarks"
    preset = False

    budget: Number = param(1024, "tokens attended to [tokens]", low=1, high=1e7, share=True)
    chunk: int = param(8, "tokens of a chunk", low=1, high=1e4)
    outliers: int = param(48, "chunks that always stay on the GPU", high=1e5)

    def tokens(self, at: LayerPass) -> Number:
        """Chosen chunks, outliers, and what was generated since the prompt."""
        return self.away(at) + self._stay(_prompt(at)) + _generated(at)

    def away(self, at: LayerPass) -> Number:
        """Whole chunks within the budget: outliers, and what is generated, stay on the GPU."""
        most = np.maximum(np.floor(self.budget / self.chunk), 1.0)
        outliers = np.minimum(self.outliers, self.pages(at))
        return self.chunk * np.minimum(most, self.pages(at) - outliers)

    def run(self) -> int:
        """Tokens that lie side by side and are fetched together: a chunk. [tokens]"""
        return self.chunk

    def pages(self, at: LayerPass) -> Number:
        """Chunks of the prompt."""
        return np.ceil(_prompt(at) / self.chunk)

    def _stay(self, tokens: Number) -> Number:
        """Those of so many tokens of the prompt that are outliers. [tokens]"""
        return self.chunk * np.minimum(self.outliers, np.ceil(tokens / self.chunk))

    def _means(self, at: LayerPass, tokens: Number) -> Number:
        return ops.HALF * at.d.shard.k_width * at.p.batch * np.ceil(tokens / self.chunk)

    def estimate(self, at: LayerPass) -> list[Op]:
        """Queries against every landmark; scores are written, then compared."""
        m, p = at.d.shard, at.p
        flops = 2.0 * p.tokens * m.heads * m.head_dim * self.pages(at)
        asked = ops.HALF * p.tokens * m.heads * m.head_dim
        moved = self._means(at, _prompt(at)) + asked + 4.0 * p.tokens * m.heads * self.pages(at)
        return [Op("landmarks", kernel="attention", flops=flops, bytes={"hbm": moved}, size=p.new)]

    def summarise(self, at: LayerPass) -> list[Op]:
        """Means of the prompt's chunks, how well each describes its own, and copies of outliers."""
        m, p = at.d.shard, at.p
        if not p.prefill:
            return []
        moved = 2 * ops.HALF * m.k_width * p.tokens + self._means(at, p.new)
        copied = 2 * ops.kv_bytes(m, p.batch * self._stay(p.new))
        return [Op("chunk_means", bytes={"hbm": moved + copied})]

    def ready(self, at: LayerPass) -> list[Op]:
        """Keys that are kept as a product are multiplied out for the chosen tokens."""
        return at.storage.restore(at, self.away(at))

    def resident(self, at: LayerPass) -> Buffers:
        """Landmarks and outlier chunks; values of generated tokens beside those on the host."""
        m, p, prompt = at.d.shard, at.p, _prompt(at)
        recent = at.placement.v_host * ops.HALF * m.v_width * p.batch * _generated(at)
        which = at.d.stack.selection.index_bytes * p.batch * m.cached_heads
        stay = self._stay(prompt)
        outliers = ops.kv_bytes(m, p.batch * stay) + which * stay / self.chunk
        means = self._means(at, prompt)
        return {"gpu": {"landmarks": means, "outlier chunks": outliers, "generated values": recent}}


def _prompt(at: LayerPass) -> Number:
    """Cached tokens of the prompt. [tokens]"""
    return np.minimum(at.kept, at.p.prompt)


def _generated(at: LayerPass) -> Number:
    """Tokens since the prompt, this pass's included. [tokens]"""
    return np.maximum(at.p.length - at.p.prompt, 0.0)
