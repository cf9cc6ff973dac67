"""KVPR: part of an offloaded cache is recomputed while the rest is still being copied."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.engine.roofline import channel_seconds, seconds
from kvsim.graph import Array, Buffers, Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.search import last_within
from kvsim.techniques.base import Technique
from kvsim.techniques.hostcache import FREE, ROW_OR_COLUMN, HostCache, Scheduled, pinned
from kvsim.techniques.settings import param


def optimal_split(context: Number, width: Number, link: Number, flops: Number) -> Number:
    """Tokens to recompute so that recomputing and copying end together, for MHA. [tokens]

    The crossing of 4 b l h^2 / flops and 4 b (s - l) h / link, at which both of the paper's
    objectives (with and without the time of the activations) are smallest.

    Parameters
    ----------
    context : cached tokens s. [tokens]
    width : hidden size h.
    link : rate of the host link. [B/s]
    flops : rate of the GPU. [FLOP/s]

    References
    ----------
    .. [1] C. Jiang et al., "KVPR", 2025, equations 8 to 11.
    """
    return context / (1.0 + link * width / flops)


@dataclass(frozen=True)
class Kvpr(Scheduled):
    """Offloading with partial recomputation of keys and values from stored layer inputs.

    References
    ----------
    .. [1] C. Jiang et al., "KVPR: efficient LLM inference with I/O-aware KV cache partial
       recomputation", ACL Findings 2025, section 3.
    """

    name: ClassVar[str] = "kvpr"

    split: Number | str = param("auto", "tokens recomputed", high=1e7, choices=("auto",))
    schedule: str = param("row", "order of layers and batch", choices=ROW_OR_COLUMN)
    bits: float = param(16, "bits per number on the host", choices=(4, 8, 16))
    parts: int = param(8, "parts of the batch by columns", low=1, high=1024)

    def recomputed(self, d: Deployment, p: Point, shape: LayerShape) -> Number:
        """The split as set, the runtime's fixed one, or the one that balances GPU and link."""
        limit: Number = np.floor(np.minimum(p.prompt, self.on_host(d, p, shape)))
        if not isinstance(self.split, str):
            given: Number = np.minimum(self.split, limit)
            return given
        if d.stack.split_prompt:
            fixed: Number = np.minimum(np.floor(d.stack.split_prompt * p.prompt), limit)
            return fixed
        balanced: Number = np.floor(d.stack.split_achieved * self._balance(d, p, shape, limit))
        return balanced

    def _balance(self, d: Deployment, p: Point, shape: LayerShape, limit: Number) -> Array:
        """The whole number of tokens that makes the longer of GPU and link time shortest.

        GPU time grows with the split and link time falls, so the best is at their crossing. Where
        an activation is no smaller than the keys and values it replaces, both grow: nothing is
        recomputed.
        """
        if self._activation(d) >= d.shard.kv_width:
            return np.zeros(np.broadcast_shapes(np.shape(p.batch), np.shape(limit)))
        surroundings = [
            *self.moved(d, p, shape),
            *blocks.before_attention(d, p),
            *attention.ops(d, p, shape),
            *blocks.after_attention(d, p, shape),
        ]
        around = _loads(surroundings, d)
        # the link also runs beside the head: its time is spread over the layers
        head, _, _ = _loads(list(blocks.head(d, p)), d)
        around = (around[0] + head / d.shard.layers / self.tiles(), *around[1:])

        def times(split: Array) -> tuple[Array, Array]:
            ops = self._fetch_split(d, p, shape, split)
            gpu, link, hbm = (a + b for a, b in zip(around, _loads(ops, d), strict=True))
            exposed = sum(seconds(o, d) for o in ops if o.kernel == "relay")
            gpu = gpu + (1 - d.stack.overlap) * exposed
            return np.asarray(np.maximum(gpu, hbm)), np.asarray(link)

        none = np.zeros(np.broadcast_shapes(np.shape(p.batch), np.shape(limit)))
        low = last_within(lambda split: np.subtract(*times(split)), none, none + limit)
        best, shortest = none, np.maximum(*times(none))  # no kernel at all may be best
        for split in (low, np.minimum(low + 1, limit)):
            longer = np.maximum(*times(split))
            best = np.where(longer < shortest, split, best)
            shortest = np.minimum(longer, shortest)
        return best

    def _activation(self, d: Deployment) -> float:
        """Numbers copied per recomputed token: the layer's input, which every shard needs."""
        return d.shard.hidden

    def fetch(self, d: Deployment, p: Point, shape: LayerShape) -> list[Op]:
        """Activations first, then the rest of the cache beside the recomputation."""
        return self._fetch_split(d, p, shape, self.recomputed(d, p, shape))

    def _fetch_split(self, d: Deployment, p: Point, shape: LayerShape, split: Number) -> list[Op]:
        m, stored = d.shard, self.stored
        states = p.batch * split * self._activation(d)
        rest = self.on_host(d, p, shape) - split
        matrix = (m.hidden, m.kv_width)
        product = blocks.gemm(d, "recompute", p.batch * split, matrix, after=("load_states",))
        wanted = np.asarray(split) > 0
        rotated = 0.0 if m.learned_positions else 2 * blocks.HALF * m.k_width * p.batch * split
        recompute = replace(product, bytes={"hbm": (product.bytes["hbm"] + rotated) * wanted})
        if d.stack.merge_passes:  # both parts are copied into one buffer
            moved = d.stack.merge_passes * blocks.kv_bytes(m, p.batch * split)
            moved = moved + 2 * blocks.kv_bytes(m, p.batch * rest) * wanted
        else:
            moved = 0.0
        joined = Op("merge", bytes={"hbm": moved}, after=("load_kv",))
        size = states * stored.number
        inputs = blocks.quantise(d, states / m.kv_width, stored, "dequantise_states")
        widened = blocks.quantise(d, p.batch * rest, stored, "dequantise")
        return [
            pinned("load_states", "h2d", size, after=(FREE,), ahead=True),
            self.load(d, p, rest),
            *(replace(op, after=("load_states",)) for op in inputs),
            recompute,
            *(replace(op, after=("load_kv",)) for op in widened),
            joined,
        ]

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """As offloading; prefill also stores the inputs that decoding will recompute from.

        Keys and values that every step recomputes never reach the host.
        """
        ops = super().attend(d, p, shape, on_gpu)
        if on_gpu or not p.prefill:
            return ops
        first, last = self._splits(d, p, shape)
        states = p.batch * last * self._activation(d)
        packed = blocks.quantise(d, states / d.shard.kv_width, self.stored, "quantise_states")
        spared = 1 - first / p.prompt
        stores = [op for op in ops if op.name == "store_kv"]
        after = ("quantise_states",) if packed else ("qkv",)
        return [
            *(op for op in ops if op.name != "store_kv"),
            *packed,
            *(replace(op, bytes={k: v * spared for k, v in op.bytes.items()}) for op in stores),
            pinned("store_states", "d2h", states * self.stored.number, after=after),
        ]

    def _splits(self, d: Deployment, p: Point, shape: LayerShape) -> tuple[Number, Number]:
        """Tokens recomputed in the first decoding step and in the last. [tokens]"""
        first = replace(p, context=p.prompt, new=1.0, prefill=False)
        last = replace(first, context=p.max_length - 1)
        return self.recomputed(d, first, shape), self.recomputed(d, last, shape)

    def resident(self, d: Deployment, p: Point) -> Buffers:
        """As every technique, but with the splits found once, not once per buffer."""
        part, shapes = self._part(p), {s for block, _ in d.shard.layout for s in block}
        found = {s: self._splits(d, part, s) for s in {*shapes, LayerShape()}}
        return _Settled(**self.settings, found=found).resident(d, p)

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """On the host the keys and values that some step loads, and the layer inputs."""
        whole = super().cache(d, p, shape, on_gpu)
        if on_gpu:
            return whole
        first, last = self._splits(d, p, shape)
        inputs = p.batch * last * self._activation(d) * self.stored.number
        loaded = whole["host"]["kv"] * (1 - first / attention.cached(d, p, shape))
        return {"gpu": whole["gpu"], "host": {"kv": loaded, "layer inputs": inputs}}

    def buffer(self, d: Deployment, p: Point, shape: LayerShape) -> Number:
        """A layer's loaded tokens and the inputs of the others.

        What is recomputed lands beside what was loaded, unless a pass joins both elsewhere.
        """
        _, split = self._splits(d, p, shape)
        tokens = attention.cached(d, p, shape)
        if d.stack.merge_passes:
            tokens = np.maximum(tokens - split, 0)
        numbers = tokens * d.shard.kv_width + split * self._activation(d)
        return self.stored.number * p.batch * numbers

    def scratch(self, d: Deployment, p: Point) -> Number:
        """One more layer in fp16: where both parts are joined, or of a packed cache.

        One packed layer is widened and recomputed while another is attended to. The update of a
        static cache fills the joined layer in prefill too.
        """
        merged = d.stack.merge_passes > 0
        own = super().scratch(d, p)
        unused = p.prefill and not (d.stack.static_cache and merged)
        if unused or not (merged or self.stored.bits < 16):
            return own
        shape = LayerShape()
        _, split = self._splits(d, p, shape)
        whole = blocks.kv_bytes(d.shard, p.batch * attention.cached(d, p, shape))
        return own + whole * (np.asarray(split) > 0)

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """Splits by sixteenths of the prompt, the balanced one, both schedules, and packed."""
        splits = np.floor(np.linspace(0, prompt, 17))[:, None, None]
        column = [Kvpr("auto", "column", bits) for bits in (16, 4)]
        return [Kvpr(splits), Kvpr(), Kvpr(bits=4), *column]

    def notes(self, d: Deployment, p: Point) -> tuple[str, ...]:
        """The split in use, and why it is 0 on grouped-query models."""
        m, shape = d.shard, d.shard.layout[0][0][0]
        if self._activation(d) < m.kv_width:
            tile = replace(p, batch=p.batch / self.tiles())
            split = float(np.ravel(self.recomputed(d, tile, shape))[0])
            cached = float(np.ravel(p.context)[0])
            rates = d.bandwidth["h2d"], d.flops("fp16")
            ideal = float(optimal_split(cached, m.hidden, *rates)) if m.queries_per_kv == 1 else 0
            return (
                f"split: {split:.0f} of {cached:.0f} cached tokens are recomputed in the last step "
                f"(the paper's equation 11 at peak rates: {ideal:.0f})",
            )
        sharing = "a latent cache" if m.latent else f"{m.queries_per_kv} query heads per KV head"
        return (
            f"split 0: with {sharing} a token's layer input ({self._activation(d):.0f} numbers) is "
            f"no smaller than the keys and values it would replace ({m.kv_width:.0f}), so "
            f"recomputing saves no transfer and only adds work",
        )


@dataclass(frozen=True)
class _Settled(Kvpr):
    """Kvpr whose first and last splits are known for every shape of layer."""

    found: Mapping[LayerShape, tuple[Number, Number]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """The settings have been checked."""

    def _splits(self, d: Deployment, p: Point, shape: LayerShape) -> tuple[Number, Number]:
        return self.found[shape]

    def resident(self, d: Deployment, p: Point) -> Buffers:
        return HostCache.resident(self, d, p)


def _loads(ops: list[Op], d: Deployment) -> tuple[Number, Number, Number]:
    """Time that the GPU, the link to it, and GPU memory as a channel work on some ops. [s]"""
    gpu = sum((seconds(op, d) for op in ops if op.stream == "gpu"), ZERO)
    link = sum((seconds(op, d) for op in ops if op.stream == "h2d"), ZERO)
    hbm = sum((channel_seconds(op, d).get("hbm", 0.0) for op in ops), ZERO)
    return gpu, link, hbm


ZERO: Number = 0.0
