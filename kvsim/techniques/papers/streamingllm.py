"""StreamingLLM: attention sinks and a window of recent tokens."""

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.axes.base import Launches, LayerPass
from kvsim.techniques.axes.selection import Bounded, compact
from kvsim.techniques.axes.settings import Budget, param


@frozen
class Streamingllm(Bounded):
    """Keeps the first tokens (attention sinks) and the latest ones.

    Positions are counted within the cache.

    References
    ----------
    .. [1] G. Xiao et al., "Efficient streaming language models with attention sinks", ICLR 2024,
       section 3.2.
    """

    name = "streamingllm"
    launches = Launches(prefill={"compact": 17}, decode={"turn": 5, "attn": 15})

    sink: Number = param(4, "first tokens kept [tokens]", high=1e7)
    recent: Number = param(1020, "recent tokens kept [tokens]", low=1, high=1e7, share=True)

    candidates = ({"sink": 4, "recent": Budget((0.125, 0.25, 0.5))},)

    @property
    def budget(self) -> Number:
        """Tokens kept at most."""
        return self.sink + self.recent

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the op that moves the sinks' keys with the window, one kernel for all layers."""
        evicts = np.asarray(at.p.length) > self.budget
        stored, _ = at.storage.number_bytes(at)
        moved = self._sink_keys(at) * (1 + stored / ops.FP16_BYTES) * evicts
        return [Op("turn", bytes={"hbm": moved}, launches=1.0 / at.d.model.layers)]

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the ops that cut the prompt after full attention; nothing in decoding."""
        return compact(at, self.budget, scored=0.0) if at.p.prefill else []

    def _sink_keys(self, at: LayerPass) -> Number:
        """One layer's keys of the sinks; learned positions do not move. [B]"""
        m = at.d.shard
        return ops.FP16_BYTES * m.k_width * at.p.batch * self.sink * (not m.learned_positions)

    def resident(self, at: LayerPass) -> Buffers:
        """Return the memory of the sinks' keys before rotary embedding. [B]

        Positions are applied to them anew at each step, so that rounding does not accumulate.
        """
        sinks = self._sink_keys(at) * (np.asarray(at.p.max_length) > self.budget)
        return {"gpu": {"sink keys": sinks}}
