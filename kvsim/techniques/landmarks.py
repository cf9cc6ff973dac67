"""ShadowKV's selection: chunks chosen by the mean of their keys."""

from dataclasses import dataclass

import numpy as np

from kvsim.engine import ops
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.chosen import Chosen
from kvsim.techniques.layers import LayerPass
from kvsim.techniques.settings import param


@dataclass(frozen=True)
class Landmarks(Chosen):
    """The best chunks by the mean of their keys; chunks that their mean describes badly stay.

    References
    ----------
    .. [1] H. Sun et al., "ShadowKV", ICML 2025, section 4.2, algorithms 1 and 2.
    """

    name = "landmarks"
    preset = False

    budget: Number = param(1024, "tokens attended to [tokens]", low=1, high=1e7)
    chunk: int = param(8, "tokens of a chunk", low=1, high=1e4)
    outliers: int = param(48, "chunks that always stay on the GPU", high=1e5)

    def tokens(self, at: LayerPass) -> Number:
        """Chosen chunks, outliers, and what was generated since the prompt."""
        return self.budget + self._always(at)

    def away(self, at: LayerPass) -> Number:
        """Chosen chunks alone: outliers, and what is generated, stay on the GPU."""
        return np.minimum(self.budget, at.kept)

    def _always(self, at: LayerPass) -> Number:
        generated = np.maximum(at.p.length - at.p.prompt, 0.0)
        return generated + np.minimum(self.outliers * self.chunk, at.p.prompt)

    def run(self) -> int:
        """Tokens that lie side by side and are fetched together: a chunk. [tokens]"""
        return self.chunk

    def _means(self, at: LayerPass, tokens: Number) -> Number:
        return ops.HALF * at.d.shard.k_width * at.p.batch * np.ceil(tokens / self.chunk)

    def estimate(self, at: LayerPass) -> list[Op]:
        """Queries against every landmark."""
        m, p = at.d.shard, at.p
        chunks = np.ceil(at.kept / self.chunk)
        flops = 2.0 * p.tokens * m.heads * m.head_dim * chunks
        moved = self._means(at, at.kept) + 4.0 * p.tokens * m.heads * chunks
        return [Op("landmarks", kernel="attention", flops=flops, bytes={"hbm": moved}, size=p.new)]

    def summarise(self, at: LayerPass) -> list[Op]:
        """Means of the prompt's chunks and how well each describes its own; later nothing."""
        if not at.p.prefill:
            return []
        moved = 2 * ops.HALF * at.d.shard.k_width * at.p.tokens + self._means(at, at.p.new)
        return [Op("chunk_means", bytes={"hbm": moved})]

    def ready(self, at: LayerPass) -> list[Op]:
        """Keys that are kept as a product are multiplied out for the chosen tokens."""
        return at.storage.restore(at, np.minimum(self.budget, at.kept))

    def resident(self, at: LayerPass) -> Buffers:
        """Landmarks and outlier chunks; values of generated tokens beside those on the host."""
        m, p = at.d.shard, at.p
        generated = np.maximum(p.length - p.prompt, 0.0)
        recent = at.placement.v_host * ops.HALF * m.v_width * p.batch * generated
        stay = ops.kv_bytes(m, p.batch * np.minimum(self.outliers * self.chunk, p.prompt))
        means = self._means(at, at.cached)
        return {"gpu": {"landmarks": means, "outlier chunks": stay, "generated values": recent}}
