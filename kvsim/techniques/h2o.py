"""H2O: heavy hitters and recent tokens are kept, the rest evicted."""

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
from kvsim.techniques.eviction import compact, kept_cache, score_upkeep
from kvsim.techniques.settings import param


@dataclass(frozen=True)
class H2o(Technique):
    """Greedy eviction by accumulated attention scores.

    Scores of every query are accumulated in fp32 per head, so they have to leave the attention
    kernel; the lowest is evicted when a token comes in. Nothing is done where nothing is evicted.

    References
    ----------
    .. [1] Z. Zhang et al., "H2O: heavy-hitter oracle for efficient generative inference of large
       language models", NeurIPS 2023, algorithm 1.
    """

    name: ClassVar[str] = "h2o"

    heavy: Number = param(512, "heavy hitters kept [tokens]", high=1e7)
    recent: Number = param(512, "recent tokens kept [tokens]", low=1, high=1e7)

    @property
    def _budget(self) -> Number:
        return self.heavy + self.recent

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Attention over the kept tokens, then the upkeep of their scores."""
        limit = None if p.prefill else self._budget
        tokens = attention.cached(d, p, shape)
        seen = tokens if p.prefill else np.minimum(tokens, self._budget)
        ranked = seen * (p.max_length > self._budget)
        ops = [
            *attention.ops(d, p, shape, limit=limit, scored=True),
            *score_upkeep(d, p, ranked),
        ]
        if p.prefill:
            return [*ops, *compact(d, p, self._budget, scored=tokens)]
        # the token that leaves the recent ones is compared with the heavy hitters
        compared = (self.heavy + 1) * (p.length > self._budget) * (np.asarray(self.heavy) > 0)
        sums = 4.0 * p.batch * d.shard.heads * compared
        return [*ops, Op("lowest", kernel="topk", bytes={"hbm": sums})]

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """Kept tokens and their scores."""
        kept = kept_cache(d, p, shape, self._budget)
        sums = 4.0 * p.batch * d.shard.heads * np.minimum(self._budget, p.length)
        return {"gpu": {"kv": kept, "scores": sums * (p.max_length > self._budget)}}

    def once(self, d: Deployment, p: Point) -> Buffers:
        """One layer's whole cache while the prompt is read."""
        return blocks.prompt_kv(d, p)

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """A tenth, a fifth and two fifths of the longest context, half of it heavy."""
        half = np.ceil(np.array([0.05, 0.1, 0.2]) * (prompt + generate))[:, None, None]
        return [H2o(half, half)]
