"""FlexPrefill: every head's part of a prompt's attention follows from its own scores."""

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Number, Op
from kvsim.techniques.axes.base import Launches, LayerPass
from kvsim.techniques.axes.selection import SparsePrompt, block_density
from kvsim.techniques.axes.settings import param


@frozen
class Flexprefill(SparsePrompt):
    """Chooses blocks, or columns and diagonals, of attention per head from the last queries.

    References
    ----------
    .. [1] X. Lai et al., "FlexPrefill: a context-aware sparse attention mechanism for efficient
       long-sequence inference", ICLR 2025, section 4, algorithms 1 to 4: blocks of 128; the share
       at a cumulated weight of 0.95 depends on the text; https://arxiv.org/abs/2502.20766.
    """

    name = "flexprefill"
    launches = Launches(prefill={"last_block": 97, "rank_blocks": 9})

    block: int = param(128, "tokens per block", low=8, high=1024)
    share: float = param(
        0.2, "share of query-key pairs that are computed", low=0.001, high=1, whole=False
    )

    def density(self, at: LayerPass) -> Number:
        """Return the share of causal pairs in the chosen blocks: a setting, as texts differ."""
        return block_density(at, self.block, self.share)

    def estimate(self, at: LayerPass) -> list[Op]:
        """Return the ops that score keys by the last block's queries, and blocks by their means."""
        m, p = at.d.shard, at.p
        asking = np.minimum(self.block, p.new)
        pairs = p.batch * m.heads * asking * p.length
        rows, columns = np.ceil(p.new / self.block), np.ceil(p.length / self.block)
        blocks, ends = p.batch * m.heads * rows * columns, p.batch * m.heads * columns
        width = m.k_width / m.cached_heads
        asked = m.heads * width * (asking + p.new)
        read = ops.FP16_BYTES * p.batch * (2 * m.k_width * p.length + asked)
        return [
            Op("last_block", kernel="attention", flops=2.0 * width * (pairs + blocks + ends),
               bytes={"hbm": read + 2 * ops.SCORE * (pairs + blocks)}, size=asking),
            ops.top_k("rank_blocks", blocks),
        ]  # fmt: skip
