"""GEAR: a packed cache whose error is corrected by low-rank factors and sparse outliers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.engine.formats import Format, kivi
from kvsim.graph import Array, Buffers, Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.base import Technique, merge
from kvsim.techniques.settings import param

LOOPS = 3  # of the power iteration, in the released code
QR = 4  # orthonormalisations: of both factors, in the last loop, for K and for V
PRODUCTS = 4 * LOOPS  # with the error and its transpose, for K and for V


@dataclass(frozen=True)
class Gear(Technique):
    """KIVI's layout, the error of each packed block and head approximated by a product P Q^T.

    The prompt is one block, later ones are as long as the residual. The factors' part of scores
    and outputs comes from thin products beside the packed kernel. Outliers, if any, are taken out
    before packing and kept in fp16 with their indices; the released kernels run without. The
    released model files attend to the prompt without a fused kernel.

    References
    ----------
    .. [1] H. Kang et al., "GEAR: an efficient KV cache compression recipe for near-lossless
       generative inference of LLM", 2024, section 3, algorithm 2.
    """

    name: ClassVar[str] = "gear"

    bits: float = param(4, "bits per cached number", choices=(1, 2, 4, 8))
    group: int = param(64, "numbers that share a scale", low=8, high=1024)
    residual: int = param(64, "latest tokens in fp16 until they are packed", low=8, high=1e6)
    rank: int = param(2, "rank of a head's error correction", high=128)
    outliers: Number = param(0.0, "share of numbers kept in fp16", high=0.5, whole=False)

    @property
    def stored(self) -> Format:
        """As KIVI, with the corrections beside it."""
        return kivi(self.bits, self.group, self.residual)

    def _packed(self, tokens: Number) -> Number:
        return tokens - tokens % self.residual

    def _factors(self, d: Deployment, p: Point, tokens: Number) -> Number:
        """P: a row per packed token and head; Q: a row per channel and block; of K and V. [B]"""
        m = d.shard
        rows = 2 * m.cached_heads * self._packed(tokens) + m.kv_width * self._products(p, tokens)
        return blocks.HALF * self.rank * p.batch * rows

    def _products(self, p: Point, tokens: Number) -> Number:
        """Error products: the prompt's and those of blocks packed since."""
        later: Array = np.minimum(np.maximum(p.length - p.prompt, 0.0), tokens) // self.residual
        return 1.0 + later

    def _sparse(self, d: Deployment, numbers: Number) -> Number:
        return self.outliers * numbers * (blocks.HALF + d.stack.index_bytes)

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """As KIVI, then the corrections; the prompt's own attention is in full precision."""
        corrected = bool(np.any(np.asarray(self.outliers) + self.rank > 0))  # else KIVI's code
        ops = [
            *blocks.pack(d, p, self.stored),
            *self._compress(d, p),
            *attention.ops(d, p, shape, stored=self.stored, scored=corrected),
        ]
        return ops if p.prefill else [*ops, *self._correct(d, p, shape)]

    def _compress(self, d: Deployment, p: Point) -> list[Op]:
        """Search for outliers and power iteration over the error, once per block."""
        numbers = d.shard.kv_width * p.tokens
        often = 1.0 if p.prefill else 1.0 / self.residual
        found = (blocks.HALF * numbers + self._sparse(d, numbers)) * (np.asarray(self.outliers) > 0)
        error = blocks.HALF * numbers * (self.rank > 0)  # written once, read by every product
        flops = 4.0 * LOOPS * self.rank * numbers
        orthonormal = QR * p.batch * d.shard.cached_heads * often * (self.rank > 0)
        return [
            Op("outliers", kernel="topk", bytes={"hbm": found}, launches=4 * often),
            Op(
                "power_iteration",
                kernel="attention",
                flops=flops,
                bytes={"hbm": (1 + 2 * LOOPS) * error},
                launches=(PRODUCTS + QR) * often,
                fixed=d.stack.qr * orthonormal,
            ),
        ]

    def _correct(self, d: Deployment, p: Point, shape: LayerShape) -> list[Op]:
        """Two thin products for scores and two for outputs, and the outliers' part."""
        m, tokens = d.shard, attention.cached(d, p, shape)
        packed = self._packed(tokens)
        queries = 2.0 * p.tokens * m.heads
        thin = (
            2 * self.rank * (m.kv_width / m.cached_heads / 2 * self._products(p, tokens) + packed)
        )
        sparse = self.outliers * m.kv_width / m.cached_heads * packed
        there = (np.asarray(self.outliers) + self.rank > 0) * 1.0
        # what is added to scores and outputs is written once and read once
        corrected = p.tokens * m.heads * (packed + m.head_dim) * there
        moved = (
            self._factors(d, p, tokens)
            + self._sparse(d, p.batch * m.kv_width * packed)
            + blocks.SCORE * corrected
        )
        flops = queries * (thin + sparse)
        return [Op("correct", kernel="attention", flops=flops, bytes={"hbm": moved}, launches=4)]

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """KIVI's cache, the factors, and the outliers."""
        tokens = attention.cached(d, p, shape)
        numbers = p.batch * d.shard.kv_width * self._packed(tokens)
        return {
            "gpu": {
                "kv": attention.resident_kv(d, p, shape, self.stored),
                "factors": self._factors(d, p, tokens),
                "outliers": self._sparse(d, numbers),
            }
        }

    def once(self, d: Deployment, p: Point) -> Buffers:
        """One layer's prompt until it is packed, and the error of its keys or values."""
        widest = max(d.shard.k_width, d.shard.v_width) * (self.rank > 0)
        error = blocks.HALF * widest * p.tokens if p.prefill else 0.0
        return merge(blocks.prompt_kv(d, p), {"gpu": {"error": error}})

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """The paper's widths, with its rank and with 2 % of outliers."""
        return [Gear(bits, outliers=share) for bits in (2, 4) for share in (0.0, 0.02)]
