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
from kvsim.techniques.axes.storage import WholeStorage

LOOPS = 3  # of the power iteration, in the released code
QR = 4  # orthonormalisations: of both factors, in the last loop, for K and for V
GEAR_PRODUCTS = 4 * LOOPS  # with the error and its transpose, for K and for V


@frozen
class Gear(Storage):
    """KIVI with a low-rank correction of the quantisation error.

    KIVI's layout, with the error of each packed block and head approximated by a product P Q^T.

    The prompt is one block, later ones are as long as the residual. The factors contribute to
    scores and outputs by thin matrix products beside the packed kernel. Outliers, if any, are kept
    in fp16 with their indices; the released kernels have none. The
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
        prefill={"attn": 9, "quantise": 44, "power_iteration": 3},
        decode={"attn": 36, "power_iteration": 3},
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
        """Whether the prompt's attention scores are written to memory, to correct errors."""
        return bool(np.any(np.asarray(self.outliers) + self.rank > 0))

    def _packed(self, tokens: Number) -> Number:
        return tokens - tokens % self.residual

    def _factors(self, at: LayerPass, tokens: Number) -> Number:
        """Return the size of P (row per packed token, head) and Q (per channel, block). [B]"""
        m = at.d.shard
        rows = 2 * m.cached_heads * self._packed(tokens) + m.kv_width * self._products(at, tokens)
        return ops.FP16_BYTES * self.rank * at.p.batch * rows

    def _products(self, at: LayerPass, tokens: Number) -> Number:
        """Count the low-rank products: one for the prompt's blocks, one per block packed since."""
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


# as first released: plain PyTorch over a sequence's whole cache, its heads repeated

SINGLE = 4.0  # bytes of an fp32 number [B]
POSITION = 8.0  # bytes of an int64 position [B]

# Memory accesses per cached number, counted in the release's source. [B]
SORTS = 2 * 78.0
"""The smallest and the largest numbers, each by a sort of all: numbers copied 4 and positions made
8; then three digits of 7 bits, each reading numbers 2, and reading and writing both 20, to
scattered places."""
PACKING_BYTES = 54.0
"""Range and error of the packed numbers 30, range and numbers once more 19.5, packing 4.5."""
REORDERING_BYTES = 10.0
"""The error reordered so that a token's heads are together 4, and in fp32 6."""
RESTORED = 12.0
"""The product of the factors written 4, and added to the unpacked cache 8."""
LAUNCHES = 60.0  # kernels that pack one layer's keys and values
PANEL, TALL = 13.0, 5500.0
"""Columns that take as long again to orthonormalise, and rows with which they take twice that:
fitted to torch.linalg.qr of 512 x 64, 128 x 32, 8192 x 8 and 4096 x 4 (FlagGems#5586: 259, 179, 112
and 74 us) over the 45 us that ``packed_cache.qr_s`` of Hugging Face's stacks is."""


@frozen
class GearFirst(WholeStorage):
    """GEAR as first released: one quantisation range and low-rank correction per sequence.

    The whole cache of a sequence shares one quantisation range and one low-rank correction. Packed
    values have a copy per query head, as ``repeat_kv`` makes them. Rank and outliers are shares, as
    in the release's example. The whole cache is packed again every ``residual`` steps. For up to
    ten sequences PyTorch finds the outliers by sorting all elements; the model assumes the same for
    larger batches. The prompt's attention is not fused.

    References
    ----------
    .. [1] H. Kang et al., "GEAR", 2024, section 3, algorithms 1 and 2; the code of March 2024.
    """

    name = "gear-first"
    scored = True  # the prompt's attention is not fused
    by_token = False  # one range and one product are of the whole cache

    bits: float = param(4, "bits per cached number", choices=(4, 8), gentler=1)
    residual: int = param(
        20, "latest tokens kept in fp16 until all are packed", low=1, high=1e6, gentler=1
    )
    rank: Number = param(
        0.02,
        "rank of the correction, relative to the smaller of tokens and width",
        high=1,
        whole=False,
        gentler=1,
    )
    outliers: Number = param(
        0.02, "share of numbers kept in fp16", high=0.5, whole=False, gentler=1
    )

    @property
    def stored(self) -> Format:
        """Format of the cache: one quantisation range for all values."""
        return Format(self.bits, k_block=self.residual, v_block=self.residual)

    def _numbers(self, deployment: Deployment, tokens: Number) -> Number:
        """Count the cached values of some tokens; keys and values have a copy per query head."""
        return deployment.shard.queries_per_kv * deployment.shard.kv_width * tokens

    def _columns(self, deployment: Deployment, tokens: Number) -> Number:
        """Return the rank of the correction of one sequence's keys or values."""
        return np.floor(self.rank * np.minimum(tokens, self._numbers(deployment, 0.5)))

    def _factors(self, deployment: Deployment, batch: Number, tokens: Number) -> Number:
        """Return the size of the low-rank factors of keys and values. [B]"""
        rows = 2 * tokens + self._numbers(deployment, 1.0)
        return ops.FP16_BYTES * batch * self._columns(deployment, tokens) * rows

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the op that restores the cache for attention; nothing in prefill."""
        return [] if at.p.prefill else [self._restore(at, at.kept_tokens)]

    def extra_bytes(self, at: LayerPass) -> Number:
        """Return the bytes that attention reads and unpacks for the copies of heads. [B]"""
        if at.p.prefill:
            return 0.0
        d, stored = at.d, self.stored
        own = (
            at.p.batch
            * d.shard.kv_width
            * at.kept_tokens
            * (stored.number + d.stack.packed_cache.unpack_bytes)
        )
        return (d.shard.queries_per_kv - 1) * own

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the ops that pack the prompt; in decoding, a share of packing all tokens anew.

        Each decoding step is charged 1 / ``residual`` of it.
        """
        return self._pack(at, at.kept_tokens, 1.0 if at.p.prefill else 1.0 / self.residual)

    def _pack(self, at: LayerPass, tokens: Number, often: float) -> list[Op]:
        """Return the ops that separate outliers, quantise the rest and approximate the error.

        Parameters
        ----------
        at : the pass through the layer.
        tokens : tokens per sequence to pack. [tokens]
        often : how often this is done per pass; below 1 if not in every one.
        """
        d, p = at.d, at.p
        numbers = often * self._numbers(d, p.batch * tokens)
        rank = self._columns(d, tokens)
        corrected = 1.0 * (rank > 0)
        rows = tokens + self._numbers(d, 0.5)  # of a pair of factors
        pair = d.stack.packed_cache.qr * (2 + rank / PANEL * (2 + rows / TALL))
        products = SINGLE * GEAR_PRODUCTS / 2 * numbers  # each reads the error of keys or of values
        return [
            Op(
                "outliers",
                kernel="gather",
                bytes={"hbm": SORTS * numbers * (np.asarray(self.outliers) > 0)},
                launches=2 * QR * often,
            ),
            Op(
                "quantise",
                bytes={"hbm": (PACKING_BYTES + REORDERING_BYTES * corrected) * numbers},
                launches=LAUNCHES * often,
            ),
            Op(
                "power_iteration",
                kernel="gemm",
                flops=4.0 * LOOPS * rank * numbers,
                bytes={"hbm": products * corrected},
                dtype="fp32",
                launches=(GEAR_PRODUCTS + QR) * often,
                fixed=QR / 2 * often * p.batch * pair * corrected,
            ),
        ]

    def _restore(self, at: LayerPass, tokens: Number) -> Op:
        """Return the op that adds the product of the error's factors to the unpacked cache."""
        d, p = at.d, at.p
        numbers = self._numbers(d, p.batch * tokens)
        moved = RESTORED * numbers + self._factors(d, p.batch, tokens)
        rank = self._columns(d, tokens)
        return Op(
            "correct",
            kernel="gemm",
            flops=2.0 * rank * numbers,
            bytes={"hbm": moved * (rank > 0)},
            dtype="fp32",
            launches=4,
        )

    def resident(self, at: LayerPass) -> dict[str, Number]:
        """Return the memory of packed numbers of all query heads, factors and outliers. [B]"""
        d, tokens = at.d, at.kept_tokens
        numbers = self._numbers(d, at.p.batch * tokens)
        return {
            "kv": d.shard.queries_per_kv * resident_kv(at, self.stored),
            "factors": self._factors(d, at.p.batch, tokens),
            "outliers": self.outliers * numbers * (ops.FP16_BYTES + POSITION),
        }

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's buffers in prefill, which all layers share. [B]

        It holds one layer's prompt in fp16 until it is packed, and the error of its keys, then of
        its values, in fp32.
        """
        error = SINGLE * self._numbers(at.d, at.p.tokens) / 2 if at.p.prefill else 0.0
        return merge(ops.prompt_kv(at.d, at.p), {"gpu": {"error": error}})
