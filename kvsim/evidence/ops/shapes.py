"""Measured operators predicted through the functions of every other prediction.

``ShapeTable`` stands for a model whose widths are arrays, one element per row, so that one call
states the op of all rows.
"""

from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

from kvsim.engine import attention, ops
from kvsim.engine.formats import Format
from kvsim.engine.ops import all_reduce
from kvsim.engine.roofline import seconds
from kvsim.evidence.ops.rows import LATENT, OpRows
from kvsim.frozen import frozen
from kvsim.graph import Array, Number, Op, Point
from kvsim.machines.deployment import WEIGHTS, Deployment
from kvsim.machines.hardware import Hardware, Stack
from kvsim.models.model import LayerShape, Model

KV_RANK, ROPE_DIM, VALUE_DIM = 512.0, 64.0, 128.0  # DeepSeek-V2 and V3
CACHES = {"fp16": Format(), "fp8": Format(8)}


@frozen
class ShapeTable:
    """What formulas ask of a model, as arrays over the rows of a table."""

    heads: Number = 1.0
    kv_heads: Number = 1.0
    head_dim: Number = 128.0
    hidden: Number = 1.0
    expert_ffn: Number = 0.0
    experts: Number = 0.0
    experts_active: Number = 0.0
    shared_experts: int = 0
    latent: bool = False
    kv_rank: float = KV_RANK
    rope_dim: float = ROPE_DIM
    value_dim: float = VALUE_DIM
    indexer: None = None

    def shard(self, tp: int) -> "ShapeTable":
        """The shapes are those of one GPU already."""
        return self

    def biased(self, name: str) -> bool:
        """No measured product has a bias."""
        return False

    @property
    def k_width(self) -> Number:
        """Numbers of K per token, of latents all. [numbers]"""
        return LATENT if self.latent else self.kv_heads * self.head_dim

    @property
    def v_width(self) -> Number:
        """Numbers of V per token. [numbers]"""
        return 0.0 if self.latent else self.kv_heads * self.head_dim

    @property
    def kv_width(self) -> Number:
        """Numbers of K and V per token. [numbers]"""
        return self.k_width + self.v_width

    @property
    def queries_per_kv(self) -> Number:
        """Query heads per KV head."""
        return self.heads / self.kv_heads

    def attention_matrices(self) -> Mapping[str, tuple[Number, Number]]:
        """The up-projection of latents alone."""
        return {"kv_up": (KV_RANK, self.heads * (self.head_dim + VALUE_DIM))}

    def mlp_matrices(self, width: Number) -> Mapping[str, tuple[Number, Number]]:
        """Inputs and outputs of the products of gated experts, whose gate and up are one matrix."""
        return {"up": (self.hidden, 2 * width), "down": (width, self.hidden)}


def _at(shapes: ShapeTable, hardware: Hardware, stack: Stack, weights: str, tp: int) -> Deployment:
    return Deployment(cast(Model, shapes), hardware, stack, weights, tp)


def _gemm(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    d, s = _at(ShapeTable(), hardware, stack, rows.dtype, 1), rows.shape
    matrix = cast(tuple[int, int], (s["k"], s["n"]))
    return _seconds(ops.gemm(d, "product", s["m"], matrix, WEIGHTS[rows.dtype]), d)


def _decode(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    s = rows.shape
    latent = rows.kind == "mla_decode"
    shapes = (
        ShapeTable(heads=s["heads"], latent=True)
        if latent
        else ShapeTable(s["heads"], s["kv_heads"], s["head_dim"])
    )
    d = _at(shapes, hardware, stack, "fp16", 1)
    p = Point(s["batch"], s["context"], 1.0, s["context"], s["context"] + 1)
    found = attention.ops(d, p, LayerShape(), stored=CACHES[rows.dtype])
    return _seconds(next(op for op in found if op.name == "attn"), d)


def _prompt(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    s = rows.shape
    d = _at(ShapeTable(s["heads"], s["kv_heads"], s["head_dim"]), hardware, stack, "fp16", 1)
    length = s["context"] + s["new"]
    p = Point(s["batch"], s["context"], s["new"], length, length, prefill=True)
    return _seconds(attention.ops(d, p, LayerShape())[-1], d)


def _experts(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    s = rows.shape
    shapes = ShapeTable(
        hidden=s["hidden"], expert_ffn=s["expert_ffn"] / s["tp"],
        experts=s["experts"], experts_active=s["active"],
    )  # fmt: skip
    d = _at(shapes, hardware, stack, rows.dtype, 1)
    p = Point(s["tokens"], 0.0, 1.0, 1.0, 1.0)
    total: Array = np.zeros(len(rows))
    for op in ops.routed_experts(d, p):
        total = total + _seconds(op, d)
    return total


def _sums(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    out = np.empty(len(rows))
    for gpus in np.unique(rows.shape["gpus"]):
        here = rows.shape["gpus"] == gpus
        d = _at(ShapeTable(hidden=rows.shape["elements"][here]), hardware, stack, "fp16", int(gpus))
        out[here] = _seconds(all_reduce(d, "sum", ops.HALF * d.shard.hidden)[0], d)
    return out


def _quantising(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    d, s = _at(ShapeTable(), hardware, stack, "fp8-dynamic", 1), rows.shape
    return np.asarray(ops.quantising(d, WEIGHTS["fp8-dynamic"], s["m"] * s["k"]), dtype=float)


PREDICTED: Mapping[str, Callable[[OpRows, Hardware, Stack], Array]] = {
    "gemm": _gemm,
    "quantise_input": _quantising,
    "decode_attention": _decode,
    "mla_decode": _decode,
    "prefill_attention": _prompt,
    "moe": _experts,
    "all_reduce": _sums,
}
"""What each kind of op takes, element by element. [s]"""


def predicted(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    """What a stack says of measured rows. [s]"""
    return PREDICTED[rows.kind](rows, hardware, stack)


def _seconds(op: Op, deployment: Deployment) -> Array:
    return np.asarray(seconds(op, deployment), dtype=float)
