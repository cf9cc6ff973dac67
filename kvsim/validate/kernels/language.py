"""Triton, compiled on a GPU and interpreted where there is none.

Triton decides between the two when it is first imported, so everything here imports it from this
file alone.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default; saying so keeps it quiet

import triton
import triton.language as tl
from triton.errors import TritonError

from kvsim.errors import InputError
from kvsim.validate.counter import Fused

Kernel = TypeVar("Kernel", bound=Callable[..., object])

__all__ = [
    "TritonError", "ceil_div", "interpreted", "interpreter_fault", "jit", "jit_for_any", "launch",
    "next_power_of_2", "tl",
]  # fmt: skip


def interpreted() -> bool:
    """Whether kernels are interpreted and not compiled."""
    return bool(triton.knobs.runtime.interpret)


def interpreter_fault(problem: BaseException | None) -> str:
    """Return why Triton's interpreter fails with the installed NumPy.

    Returns
    -------
    str
        One line; empty for any other error.
    """
    while problem is not None:
        if interpreted() and "converted to Python scalars" in str(problem):
            return (
                f"Triton {triton.__version__} cannot interpret it with NumPy {numpy.__version__}; "
                "compiled kernels do without NumPy"
            )
        problem = problem.__cause__ or problem.__context__
    return ""


def jit(kernel: Kernel) -> Kernel:
    """Apply ``triton.jit``, keeping the function's type."""
    compiled: Kernel = triton.jit(kernel)
    return compiled


def jit_for_any(*names: str) -> Callable[[Kernel], Kernel]:
    """Return a ``triton.jit`` decorator that compiles once for all values of some integers.

    Otherwise Triton compiles a kernel again for 1 and for multiples of 16.

    Parameters
    ----------
    *names
        Names of the kernel's integer arguments.
    """
    compiled: Callable[[Kernel], Kernel] = triton.jit(do_not_specialize=list(names))
    return compiled


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run ``kernel`` on a grid of programs.

    Parameters
    ----------
    kernel
        A function under ``jit_for_any`` or ``triton.jit``.
    grid
        Programs along each axis; nothing runs if one is 0.
    *arguments, **options
        Of the kernel.

    Raises
    ------
    InputError
        If there is neither a GPU nor the interpreter.
    """
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        raise InputError(
            "Triton kernels need a GPU here, because Triton was imported before kvsim; "
            "set TRITON_INTERPRET=1 before Python starts to interpret them on the CPU"
        )
    if all(grid):
        Fused.launched += 1
        kernel[grid](*arguments, **options)


def ceil_div(number: int, by: int) -> int:
    """Count the blocks that hold some items."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least a number."""
    return 1 << max(number - 1, 0).bit_length()
