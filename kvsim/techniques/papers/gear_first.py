"""GEAR's first release: plain PyTorch over a sequence's whole cache, its heads repeated."""

import numpy as np

from kvsim.engine import ops
from kvsim.engine.buffers import merge
from kvsim.engine.formats import Format
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import LayerPass, resident_kv
from kvsim.techniques.axes.settings import param
from kvsim.techniques.axes.storage import WholeStorage
from kvsim.techniques.papers.gear import GEAR_PRODUCTS, LOOPS, QR

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
    """GEAR as first released: one range and one low-rank correction per cache.

    GEAR as first released: one range and one low-rank product for a sequence's whole cache.

    What is packed has a copy per query head, as repeat_kv makes them. Rank and outliers are shares,
    as in the release's example. Every ``residual`` steps the whole cache is packed anew. PyTorch
    sorts all numbers to find the largest for up to ten sequences; it is taken to do so for more,
    too. The prompt's attention is not fused.

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
        """Format of the cache: one range for all numbers."""
        return Format(self.bits, k_block=self.residual, v_block=self.residual)

    def _numbers(self, deployment: Deployment, tokens: Number) -> Number:
        """Count the cached numbers of some tokens, keys and values copied for every query head."""
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
        """Return what attention reads and unpacks for the further copies of heads. [B]"""
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

        Each step is charged with 1 / ``residual`` of that.
        """
        return self._pack(at, at.kept_tokens, 1.0 if at.p.prefill else 1.0 / self.residual)

    def _pack(self, at: LayerPass, tokens: Number, often: float) -> list[Op]:
        """Return the ops that take out outliers, round the rest and approximate its error.

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
