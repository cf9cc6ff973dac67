"""KCache: keys on the GPU, values in host memory, the best N fetched for every query."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.graph import Buffers, Channel, Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.base import Technique
from kvsim.techniques.settings import param


@dataclass(frozen=True)
class Kcache(Technique):
    """Top-N attention over values in host memory, per batch entry and query head.

    Nothing hides the fetch: scores, selection, copy and weighted sum follow one another.

    References
    ----------
    .. [1] Q. He and Z. Wu, "Efficient LLM inference with KCache", 2024, section 3, table 1.
    """

    name: ClassVar[str] = "kcache"

    n: Number = param(128, "values fetched per query head", low=1, high=1e7)
    gpu_layers: int = param(0, "first layers whose values stay on the GPU", high=1000)

    def refuses(self, d: Deployment) -> str:
        """A latent cache has no separate values."""
        return "keys and values share one latent (MLA)" if d.shard.latent else ""

    def gpu_layers_of(self, d: Deployment) -> int:
        """As set."""
        return self.gpu_layers

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Scores over all keys, then the values of the best N."""
        m = d.shard
        if p.prefill:
            values = 0.0 if on_gpu else blocks.HALF * m.v_width * p.tokens
            store = blocks.copy("store_v", "d2h", values, after=("qkv",))
            return [store, *attention.ops(d, p, shape)]
        length = attention.cached(d, p, shape)
        chosen = np.minimum(self.n, length)
        scores = p.tokens * m.heads * length
        rows = p.batch * np.minimum(p.new * m.heads * chosen, m.kv_heads * length)
        size = blocks.HALF * rows * m.head_dim
        weights = blocks.HALF * p.tokens * m.heads * chosen
        if on_gpu:
            shared = blocks.HALF * p.batch * m.v_width * chosen  # if a group chose alike
            more = size - shared + weights
            select = blocks.top_k("topk", scores)
            return [*attention.ops(d, p, shape, values=chosen, extra_bytes=more), select]
        flops = 2.0 * p.tokens * m.heads * m.head_dim * chosen
        out = blocks.HALF * p.tokens * m.heads * m.head_dim
        without = blocks.HALF * m.v_width * p.tokens + out  # no values are written, nor an output
        weighted: dict[Channel, Number] = {"hbm": size + weights + out}
        sync = d.stack.gather_sync
        return [
            *blocks.runtime(d),
            *attention.ops(d, p, shape, name="scores", values=0.0, extra_bytes=-without),
            blocks.top_k("topk", scores, sync=sync),
            blocks.copy("fetch_v", "h2d", size, rows=rows, after=("topk",)),
            blocks.copy("store_v", "d2h", blocks.HALF * m.v_width * p.tokens, after=("qkv",)),
            Op("attn", "gpu", "attention", flops, weighted, after=("fetch_v",)),
        ]

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """Keys on the GPU, values on the host but for the first layers."""
        whole, m = attention.resident_kv(d, p, shape), d.shard
        values = whole * m.v_width / m.kv_width
        if on_gpu:
            return {"gpu": {"keys": whole - values, "values": values}}
        return {"gpu": {"keys": whole - values}, "host": {"values": values}}

    def once(self, d: Deployment, p: Point) -> Buffers:
        """Fetched values and their indices, or a layer's values on their way out in prefill."""
        m = d.shard
        if self.gpu_layers >= m.layers:
            return {}
        if p.prefill:
            return {"gpu": {"value buffers": 2 * blocks.HALF * m.v_width * p.tokens}}
        rows = p.tokens * m.heads * np.minimum(self.n, p.max_length)
        row = blocks.HALF * m.head_dim + d.stack.index_bytes
        return {"gpu": {"value buffers": rows * row}}

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """The paper's N, with and without one layer on the GPU."""
        counts = np.array([32.0, 64.0, 128.0, 256.0])[:, None, None]
        return [Kcache(counts, layers) for layers in (0, 1)]
