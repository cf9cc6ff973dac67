"""ZipCache: salient tokens at higher precision, found by a few probe queries."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim import attention, blocks
from kvsim.deployment import Deployment
from kvsim.formats import Format, averaged, mixed_bits, mixed_parameters
from kvsim.graph import Array, Buffers, Channel, Number, Op, Point
from kvsim.model import LayerShape
from kvsim.techniques.base import Technique, param


@dataclass(frozen=True)
class Zipcache(Technique):
    """Mixed-precision cache, channelwise keys and channel-separable tokenwise values.

    References
    ----------
    .. [1] Y. He et al., "ZipCache: accurate and efficient KV cache quantization with salient
       token identification", NeurIPS 2024, section 4, equation 9, algorithms 2 and 3.
    """

    name: ClassVar[str] = "zipcache"

    salient: Number = param(0.6, "share of tokens at high precision", high=1, whole=False)
    high: float = param(4, "bits of salient tokens", choices=(2, 4, 8, 16))
    low: float = param(2, "bits of the others", choices=(1, 2, 4, 8, 16))
    probe: float = param(0.1, "share of queries that probe", high=1, whole=False)
    window: int = param(100, "new tokens in fp16 until they are packed", low=1, high=1e5)

    @property
    def _bits(self) -> Number:
        return mixed_bits(self.salient, self.high, self.low)

    @property
    def stored(self) -> Format:
        """The kernel's format; tokenwise parameters are counted apart."""
        return averaged(self._bits)

    @property
    def exact(self) -> bool:
        """Only without packing."""
        return bool(np.all(np.asarray(self._bits) == 16))

    def _packed(self, d: Deployment, batch: Number, tokens: Number) -> Number:
        """Bytes of packed tokens with their parameters and, for mixtures, their indices."""
        m = d.shard
        numbers = batch * m.kv_width * tokens * np.asarray(self._bits) / 8
        parameters = blocks.HALF * mixed_parameters(batch, m.kv_width / 2, tokens)
        return numbers + parameters * (np.asarray(self._bits) < 16)

    def _fresh(self, p: Point, tokens: Number) -> Number:
        """Generated tokens not packed yet. [tokens]"""
        waiting: Number = np.maximum(p.length - p.prompt, 0.0) % self.window
        return np.minimum(tokens, waiting)

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Attention over both precisions; probes score all tokens; new tokens are packed.

        In decoding one new token in a hundred pays for the repacking of a hundred; saliency is
        selected once per window.
        """
        m = d.shard
        tokens = attention.cached(d, p, shape)
        fresh = self._fresh(p, tokens)
        packed = self._packed(d, p.batch, tokens - fresh)
        read = packed + blocks.kv_bytes(m, p.batch * fresh)
        plain = blocks.kv_bytes(m, p.batch * tokens)
        stored = self.stored
        # what this cache reads instead of a plain one of the same kernel
        less = 0.0 if p.prefill else read - plain * stored.number / blocks.HALF
        ops = [] if self.exact else [self._pack(d, p)]
        ops += attention.ops(d, p, shape, stored=stored, extra_bytes=less)
        ops += self._probes(d, p, tokens, packed)
        if self.exact:
            return ops
        return ops + blocks.id_lists(d, p.batch, 1 if p.prefill else self.window)

    def _pack(self, d: Deployment, p: Point) -> Op:
        numbers = d.shard.kv_width * p.tokens
        moved = numbers * (blocks.HALF + np.asarray(self._bits) / 8)
        often = 1.0 if p.prefill else 1.0 / self.window
        return Op("quantise", kernel="quantise", bytes={"hbm": moved}, launches=often)

    def _probes(self, d: Deployment, p: Point, tokens: Number, packed: Number) -> list[Op]:
        """Scores of the probing queries over all keys, and the ranking of tokens by them.

        In decoding a share of the steps probes, over packed keys; the ranking is made once per
        window.
        """
        m = d.shard
        pairs = self.probe * p.new * tokens
        passes = np.minimum(self.probe * p.new, 1.0)
        plain = blocks.HALF * p.batch * m.k_width * tokens
        keys = passes * (plain if p.prefill else packed * m.k_width / m.kv_width)
        scores = 2 * blocks.SCORE * p.batch * m.heads * pairs
        flops = 2.0 * p.batch * m.heads * (m.k_width / m.cached_heads) * pairs
        window = 1 if p.prefill else self.window
        ranked = p.batch * m.cached_heads * tokens / window
        moved: dict[Channel, Number] = {"hbm": keys + scores}
        often = 1.0 if p.prefill else self.probe
        return [
            Op("probe", kernel="attention", flops=flops, bytes=moved, launches=often),
            blocks.top_k("saliency", ranked, every=window),
        ]

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """Packed tokens sized for every token, the fp16 window, scores and indices."""
        m, bits = d.shard, np.asarray(self._bits)
        tokens = attention.cached(d, p, shape)
        below: Array = (bits < 16).astype(float)
        per_head = p.batch * m.cached_heads * tokens * below
        mixed = (np.asarray(self.salient) > 0) & (np.asarray(self.salient) < 1)
        return {
            "gpu": {
                "kv": d.stack.cache_overhead * self._packed(d, p.batch, tokens),
                "fp16 window": blocks.kv_bytes(m, p.batch * self.window) * below,
                "indices": d.stack.index_bytes * per_head * mixed,
                "saliency": 4.0 * per_head,
            }
        }

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """Saliency ratios around the paper's."""
        ratios = np.array([0.2, 0.4, 0.6, 0.8])[:, None, None]
        return [Zipcache(ratios), Zipcache(1.0, 4, 4)]
