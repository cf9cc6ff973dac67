"""StreamingLLM: attention sinks and a window of recent tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.graph import Buffers, Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.base import Technique
from kvsim.techniques.eviction import compact, kept_cache
from kvsim.techniques.settings import param


@dataclass(frozen=True)
class Streamingllm(Technique):
    """The first tokens and the latest ones are kept; positions count within the cache.

    References
    ----------
    .. [1] G. Xiao et al., "Efficient streaming language models with attention sinks", ICLR 2024,
       section 3.2.
    """

    name: ClassVar[str] = "streamingllm"

    sink: Number = param(4, "first tokens kept [tokens]", high=1e7)
    recent: Number = param(1020, "recent tokens kept [tokens]", low=1, high=1e7)

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Attention over what is kept; the prompt is read with full attention."""
        budget = self.sink + self.recent
        if p.prefill:
            return [*attention.ops(d, p, shape), *compact(d, p, budget, scored=0.0)]
        return [self._turn(d, p), *attention.ops(d, p, shape, limit=budget)]

    def _turn(self, d: Deployment, p: Point) -> Op:
        """Sinks' keys move along with the window: one kernel per step for those of all layers."""
        moved = 2 * self._sink_keys(d, p.batch) * (np.asarray(p.length) > self.sink + self.recent)
        return Op("turn", bytes={"hbm": moved}, launches=1.0 / d.model.layers)

    def _sink_keys(self, d: Deployment, batch: Number) -> Number:
        """One layer's keys of the sinks; learned positions do not move. [B]"""
        m = d.shard
        return blocks.HALF * m.k_width * batch * self.sink * (not m.learned_positions)

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """Sinks and window; sinks' keys once more, as they were before they moved along.

        Without them, turning the sinks at every step would round them again and again.
        """
        budget = self.sink + self.recent
        sinks = self._sink_keys(d, p.batch) * (np.asarray(p.max_length) > budget)
        return {"gpu": {"kv": kept_cache(d, p, shape, budget), "sink keys": sinks}}

    def once(self, d: Deployment, p: Point) -> Buffers:
        """One layer's whole cache while the prompt is read."""
        return blocks.prompt_kv(d, p)

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """An eighth, a quarter and a half of the longest context."""
        part = np.ceil(np.array([0.125, 0.25, 0.5]) * (prompt + generate))[:, None, None]
        return [Streamingllm(4, part)]
