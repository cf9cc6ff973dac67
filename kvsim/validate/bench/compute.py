"""Benchmarks of compute: matrix products, the other ops of a layer, and kernel launches."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.graph import Op
from kvsim.validate.bench.work import Bench, Call, Work
from kvsim.validate.model.architecture import rotate
from kvsim.validate.model.weights import Norm

SHAPES = ((576, 576), (576, 3072), (2048, 2048), (4096, 4096), (4096, 11008))
"""Inputs and outputs: SmolLM2-135M's output and MLP, a 1B model's, Llama-2-7B's output and MLP."""
LARGE_SHAPE = (8192, 28672)
"""A 70B model's MLP, which a GPU's rates are told by."""
PRODUCT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
QUICK_ROWS = (1, 4, 16, 64, 256, 1024)
OTHER_ROWS = (32, 64, 256, 1024, 4096)  # torch._int_mm takes more than 16
DTYPE_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}


def product_works(place: Bench) -> Iterator[Work]:
    """Yield benchmarks of matrix products.

    All shapes are multiplied in the 16-bit format, the largest ones in every other format that the
    device has.
    """
    for dtype in formats(place):
        shapes = SHAPES if dtype == "fp16" else SHAPES[2:4]
        for inputs, outputs in [*shapes, *([] if place.on_cpu else [LARGE_SHAPE])]:
            rows_of = place.pick(QUICK_ROWS, PRODUCT_ROWS) if dtype == "fp16" else OTHER_ROWS
            for rows in rows_of:
                work = product(place, dtype, rows, inputs, outputs)
                if work.op.flops <= place.most_flops:
                    yield work


PRODUCTS_IN_A_ROW = (2, 24, 96)  # 5, 60 and 240 ms of an H100


def sustained_works(place: Bench) -> Iterator[Work]:
    """Yield benchmarks of large products back to back, after a rest.

    A GPU that was idle computes for some tens of milliseconds at its full clock, until its power
    limit lowers it. A CPU has none of these benchmarks.
    """
    one = product(place, "fp16", PRODUCT_ROWS[-1], *LARGE_SHAPE)
    if place.on_cpu or one.op.flops > place.most_flops:
        return
    for count in PRODUCTS_IN_A_ROW:
        moved = {channel: count * n for channel, n in one.op.bytes.items()}
        op = replace(one.op, flops=count * one.op.flops, bytes=moved, launches=float(count))
        case = {**one.case, "products": count}
        call = partial(_repeat, count)
        yield replace(one, case=case, op=op, call=call, clock="rested", alone=True)


def _repeat(count: int, tensor: Tensor, w: Tensor) -> Call:
    def work() -> None:
        for _ in range(count):
            F.linear(tensor, w)

    return work


def formats(place: Bench) -> list[str]:
    """List the number formats in which the device can multiply matrices."""
    if place.on_cpu:
        return ["fp16", "fp32"]
    major, minor = torch.cuda.get_device_capability(place.device)
    found = ["fp16", "bf16", "fp32"]
    found += ["tf32"] if major >= 8 else []
    found += ["int8"] if (major, minor) >= (7, 5) else []
    return found + (["fp8"] if (major, minor) >= (8, 9) else [])


def product(place: Bench, dtype: str, rows: int, inputs: int, outputs: int) -> Work:
    """Create the benchmark of hidden states (rows, inputs) times a matrix (outputs, inputs).

    Parameters
    ----------
    dtype
        Number format, a key of ``DTYPE_BYTES``.
    rows, inputs, outputs
        Sizes of the product.
    """
    each = DTYPE_BYTES[dtype]
    wide = 2 if dtype == "fp8" else 4 if dtype == "int8" else each  # per number of the result
    moved = each * (inputs * outputs + rows * inputs) + wide * rows * outputs
    op = Op(
        "product",
        kernel="gemm",
        flops=2.0 * rows * inputs * outputs,
        bytes={"hbm": float(moved)},
        size=float(rows),
        dtype=dtype,
    )
    case = {"dtype": dtype, "rows": rows, "inputs": inputs, "outputs": outputs}

    def operands() -> tuple[Tensor, ...]:
        both = place.random(rows, inputs), place.random(outputs, inputs)
        return tuple(_stored(numbers, dtype, place) for numbers in both)

    around = partial(_tf32, dtype == "tf32")
    return Work(place, case, op, operands, partial(_multiply, dtype), around=around)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _stored(numbers: Tensor, dtype: str, place: Bench) -> Tensor:
    if dtype == "int8":
        return (100 * numbers).to(torch.int8)
    if dtype == "fp8":
        return numbers.to(torch.float8_e4m3fn)
    if dtype in ("fp32", "tf32"):
        return numbers.float()
    return numbers.to(torch.bfloat16) if dtype == "bf16" else numbers.to(place.half)


def _multiply(dtype: str, tensor: Tensor, w: Tensor) -> Call:
    if dtype == "int8":
        return lambda: torch._int_mm(tensor, w.t())
    if dtype == "fp8":
        one = torch.ones((), device=tensor.device)
        return lambda: torch._scaled_mm(tensor, w.t(), one, one, out_dtype=torch.float16)
    return lambda: F.linear(tensor, w)


POINTWISE_KERNELS = (
    16.0  # of a Llama layer: 2 norms, 2 sums, 10 for positions, 2 for the activation
)
LAYERS = ((576, 9, 3, 64, 1536), (4096, 32, 8, 128, 14336))
"""Hidden, heads, KV heads, head dim and FFN width of SmolLM2-135M and Llama-3-8B."""


def pointwise_works(place: Bench) -> Iterator[Work]:
    """Yield benchmarks of a layer's norms, sums, rotations and activation, by tokens."""
    for layer in LAYERS:
        hidden, heads, kv_heads, dim, ffn = layer
        for tokens in place.pick((1, 16, 256, 2048), (1, 4, 16, 64, 256, 1024, 4096)):
            rotated = 2 * (heads + kv_heads) * dim
            moved = 2.0 * tokens * (4 * hidden + 6 * hidden + rotated + 3 * ffn)
            case = {"hidden": hidden, "ffn": ffn, "tokens": tokens}
            op = Op("pointwise", bytes={"hbm": moved}, launches=POINTWISE_KERNELS)
            if place.fits(2 * moved):
                inputs = partial(_pointwise_inputs, place, tokens, *layer)
                yield Work(place, case, op, inputs, lambda *inputs: partial(_layer, *inputs))


def _pointwise_inputs(
    place: Bench, tokens: int, hidden: int, heads: int, kv_heads: int, dim: int, ffn: int
) -> tuple[object, ...]:
    angles = place.random(1, 1, tokens, dim)
    return (
        place.random(1, tokens, hidden),
        place.random(1, heads, tokens, dim),
        place.random(1, kv_heads, tokens, dim),
        place.random(1, tokens, 2 * ffn),
        (angles.cos(), angles.sin()),
        Norm(torch.ones(hidden, device=place.device, dtype=place.half), None, 1e-5),
    )


def _layer(
    x: Tensor, q: Tensor, k: Tensor, wide: Tensor, turns: tuple[Tensor, Tensor], norm: Norm
) -> None:
    """Run a layer's pointwise ops as ``kvsim.validate.model.decoder`` does."""
    normed = norm(x)
    rotate(q, *turns)
    rotate(k, *turns)
    x.add_(normed)
    x.sub_(norm(x))
    gate, up = wide.chunk(2, dim=-1)
    F.silu(gate).mul_(up)


def launch_works(place: Bench) -> Iterator[Work]:
    """Yield benchmarks of the fixed cost of kernel launches, by series of very small kernels.

    On a GPU also of replaying CUDA graphs, and of synchronisation with the host.

    Yields
    ------
    Work
        The benchmarks.
    """
    for count in place.pick((20, 100, 200), (20, 50, 100, 200, 500)):
        yield _work(place, "eager", count, "host")
        if not place.on_cpu:
            yield _work(place, "graph", count, "device")
    if not place.on_cpu:
        for _ in range(3):
            yield _work(place, "sync", 1, "host")


def _work(place: Bench, way: str, count: int, clock: str) -> Work:
    case = {"way": way, "kernels": count}
    op = Op("launch", bytes={"hbm": 16.0 * count}, launches=float(count))
    inputs = partial(torch.ones, 4, device=place.device)
    call = partial(_launch_call, way, count)
    return Work(place, case, op, inputs, call, clock, alone=True)


def _launch_call(way: str, count: int, few: Tensor) -> Call:
    def issue() -> None:
        for _ in range(count):
            few.add_(1.0)

    def issue_and_wait() -> None:
        issue()
        torch.cuda.synchronize(few.device)

    if way != "graph":
        return issue_and_wait if way == "sync" else issue
    issue()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        issue()
    return graph.replay
