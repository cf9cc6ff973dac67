"""Where benchmarks run, and what one of them is: work of a known size, ready to be timed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from math import ceil
from typing import TypeVar

import torch
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.graph import Op
from kvsim.validate.counter import size

Call = Callable[[], object]
T = TypeVar("T")

MOST_TURNS = 64  # copies of a work's inputs
DRAWN = 2**20 - 3  # numbers that are drawn; rows do not repeat, as it divides no row
MANY = 1e14  # what a GPU may compute for one timing, some tenths of a second [FLOP]
FEW = 3e10  # the same for a core of a CPU [FLOP]


@frozen
class Work:
    """One op of known FLOPs and bytes.

    ``make`` allocates its inputs for as long as it is timed and gives calls that do the same on
    different inputs, so that none finds its own in the cache.
    """

    case: Mapping[str, object]
    op: Op
    make: Callable[[], AbstractContextManager[Sequence[Call]]]
    clock: str = "device"  # "host": the host's part alone; "lanes": threads or streams beside too


@frozen
class Bench:
    """A device, and how much of it benchmarks may use.

    On a CPU the "GPU" is its compute threads and the "link" a copy between two pools by one more.
    """

    device: torch.device
    quick: bool
    cache: int  # its largest cache [B]
    memory: int  # what a work may allocate [B]

    @property
    def on_cpu(self) -> bool:
        """Whether there is no GPU."""
        return self.device.type == "cpu"

    @property
    def half(self) -> torch.dtype:
        """Its numbers of 16 bits: CPUs compute with bf16 where they have to emulate fp16."""
        return torch.bfloat16 if self.on_cpu else torch.float16

    @property
    def most_flops(self) -> float:
        """More than this is not worth waiting for. [FLOP]"""
        return (FEW if self.on_cpu else MANY) / (3 if self.quick else 1)

    def fits(self, moved: float) -> bool:
        """Whether inputs of so many bytes leave room for a second set. [B]"""
        return 2 * moved <= self.memory

    def either(self, quick: T, full: T) -> T:
        """The smaller or the larger choice."""
        return quick if self.quick else full

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers around zero on the device: a million, over and over, as drawing is slow."""
        numbers = torch.empty(shape, device=self.device, dtype=dtype or self.half)
        flat, some = numbers.view(-1), _drawn(self.device, numbers.dtype)
        whole = len(flat) // len(some) * len(some)
        flat[:whole].view(-1, len(some)).copy_(some)
        flat[whole:].copy_(some[: len(flat) - whole])
        return numbers

    def codes(self, *shape: int) -> Tensor:
        """Bytes on the device."""
        return torch.randint(256, shape, device=self.device, dtype=torch.uint8)

    def turns(self, first: T, tensors: Sequence[Tensor | None], more: Callable[[], T]) -> list[T]:
        """Sets of inputs that together are twice as large as the cache, ``first`` among them.

        Parameters
        ----------
        tensors : what is read of a set.
        more : makes one more set.
        """
        each = max(1, size(*tensors))
        wanted = ceil(2 * self.cache / each)
        room = self.memory // (2 * each)
        count = max(1, min(wanted, room, MOST_TURNS))
        return [first, *(more() for _ in range(count - 1))]


@cache
def _drawn(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers that inputs are filled with."""
    drawn = torch.empty(DRAWN, dtype=torch.float32).normal_(0, 0.1)
    return drawn.to(device, dtype)


Benchmark = Callable[[Bench], Iterator[Work]]
"""A file of the suite: its works, from the smallest on."""
