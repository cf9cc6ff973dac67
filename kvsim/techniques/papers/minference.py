"""MInference: a prompt's queries attend along the lines and columns that matter to each head."""

import numpy as np

from kvsim.engine import attention, ops
from kvsim.frozen import frozen
from kvsim.graph import Number, Op
from kvsim.techniques.axes.base import Launches, LayerPass
from kvsim.techniques.axes.selection import SparsePrompt
from kvsim.techniques.axes.settings import param


@frozen
class Minference(SparsePrompt):
    """Computes attention only on columns and diagonals found from the last queries.

    References
    ----------
    .. [1] H. Jiang et al., "MInference 1.0: accelerating pre-filling for long-context LLMs via
       dynamic sparse attention", NeurIPS 2024, section 3.2, algorithm 1: 64 queries, 1,000
       columns and 6,096 diagonals as released; https://arxiv.org/abs/2407.02490.
    """

    name = "minference"
    launches = Launches(prefill={"find_lines": 18, "rank_lines": 5, "attn": 18})

    vertical: int = param(1000, "columns that every query attends to [tokens]", low=1, high=1e6)
    slash: int = param(6096, "diagonals that every query attends to [tokens]", low=1, high=1e6)
    window: int = param(64, "last queries used to find them [tokens]", low=1, high=1e4)

    def density(self, at: LayerPass) -> Number:
        """Return the share of causal pairs on the chosen columns and diagonals, without overlap."""
        whole = attention.query_key_pairs(at.d, at.p, None)
        near = attention.query_key_pairs(at.d, at.p, float(self.vertical + self.slash))
        return near / np.maximum(whole, 1.0)

    def estimate(self, at: LayerPass) -> list[Op]:
        """Return the ops that score keys by the last queries, and rank columns and diagonals."""
        m, p = at.d.shard, at.p
        asking = np.minimum(self.window, p.new)
        pairs = p.batch * m.heads * asking * p.length
        width = m.k_width / m.cached_heads
        read = ops.FP16_BYTES * p.batch * (m.k_width * p.length + m.heads * width * asking)
        ranked = p.batch * m.heads * 2.0 * p.length
        return [
            Op("find_lines", kernel="attention", flops=2.0 * width * pairs,
               bytes={"hbm": read + 2 * ops.SCORE * pairs}, size=asking),
            ops.top_k("rank_lines", ranked),
        ]  # fmt: skip
