"""Host memory that a GPU reads: pinned once per run, and exactly as large as what is kept there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.validate.processor import available_memory

MAPPED = 3  # cudaHostRegisterPortable and cudaHostRegisterMapped
CACHE_LINE = 64  # every home begins at a line of the host's cache [B]
PINNED_SHARE = 0.8  # of the host's free memory that a run may pin


class HostArena:
    """Pinned memory of one run, in one mapping as large as was planned.

    What the plan does not know gets a mapping of its own. PyTorch's pinned memory takes the next
    power of two of every tensor, and is never given back.

    Parameters
    ----------
    planned : what all homes take together. [B]
    """

    def __init__(self, planned: int = 0) -> None:
        self.planned, self.users = planned, 0
        self._pages: mmap | None = None
        self._used = 0
        self._registered: list[int] = []  # addresses

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate zeros in pinned memory.

        Raises
        ------
        RuntimeError
            If the memory cannot be pinned.
        """
        numbers = prod(shape)
        needed = lines(numbers * dtype.itemsize)
        if not numbers:
            return torch.zeros(shape, dtype=dtype)
        if self._used + needed > self.planned:
            return torch.frombuffer(self._map(needed), dtype=dtype, count=numbers).view(shape)
        if self._pages is None:
            self._pages = self._map(self.planned)
        begin, self._used = self._used, self._used + needed
        home = torch.frombuffer(self._pages, dtype=dtype, count=numbers, offset=begin)
        return home.view(shape)

    def leave(self) -> None:
        """One who uses it has ended; with the last one nothing is pinned any more."""
        self.users -= 1
        if self.users > 0:
            return
        while self._registered:
            _runtime().cudaHostUnregister(self._registered.pop())
        self._pages, self._used = None, 0

    def _map(self, needed: int) -> mmap:
        pages = mmap(-1, needed)
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        problem = int(_runtime().cudaHostRegister(address, needed, MAPPED))
        if problem:
            size = f"{needed / 2**20:.0f} MiB"
            raise RuntimeError(f"host memory: {size} cannot be pinned (CUDA error {problem})")
        self._registered.append(address)
        return pages


_PLANNED: ContextVar[HostArena | None] = ContextVar("planned", default=None)


def arena() -> HostArena:
    """What the run that is being set up has planned, or memory as it is asked for."""
    found = _PLANNED.get() or HostArena()
    found.users += 1
    return found


@contextmanager
def planned(needed: int) -> Iterator[None]:
    """Let what asks for host memory inside share one mapping.

    Parameters
    ----------
    needed
        Size of the mapping. [B]
    """
    before = _PLANNED.set(HostArena(needed))
    try:
        yield
    finally:
        _PLANNED.reset(before)


def check_host_memory(needed: int, what: str, free: Callable[[], int] = available_memory) -> None:
    """Refuse to pin what the host does not have: being killed for it cannot be caught.

    Parameters
    ----------
    free
        Measures the host's free memory. [B]

    Raises
    ------
    InputError
        Saying what is needed and what is free.
    """
    there = free()
    if needed > PINNED_SHARE * there:
        raise InputError(
            f"{what}: {needed / 2**30:.1f} GiB of host memory are needed, {there / 2**30:.1f} GiB "
            f"are free; choose a smaller batch, or shorter prompts"
        )


def lines(size: int) -> int:
    """Round a size up to whole lines of the host's cache. [B]"""
    return -(-size // CACHE_LINE) * CACHE_LINE


def _runtime() -> Any:
    """CUDA's runtime library, loaded with PyTorch."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
