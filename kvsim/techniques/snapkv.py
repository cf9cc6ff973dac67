"""SnapKV: the prompt is cut to the tokens its last queries attend to."""

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


def observe(d: Deployment, p: Point, window: Number, budget: Number) -> Op:
    """Scores of the prompt's last queries over all its keys, where any is dropped."""
    m = d.shard
    evicts = (p.prompt > np.asarray(budget)).astype(float)
    asking = np.minimum(window, p.prompt)
    pairs = asking * p.prompt * evicts
    width = m.k_width / m.cached_heads
    keys = blocks.HALF * p.batch * m.k_width * p.prompt * evicts
    queries = blocks.HALF * p.batch * m.heads * width * asking * evicts
    scores = 2 * blocks.SCORE * p.batch * m.heads * pairs  # softmax, then pooling over queries
    flops = 2.0 * p.batch * m.heads * width * pairs
    return Op("observe", kernel="attention", flops=flops, bytes={"hbm": keys + queries + scores})


def kept_tokens(p: Point, budget: Number) -> Number:
    """The kept part of the prompt and everything generated since. [tokens]"""
    generated = np.maximum(p.length - p.prompt, 0.0)
    return np.minimum(p.prompt, budget) + generated


@dataclass(frozen=True)
class Snapkv(Technique):
    """Prompt compression by an observation window; generated tokens are all kept.

    References
    ----------
    .. [1] Y. Li et al., "SnapKV: LLM knows what you are looking for before generation",
       NeurIPS 2024, section 4.
    """

    name: ClassVar[str] = "snapkv"

    budget: Number = param(1024, "prompt tokens kept [tokens]", low=1, high=1e7)
    window: int = param(32, "observing queries [tokens]", low=1, high=1e5)

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Full attention in prefill, then attention over what is kept."""
        if p.prefill:
            return [
                *attention.ops(d, p, shape),
                observe(d, p, self.window, self.budget),
                *compact(d, p, self.budget, scored=p.prompt),
            ]
        return attention.ops(d, p, shape, limit=kept_tokens(p, self.budget))

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """What is kept."""
        return {"gpu": {"kv": kept_cache(d, p, shape, kept_tokens(p, self.budget))}}

    def once(self, d: Deployment, p: Point) -> Buffers:
        """One layer's whole cache while the prompt is read."""
        return blocks.prompt_kv(d, p)

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """An eighth, a quarter and a half of the prompt."""
        part = np.ceil(np.array([0.125, 0.25, 0.5]) * prompt)[:, None, None]
        return [Snapkv(part)]
