"""DMS: a model trained to drop tokens decides for each, and drops it a window later."""

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.axes.base import LayerPass, Selection
from kvsim.techniques.axes.settings import param


@frozen
class Dms(Selection):
    """Keeps the latest tokens and one in ``ratio`` of the earlier ones, per head.

    One number of each key tells whether its token goes; the model is trained for it.

    References
    ----------
    .. [1] A. Lancucki et al., "Inference-time hyper-scaling with KV cache compression", NeurIPS
       2025, section 3: eight times, a window of 256; https://arxiv.org/abs/2506.05345.
    """

    name = "dms"
    evicts = "always"
    per_head = True

    ratio: float = param(8, "of this many earlier tokens, one is kept", low=1, high=64, whole=False)
    window: int = param(256, "latest tokens, all of which are kept [tokens]", low=1, high=1e5)

    candidates = ({"ratio": 4}, {"ratio": 8})

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """Nothing is dropped well by a model that was not trained to."""
        return ("the model must have been trained to drop tokens, as its authors' checkpoints are",)

    def _kept(self, tokens: Number) -> Number:
        """Tokens that stay of so many. [tokens]"""
        near = np.minimum(tokens, self.window)
        return near + (tokens - near) / self.ratio

    def count_kept(self, at: LayerPass) -> Number:
        """The mean over heads."""
        return self._kept(at.cached)

    def count_kept_prompt(self, at: LayerPass) -> Number:
        """The mean over heads."""
        return self._kept(at.p.length)

    def limit(self, at: LayerPass) -> Number:
        """The mean over heads. [tokens]"""
        return self._kept(at.cached)

    def complete(self, at: LayerPass) -> list[Op]:
        """What stays of the prompt is gathered; later a token takes a dropped one's slot."""
        if not at.p.prefill:
            return []
        dropped = np.asarray(at.p.length) > self._kept(at.p.length)
        kept = ops.kv_bytes(at.d.shard, at.p.batch * self._kept(at.p.length)) * dropped
        return [Op("compact", kernel="gather", bytes={"hbm": 2 * kept})]

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """One layer's whole cache while the prompt is read."""
        return ops.prompt_kv(at.d, at.p)
