"""A few numbers of a machine and its software found from the samples of a benchmark."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from math import hypot

import numpy as np

from kvsim.engine.roofline import seconds
from kvsim.evidence.leastsquares import BLIND, FAR_OFF, Parameter, fit_ratio
from kvsim.evidence.machine.samples import Sample
from kvsim.frozen import frozen
from kvsim.graph import Array, Channel, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import KERNEL_CLASSES, Hardware, Kernel, Link, Stack
from kvsim.machines.profiles import number_of, with_numbers
from kvsim.models.configs import load_model
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique


def predict_samples(samples: Sequence[Sample], deployment: Deployment) -> Array:
    """Predict the time of every sample.

    Ops of one kind are evaluated together.

    Parameters
    ----------
    samples
        The samples, of any benchmarks.
    deployment
        The machine and software to predict for.

    Returns
    -------
    array
        One time per sample. [s]
    """
    out = np.empty(len(samples))
    order = sorted(range(len(samples)), key=lambda i: _kind(samples[i].op))
    for _, group in groupby(order, key=lambda i: _kind(samples[i].op)):
        rows = list(group)
        out[rows] = seconds(_stacked([samples[i].op for i in rows]), deployment)
    return out


def _kind(op: Op) -> tuple[str, str, str, float, float, tuple[str, ...]]:
    often = float(op.launches), float(np.ravel(op.times)[0])
    return op.stream, op.kernel, op.dtype, *often, tuple(sorted(op.bytes))


def _stacked(ops: Sequence[Op]) -> Op:
    """Ops of one kind as one whose work is an array."""

    def column(values: Iterable[Number]) -> Array:
        return np.array([float(np.asarray(v)) for v in values])

    first = ops[0]
    moved: dict[Channel, Number] = {c: column(op.bytes[c] for op in ops) for c in first.bytes}
    return replace(
        first,
        flops=column(op.flops for op in ops),
        bytes=moved,
        rows=column(op.rows for op in ops),
        size=column(op.size for op in ops),
        unpacked=column(op.unpacked for op in ops),
    )


def with_rates(hardware: Hardware, numbers: Mapping[str, float]) -> Hardware:
    """Replace rates and latencies of a machine.

    Parameters
    ----------
    hardware
        The machine to start from.
    numbers
        New values by the keys of its file.

    Returns
    -------
    Hardware
        The machine with the new numbers.
    """
    flops, links, cpu = dict(hardware.flops), dict(hardware.links), hardware.cpu_flops
    for key, value in numbers.items():
        table, _, name = key.partition(".")
        if key == "compute.cpu_fp32_FLOPps":
            cpu = value
        elif table == "compute":
            flops[name.removesuffix("_FLOPps")] = value
        else:
            changed = {"bandwidth" if name == "bandwidth_Bps" else "latency": value}
            links[table] = replace(links[table], **changed)
    return replace(hardware, flops=flops, links=links, cpu_flops=cpu)


MAX_CERTAIN_ERROR = 0.05 / 3  # relative standard error up to which samples tell a number
UNDETERMINED = 10.0  # relative error of numbers of which samples tell nothing alone
RUNS_BENCHMARK = "techniques"  # samples of ops within real runs
SAMPLING, REST = "sample", "rest"  # ops there: the choice of tokens; all that no op accounts for
LEVEL = "level"  # rates of a kernel in real runs over those that it has alone
LEVEL_RUNS = 3  # samples of real runs from which on they set the level too, besides the floor
HALF_SIZES = (10.0, 0.1)  # to start from
KEY_RANGES = {
    "gap_s": (1e-9, 1e-2),
    "bandwidth_Bps": (1e7, 1e14),
    "FLOPps": (1e8, 1e17),
    "latency_s": (1e-9, 1e-2),
    "memory": (1e-5, 1.0),
    "compute": (1e-5, 1.0),
    "floor_s": (1e-9, 1e-1),
    "half_size": (1e-4, 1e4),
    "unpack_ops": (1e-2, 1e4),
    "gather_row_s": (1e-12, 1e-3),
}
"""What a number may be, by the end of its key; wide, as it is searched by its logarithm."""


@frozen
class Known:
    """A fitted number of a machine, and how well its samples determine it.

    Attributes
    ----------
    value
        The number, in the unit of its key.
    error
        Relative standard error; infinite if the samples do not determine the number.
    residual
        Median of the samples' absolute relative residuals.
    samples
        Number of samples in the fit.
    benchmark
        Benchmark that the samples are of.
    confused
        Keys of numbers whose effects the samples cannot separate from this one's.
    """

    value: float
    error: float
    residual: float  # median of the samples' relative residuals, without their signs
    samples: int
    benchmark: str
    confused: tuple[str, ...] = ()

    @property
    def identified(self) -> bool:
        """Whether three standard errors are within 5 % of the number."""
        return self.error <= MAX_CERTAIN_ERROR

    @property
    def verdict(self) -> str:
        """Why the samples do not determine the number; empty if they do."""
        return "" if self.identified else "uncertain" if self.error <= BLIND else "not identified"


class Solver:
    """Solves for a machine's numbers step by step; each step builds on the ones before.

    Parameters
    ----------
    samples
        Samples of all finished benchmarks.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        links = {name: Link(1e9) for name in ("hbm", "dram", "h2d", "d2h", "link")}
        hardware = Hardware("", "", {"fp16": 1e12}, 1e12, links, 0, 0, None, "measured", {})
        stack = Stack("", kernels=dict.fromkeys(KERNEL_CLASSES, Kernel()))
        # ops are ready-made, so that any model does
        self.d = Deployment(load_model("llama2-7b"), hardware, stack)
        self.hardware: dict[str, Known] = {}
        self.stack: dict[str, Known] = {}
        self.rates: dict[str, Known] = {}

    def as_run(self, samples: list[Sample], keys: Sequence[str]) -> dict[str, Known]:
        """Fit a kernel class to its benchmark, corrected by real runs.

        An op of a technique does more than its kernel: it appends, looks up and allocates. On a
        CPU, the class's floor is therefore fitted to the ops of real runs, and its rates are those
        of the kernel alone times one common factor, which is fitted to the runs too. On a GPU the
        runs time kernels themselves, and their ops are few and small, so that only the floor is
        taken from them; likewise where there are too few runs.

        Parameters
        ----------
        samples
            Samples of the class's kernels alone, and of its ops in real runs.
        keys
            Keys of the numbers to fit.

        Returns
        -------
        dict of Known
            The fitted numbers by key.
        """
        alone = [s for s in samples if s.benchmark != RUNS_BENCHMARK]
        runs = [s for s in samples if s.benchmark == RUNS_BENCHMARK]
        # on a CPU, copies that run beside an op share its memory
        if alone and any(s.host_s for s in runs):
            runs = [s for s in runs if not self.copies_beside(s)]
        found = self.solve(alone or runs, [self.parameter(k, alone or runs) for k in keys])
        floor = next((key for key in keys if key.endswith(("floor_s", "gap_s"))), None)
        if not floor or not alone or not runs:
            return found
        rates = [key for key in keys if key.endswith((".memory", ".compute"))]
        alone_at = {key: known.value for key, known in found.items()}

        def scaled(numbers: Mapping[str, float]) -> dict[str, float]:
            shares = {key: min(1.0, alone_at[key] * numbers[LEVEL]) for key in rates}
            return alone_at | shares | {floor: numbers.get(floor, alone_at[floor])}

        best = max((alone_at[key] for key in rates), default=1.0)  # beyond 1 levels tell nothing
        level = Parameter(LEVEL, min(1.0, 0.5 / best), 1e-2, 1e2, True)

        def predict(numbers: Mapping[str, float]) -> Array:
            return predict_samples(
                runs, self._replace_numbers(scaled({LEVEL: 1.0} | dict(numbers)))
            )

        again = {LEVEL: Known(1.0, np.inf, 0.0, len(runs), RUNS_BENCHMARK)}
        if len(runs) >= LEVEL_RUNS and not any(s.host_s for s in runs):
            again = self.solve(runs, [level, self.parameter(floor, runs)], predict)
        if again[LEVEL].error > BLIND:  # runs too small to tell: the kernel's own rates
            again = self.solve(runs, [self.parameter(floor, runs)], predict)
            again[LEVEL] = replace(again[floor], value=1.0, error=0.0)
        final = scaled({name: known.value for name, known in again.items()})
        for key in rates:
            error = hypot(again[LEVEL].error, found[key].error)
            found[key] = replace(again[LEVEL], value=final[key], error=error)
        return found | {floor: again[floor]}

    def all_of(self, kernel: str, benchmark: str) -> list[Sample]:
        """Select the samples of a kernel class, from its own benchmark and from real runs.

        Parameters
        ----------
        kernel
            The kernel class.
        benchmark
            The benchmark that runs its kernels alone.

        Returns
        -------
        list of Sample
            The samples, without those of sampling and those of time that no op accounts for.
        """
        here = [
            s for s in self.select(benchmark) + self.select(RUNS_BENCHMARK) if s.op.kernel == kernel
        ]
        return [s for s in here if s.case.get("op") not in (SAMPLING, REST)]

    def select(self, benchmark: str, **case: object) -> list[Sample]:
        """Select the samples of a benchmark.

        Parameters
        ----------
        benchmark
            Its name.
        **case
            Values that the case of a sample must have.

        Returns
        -------
        list of Sample
            The samples that match.
        """
        return [
            s
            for s in self.samples
            if s.benchmark == benchmark and all(s.case.get(k) == v for k, v in case.items())
        ]

    def copies_beside(self, sample: Sample) -> bool:
        """Tell whether the technique of a real run copies between host and GPU while its ops run.

        Parameters
        ----------
        sample
            A sample of the run.
        """
        return technique_of(str(sample.case["technique"])).uses_host(self.d)

    def solve(
        self,
        samples: list[Sample],
        free: list[Parameter],
        predict: Callable[[Mapping[str, float]], Array] | None = None,
    ) -> dict[str, Known]:
        """Fit numbers to samples.

        Parameters
        ----------
        samples
            Samples of one benchmark, at least one.
        free
            The numbers to fit, most important first. If samples are too few or cannot distinguish
            numbers, the last ones keep their values, with infinite errors.
        predict
            Times of the samples for given numbers; by default those of the machine known so far
            with these numbers changed. [s]

        Returns
        -------
        dict of Known
            The numbers by key.
        """
        spare = max(1, len(samples) - 1)  # one sample is left to tell how far they scatter
        kept, free = [p.name for p in free[spare:]], free[:spare]
        measured = np.array([s.seconds for s in samples])
        predict = predict or (
            lambda numbers: predict_samples(samples, self._replace_numbers(numbers))
        )
        while True:
            fits = [fit_ratio(predict, measured, start, robust=True) for start in _starts(free)]
            fit = min(fits, key=lambda f: float(np.sum(np.hypot(1, f.residuals / FAR_OFF))))
            untold = {k for k, error in fit.errors.items() if error > UNDETERMINED * fit.values[k]}
            pairs = [pair for pair in fit.confused if untold.issuperset(pair)]
            if not pairs:
                break
            last = next(p.name for p in reversed(free) if any(p.name in pair for pair in pairs))
            kept.append(last)
            free = [p for p in free if p.name != last]
        unseen = {
            key: Known(self._value(key), np.inf, 0.0, len(samples), samples[0].benchmark)
            for key in kept
        }
        off = float(np.median(np.abs(fit.residuals)))
        more = _more_uncertain(samples, off, len(free))
        return {
            key: Known(
                value,
                float(more * fit.errors[key] / value),
                off,
                len(samples),
                samples[0].benchmark,
                tuple(b if a == key else a for a, b in fit.confused if key in (a, b)),
            )
            for key, value in fit.values.items()
        } | unseen

    def _value(self, key: str) -> float:
        """A number as known so far."""
        if not _of_hardware(key):
            return number_of(self.d.stack, key)
        table, _, name = key.partition(".")
        if name.endswith("_FLOPps"):
            on_host = key == "compute.cpu_fp32_FLOPps"
            return self.d.hardware.cpu_flops if on_host else self.d.flops(name[: -len("_FLOPps")])
        link = self.d.hardware.links[table]
        return link.bandwidth if name == "bandwidth_Bps" else link.latency

    def parameter(self, key: str, samples: list[Sample]) -> Parameter:
        """Set up a number to fit, with a start that the samples suggest.

        Rates start from the best one seen, times from half the shortest.

        Parameters
        ----------
        key
            The number's key, whose ending sets its range.
        samples
            The samples that it will be fitted to.

        Returns
        -------
        Parameter
            The number, searched by its logarithm.
        """
        low, high = KEY_RANGES[next(end for end in KEY_RANGES if key.endswith(end))]
        name = key.rpartition(".")[2]
        shortest = min(s.seconds for s in samples)
        if name == "bandwidth_Bps":
            channel = key.partition(".")[0]
            start = max(_work(s.op, channel) / s.seconds for s in samples)
        elif name.endswith("FLOPps"):
            start = max(_work(s.op, "flops") / s.seconds for s in samples)
        elif name in ("memory", "compute"):
            start = self._share(name, samples)
        elif name == "half_size":
            start = HALF_SIZES[0]
        elif name == "unpack_ops":
            rate = self.d.flops("fp32") / 2
            widened = [(s.seconds, n) for s in samples if (n := _work(s.op, "unpacked"))]
            start = min(took * rate / numbers for took, numbers in widened)
        elif name == "gather_row_s":
            start = max(shortest / max(_work(s.op, "rows"), 1.0) for s in samples)
        else:
            start = shortest / 2
        return Parameter(key, float(np.clip(start, low * 1.01, high / 1.01)), low, high, True)

    def _share(self, name: str, samples: list[Sample]) -> float:
        """The best share of the machine's rate that a sample shows."""
        if name == "memory":
            rates = self.d.bandwidth
            return max(_work(s.op, c) / s.seconds / rates[c] for s in samples for c in s.op.bytes)
        cpu = samples[0].op.stream == "cpu"
        peak = self.d.hardware.cpu_flops if cpu else self.d.flops(samples[0].op.dtype)
        return max(_work(s.op, "flops") / s.seconds / peak for s in samples)

    def _replace_numbers(self, numbers: Mapping[str, float]) -> Deployment:
        hard = {k: v for k, v in numbers.items() if _of_hardware(k)}
        soft = {k: v for k, v in numbers.items() if k not in hard}
        return replace(
            self.d,
            hardware=with_rates(self.d.hardware, hard),
            stack=with_numbers(self.d.stack, soft),
        )

    def adopt(self) -> None:
        """Update the machine with all numbers that are known so far, for the steps that follow."""
        known = self.hardware | self.stack
        self.d = self._replace_numbers({key: number.value for key, number in known.items()})


@cache
def technique_of(notation: str) -> Technique:
    """Parse the technique of a sample; equal notations give the same object.

    Parameters
    ----------
    notation
        Technique as on the command line: a name, and its settings after a colon.

    Returns
    -------
    Technique
        The technique.
    """
    return parse(notation)


def _starts(free: list[Parameter]) -> list[list[Parameter]]:
    """Where to begin: with arithmetic that saturates early and late, if it does at all.

    Whether a kernel waits for memory or computes at a low rate may look alike from one side.
    """
    if not any(p.name.endswith("half_size") for p in free):
        return [free]
    return [
        [replace(p, start=half) if p.name.endswith("half_size") else p for p in free]
        for half in HALF_SIZES
    ]


def _more_uncertain(samples: Sequence[Sample], off: float, numbers: int) -> float:
    """By how much a fit to few samples underestimates its errors.

    Few samples may agree by chance: their runs say how far they scatter at least, and Student's
    distribution how much less a few tell than many.
    """
    from scipy.stats import t  # as slow to import as it is rarely needed

    spare = len(samples) - numbers
    if spare < 1:
        return np.inf
    scatter = float(np.median([s.error for s in samples]))
    fewer = float(t.ppf(0.8413, spare))
    return fewer * max(1.0, scatter / max(1.4826 * off, 1e-12))


def _of_hardware(key: str) -> bool:
    return key.endswith(("_Bps", "latency_s", "_FLOPps"))


def _work(op: Op, what: str) -> float:
    """FLOPs, rows, numbers that are widened, or bytes through a channel."""
    if what in ("flops", "rows", "unpacked"):
        return float(np.asarray(getattr(op, what)))
    return float(np.asarray(op.bytes.get(what, 0.0)))  # type: ignore[call-overload]
