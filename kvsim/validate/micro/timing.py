"""Clocks, and how often to look at them."""

from collections.abc import Callable, Sequence
from math import ceil
from time import perf_counter
from typing import Protocol

import torch

from kvsim.validate.micro.place import Call
from kvsim.validate.times.clock import BEHIND, computing_clock, keep_busy

GROUP = 2e-4  # shortest stretch between two looks at a clock [s]
FEWEST, MOST = 5, 41  # runs of a work
SLEEP = 1e-3  # the GPU waits this long at least, so that the host can queue work ahead of it [s]


class Timer(Protocol):
    """Something that times calls one after another."""

    def __call__(self, calls: Sequence[Call]) -> float:
        """Time from the start of the first call to the end of the last one. [s]"""


def host_timer(
    clock: Callable[[], float] = perf_counter, synchronise: Callable[[], None] | None = None
) -> Timer:
    """A clock of the host: all of a CPU's work, or the host's part of a GPU's."""

    def time(calls: Sequence[Call]) -> float:
        if synchronise:
            synchronise()
        begin = clock()
        for call in calls:
            call()
        return clock() - begin

    return time


def cuda_timer(device: torch.device, clock: Callable[[], float] = perf_counter) -> Timer:
    """Events on the current stream; the host queues all calls while the GPU is kept waiting.

    It waits for longer than the host took for as many calls before.
    """
    each = 0.0  # what the host takes for one call [s]

    def time(calls: Sequence[Call]) -> float:
        nonlocal each
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            keep_busy(max(SLEEP, BEHIND * each * len(calls)))
            start.record()
            begin = clock()
            for call in calls:
                call()
            each = (clock() - begin) / len(calls)
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return time


def timers(device: torch.device) -> dict[str, Timer]:
    """The clocks of the device, of the host's part, and of work on several lanes."""
    if device.type == "cuda":
        on_device = cuda_timer(device)
        host = host_timer(synchronise=lambda: torch.cuda.synchronize(device))
        return {"device": on_device, "host": host, "lanes": on_device}
    computing = host_timer(computing_clock())
    return {"device": computing, "host": computing, "lanes": host_timer()}


def measure(timer: Timer, calls: Sequence[Call], budget: float) -> tuple[float, ...]:
    """Times of one call, over and over on rotated inputs. [s]

    Parameters
    ----------
    budget : what the runs may take together; five are made even so. [s]
    """
    timer(calls)  # warm-up: every input is touched, kernels are compiled and chosen
    timer(calls[:1])
    one = max(timer(calls[:1]), 1e-9)
    inner = max(1, ceil(GROUP / one))
    runs = min(MOST, max(FEWEST, int(budget / (inner * one))))
    found = []
    turn = 0
    for _ in range(runs):
        group = [calls[(turn + i) % len(calls)] for i in range(inner)]
        turn += inner
        found.append(timer(group) / inner)
    return tuple(found)
