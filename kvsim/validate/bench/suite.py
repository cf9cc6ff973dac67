"""The suite of benchmarks: its cost, its order, and running it.

Costs are estimated from three rough rates before anything is measured; while the suite runs, what
it really took corrects them. Every unit of measurements is kept once it is done.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from math import ceil
from statistics import median
from time import perf_counter, process_time

import torch

from kvsim.errors import InputError, first_line
from kvsim.evidence.machine.samples import Log, Sample
from kvsim.evidence.machine.solve import REST, with_rates
from kvsim.evidence.machine.solve import RUNS_BENCHMARK as NAME
from kvsim.frozen import frozen
from kvsim.graph import Op
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.techniques.technique import Technique
from kvsim.validate.bench.attention import (
    attention_works,
    packed_attention_works,
    packing_works,
    topk_works,
)
from kvsim.validate.bench.compute import (
    launch_works,
    pointwise_works,
    product_works,
    sustained_works,
)
from kvsim.validate.bench.device import Since, running
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
from kvsim.validate.counts.check import SLACK, representative
from kvsim.validate.counts.expected import RandomPrompts, ops_by_name, phase_steps, predict
from kvsim.validate.machine import refusals
from kvsim.validate.model.architecture import load_architecture
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import Weights, random_weights
from kvsim.validate.runner import BY_USE, Past, Runner, Unit
from kvsim.validate.times.clock import TimedPass, computing_clock
from kvsim.validate.times.timed import Timing, issuing, run_timed

SUITE_CPU_MODELS = (("smollm2-135m", 4), ("smollm2-135m", 12), ("smollm2-1.7b", 2))
BATCH, PROMPTS = 2, (192, 640)
SUITE_GPU_MODELS = (("llama2-7b", 1), ("llama2-7b", 3), ("smollm2-135m", 4))
GPU_BATCH, GPU_PROMPTS = 4, (1536, 6144)  # large enough for kernels to be more than their floors
SUITE_GENERATED = 7
SUITE_REPEATS = 3
UNTIMED = ("h2d", "d2h", "cpu")  # what runs beside compute is seen by who waits for it


@frozen
class TechniqueRun:
    """A run of a technique whose ops are timed, on a model that is cut to a few layers.

    Attributes
    ----------
    technique
        The technique.
    model
        Name in the catalogue.
    layers
        Layers that the model is cut to.
    prompt
        Tokens of the prompts. [tokens]
    rank
        Priority among the techniques; lower ranks are run first.
    place
        The device.
    required
        Whether numbers of the hardware profile depend on this run alone.
    """

    technique: Technique
    model: str
    layers: int
    prompt: int
    rank: int
    place: Bench
    required: bool = False

    @property
    def name(self) -> str:
        """Name of the run, unique in a suite."""
        cut = f"{self.model} cut to {self.layers} layers"
        return f"{NAME} {self.technique}, {cut}, prompt {self.prompt}"

    @property
    def work(self) -> RandomPrompts:
        """Workload of the run: random prompts, and tokens to generate."""
        return _work(self.place, self.prompt)

    def unit(self, moved: float, flops: float) -> Unit:
        """Return the run as a unit for ``Runner``, with its estimated duration.

        Parameters
        ----------
        moved, flops
            Approximate memory and arithmetic rates of the machine. [B/s], [FLOP/s]
        """
        d = _deployment(self.model, self.layers, self.place.on_cpu)
        rates = {f"{link}.bandwidth_Bps": moved for link in d.hardware.links}
        rough = replace(d, hardware=with_rates(d.hardware, rates | {"compute.fp16_FLOPps": flops}))
        p = predict(rough, self.technique, self.work)
        once = float(p.ttft_s[0] + p.tpot_s[0] * SUITE_GENERATED)
        seconds = once * (self._repeats + 2)
        return Unit(self.name, seconds, required=self.required, rank=self.rank)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Kernel classes of the timed ops, and "moved" if a cache is copied to or from the host."""
        d = _deployment(self.model, self.layers, self.place.on_cpu)
        steps = phase_steps(d, self.technique, self.work).values()
        timed = [op for step in steps for op, _ in ops_by_name(step).values()]
        found = {op.kernel for op in timed if op.stream not in UNTIMED}
        return frozenset(found | ({"moved"} if self.technique.uses_host(d) else set()))

    def samples(self) -> list[Sample]:
        """Time every op of the run, and return the samples."""
        d = _deployment(self.model, self.layers, self.place.on_cpu)
        weights = _weights(self.model, self.layers, self.place.device, self.place.half)
        arch = load_architecture(self.model).cut(self.layers)
        decoder = Decoder(arch, weights, self.prompt + SUITE_GENERATED + SLACK, deployment=d)
        return list(
            of_runs(d, self.work, _timed(decoder, self.technique, self.work, self._repeats))
        )

    @property
    def _repeats(self) -> int:
        return self.place.pick(2, SUITE_REPEATS)


def list_runs(place: Bench) -> list[TechniqueRun]:
    """List the runs of every technique at a few points, point by point.

    Required runs are full KV and offloading at two depths, which determine the fixed time of steps
    and layers, and for each kernel class the first technique that uses it, which determines the
    class's minimum time.
    """
    models = (SUITE_CPU_MODELS if place.on_cpu else SUITE_GPU_MODELS)[: place.pick(2, 3)]
    prompts = (PROMPTS if place.on_cpu else GPU_PROMPTS)[: place.pick(1, 2)]
    found: list[TechniqueRun] = []
    known: set[str] = set()
    for model, layers in models:
        for prompt in prompts:
            work = _work(place, prompt)
            asked = representative(load_architecture(model).cut(layers).model, work)
            ranks = {name: rank for rank, name in enumerate(BY_USE)}
            asked.sort(key=lambda t: ranks.get(t.name, len(ranks)))
            deep = (model, prompt) == (models[0][0], prompts[0])
            for rank, t in enumerate(asked):
                run = TechniqueRun(t, model, layers, prompt, rank, place)
                first = bool(run.kinds - known)
                known |= run.kinds
                found.append(
                    replace(run, required=first or (deep and t.name in ("full", "offload")))
                )
    return found


def _work(place: Bench, prompt: int) -> RandomPrompts:
    return RandomPrompts(BATCH if place.on_cpu else GPU_BATCH, prompt, SUITE_GENERATED)


@lru_cache(maxsize=1)
def _weights(model: str, layers: int, device: torch.device, dtype: torch.dtype) -> Weights:
    return random_weights(load_architecture(model).cut(layers), device, dtype)


@cache
def _deployment(model: str, layers: int, on_cpu: bool) -> Deployment:
    """Return a deployment on any machine, as only relative amounts of work matter."""
    stack = load_stack("kvsim")
    if on_cpu:  # the kernels that were counted are those that a GPU is given
        stack = replace(stack, time=replace(stack.time, counted_launches=False))
    return Deployment(load_architecture(model).cut(layers).model, load_hardware("a6000"), stack)


@frozen
class Runs:
    """Timed runs of one workload.

    Attributes
    ----------
    by_op
        Runs in which every op is timed.
    whole
        On a CPU, a run without timing of ops, which would slow it down. On a GPU, one with the
        host's time of each op.
    plain
        On a GPU, a run in which only whole rounds are timed.
    """

    by_op: list[Timing]
    whole: Timing
    plain: Timing | None = None

    @property
    def host_share(self) -> float:
        """Host time of a round relative to a run in which every op is timed."""
        if self.plain is None:
            return 1.0
        return min(1.0, median(self.plain.computing) / median(self.whole.computing))

    def rests(self, stated: Mapping[str, tuple[Op, int]]) -> tuple[list[float], float]:
        """Return the time of each round, and the part of it outside the ops. [s]

        On a GPU both are times of the host.
        """
        decoding = [
            [p for p in run.passes if p.kind == "decode"] for run in (*self.by_op, self.whole)
        ]
        if self.plain:
            each = zip(self.whole.computing, decoding[-1], strict=True)
            rest = median(took - sum(p.hosts.values()) for took, p in each)
            return [self.host_share * rest], 0.0

        def accounted(one: TimedPass) -> float:
            known = {name: times for name, (_, times) in stated.items() if name in one.ops}
            return sum(
                known[name] * one.steady(name, known[name]) if name in known else took
                for name, took in one.seconds().items()
            )

        return list(self.whole.computing), median(accounted(p) for some in decoding for p in some)


def _timed(decoder: Decoder, technique: Technique, work: RandomPrompts, repeats: int) -> Runs:
    """Time runs of one workload after a first one that compiles and selects kernels."""
    run_timed(decoder, technique, work, by_op=True)
    if decoder.device.type == "cpu":
        whole = run_timed(decoder, technique, work)
        return Runs(
            [run_timed(decoder, technique, work, by_op=True) for _ in range(repeats)], whole
        )
    host = run_timed(decoder, technique, work, by_op=True)
    busy = issuing(host)
    runs = [run_timed(decoder, technique, work, True, busy) for _ in range(repeats)]
    return Runs(runs, host, run_timed(decoder, technique, work))


def of_runs(deployment: Deployment, work: RandomPrompts, runs: Runs) -> Iterator[Sample]:
    """Yield samples of the ops of one workload: of its prefill, and of rounds with a single pass.

    There is one sample for each op that runs once per layer or once in the head.
    """
    technique, every = runs.whole.technique, runs.by_op
    hosts, share = runs.whole.passes if runs.plain else (), runs.host_share
    drafts = {p.kind for p in every[0].passes[1:]} - {"between", "decode"}
    for phase, step in phase_steps(deployment, technique, work).items():
        if phase == "decode" and drafts:
            return
        stated, case = ops_by_name(step), _case(deployment, technique, work, phase)
        picked = [_passes(run.passes, phase) for run in every]
        issued = [p.hosts for p in _passes(hosts, phase)]
        for name, (op, times) in stated.items():
            found = [[p.steady(name, times) for p in some if name in p.ops] for some in picked]
            if op.stream not in UNTIMED and all(found):
                own = [share * ops[name] / times for ops in issued if name in ops]
                took = tuple(max(median(f), 1e-9) for f in found)
                yield Sample(NAME, case | {"op": name}, op, took, median(own) if own else 0.0)
        if phase == "decode":
            rest, ops_s = runs.rests(stated)
            if min(rest) > 0:
                host_s = median(rest) if runs.plain else 0.0
                own_case = case | {"op": REST, "ops_s": ops_s}
                yield Sample(NAME, own_case, Op(REST, launches=0.0), tuple(rest), host_s)


def _passes(passes: Sequence[TimedPass], phase: str) -> Sequence[TimedPass]:
    """Return the passes of a phase; of prefill only that of the model itself."""
    return passes[:1] if phase == "prefill" else [p for p in passes if p.kind == "decode"]


def _case(
    deployment: Deployment, technique: Technique, work: RandomPrompts, phase: str
) -> dict[str, object]:
    return {
        "technique": str(technique),
        "phase": phase,
        "model": deployment.model.name,
        "layers": deployment.model.layers,
        "batch": work.batch,
        "prompt": work.prompt,
        "graphs": "no",  # ops are timed one by one
    }


LEAST_REQUIRED: Mapping[str, int] = {
    "memory": 2,
    "host": 2,
    "gemm": 5,
    "sustained": 3,
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
    """Approximate rates of a device, from which the duration of benchmarks is estimated.

    Attributes
    ----------
    fill
        Rate at which inputs are created. [B/s]
    moved
        Rate at which ops read and write memory. [B/s]
    flops
        Rate of matrix products in 16 bits. [FLOP/s]
    """

    fill: float
    moved: float
    flops: float

    @classmethod
    def measure(cls, place: Bench) -> "Speed":
        """Measure the rates, which takes some tenths of a second."""
        numbers = place.random(PROBED // 2)
        wide = min(1024, place.cache)
        clock = computing_clock() if place.on_cpu else perf_counter
        x = place.random(256, wide)
        w = place.random(wide, wide)

        def took(work: Callable[[], object]) -> float:
            times = []
            for _ in range(PROBES):
                _wait(place)
                begin = clock()
                work()
                _wait(place)
                times.append(clock() - begin)
            return max(min(times), 1e-7)

        fill = PROBED / took(lambda: place.random(PROBED // 2))
        moved = 2 * PROBED / took(numbers.clone)
        return cls(fill, moved, 2 * 256 * wide**2 / took(lambda: x @ w.t()))


def _wait(place: Bench) -> None:
    if not place.on_cpu:
        torch.cuda.synchronize(place.device)


@frozen
class Cost:
    """Function that estimates the duration of a benchmark from approximate rates."""

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
    """Group benchmarks into units of work, and rank the units to share out the time.

    Benchmarks with the same ``pair``, or that use the same bytes in different ways, are one unit.
    Within a kind of benchmark and number format, small and large cases alternate, as large ones
    determine rates and small ones fixed times. The rank of a unit is the estimated time of all
    units of its group up to it.

    Parameters
    ----------
    suite
        Cases by kind of benchmark.
    cost
        Estimates the time of a case. [s]
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
    """Order indices so that the first n of them are spread evenly over all, for any n.

    Parameters
    ----------
    count
        Number of indices.

    Returns
    -------
    list of int
        Every index below ``count``: the first, the last, the middle, the quarters and so on.
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
    """Check that a suite contains every benchmark that a hardware profile needs.

    Parameters
    ----------
    suite
        Cases by kind of benchmark.

    Raises
    ------
    InputError
        If a required benchmark has no cases on this device; the message says why.
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
STARVED = 3.0
"""Times as long on the wall as it may compute, where others share the CPU that it measures."""
LEAST_SECONDS = 0.01  # what the runs of a work may take even when time is up [s]
TIMED_SHARE = 0.6  # of the time that is to spare which its runs take

SUITE: dict[str, Benchmark] = {
    "launch": launch_works,
    "memory": memory_works,
    "gemm": product_works,
    "sustained": sustained_works,
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
    """Yield the name and the cases of every benchmark; no inputs are allocated yet."""
    for name, works in SUITE.items():
        yield name, list(works(place))


@torch.inference_mode()
def run_suite(place: Bench, log: Log, say: Say) -> None:
    """Run all benchmarks, then the runs of techniques, except those already in a log.

    Parameters
    ----------
    log
        Log of samples, which is continued.
    say
        Function that prints the progress.

    Raises
    ------
    InputError
        If something that a profile needs cannot be measured on this device.
    """
    planned = {name: works for name, works in plan(place) if works}
    check_complete(planned, place)
    speed = Speed.measure(place)
    units = list_units(planned, Cost(place, speed))
    clock = _budget_clock(place)
    end = clock() + SUITE_SECONDS[place.quick] + RUNS_LIMIT[place.quick]
    with running(place.device) as since:
        todo = {unit: works for unit, works in units.items() if unit.name not in log.done}
        runner = Runner(list(todo), SUITE_SECONDS[place.quick], clock=clock)
        _run_works(todo, runner, place, log, say, since)
        every = (run for run in list_runs(place) if run.name not in log.done)
        runs = {run.unit(speed.moved, speed.flops): run for run in every}
        runner = Runner(list(runs), end - clock(), clock=clock)
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


def _budget_clock(place: Bench) -> Callable[[], float]:
    """Make the clock that time is planned by: that of the wall, or of this process's computing. [s]

    With one thread on a CPU, what other jobs take of it then costs no measurements. With several,
    the time they compute is no measure of how long the suite takes.
    """
    if not place.on_cpu or torch.get_num_threads() > 1:
        return perf_counter
    wall, own = perf_counter(), process_time()
    return lambda: max(process_time() - own, (perf_counter() - wall) / STARVED)


def _run_works(
    todo: Mapping[Unit, list[Work]], runner: Runner, place: Bench, log: Log, say: Say, since: Since
) -> None:
    clocks, benchmark = timers(place.device), ""
    refused: dict[str, str] = {}
    coming = runner.plan()
    if coming:
        count = sum(len(todo[one.unit]) for one in coming)
        own = "" if runner.now is perf_counter else " of computing"
        seconds = sum(one.seconds for one in coming)
        say(f"{count} measurements, about {max(1.0, seconds):.0f} s{own}")
    for chosen in runner:
        unit, begin = chosen.unit, runner.now()
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
        runner.past[unit.name] = Past("long", max(runner.now() - begin - extra, 1e-6))
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
    """Check that every benchmark that a profile needs was measured.

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
        for sample in log.items
        if sample.benchmark == name and sample.case.get("cached") != "yes"
    }
    if wanted - found:
        raise InputError(
            f"--device: {name} in {', '.join(sorted(wanted - found))} could not be measured, and "
            f"no profile is without it (skipped {refused.get(name)}); free memory or mend PyTorch, "
            f"and run the same command again: what is measured is kept"
        )


def _measured(work: Work, name: str, clocks: Mapping[str, Timer], budget: float) -> Sample | str:
    """Return the sample of one benchmark, or why this device or build of PyTorch cannot run it."""
    try:
        with work.make() as calls:
            runs = measure(clocks[work.clock], calls, budget)
    except refusals() as problem:
        return first_line(problem, 80)
    return Sample(name, dict(work.case), replace(work.op, bytes=dict(work.op.bytes)), runs)
