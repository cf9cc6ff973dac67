"""What offloading techniques share: a cache in host memory, copied to the GPU layer by layer.

The copies of the next layer run beside the compute of this one, through two buffers. Which
tokens are copied, which are recomputed, and whether weights and hidden states move too, is what
the techniques built on this class say.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.engine.formats import Format
from kvsim.graph import Buffers, Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.base import Technique, layer_weights

ROW_OR_COLUMN = ("row", "column")
PACKED_GROUP = 64  # FlexGen, section 4.4: 4-bit groups of 64
pinned = partial(blocks.copy, kernel="copy")
FREE = "attn@-2"  # a buffer is free when attention two layers earlier has read it


@dataclass(frozen=True)
class HostCache(Technique):
    """Base of the offloading techniques; the hooks say what one of them does differently."""

    name: ClassVar[str]

    @property
    def stored(self) -> Format:
        """Format of the cache in host memory; it is widened to fp16 on the GPU."""
        return Format()

    @property
    def host_part(self) -> Number:
        """Share of the cached tokens that live in host memory."""
        return 1.0

    @property
    def streamed_weights(self) -> float:
        """Share of the weights that live in host memory."""
        return 0.0

    @property
    def streamed_states(self) -> float:
        """Share of the hidden states that live in host memory between layers."""
        return 0.0

    def recomputed(self, d: Deployment, p: Point, shape: LayerShape) -> Number:
        """Cached tokens whose keys and values the GPU recomputes from layer inputs. [tokens]"""
        return 0.0

    @property
    def exact(self) -> bool:
        """Moving numbers does not change them; packing does."""
        return self.stored.bits == 16

    def gpu_layers_of(self, d: Deployment) -> int:
        """Some runtimes never offload their first layers."""
        return d.stack.resident_layers

    def on_host(self, d: Deployment, p: Point, shape: LayerShape) -> Number:
        """Tokens per sequence whose cache is in host memory before this pass. [tokens]"""
        tokens = attention.cached(d, p, shape)
        if not d.stack.static_cache:
            tokens = np.maximum(tokens - p.new, 0.0)
        return self.host_part * tokens

    def load(self, d: Deployment, p: Point, tokens: Number) -> Op:
        """Copy of ``tokens`` cached tokens per sequence to the GPU."""
        size = p.batch * tokens * d.shard.kv_width * self.stored.number
        return blocks.copy("load_kv", "h2d", size, launches=2, after=(FREE,), ahead=True)

    def fetch(self, d: Deployment, p: Point, shape: LayerShape) -> list[Op]:
        """Everything that brings the host's part of the cache into GPU memory."""
        tokens = self.on_host(d, p, shape)
        widened = blocks.quantise(d, p.batch * tokens, self.stored, "dequantise")
        return [self.load(d, p, tokens), *(replace(op, after=("load_kv",)) for op in widened)]

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Fetch, attend, and send the new tokens to the host."""
        if on_gpu:
            return attention.ops(d, p, shape)
        fetched = [] if p.prefill else self.fetch(d, p, shape)
        packed = blocks.quantise(d, self.host_part * p.tokens, self.stored)
        stored = p.batch * attention.cached(d, p, shape) if d.stack.store_layer else p.tokens
        size = self.host_part * stored * d.shard.kv_width * self.stored.number
        after = ("quantise",) if packed else ("qkv",)
        sync = d.stack.blocking_store and not p.prefill
        waits = ("load_kv",) if fetched else ()
        if d.stack.store_layer:  # on the compute stream, before attention
            waits = (*waits, "store_kv")
        return [
            *blocks.runtime(d, self.host_part),
            *fetched,
            *packed,
            blocks.copy("store_kv", "d2h", size, launches=2, after=after, sync=sync),
            *attention.ops(d, p, shape, after=waits),
        ]

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """The host's part packed, the GPU's part in fp16."""
        whole = attention.resident_kv(d, p, shape)
        if on_gpu:
            return {"gpu": {"kv": whole}}
        host = self.host_part * attention.resident_kv(d, p, shape, self.stored)
        return {"gpu": {"kv": (1 - self.host_part) * whole}, "host": {"kv": host}}

    def buffer(self, d: Deployment, p: Point, shape: LayerShape) -> Number:
        """GPU memory that one layer's copy from the host fills. [B]"""
        return self.host_part * attention.resident_kv(d, p, shape, self.stored)

    def scratch(self, d: Deployment, p: Point) -> Number:
        """A packed layer is widened to fp16 for attention."""
        whole = attention.resident_kv(d, p, LayerShape()) if self.stored.bits < 16 else 0.0
        return super().scratch(d, p) + (0.0 if p.prefill else whole)

    def once(self, d: Deployment, p: Point) -> Buffers:
        """Two buffers for copies from the host, and a column's hidden states."""
        shapes = [s for block, _ in d.shard.layout for s in block]
        widest = max(shapes, key=lambda s: s.window or np.inf)
        largest = max(layer_weights(d, s) for s in shapes)
        others = self.tiles() if self.tiles() > 1 else 0
        states = others * blocks.HALF * p.tokens * d.shard.hidden
        return {
            "gpu": {
                "kv buffers": 2 * self.buffer(d, p, widest),
                "weight buffers": 2 * self.streamed_weights * largest,
                "hidden states": (1 - self.streamed_states) * states,
            },
            "host": {"hidden states": self.streamed_states * states},
        }

    def layer(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """One layer for one tile; its weights arrive spread evenly over the tiles."""
        return [
            *self.moved(d, p, shape),
            *blocks.before_attention(d, p, ("load_weights",) if self.streamed_weights else ()),
            *self.attend(d, p, shape, on_gpu),
            *blocks.after_attention(d, p, shape),
        ]

    def moved(self, d: Deployment, p: Point, shape: LayerShape) -> list[Op]:
        """Copies of weights and hidden states, where those live on the host."""
        ops = []
        if self.streamed_weights:
            size = self.streamed_weights * layer_weights(d, shape) / self.tiles()
            ops.append(pinned("load_weights", "h2d", size, after=(FREE,), ahead=True))
        if self.streamed_states:
            states = self.streamed_states * blocks.HALF * p.tokens * d.shard.hidden
            ops.append(pinned("load_states", "h2d", states, ahead=True))
            ops.append(pinned("store_states", "d2h", states))
        return ops

    def weights(self, d: Deployment, shape: LayerShape) -> Buffers:
        """Weights on both sides."""
        size = d.stack.weight_copies * layer_weights(d, shape)
        host = self.streamed_weights * size
        return {"gpu": {"weights": size - host}, "host": {"weights": host}}


class Scheduled(HostCache):
    """Offloading by rows or by columns, packed on the host or not; subclasses hold the settings."""

    schedule: str
    bits: float
    parts: int

    @property
    def stored(self) -> Format:
        """Fp16, or packed on the host."""
        return Format() if self.bits == 16 else Format(self.bits, PACKED_GROUP)

    @property
    def streamed_weights(self) -> float:
        """By columns all weights live on the host."""
        return 1.0 if self.schedule == "column" else 0.0

    def tiles(self) -> int:
        """Only columns have parts."""
        return self.parts if self.schedule == "column" else 1
