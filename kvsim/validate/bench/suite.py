"""The suite of benchmarks: what it costs, a selection that fits the time, and running it.

Costs are estimated from three rough rates before anything is measured; while the suite runs, what
it really took corrects them. Every benchmark is kept once it is done.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from math import ceil
from time import perf_counter

import torch

from kvsim.errors import InputError, first_line
from kvsim.evidence.machine.samples import Log, Sample
from kvsim.evidence.machine.solve import RUNS_BENCHMARK
from kvsim.frozen import frozen
from kvsim.validate.bench import techniques
from kvsim.validate.bench.attention import (
    attention_works,
    packed_attention_works,
    packing_works,
    topk_works,
)
from kvsim.validate.bench.compute import launch_works, pointwise_works, product_works
from kvsim.validate.bench.device import Since, running
from kvsim.validate.bench.traffic import (
    attends,
    contention_works,
    d2h,
    duplex,
    gather_works,
    h2d,
    memory_works,
    peer_works,
    products,
    reads,
    row_works,
)
from kvsim.validate.bench.work import (
    FEWEST,
    MIN_TIMED_SECONDS,
    MOST_TURNS,
    Bench,
    Benchmark,
    Timer,
    Work,
    measure,
    timers,
)
from kvsim.validate.machine import refusals
from kvsim.validate.progress import Progress
from kvsim.validate.times.clock import computing_clock

LEAST_WORKS = 4  # works that a benchmark keeps, whatever they take
LEAST_REQUIRED: Mapping[str, int] = {
    "memory": 2,
    "host": 1,
    "gemm": 5,
    "host_gemm": 3,
    "h2d": 3,
    "d2h": 3,
}
"""Benchmarks that no profile is without, and the works (or pairs) that each needs at least."""
SETUP = 2e-3  # around each work: allocations, threads that start [s]
LAUNCH = 2e-5  # of an op's kernels on the host [s]
PROBED = 2**25  # bytes that rough rates are taken from

Suite = Mapping[str, Sequence[Work]]


@frozen
class Speed:
    """Rough rates of a place."""

    fill: float  # inputs that are made [B/s]
    moved: float  # what ops read and write [B/s]
    flops: float  # of products in 16 bits [FLOP/s]

    @classmethod
    def measure(cls, place: Bench) -> "Speed":
        """Measured in some tenths of a second."""
        numbers = place.random(PROBED // 2)
        wide = min(1024, place.cache)
        x = place.random(256, wide)
        w = place.random(wide, wide)
        clock = suite_clock(place)

        def took(work: Callable[[], object]) -> float:
            work()
            _wait(place)
            begin = clock()
            work()
            _wait(place)
            return max(clock() - begin, 1e-7)

        fill = PROBED / took(lambda: place.random(PROBED // 2))
        moved = 2 * PROBED / took(numbers.clone)
        return cls(fill, moved, 2 * 256 * wide**2 / took(lambda: x @ w.t()))


def _wait(place: Bench) -> None:
    if not place.on_cpu:
        torch.cuda.synchronize(place.device)


def suite_clock(place: Bench) -> Callable[[], float]:
    """The clock that tells what a suite takes; on a CPU other processes do not move it. [s]"""
    return computing_clock() if place.on_cpu else perf_counter


@frozen
class Cost:
    """Seconds of a work, given rough rates."""

    place: Bench
    speed: Speed

    def __call__(self, work: Work) -> float:
        """Inputs made, one warm-up through all of them, two more calls and the fewest runs. [s]"""
        moved = max((float(n) for n in work.op.bytes.values()), default=0.0)
        flops = float(work.op.flops)
        launches = float(work.op.launches)
        once = moved / self.speed.moved + flops / self.speed.flops + launches * LAUNCH
        sets = max(1, min(ceil(2 * self.place.cache / max(moved, 1.0)), MOST_TURNS))
        made = min(sets * moved, self.place.memory / 2)
        return (
            SETUP
            + made / self.speed.fill
            + (sets + 2) * once
            + FEWEST * max(MIN_TIMED_SECONDS, once)
        )


@frozen
class Budgeted:
    """What a suite measures, and what it leaves out."""

    kept: dict[str, list[Work]]
    left_out: dict[str, int] = field(default_factory=dict)  # works by benchmark
    seconds: float = 0.0  # estimated for what is kept

    @property
    def summary(self) -> str:
        """One line for people."""
        count = sum(map(len, self.kept.values()))
        text = f"{count} measurements, about {max(1.0, self.seconds):.0f} s"
        if self.left_out:
            listed = ", ".join(f"{n} of {name}" for name, n in self.left_out.items())
            text += f"; left out, as they would take too long: {listed}"
        return text


def select(suite: Suite, cost: Callable[[Work], float], limit: float) -> Budgeted:
    """As many works as fit a limit: the costliest benchmarks lose their costliest works first.

    Works whose case names the same ``pair``, or ways to use the same bytes, stay or go together;
    every number format of a benchmark keeps some.

    Parameters
    ----------
    limit : what all of them may take together. [s]
    """
    parts = {
        (name, dtype): _units([work for work in works if work.op.dtype == dtype])
        for name, works in suite.items()
        for dtype in dict.fromkeys(work.op.dtype for work in works)
    }
    costs = {part: [sum(map(cost, unit)) for unit in units] for part, units in parts.items()}
    kept = {part: list(range(len(units))) for part, units in parts.items()}
    totals = {part: sum(each) for part, each in costs.items()}
    while sum(totals.values()) > limit:
        least = {part: LEAST_REQUIRED.get(part[0], LEAST_WORKS) for part in parts}
        spare = [part for part in parts if len(kept[part]) > least[part]]
        if not spare:
            break
        part = max(spare, key=lambda p: totals[p])
        worst = max(kept[part], key=lambda i: costs[part][i])
        kept[part].remove(worst)
        totals[part] -= costs[part][worst]
    chosen: dict[str, list[Work]] = {name: [] for name in suite}
    for part, units in parts.items():
        chosen[part[0]] += [work for i in kept[part] for work in units[i]]
    gone = {name: len(suite[name]) - len(works) for name, works in chosen.items()}
    left_out = {name: count for name, count in gone.items() if count}
    return Budgeted(chosen, left_out, sum(totals.values()))


def _units(works: Sequence[Work]) -> list[list[Work]]:
    found: dict[object, list[Work]] = {}
    for i, work in enumerate(works):
        same = work.case.get("bytes") if "way" in work.case else None
        found.setdefault(work.case.get("pair", same or (i,)), []).append(work)
    return list(found.values())


def check_complete(suite: Suite, place: Bench) -> None:
    """Refuse a suite that no profile could be made of, before anything is measured.

    Raises
    ------
    InputError
        Naming what cannot be measured, and why.
    """
    for name, works in suite.items():
        if name not in LEAST_REQUIRED:
            continue
        if not [w for w in works if w.case.get("cached") != "yes"]:
            raise InputError(
                f"--device: {name} cannot be measured here: the cache holds "
                f"{place.cache / 2**20:.0f} MiB and one benchmark may take "
                f"{place.memory / 2**20:.0f} MiB of the memory that is free; free some memory, or "
                f"raise the container's limit"
            )


SUITE_SECONDS = {True: 60.0, False: 240.0}
"""What the quick and the full suite may take. [s]"""
RUNS_LIMIT = {True: 40.0, False: 170.0}
"""What whole runs may take after it. [s]"""
LEAST_SECONDS = 0.01  # what the runs of a work may take even when time is up [s]
TIMED_SHARE = 0.6  # of a work's time that its runs take; the rest is allocation and warm-up

SUITE: dict[str, Benchmark] = {
    "launch": launch_works,
    "memory": memory_works,
    "gemm": product_works,
    "attention": attention_works,
    "lowbit": packed_attention_works,
    "pointwise": pointwise_works,
    "topk": topk_works,
    "quantise": packing_works,
    "gather": gather_works,
    "h2d": h2d,
    "d2h": d2h,
    "duplex": duplex,
    "rows": row_works,
    "contention": contention_works,
    "host": reads,
    "host_gemm": products,
    "host_attention": attends,
    "peers": peer_works,
}
"""Every benchmark under the name its samples have, in the order they run."""

Say = Callable[[str], None]
Done = Mapping[str, Sequence[Sample]]
Runs = Callable[[Bench, Done, Callable[[], float], Say], Iterator[tuple[str, list[Sample]]]]

RUNS: dict[str, Runs] = {RUNS_BENCHMARK: techniques.samples}
"""Samples from whole runs, after the suite: told what is done, how much time is left and where to
speak, they give one part after another."""


def plan(place: Bench) -> Iterator[tuple[str, list[Work]]]:
    """Every benchmark's works; none is allocated yet."""
    for name, works in SUITE.items():
        yield name, list(works(place))


def plan_suite(place: Bench, log: Log) -> Budgeted:
    """What will be measured of what the log does not hold yet.

    Raises
    ------
    InputError
        If something that a profile needs cannot be measured here.
    """
    planned = dict(plan(place))
    check_complete(planned, place)
    todo = {name: works for name, works in planned.items() if works and name not in log.done}
    return select(todo, Cost(place, Speed.measure(place)), SUITE_SECONDS[place.quick])


@torch.inference_mode()
def run_suite(place: Bench, log: Log, say: Say) -> None:
    """Measure what the log does not hold yet.

    Parameters
    ----------
    say : told what will be measured, what is being measured and how long the rest will take.
    """
    with running(place.device) as since:
        _run_suite(place, log, say, since)


def _run_suite(place: Bench, log: Log, say: Say, since: Since) -> None:
    selection = plan_suite(place, log)
    if selection.kept:
        say(selection.summary)
    progress = Progress(sum(map(len, selection.kept.values())))
    clocks, left = timers(place.device), _time_left(place, SUITE_SECONDS)
    for name, works in selection.kept.items():
        say(f"{name}: {len(works)} of {progress.left:.0f} measurements left{progress.remaining}")
        samples: list[Sample] = []
        refused = ""
        for i, work in enumerate(works):
            if left() <= 0 and samples and name not in LEAST_REQUIRED and not _paired(work):
                say(f"{name}: {len(works) - i} left out, as time is up")
                progress.done += len(works) - i
                break
            sample = _measured(work, name, clocks, _budget(left(), progress))
            if isinstance(sample, Sample):
                samples.append(sample)
            else:
                refused = f"{dict(work.case)}: {sample}"
                say(f"{name}: skipped {refused}")
            progress.done += 1
        check_measured(name, works, samples, refused)
        log.append(name, samples, since())
    left = _time_left(place, RUNS_LIMIT)
    for name, runs in RUNS.items():
        for part, samples in runs(place, log.done, left, say):
            log.append(f"{name}: {part}", samples, since())


def _time_left(place: Bench, limits: Mapping[bool, float]) -> Callable[[], float]:
    """What is left of a limit that begins now; below 0 when it is over. [s]"""
    clock = suite_clock(place)
    end = clock() + limits[place.quick]
    return lambda: end - clock()


def _budget(left: float, progress: Progress) -> float:
    """What the runs of the next work may take. [s]"""
    return max(LEAST_SECONDS, TIMED_SHARE * left / max(progress.left, 1))


def _paired(work: Work) -> bool:
    """Whether a work means nothing without the others of its pair."""
    return "pair" in work.case


def check_measured(
    name: str, works: Sequence[Work], samples: Sequence[Sample], refused: str
) -> None:
    """Refuse to go on without a benchmark that every profile needs; nothing of it is kept.

    Parameters
    ----------
    refused : the last work that could not run, and why.

    Raises
    ------
    InputError
        If none of its works outside the cache, or none of a number format, could run.
    """
    if name not in LEAST_REQUIRED:
        return
    wanted = {work.op.dtype for work in works if work.case.get("cached") != "yes"}
    found = {sample.op.dtype for sample in samples if sample.case.get("cached") != "yes"}
    if wanted - found:
        raise InputError(
            f"--device: {name} in {', '.join(sorted(wanted - found))} could not be measured, and "
            f"no profile is without it (skipped {refused}); free memory or mend PyTorch, and run "
            f"the same command again: what is measured is kept"
        )


def _measured(work: Work, name: str, clocks: Mapping[str, Timer], budget: float) -> Sample | str:
    """One work's sample, or why this device or build of PyTorch cannot run it."""
    try:
        with work.make() as calls:
            runs = measure(clocks[work.clock], calls, budget)
    except refusals() as problem:
        return first_line(problem, 80)
    return Sample(name, dict(work.case), replace(work.op, bytes=dict(work.op.bytes)), runs)
