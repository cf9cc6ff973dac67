"""Timing of the ops of a real run, under their names in predictions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, thread_time

import numpy as np
import torch

from kvsim.engine.timeline import OpSpan
from kvsim.graph import Channel
from kvsim.validate.counter import Kind, NullCounter, OpRecord

Elapsed = Callable[[], float]
CYCLES = 2e9  # of a GPU's clock; none is much faster [1/s]
HOST_MARGIN = 1.5  # a GPU waits longer than the host needs, by this
LONG = 1e-3
"""Ops of a CPU that take longer are likely to be interrupted, and are timed by its thread's clock,
which costs too much for short ones: on a busy machine asking for it lets others run. [s]"""
UNDISTURBED = 0.1  # share of layers that other processes leave alone even on a busy machine
UNKNOWN_HOST = 4e-4  # where the host's time was not measured [s]
Moment = float | torch.cuda.Event
"""A point in time: of the host's clock [s], or an event on the stream that it is about."""


@dataclass
class TimedPass:
    """One forward pass, with the time spent in each op.

    Attributes
    ----------
    kind
        Kind of the pass, such as "decode".
    start
        Begin of the pass.
    found
        Stream, name, begin and end of each op and copy.
    ops
        Times of each op, one per call.
    hosts
        Host time of each op. [s]
    """

    kind: Kind
    start: "Moment"
    found: list[tuple[str, str, "Moment", "Moment"]] = field(default_factory=list)
    ops: dict[str, list[Elapsed]] = field(default_factory=dict)
    hosts: dict[str, float] = field(default_factory=dict)

    def seconds(self) -> dict[str, float]:
        """Time by op, over all layers; the device must have finished. [s]"""
        return {name: sum(each() for each in spans) for name, spans in self.ops.items()}

    def steady(self, name: str, times: int) -> float:
        """Estimate the time of an op in a single layer, if nothing disturbs it. [s]

        The first layer is left out, because the head before it has displaced its data and code from
        the processor's caches.
        """
        spans = [each() for each in self.ops[name]]
        each, rest = divmod(len(spans), times)
        if times < 2 or rest or not each:
            return sum(spans) / times
        return undisturbed([sum(spans[i : i + each]) for i in range(each, len(spans), each)])

    def spans(self) -> list[OpSpan]:
        """Begin and end of ops and copies since the pass's start; earlier begins are negative."""
        return [
            OpSpan(stream, name, _elapsed(self.start, begin), _elapsed(self.start, end))
            for stream, name, begin, end in self.found
        ]


class Clock(NullCounter):
    """Counter that times every op, and records when ops and copies begin and end.

    On a GPU it uses events on the current stream; on a CPU the wall clock, or for long ops the
    thread's CPU time.

    Parameters
    ----------
    busy : host time to issue each op; a GPU is kept waiting for longer before the op, so that
        events measure the kernels and not the host. [s]
    """

    def __init__(self, device: torch.device, busy: Mapping[str, float] | None = None) -> None:
        self.passes: list[TimedPass] = []
        self._busy = busy
        on_cuda = device.type == "cuda"
        self._span: Callable[[Kind, str], Callable[[], Elapsed]]
        self._span = _cuda_span if on_cuda else _HostSpans()
        self._look: Callable[[], Moment] = _event if on_cuda else perf_counter

    def begin(self, kind: Kind) -> None:
        """Record that a forward pass starts."""
        self.passes.append(TimedPass(kind, self._look()))

    @contextmanager
    def op(self, name: str, memory: Channel = "hbm") -> Iterator[OpRecord]:
        """Time the work within the context under the name of an op."""
        with self._noted("gpu" if memory == "hbm" else "cpu", name):
            if self._busy is not None:
                keep_busy(HOST_MARGIN * self._busy.get(name, UNKNOWN_HOST))
            begin, stop = perf_counter(), self._span(self.passes[-1].kind, name)
            yield OpRecord()
            now = self.passes[-1]
            now.ops.setdefault(name, []).append(stop())
            now.hosts[name] = now.hosts.get(name, 0.0) + perf_counter() - begin

    @contextmanager
    def moving(self, stream: str) -> Iterator[None]:
        """Context that records a copy on ``stream``, under the pass in which it ends."""
        with self._noted(stream, "copy"):
            yield

    @contextmanager
    def _noted(self, stream: str, name: str) -> Iterator[None]:
        begin = self._look()
        yield
        if self.passes:  # the first weights of a column arrive before any
            self.passes[-1].found.append((stream, name, begin, self._look()))


def keep_busy(seconds: float) -> None:
    """Let the current GPU wait, so that the host can queue work ahead of it.

    Parameters
    ----------
    seconds
        Approximate duration of the wait. [s]
    """
    torch.cuda._sleep(int(seconds * CYCLES))  # type: ignore[no-untyped-call]


def computing_clock() -> Callable[[], float]:
    """Return a clock: the thread's CPU time if it computes alone, else the wall clock."""
    return thread_time if torch.get_num_threads() == 1 else perf_counter


def undisturbed(layers: Sequence[float]) -> float:
    """Estimate the time of a layer that nothing interrupts. [s]

    Parameters
    ----------
    layers
        Measured time of each layer. [s]
    """
    return float(np.quantile(layers, UNDISTURBED))


class _HostSpans:
    """Spans of ops on a CPU, each by the clock that suits it."""

    def __init__(self) -> None:
        self._own = computing_clock()
        self._least: dict[tuple[Kind, str], float] = {}  # that an op has taken so far [s]

    def __call__(self, kind: Kind, name: str) -> Callable[[], Elapsed]:
        key = kind, name
        least = self._least.get(key, 2 * LONG if kind == "prefill" else 0.0)
        clock = self._own if least > LONG else perf_counter
        begin = clock()

        def stop() -> Elapsed:
            took = clock() - begin
            self._least[key] = min(self._least.get(key, took), took)
            return lambda: took

        return stop


def _cuda_span(kind: Kind, name: str) -> Callable[[], Elapsed]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()

    def stop() -> Elapsed:
        end.record()
        return lambda: float(start.elapsed_time(end)) / 1e3

    return stop


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _elapsed(start: Moment, moment: Moment) -> float:
    """Return the time between two moments, which are both host times or CUDA events. [s]"""
    if isinstance(start, float):
        assert isinstance(moment, float)
        return moment - start
    assert isinstance(moment, torch.cuda.Event)
    return float(start.elapsed_time(moment)) / 1e3
