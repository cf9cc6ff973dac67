"""Where benchmarks run, work of a known size that is ready to be timed, and the clocks for it."""

import threading
import time as time_of
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from math import ceil
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.graph import Op
from kvsim.validate.times.clock import HOST_MARGIN, computing_clock, keep_busy

Call = Callable[[], object]
Inputs = Any
"""What one call works on: a tensor, packed rows, or a tuple of such."""
T = TypeVar("T")

MOST_TURNS = 64  # copies of a work's inputs
RANDOM_NUMBERS = 2**20 - 3  # numbers that are drawn; rows do not repeat, as it divides no row
GPU_FLOP_PER_TIMING = 1e14  # what a GPU may compute for one timing, some tenths of a second [FLOP]
CPU_FLOP_PER_TIMING = 3e10  # the same for a core of a CPU [FLOP]


@frozen
class Bench:
    """A device, and how much of it benchmarks may use.

    On a CPU the "GPU" is its compute threads and the "link" a copy between two pools by one more.

    Attributes
    ----------
    cache
        Its largest cache. [B]
    memory
        What a work may allocate. [B]
    """

    device: torch.device
    quick: bool
    cache: int
    memory: int

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
        return (CPU_FLOP_PER_TIMING if self.on_cpu else GPU_FLOP_PER_TIMING) / (
            3 if self.quick else 1
        )

    def fits(self, moved: float) -> bool:
        """Tell whether inputs leave room for a second set.

        Parameters
        ----------
        moved
            Size of the inputs. [B]
        """
        return 2 * moved <= self.memory

    def pick(self, quick: T, full: T) -> T:
        """Choose by whether the suite is quick.

        Parameters
        ----------
        quick, full
            What a quick suite takes, and what a whole one does.
        """
        return quick if self.quick else full

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Make numbers around zero on the device: a million, over and over, as drawing is slow.

        Parameters
        ----------
        *shape
            Of the tensor.
        dtype
            Its number format; the device's 16 bits if not given.
        """
        numbers = torch.empty(shape, device=self.device, dtype=dtype or self.half)
        flat, some = numbers.view(-1), _drawn(self.device, numbers.dtype)
        whole = len(flat) // len(some) * len(some)
        flat[:whole].view(-1, len(some)).copy_(some)
        flat[whole:].copy_(some[: len(flat) - whole])
        return numbers

    def codes(self, *shape: int) -> Tensor:
        """Bytes on the device."""
        return torch.randint(256, shape, device=self.device, dtype=torch.uint8)

    def turns(self, inputs: Callable[[], Inputs]) -> list[Inputs]:
        """Make sets of inputs that together are twice as large as the cache.

        Parameters
        ----------
        inputs
            Makes one set.
        """
        first = inputs()
        each = max(1, sum(getattr(one, "nbytes", 0) for one in _as_tuple(first)))
        wanted = ceil(2 * self.cache / each)
        room = self.memory // (2 * each)
        count = max(1, min(wanted, room, MOST_TURNS))
        return [first, *(inputs() for _ in range(count - 1))]


@frozen
class Work:
    """One op of known FLOPs and bytes.

    Calls do the same on different inputs, so that none finds its own in the cache.
    """

    place: Bench
    case: Mapping[str, object]
    op: Op
    inputs: Callable[[], Inputs]
    """Allocates what one call works on."""
    call: Callable[..., Call]
    """Makes a call of that, behind what ``around`` gives."""
    clock: str = "device"
    """Also "host": its part of a device's work alone; "lane": through a lane; "beside": lanes at
    once; "cpu": the host's own work."""
    alone: bool = False
    """Whether one set of inputs serves all calls."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """Holds for as long as it is timed."""

    @contextmanager
    def make(self) -> Iterator[list[Call]]:
        """Allocate inputs for as long as it is timed."""
        with self.around() as held:
            before = () if held is None else (held,)
            sets = [self.inputs()] if self.alone else self.place.turns(self.inputs)
            yield [self.call(*before, *_as_tuple(each)) for each in sets]


def _as_tuple(inputs: Inputs) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)


@cache
def _drawn(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers that inputs are filled with."""
    drawn = torch.empty(RANDOM_NUMBERS, dtype=torch.float32).normal_(0, 0.1)
    return drawn.to(device, dtype)


Benchmark = Callable[[Bench], Iterator[Work]]
"""A file of the suite: its works, from the smallest on."""


MIN_TIMED_SECONDS = 2e-4  # shortest stretch between two looks at a clock [s]
FEWEST, MOST = 5, 41  # runs of a work
SLEEP = 1e-3  # the GPU waits this long at least, so that the host can queue work ahead of it [s]
MOST_SLEEP = 0.1  # and no longer, as a first call may have compiled kernels [s]


class Timer(Protocol):
    """Something that times calls one after another."""

    def __call__(self, calls: Sequence[Call]) -> float:
        """Time from the start of the first call to the end of the last one. [s]"""


def host_timer(
    clock: Callable[[], float] = perf_counter, synchronise: Callable[[], None] | None = None
) -> Timer:
    """Make a timer by a clock of the host: all of a CPU's work, or the host's part of a GPU's.

    Parameters
    ----------
    synchronise
        Waits for the device before the first call, if given.
    """

    def time(calls: Sequence[Call]) -> float:
        if synchronise:
            synchronise()
        begin = clock()
        for call in calls:
            call()
        return clock() - begin

    return time


def cuda_timer(device: torch.device, clock: Callable[[], float] = perf_counter) -> Timer:
    """Make a timer by events on the current stream.

    The host queues all calls while the GPU is kept waiting, for longer than the host took for as
    many calls before. A call that itself waits for the GPU, as a copy from pageable memory does,
    would find a longer wait each time; what it waited for is left out.

    Parameters
    ----------
    clock
        Of the host. [s]
    """
    each = 0.0  # what the host takes for one call [s]

    def time(calls: Sequence[Call]) -> float:
        nonlocal each
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            slept = min(max(SLEEP, HOST_MARGIN * each * len(calls)), MOST_SLEEP)
            keep_busy(slept)
            start.record()
            begin = clock()
            for call in calls:
                call()
            took = clock() - begin
            each = (took if took <= slept else took - slept) / len(calls)
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return time


def threads_timer() -> Timer:
    """Make a timer by the clock of the thread that computes longest, beside which others work."""

    def time(calls: Sequence[Call]) -> float:
        threads = [one.ident for one in threading.enumerate() if one.ident]
        clocks = [time_of.pthread_getcpuclockid(thread) for thread in threads]
        begin = [time_of.clock_gettime(clock) for clock in clocks]
        for call in calls:
            call()
        ends = [time_of.clock_gettime(clock) for clock in clocks]
        return max(end - was for end, was in zip(ends, begin, strict=True))

    return time


def timers(device: torch.device) -> dict[str, Timer]:
    """Make the timers of a device, by what a work's ``clock`` asks for.

    A CPU that computes with one thread is timed by its threads' own clocks, which other processes
    do not move.
    """
    if device.type == "cuda":
        on_device = cuda_timer(device)
        host = host_timer(synchronise=lambda: torch.cuda.synchronize(device))
        lanes = dict.fromkeys(("lane", "beside"), on_device)
        return {"device": on_device, "host": host, "cpu": host_timer(), **lanes}
    computing, wall = host_timer(computing_clock()), host_timer()
    alone = torch.get_num_threads() == 1 and hasattr(time_of, "pthread_getcpuclockid")
    lane, beside = (host_timer(time_of.process_time), threads_timer()) if alone else (wall, wall)
    own = dict.fromkeys(("device", "host", "cpu"), computing)
    return {**own, "lane": lane, "beside": beside}


def measure(timer: Timer, calls: Sequence[Call], budget: float) -> tuple[float, ...]:
    """Time one call, over and over on rotated inputs.

    Parameters
    ----------
    budget
        What the runs may take together; five are made even so. [s]
    """
    timer(calls)  # warm-up: every input is touched, kernels are compiled and chosen
    timer(calls[:1])
    one = max(timer(calls[:1]), 1e-9)
    inner = max(1, ceil(MIN_TIMED_SECONDS / one))
    runs = min(MOST, max(FEWEST, int(budget / (inner * one))))
    found = []
    turn = 0
    for _ in range(runs):
        group = [calls[(turn + i) % len(calls)] for i in range(inner)]
        turn += inner
        found.append(timer(group) / inner)
    return tuple(found)
