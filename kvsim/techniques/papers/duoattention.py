"""DuoAttention: retrieval heads keep everything, streaming heads sinks and a window."""

import numpy as np

from kvsim.engine import attention
from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.techniques.axes.base import Launches, LayerPass
from kvsim.techniques.axes.selection import Thinned
from kvsim.techniques.axes.settings import param


@frozen
class Duoattention(Thinned):
    """Keeps the whole context in some KV heads and a sliding window in the others.

    A share of each layer's KV heads are retrieval heads; the others are streaming heads with
    attention sinks and a window, also in prefill. Token counts are means over the heads of a layer.

    References
    ----------
    .. [1] G. Xiao et al., "DuoAttention: efficient long-context LLM inference with retrieval and
       streaming heads", ICLR 2025, sections 2.3 and 3.1: half of the heads of grouped-query
       models, a quarter of those of multi-head ones; 64 sinks and 256 recent tokens.
    """

    name = "duoattention"
    launches = Launches(prefill={"attn": 22, "compact": 9}, decode={"attn": 12})

    retrieval: Number = param(0.5, "share of retrieval heads", high=1, whole=False)
    sink: Number = param(64, "first tokens kept by streaming heads [tokens]", high=1e7)
    recent: Number = param(256, "recent tokens kept by streaming heads [tokens]", low=1, high=1e7)

    def mean_kept(self, tokens: Number) -> Number:
        """Return the tokens kept, averaged over retrieval and streaming heads. [tokens]"""
        streamed = np.minimum(tokens, self.sink + self.recent)
        return self.retrieval * tokens + (1 - self.retrieval) * streamed

    def density(self, at: LayerPass) -> Number:
        """Return the share of causal pairs in prefill: streaming heads compute a window only."""
        whole = attention.query_key_pairs(at.d, at.p, None)
        near = attention.query_key_pairs(at.d, at.p, self.sink + self.recent)
        return self.retrieval + (1 - self.retrieval) * near / np.maximum(whole, 1.0)
