"""Matrix products over rows and shapes of real models, per number format; one row is a GEMV."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.graph import Op
from kvsim.validate.micro.place import Bench, Call, Work

SHAPES = ((576, 576), (576, 3072), (2048, 2048), (4096, 4096), (4096, 11008))
"""Inputs and outputs: SmolLM2-135M's output and MLP, a 1B model's, Llama-2-7B's output and MLP."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
QUICK_ROWS = (1, 4, 16, 64, 256, 1024)
OTHER_ROWS = (32, 64, 256, 1024, 4096)  # torch._int_mm takes more than 16
BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}


def works(place: Bench) -> Iterator[Work]:
    """All shapes in the 16-bit format, the largest ones in the others that the device has."""
    for dtype in formats(place):
        shapes = SHAPES if dtype == "fp16" else SHAPES[2:4]
        for inputs, outputs in shapes:
            rows_of = place.either(QUICK_ROWS, ROWS) if dtype == "fp16" else OTHER_ROWS
            for rows in rows_of:
                work = product(place, dtype, rows, inputs, outputs)
                if work.op.flops <= place.most_flops:
                    yield work


def formats(place: Bench) -> list[str]:
    """Number formats that it multiplies in."""
    if place.on_cpu:
        return ["fp16", "fp32"]
    major, minor = torch.cuda.get_device_capability(place.device)
    found = ["fp16", "bf16", "fp32"]
    found += ["tf32"] if major >= 8 else []
    found += ["int8"] if (major, minor) >= (7, 5) else []
    return found + (["fp8"] if (major, minor) >= (8, 9) else [])


def product(place: Bench, dtype: str, rows: int, inputs: int, outputs: int) -> Work:
    """Hidden states (rows, inputs) times a matrix (outputs, inputs)."""
    each = BYTES[dtype]
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
    return Work(case, op, lambda: _calls(place, dtype, rows, inputs, outputs))


@contextmanager
def _calls(
    place: Bench, dtype: str, rows: int, inputs: int, outputs: int
) -> Iterator[Sequence[Call]]:
    def operands() -> tuple[Tensor, Tensor]:
        x, w = place.random(rows, inputs), place.random(outputs, inputs)
        return _stored(x, dtype, place), _stored(w, dtype, place)

    first = operands()
    sets = place.turns(first, first, operands)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        yield [_multiply(dtype, *pair) for pair in sets]
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
