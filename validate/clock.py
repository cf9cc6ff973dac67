"""How long the ops of a real run take, under the names that predictions give them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, thread_time

import torch

from kvsim.validate.tally import Kind, Marks, Silent

Elapsed = Callable[[], float]


@dataclass
class TimedPass:
    """One forward pass: time spent in each op, over all layers."""

    kind: Kind
    ops: dict[str, list[Elapsed]] = field(default_factory=dict)

    def seconds(self) -> dict[str, float]:
        """By op; the device must have finished. [s]"""
        return {name: sum(each() for each in spans) for name, spans in self.ops.items()}


class Clock(Silent):
    """Times every op that compute runs; copies beside it are seen by who waits for them.

    On a GPU between events on the current stream, on a CPU by its clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.passes: list[TimedPass] = []
        self._span = _cuda_span if device.type == "cuda" else _host_span

    def begin(self, kind: Kind) -> None:
        """A forward pass starts."""
        self.passes.append(TimedPass(kind))

    @contextmanager
    def op(self, name: str) -> Iterator[Marks]:
        """Time what runs inside under that name."""
        stop = self._span()
        yield Marks()
        self.passes[-1].ops.setdefault(name, []).append(stop())


def computing_clock() -> Callable[[], float]:
    """A CPU's clock for what the calling thread computes.

    One that computes alone has its own, which other jobs on the machine do not move.
    """
    return thread_time if torch.get_num_threads() == 1 else perf_counter


def _host_span() -> Callable[[], Elapsed]:
    clock = computing_clock()
    begin = clock()

    def stop() -> Elapsed:
        took = clock() - begin
        return lambda: took

    return stop


def _cuda_span() -> Callable[[], Elapsed]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()

    def stop() -> Elapsed:
        end.record()
        return lambda: float(start.elapsed_time(end)) / 1e3

    return stop
