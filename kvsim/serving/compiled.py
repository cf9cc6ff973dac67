"""Numba's compiler, with types that mypy keeps."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Machine code on first call, kept on disk; the Python function is its ``py_func``.

    Compiled functions allocate nothing, so that arrays need no reference counts: counting them
    at every call would take longer than the work.
    """
    options: Any = {"cache": True, "error_model": "numpy", "_nrt": False}
    return cast(F, njit(**options)(function))


@contextmanager
def announced() -> Iterator[None]:
    """x"""
    yield
