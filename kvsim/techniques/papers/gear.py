"""GEAR: a packed cache whose error is corrected by low-rank factors and sparse outliers."""

import numpy as np

from kvsim.engine import ops
from kvsim.engine.buffers import merge
from kvsim.engine.formats import Format, kivi
from kvsim.frozen import frozen
from kvsim.graph import Array, Buffers, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Launches, LayerPass, Storage, pack, resident_kv
from kvsim.techniques.axes.settings import combine, param

LOOPS = 3  # of the power iteration, in the released code
QR = 4  # orthonormalisations: of both factors, in the last loop, for K and for V
GEAR_PRODUCTS = 4 * LOOPS  # with the error and its transpose, for K and for V


@frozen
class Gear(Storage):
    """KIVI with a low-rank correction of the quantisation error.

    KIVI's layout, the error of each packed block and head approximated by a product P Q^T.

    The prompt is one block, later ones are as long as the residual. The factors' part of scores
    and outputs comes from thin products beside the packed kernel. Outliers, if any, are taken out
    before packing and kept in fp16 with their indices; the released kernels run without. The
    released model files attend to the prompt without a fused kernel.

    References
    ----------
    .. [1] H. Kang et al., "GEAR: an efficient KV cache compression recipe for near-lossless
       generative inference of LLM", 2024, section 3, algorithm 2.
    """

    name = "gear"
    # keys of a group of tokens share their scales, and factors are of whole blocks
    by_token = False
    launches = Launches(
        prefill={"attn": 9, "quantise": 50, "power_iteration": 3},
        decode={"attn": 40, "power_iteration": 3},
    )

    bits: float = param(4, "bits per cached number", choices=(1, 2, 4, 8), gentler=1)
    group: int = param(64, "numbers that share a scale", low=8, high=1024, gentler=-1)
    residual: int = param(
        64, "latest tokens kept in fp16 until they are packed", low=8, high=1e6, gentler=1
    )
    rank: int = param(2, "rank of the error correction per head", high=128, gentler=1)
    outliers: Number = param(0.0, "share of numbers kept in fp16", high=0.5, whole=False, gentler=1)

    candidates = combine(bits=(2, 4), outliers=(0.0, 0.02))  # the paper's

    @property
    def stored(self) -> Format:
        """Format of KIVI's cache; corrections are counted separately."""
        return kivi(self.bits, self.group, self.residual)

    @property
    def scored(self) -> bool:
        """Whether the prompt's scores are written to memory: if errors are corrected."""
        return bool(np.any(np.asarray(self.outliers) + self.rank > 0))

    def _packed(self, tokens: Number) -> Number:
        return tokens - tokens % self.residual

    def _factors(self, at: LayerPass, tokens: Number) -> Number:
        """P: a row per packed token and head; Q: a row per channel and block; of K and V. [B]"""
        m = at.d.shard
        rows = 2 * m.cached_heads * self._packed(tokens) + m.kv_width * self._products(at, tokens)
        return ops.FP16_BYTES * self.rank * at.p.batch * rows

    def _products(self, at: LayerPass, tokens: Number) -> Number:
        """Error products: that of the prompt's whole blocks, and one for each packed since."""
        prompt = np.minimum(tokens, at.kept_of_prompt)
        first: Array = 1.0 * (np.asarray(prompt) >= self.residual)
        return first + (self._packed(tokens) - self._packed(prompt)) / self.residual

    def _sparse(self, deployment: Deployment, numbers: Number) -> Number:
        return self.outliers * numbers * (ops.FP16_BYTES + deployment.stack.selection.index_bytes)

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the ops that pack as KIVI, find outliers and approximate the error, per block.

        The approximation is a power iteration of rank ``rank``.
        """
        d, p = at.d, at.p
        numbers = d.shard.kv_width * at.staying
        if p.prefill:  # whole blocks of what stays, but for those of earlier passes
            kept = at.selection.count_kept_prompt(at)
            packed = self._packed(kept) - self._packed(np.minimum(kept, p.context))
            numbers = d.shard.kv_width * p.batch * packed
        often = 1.0 if p.prefill else 1.0 / self.residual
        found = (ops.FP16_BYTES * numbers + self._sparse(d, numbers)) * (
            np.asarray(self.outliers) > 0
        )
        error = ops.FP16_BYTES * numbers * (self.rank > 0)  # written once, read by every product
        flops = 4.0 * LOOPS * self.rank * numbers
        orthonormal = QR * p.batch * d.shard.cached_heads * often * (self.rank > 0)
        return [
            *pack(at),
            Op("outliers", kernel="topk", bytes={"hbm": found}, launches=4 * often),
            Op(
                "power_iteration",
                kernel="attention",
                flops=flops,
                bytes={"hbm": (1 + 2 * LOOPS) * error},
                launches=(GEAR_PRODUCTS + QR) * often,
                fixed=d.stack.packed_cache.qr * orthonormal,
            ),
        ]

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the op that corrects scores and outputs by the factors and outliers, in decoding.

        The factors take two thin products for scores and two for outputs.
        """
        if at.p.prefill:  # its own attention is in full precision
            return []
        m, p, tokens = at.d.shard, at.p, at.kept_tokens
        packed = self._packed(tokens)
        queries = 2.0 * p.tokens * m.heads
        products = self._products(at, tokens)
        thin = 2 * self.rank * (m.kv_width / m.cached_heads / 2 * products + packed)
        sparse = self.outliers * m.kv_width / m.cached_heads * packed
        there = (np.asarray(self.outliers) + self.rank > 0) * (np.asarray(packed) > 0) * 1.0
        # what is added to scores and outputs is written once and read once
        corrected = p.tokens * m.heads * (packed + m.head_dim) * there
        moved = (
            self._factors(at, tokens)
            + self._sparse(at.d, p.batch * m.kv_width * packed)
            + ops.SCORE * corrected
        )
        flops = queries * (thin + sparse)
        return [Op("correct", kernel="attention", flops=flops, bytes={"hbm": moved}, launches=4)]

    def resident(self, at: LayerPass) -> dict[str, Number]:
        """Return the memory of KIVI's cache, the factors and the outliers. [B]"""
        tokens = at.kept_tokens
        numbers = at.p.batch * at.d.shard.kv_width * self._packed(tokens)
        return {
            "kv": resident_kv(at, self.stored),
            "factors": self._factors(at, tokens),
            "outliers": self._sparse(at.d, numbers),
        }

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's buffers in prefill, which all layers share. [B]

        It holds one layer's prompt in fp16 until it is packed, and the error of its keys or values.
        """
        d, p = at.d, at.p
        widest = max(d.shard.k_width, d.shard.v_width) * (self.rank > 0)
        error = ops.FP16_BYTES * widest * p.tokens if p.prefill else 0.0
        return merge(ops.prompt_kv(d, p), {"gpu": {"error": error}})
