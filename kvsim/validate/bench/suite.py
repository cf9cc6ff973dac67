"""The suite of benchmarks: what it costs, which of it comes first, and running it.

Costs are estimated from three rough rates before anything is measured; while the suite runs, what
it really took corrects them. Every unit of measurements is kept once it is done.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from time import perf_counter

import torch

from kvsim.errors import InputError, first_line
from kvsim.evidence.machine.samples import Log, Sample
from kvsim.frozen import frozen
from kvsim.validate.bench.attention import (
    attention_works,
    packed_attention_works,
    packing_works,
    topk_works,
)
from kvsim.validate.bench.compute import launch_works, pointwise_works, product_works
from kvsim.validate.bench.device import Since, running
from kvsim.validate.bench.techniques import list_runs
from kvsim.validate.bench.traffic import (
    attends,
    contention_works,
    d2h,
    gather_works,
    h2d,
    memory_works,
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
from kvsim.validate.runner import Past, Runner, Unit

LEAST_REQUIRED: Mapping[str, int] = {
    "memory": 2,
    "host": 2,
    "gemm": 5,
    "host_gemm": 3,
    "h2d": 3,
    "d2h": 3,
}
"""Benchmarks that no profile is without, and the works (or pairs) that each needs at least."""
SETUP = 2e-3  # around each work: allocations, threads that start [s]
LAUNCH = 2e-5  # of an op's kernels on the host [s]
PROBED = 2**25  # bytes that rough rates are taken from
PROBES = 4  # of each, of which the fastest counts

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

        def took(work: Callable[[], object]) -> float:
            times = []
            for _ in range(PROBES):
                _wait(place)
                begin = perf_counter()
                work()
                _wait(place)
                times.append(perf_counter() - begin)
            return max(min(times), 1e-7)

        fill = PROBED / took(lambda: place.random(PROBED // 2))
        moved = 2 * PROBED / took(numbers.clone)
        return cls(fill, moved, 2 * 256 * wide**2 / took(lambda: x @ w.t()))


def _wait(place: Bench) -> None:
    if not place.on_cpu:
        torch.cuda.synchronize(place.device)


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


def list_units(suite: Suite, cost: Callable[[Work], float]) -> dict[Unit, list[Work]]:
    """List what is timed together, ranked so that every benchmark gets its share of the time.

    Works whose case names the same ``pair``, or ways to use the same bytes, are one unit. Within a
    benchmark and number format small and large ones take turns, since rates are told by large and
    floors by small ones; a unit's rank is what those up to it cost together.
    """
    found: dict[Unit, list[Work]] = {}
    for name, works in suite.items():
        parts: dict[str, dict[object, list[Work]]] = {}
        for i, work in enumerate(works):
            same = work.case.get("bytes") if "way" in work.case else None
            key = work.case.get("pair", same or (i,))
            parts.setdefault(work.op.dtype, {}).setdefault(key, []).append(work)
        ranked: dict[str, tuple[float, bool, float]] = {}
        for part in parts.values():
            costs = sorted((sum(map(cost, unit)), _named(name, unit)) for unit in part.values())
            least, total = LEAST_REQUIRED.get(name, 0), 0.0
            order = [*range(min(least, len(costs))), *spread(len(costs))]
            for i, place in enumerate(dict.fromkeys(order)):
                seconds, unit_name = costs[place]
                total += seconds
                rank = -1.0 if i < least else total if i else 0.0
                ranked[unit_name] = seconds, i < least, rank
        for part in parts.values():
            for some in part.values():
                seconds, required, rank = ranked[_named(name, some)]
                unit = Unit(_named(name, some), seconds, required=required, rank=rank)
                found[unit] = some
    return found


def spread(count: int) -> list[int]:
    """Order places so that however many of the first are taken, they are spread over all.

    Returns
    -------
    list of int
        Every place below ``count``: the first, the last, the middle, the quarters and so on.
    """
    places, parts = [0, count - 1], 2
    while len(set(places)) < count:
        places += [(count - 1) * i // parts for i in range(1, parts)]
        parts *= 2
        if parts > 2 * count:
            places += range(count)
    return list(dict.fromkeys(places))


def _named(benchmark: str, works: Sequence[Work]) -> str:
    return f"{benchmark} {' '.join(f'{key}={value}' for key, value in works[0].case.items())}"


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


SUITE_SECONDS = {True: 55.0, False: 240.0}
"""What the quick and the full suite may take. [s]"""
RUNS_LIMIT = {True: 40.0, False: 150.0}
"""What whole runs may take after it. [s]"""
LEAST_SECONDS = 0.01  # what the runs of a work may take even when time is up [s]
TIMED_SHARE = 0.6  # of the time that is to spare which its runs take

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
    "rows": row_works,
    "contention": contention_works,
    "host": reads,
    "host_gemm": products,
    "host_attention": attends,
}
"""Every benchmark under the name its samples have, in the order they run."""

Say = Callable[[str], None]


def plan(place: Bench) -> Iterator[tuple[str, list[Work]]]:
    """Every benchmark's works; none is allocated yet."""
    for name, works in SUITE.items():
        yield name, list(works(place))


@torch.inference_mode()
def run_suite(place: Bench, log: Log, say: Say) -> None:
    """Measure what the log does not hold yet: every benchmark, then techniques as they run.

    Parameters
    ----------
    say : told what will be measured, what is being measured and how long the rest will take.

    Raises
    ------
    InputError
        If something that a profile needs cannot be measured here.
    """
    planned = {name: works for name, works in plan(place) if works}
    check_complete(planned, place)
    speed = Speed.measure(place)
    units = list_units(planned, Cost(place, speed))
    end = perf_counter() + SUITE_SECONDS[place.quick] + RUNS_LIMIT[place.quick]
    with running(place.device) as since:
        todo = {unit: works for unit, works in units.items() if unit.name not in log.done}
        runner = Runner(list(todo), SUITE_SECONDS[place.quick], clock=perf_counter)
        _run_works(todo, runner, place, log, say, since)
        every = (run for run in list_runs(place) if run.name not in log.done)
        runs = {run.unit(speed.moved, speed.flops): run for run in every}
        runner = Runner(list(runs), end - perf_counter(), clock=perf_counter)
        for chosen in runner:
            run = runs[chosen.unit]
            say(f"{run.name}{runner.remaining}")
            try:
                samples = run.samples()
            except refusals(InputError) as problem:
                say(f"{run.name}: skipped, {first_line(problem, 80)}")
                samples = []
            log.append(run.name, samples, since())
        _tell_left_out(runner, say)


def _run_works(
    todo: Mapping[Unit, list[Work]], runner: Runner, place: Bench, log: Log, say: Say, since: Since
) -> None:
    clocks, benchmark = timers(place.device), ""
    refused: dict[str, str] = {}
    coming = runner.plan()
    if coming:
        count = sum(len(todo[one.unit]) for one in coming)
        say(f"{count} measurements, about {max(1.0, sum(one.seconds for one in coming)):.0f} s")
    for chosen in runner:
        unit, begin = chosen.unit, perf_counter()
        if benchmark != unit.kind:
            left = runner.plan()
            if benchmark not in {one.unit.kind for one in left}:
                _check_measured(benchmark, todo, log, refused)
            benchmark = unit.kind
            say(f"{benchmark}: {len(left)} units of measurements left{runner.remaining}")
        works, samples, extra = todo[unit], [], 0.0
        budget = max(LEAST_SECONDS, TIMED_SHARE * chosen.spare / len(works))
        for work in works:
            sample = _measured(work, benchmark, clocks, budget)
            if isinstance(sample, Sample):
                samples.append(sample)
                run = max(sample.seconds, MIN_TIMED_SECONDS)
                extra += (len(sample.runs) - FEWEST) * run  # beyond what it is estimated by
            else:
                refused[benchmark] = f"{dict(work.case)}: {sample}"
                say(f"{benchmark}: skipped {refused[benchmark]}")
        if samples or benchmark not in LEAST_REQUIRED:  # those are tried again
            log.append(unit.name, samples, since())
        runner.past[unit.name] = Past("long", max(perf_counter() - begin - extra, 1e-6))
    for name in {unit.kind: None for unit in todo}:
        _check_measured(name, todo, log, refused)
    _tell_left_out(runner, say)


def _tell_left_out(runner: Runner, say: Say) -> None:
    kinds = [unit.kind for unit in runner.units if unit.name not in runner.past]
    if kinds:
        listed = ", ".join(f"{kinds.count(kind)} of {kind}" for kind in dict.fromkeys(kinds))
        say(f"left out, as they would take too long: {listed}")


def _check_measured(
    name: str, todo: Mapping[Unit, Sequence[Work]], log: Log, refused: Mapping[str, str]
) -> None:
    """Refuse to go on without a benchmark that every profile needs.

    Raises
    ------
    InputError
        If none of its works outside the cache, or none of a number format, could run.
    """
    if name not in LEAST_REQUIRED:
        return
    works = [work for unit, some in todo.items() if unit.kind == name for work in some]
    wanted = {work.op.dtype for work in works if work.case.get("cached") != "yes"}
    found = {
        sample.op.dtype
        for sample in log.samples
        if sample.benchmark == name and sample.case.get("cached") != "yes"
    }
    if wanted - found:
        raise InputError(
            f"--device: {name} in {', '.join(sorted(wanted - found))} could not be measured, and "
            f"no profile is without it (skipped {refused.get(name)}); free memory or mend PyTorch, "
            f"and run the same command again: what is measured is kept"
        )


def _measured(work: Work, name: str, clocks: Mapping[str, Timer], budget: float) -> Sample | str:
    """One work's sample, or why this device or build of PyTorch cannot run it."""
    try:
        with work.make() as calls:
            runs = measure(clocks[work.clock], calls, budget)
    except refusals() as problem:
        return first_line(problem, 80)
    return Sample(name, dict(work.case), replace(work.op, bytes=dict(work.op.bytes)), runs)
