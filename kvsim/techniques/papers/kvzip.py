"""KVzip: keeps the tokens that the model looks up while it repeats its context."""

import numpy as np

from kvsim.engine import ops
from kvsim.engine.buffers import layer_weights
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Op
from kvsim.techniques.axes.base import Launches, LayerPass
from kvsim.techniques.axes.selection import PromptCut

CHUNK = 2048  # tokens that are repeated, and scored, at a time


@frozen
class Kvzip(PromptCut):
    """Scores every token in a second pass over the context, in chunks.

    A token's score is the largest attention weight that it receives while the model repeats its
    chunk. Later questions do not affect it, so one eviction serves them all.

    References
    ----------
    .. [1] J.-H. Kim et al., "KVzip: query-agnostic KV cache compression with context
       reconstruction", NeurIPS 2025, sections 3.2 and 3.3: chunks of 2,048 tokens;
       https://arxiv.org/abs/2505.23416.
    """

    name = "kvzip"
    launches = Launches(
        prefill={"repeat": 20, "reconstruct": 8, "chunk_scores": 10, "select": 8, "compact": 5},
        decode={"attn": 1},
    )

    def resident(self, at: LayerPass) -> Buffers:
        """Return the memory of tokens that wait to be dropped in prefill. [B]

        No layer's cache is reduced before the whole model has repeated the prompt.
        """
        if not at.p.prefill:
            return {}
        dropped = np.maximum(at.p.prompt - np.asarray(self.budget), 0.0)
        waiting = ops.kv_bytes(at.d.shard, at.p.batch * dropped)
        return {"gpu": {"kv before the cut": waiting}}

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return no buffers: the prompt stays in the layers' caches until tokens are evicted."""
        return {}

    def score(self, at: LayerPass) -> list[Op]:
        """Return the ops of the second pass: a layer's products, attention, and chunk scores."""
        m, p, cut = at.d.shard, at.p, self.cut(at)
        chunk = np.minimum(CHUNK, p.prompt)
        chunks, rows = p.prompt / chunk, p.batch * p.prompt
        weights = layer_weights(at.d, at.shape.window_free)
        numbers = weights / at.d.weight_format.bytes(1, 1)
        own = p.batch * m.heads * p.prompt * (chunk + 1) / 2
        pairs = p.batch * m.heads * p.prompt**2 + own
        asked = 2 * ops.FP16_BYTES * rows * m.heads * m.head_dim  # queries, and outputs or weights
        read = ops.kv_bytes(m, rows) * (chunks + 1)
        scored = p.batch * m.heads * p.prompt * chunk
        keys = 2 * ops.FP16_BYTES * m.k_width * rows
        return [
            Op("repeat", kernel="gemm", flops=2.0 * numbers * rows * cut,
               bytes={"hbm": chunks * weights * cut}, size=p.batch * chunk),
            Op("reconstruct", kernel="prompt", flops=4.0 * pairs * m.head_dim * cut,
               bytes={"hbm": (read + asked) * cut}, size=p.prompt, columns=rows * m.heads),
            Op("chunk_scores", kernel="attention", flops=2.0 * (scored + own) * m.head_dim * cut,
               bytes={"hbm": (keys + asked / 2 + 2 * ops.SCORE * scored) * cut}, size=chunk),
        ]  # fmt: skip
