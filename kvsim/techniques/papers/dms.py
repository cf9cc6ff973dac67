"""DMS: a model trained to drop tokens decides for each, and drops it a window later."""

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.axes.selection import Thinned
from kvsim.techniques.axes.settings import param


@frozen
class Dms(Thinned):
    """Keeps the latest tokens and one in ``ratio`` of the earlier ones, per head.

    One channel of each key decides whether its token is dropped; the model is trained for this.

    References
    ----------
    .. [1] A. Lancucki et al., "Inference-time hyper-scaling with KV cache compression", NeurIPS
       2025, section 3: eight times, a window of 256; https://arxiv.org/abs/2506.05345.
    """

    name = "dms"

    ratio: float = param(8, "of this many earlier tokens, one is kept", low=1, high=64, whole=False)
    window: int = param(256, "latest tokens, all of which are kept [tokens]", low=1, high=1e5)

    candidates = ({"ratio": 4}, {"ratio": 8})

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """Return that the model has to be retrained for the technique."""
        return ("the model must have been trained to drop tokens, as its authors' checkpoints are",)

    def mean_kept(self, tokens: Number) -> Number:
        """Return the window and one in ``ratio`` of the other tokens. [tokens]"""
        near = np.minimum(tokens, self.window)
        return near + (tokens - near) / self.ratio
