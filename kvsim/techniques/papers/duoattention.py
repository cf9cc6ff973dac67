"""DuoAttention: retrieval heads keep everything, streaming heads sinks and a window."""

from dataclasses import replace

import numpy as np

from kvsim.engine import attention
from kvsim.frozen import frozen
from kvsim.graph import Number, Op
from kvsim.techniques.axes.base import Launches, LayerPass
from kvsim.techniques.axes.selection import Thinned
from kvsim.techniques.axes.settings import param


@frozen
class Duoattention(Thinned):
    """Keeps the whole context in some KV heads and a sliding window in the others.

    A share of each layer's KV heads are retrieval heads; the others stream, in prefill too.

    Tokens kept and read are means over the heads of a layer.

    References
    ----------
    .. [1] G. Xiao et al., "DuoAttention: efficient long-context LLM inference with retrieval and
       streaming heads", ICLR 2025, sections 2.3 and 3.1: half of the heads of grouped-query
       models, a quarter of those of multi-head ones; 64 sinks and 256 recent tokens.
    """

    name = "duoattention"
    launches = Launches(prefill={"attn": 22, "compact": 8}, decode={"attn": 12})

    retrieval: Number = param(0.5, "share of retrieval heads", high=1, whole=False)
    sink: Number = param(64, "first tokens kept by streaming heads [tokens]", high=1e7)
    recent: Number = param(256, "recent tokens kept by streaming heads [tokens]", low=1, high=1e7)

    def mean_kept(self, tokens: Number) -> Number:
        """Everything in retrieval heads, sinks and a window in the others."""
        streamed = np.minimum(tokens, self.sink + self.recent)
        return self.retrieval * tokens + (1 - self.retrieval) * streamed

    def attend(self, at: LayerPass) -> list[Op]:
        """In prefill streaming heads compute their window's scores alone."""
        return self._limit_attention(at, super().attend(at))

    def borrow(self, at: LayerPass) -> list[Op]:
        """So they do in layers that attend to an earlier one's cache."""
        return self._limit_attention(at, super().borrow(at))

    def _limit_attention(self, at: LayerPass, found: list[Op]) -> list[Op]:
        if not at.p.prefill:
            return found
        whole = attention.query_key_pairs(at.d, at.p, None)
        near = attention.query_key_pairs(at.d, at.p, self.sink + self.recent)
        share = self.retrieval + (1 - self.retrieval) * near / np.maximum(whole, 1.0)
        return [replace(op, flops=op.flops * share) if op.name == "attn" else op for op in found]
