"""Benchmarks of known work, the devices they run on, and clocks to time them."""

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
    """A device, and the limits of benchmarks on it.

    On a CPU, compute threads represent the GPU, and copies by one more thread the link.

    Attributes
    ----------
    device
        The device.
    quick
        Whether fewer and smaller cases are run.
    cache
        Size of its largest cache. [B]
    memory
        Memory that one benchmark may allocate. [B]
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
        """16-bit number format of the device; bf16 on CPUs, which would emulate fp16."""
        return torch.bfloat16 if self.on_cpu else torch.float16

    @property
    def most_flops(self) -> float:
        """Most FLOPs of one call; larger cases are left out. [FLOP]"""
        return (CPU_FLOP_PER_TIMING if self.on_cpu else GPU_FLOP_PER_TIMING) / (
            3 if self.quick else 1
        )

    def fits(self, moved: float) -> bool:
        """Return whether two sets of inputs fit in memory.

        Parameters
        ----------
        moved
            Size of the inputs. [B]
        """
        return 2 * moved <= self.memory

    def pick(self, quick: T, full: T) -> T:
        """Choose between the values of a quick and of a full suite.

        Parameters
        ----------
        quick, full
            The two values.
        """
        return quick if self.quick else full

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Create a tensor of random numbers around zero. (*shape,)

        A million numbers are drawn and repeated, as drawing is slow.

        Parameters
        ----------
        *shape
            Shape of the tensor.
        dtype
            Number format; None for the device's 16-bit format.
        """
        numbers = torch.empty(shape, device=self.device, dtype=dtype or self.half)
        flat, some = numbers.view(-1), _drawn(self.device, numbers.dtype)
        whole = len(flat) // len(some) * len(some)
        flat[:whole].view(-1, len(some)).copy_(some)
        flat[whole:].copy_(some[: len(flat) - whole])
        return numbers

    def codes(self, *shape: int) -> Tensor:
        """Create a tensor of random bytes on the device. (*shape,)

        Parameters
        ----------
        *shape
            Shape of the tensor.
        """
        return torch.randint(256, shape, device=self.device, dtype=torch.uint8)

    def turns(self, inputs: Callable[[], Inputs]) -> list[Inputs]:
        """Create sets of inputs that together are twice as large as the device's cache.

        Calls that rotate through the sets find no input in the cache.

        Parameters
        ----------
        inputs
            Creates one set.
        """
        first = inputs()
        each = max(1, sum(getattr(one, "nbytes", 0) for one in _as_tuple(first)))
        wanted = ceil(2 * self.cache / each)
        room = self.memory // (2 * each)
        count = max(1, min(wanted, room, MOST_TURNS))
        return [first, *(inputs() for _ in range(count - 1))]


@frozen
class Work:
    """A benchmark of one op of known FLOPs and bytes.

    Calls do the same on different inputs, so that none finds its inputs in the cache.

    Attributes
    ----------
    place
        The device.
    case
        Sizes and options by name, recorded with the sample.
    op
        The op, with its FLOPs and bytes.
    inputs
        Allocates the inputs of one call.
    call
        Creates a call from the inputs, given the value that ``around`` yields.
    clock
        Kind of the timed work: "device", "rested" (the same after a rest), "host" (the host's part
        of a device's work), "lane" (a copy stream), "beside" (several streams at once) or "cpu"
        (work of the host).
    alone
        Whether one set of inputs serves all calls.
    around
        Context in which the calls are timed.
    """

    place: Bench
    case: Mapping[str, object]
    op: Op
    inputs: Callable[[], Inputs]
    call: Callable[..., Call]
    clock: str = "device"
    alone: bool = False
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    @contextmanager
    def make(self) -> Iterator[list[Call]]:
        """Allocate inputs for the duration of a block, and yield the calls to time."""
        with self.around() as held:
            before = () if held is None else (held,)
            sets = [self.inputs()] if self.alone else self.place.turns(self.inputs)
            yield [self.call(*before, *_as_tuple(each)) for each in sets]


def _as_tuple(inputs: Inputs) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)


@cache
def _drawn(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the random numbers with which inputs are filled."""
    drawn = torch.empty(RANDOM_NUMBERS, dtype=torch.float32).normal_(0, 0.1)
    return drawn.to(device, dtype)


Benchmark = Callable[[Bench], Iterator[Work]]
"""A file of the suite: its works, from the smallest on."""


MIN_TIMED_SECONDS = 2e-4  # shortest stretch between two looks at a clock [s]
FEWEST, MOST = 5, 41  # runs of a work
SLEEP = 1e-3  # the GPU waits this long at least, so that the host can queue work ahead of it [s]
MOST_SLEEP = 0.1  # and no longer, as a first call may have compiled kernels [s]
RESTED = 0.05  # a GPU idles so long before it computes at its full clock again [s]


class Timer(Protocol):
    """Function that times calls one after another."""

    def __call__(self, calls: Sequence[Call]) -> float:
        """Time from the start of the first call to the end of the last one. [s]"""


def host_timer(
    clock: Callable[[], float] = perf_counter, synchronise: Callable[[], None] | None = None
) -> Timer:
    """Make a timer that uses a clock of the host.

    Parameters
    ----------
    clock
        Returns the time. [s]
    synchronise
        Function that waits for the device before the first call; None for work of the CPU.
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

    The GPU is kept waiting until the host has queued all calls. A call that itself waits for the
    GPU, such as a copy from pageable memory, is timed without this wait.

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
    """Make a timer by the CPU time of the busiest thread, which other processes do not disturb."""

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
    """Make the timers of a device, by the ``clock`` of a benchmark.

    On a CPU that computes with one thread, the CPU time of threads is used, which other processes
    do not disturb.
    """
    if device.type == "cuda":
        on_device = cuda_timer(device)
        host = host_timer(synchronise=lambda: torch.cuda.synchronize(device))
        lanes = dict.fromkeys(("lane", "beside"), on_device)

        def rested(calls: Sequence[Call]) -> float:
            torch.cuda.synchronize(device)
            time_of.sleep(RESTED)
            return on_device(calls)

        return {"device": on_device, "host": host, "cpu": host_timer(), "rested": rested, **lanes}
    computing, wall = host_timer(computing_clock()), host_timer()
    alone = torch.get_num_threads() == 1 and hasattr(time_of, "pthread_getcpuclockid")
    lane, beside = (host_timer(time_of.process_time), threads_timer()) if alone else (wall, wall)
    own = dict.fromkeys(("device", "host", "cpu"), computing)
    return {**own, "lane": lane, "beside": beside}


def measure(timer: Timer, calls: Sequence[Call], budget: float) -> tuple[float, ...]:
    """Time a call repeatedly on rotated inputs.

    Parameters
    ----------
    timer
        Times calls.
    calls
        Equal calls on different inputs.
    budget
        Time for all runs together; at least five are made in any case. [s]

    Returns
    -------
    tuple of float
        Time of one call in each run. [s]
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
