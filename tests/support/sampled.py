"""Which of several alike comparisons a quick run makes; `make.py test --all` makes them all."""

import os
from collections.abc import Sequence
from typing import TypeVar
from zlib import crc32

T = TypeVar("T")


def some(alike: Sequence[T], case: str, parts: int) -> list[T]:
    """One of so many parts of them, another one for another case, and the same in every run."""
    if "KVSIM_ALL_TESTS" in os.environ:
        return list(alike)
    return list(alike[crc32(case.encode()) % parts :: parts])


def few(alike: Sequence[T], kept: Sequence[T]) -> list[T]:
    """Those kept, where others check the same of something that is nothing to them."""
    return list(alike if "KVSIM_ALL_TESTS" in os.environ else kept)
