"""Numbers of a machine and its software fitted to microbenchmarks, kernel class by kernel class.

A sample's op is predicted by ``kvsim.evaluate`` on the machine as known so far; each stage frees
the few numbers that its benchmark is about. What the data cannot tell is kept, and marked.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import hypot

import numpy as np

from kvsim.calibrate import BLIND, FAR_OFF, Parameter, fit_ratio
from kvsim.calibration.samples import Sample
from kvsim.configs import load_model
from kvsim.deployment import Deployment
from kvsim.errors import InputError
from kvsim.evaluate import seconds
from kvsim.graph import Array, Channel, Number, Op
from kvsim.hardware import KERNELS, Hardware, Kernel, Link, Stack
from kvsim.profiles import number_of, with_numbers

SURE = 0.05 / 3  # relative standard error up to which samples tell a number

REQUIRED = frozenset({"fp16", "fp32"})  # formats that no profile is without
TECHNIQUES = "techniques"  # samples of ops within real runs
SAMPLING, REST = "sample", "rest"  # ops there: the choice of tokens; all that no op accounts for
LEVEL = "level"  # rates of a kernel in real runs over those that it has alone
FEW_RUNS = 3  # samples of real runs from which on they set the level
PAIRS = {"attention": "attention", "prompt": "attention", "lowbit": "lowbit"}
"""Kernel classes of attention, and the benchmarks that hold their kernels."""
HALF_SIZES = (10.0, 0.1)  # to start from
RANGES = {
    "gap_s": (1e-9, 1e-2),
    "bandwidth_Bps": (1e7, 1e14),
    "FLOPps": (1e8, 1e17),
    "latency_s": (1e-9, 1e-2),
    "memory": (1e-5, 1.0),
    "compute": (1e-5, 1.0),
    "floor_s": (1e-9, 1e-1),
    "half_size": (1e-4, 1e4),
    "gather_row_s": (1e-12, 1e-3),
}
"""What a number may be, by the end of its key; wide, as it is searched by its logarithm."""


@dataclass(frozen=True)
class Known:
    """A number, and how well the samples tell it."""

    value: float
    error: float  # standard error, relative; infinite where the samples do not tell
    residual: float  # median of the samples' relative residuals, without their signs
    samples: int
    benchmark: str
    confused: tuple[str, ...] = ()  # numbers that the samples cannot tell it from

    @property
    def told(self) -> bool:
        """Whether three standard errors are within 5 %."""
        return self.error <= SURE

    @property
    def verdict(self) -> str:
        """How well the samples tell it, or nothing where they tell it well."""
        return "" if self.told else "uncertain" if self.error <= BLIND else "not identified"


@dataclass(frozen=True)
class Calibration:
    """What samples say about a machine (keys of its file) and its software."""

    hardware: dict[str, Known]
    stack: dict[str, Known]
    rates: dict[str, Known] = field(default_factory=dict)  # further measured rates, to be shown


def predicted(samples: Sequence[Sample], d: Deployment) -> Array:
    """What the simulator says of every sample, ops of one kind in one evaluation. [s]"""
    out = np.empty(len(samples))
    order = sorted(range(len(samples)), key=lambda i: _kind(samples[i].op))
    for _, group in groupby(order, key=lambda i: _kind(samples[i].op)):
        rows = list(group)
        out[rows] = seconds(_stacked([samples[i].op for i in rows]), d)
    return out


def _kind(op: Op) -> tuple[str, str, str, float, tuple[str, ...]]:
    return op.stream, op.kernel, op.dtype, op.launches, tuple(sorted(op.bytes))


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
    )


def with_rates(hardware: Hardware, numbers: Mapping[str, float]) -> Hardware:
    """A machine with other numbers under some of its file's keys."""
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


def fit_samples(samples: Sequence[Sample]) -> Calibration:
    """Everything that the samples tell.

    Raises
    ------
    InputError
        If a benchmark that a profile cannot do without has no samples.
    """
    return _Fitter(samples).everything()


class _Fitter:
    """The machine as known so far, and the stages that make it known."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        links = {name: Link(1e9) for name in ("hbm", "dram", "h2d", "d2h", "link")}
        hardware = Hardware("", "", {"fp16": 1e12}, 1e12, links, 0, 0, None, "measured", {})
        stack = Stack("", kernels=dict.fromkeys(KERNELS, Kernel()))
        # ops are ready-made, so that any model does
        self.d = Deployment(load_model("llama2-7b"), hardware, stack)
        self.hardware: dict[str, Known] = {}
        self.stack: dict[str, Known] = {}
        self.rates: dict[str, Known] = {}

    def everything(self) -> Calibration:
        """All stages, each on top of the ones before."""
        self._launches()
        self._channel("hbm", "memory")
        self._channel("dram", "host")
        if "time.launch_s" in self.stack:
            self._kernel("pointwise", "pointwise", "memory", "floor_s")
        else:  # issuing its many kernels is all the time that its bytes do not take
            keys = ["time.gap_s", "kernel.pointwise.memory"]
            self._class("pointwise", "pointwise", keys)
        self._products()
        for kernel, benchmark in PAIRS.items():
            self._kernel(kernel, benchmark, "memory", "compute", "half_size", "floor_s")
        for kernel in ("quantise", "topk", "gather"):
            self._kernel(kernel, kernel, "memory", "floor_s")
        self._steps()
        self._host()
        for link in ("h2d", "d2h"):
            self._link(link)
        self._rows()
        self._overlap()
        return Calibration(self.hardware, self.stack, self.rates)

    # stages

    def _launches(self) -> None:
        """Kernels issued one by one, replayed as a graph, and a synchronisation."""
        for way, key in (("graph", "time.gap_s"), ("eager", "time.launch_s")):
            self._slope(key, self._of("launch", way=way))
        self._slope("time.sync_s", self._of("launch", way="sync"))
        gap, eager = self.stack.get("time.gap_s"), self.stack.get("time.launch_s")
        if eager and not gap:  # nothing runs ahead of anything: the host's time is the device's
            del self.stack["time.launch_s"]
            self.stack["time.gap_s"] = eager
        self._adopt()

    def _slope(self, key: str, samples: list[Sample]) -> None:
        if not samples:
            return
        each = np.array([s.seconds / s.op.launches for s in samples])
        value = float(np.median(each))
        off = np.abs(each / value - 1)
        error = 1.2533 * 1.4826 * float(np.median(off)) / np.sqrt(len(each))
        known = Known(value, error, float(np.median(off)), len(each), "launch")
        self.stack[key] = known

    def _channel(self, channel: str, benchmark: str) -> None:
        """A memory's rate is that of its fastest use; the slower ones are told beside it."""
        samples = self._of(benchmark, cached="no")
        ways = sorted({str(s.case["way"]) for s in samples})
        if not ways:
            raise _missing(benchmark)
        key = f"{channel}.bandwidth_Bps"
        for way in ways:
            here = [s for s in samples if s.case["way"] == way]
            found = self._solve(here, [self._parameter(key, here)])  # too large for a floor to tell
            self.rates[f"{channel} {way}"] = found[key]
        best = max((self.rates[f"{channel} {way}"] for way in ways), key=lambda k: k.value)
        self.hardware[key] = best
        self._adopt()

    def _products(self) -> None:
        """Peaks are what large products approach, so their own share of them is one."""
        measured = {s.op.dtype for s in self._of("gemm")}
        for dtype in REQUIRED - measured:
            raise _missing(f"gemm in {dtype}")
        for dtype in sorted(measured, key=lambda t: t != "fp16"):
            here = [s for s in self._all_of("gemm", "gemm") if s.op.dtype == dtype]
            peak = f"compute.{dtype}_FLOPps"
            first = dtype == "fp16"  # the format of the simulator's products; others share the rest
            names = ("half_size", "memory", "floor_s") if first else ("half_size",)
            keys = [peak, *(f"kernel.gemm.{name}" for name in names)]
            found = self._as_run(here, keys)
            self.hardware[peak] = found.pop(peak)
            if first:
                self.stack |= found
                top = self.hardware[peak]
                self.stack["kernel.gemm.compute"] = replace(top, value=1.0, error=0.0)
            self._adopt()

    def _kernel(self, kernel: str, benchmark: str, *names: str) -> None:
        self._class(kernel, benchmark, [f"kernel.{kernel}.{name}" for name in names])

    def _class(self, kernel: str, benchmark: str, keys: Sequence[str]) -> None:
        """A kernel class by itself and as techniques run it."""
        here = self._all_of(kernel, benchmark)
        if here:
            self.stack |= self._as_run(here, keys)
            self._adopt()

    def _as_run(self, samples: list[Sample], keys: Sequence[str]) -> dict[str, Known]:
        """A kernel class's numbers, as far as kernels alone tell them, at the level of real runs.

        Within a technique an op is more than its kernel: it appends, looks up, allocates. So its
        floor is that of the runs, and its rates are the kernel's times a share of them.
        """
        alone = [s for s in samples if s.benchmark != TECHNIQUES]
        runs = [s for s in samples if s.benchmark == TECHNIQUES]
        found = self._solve(alone or runs, [self._parameter(k, alone or runs) for k in keys])
        floor = next((key for key in keys if key.endswith(("floor_s", "gap_s"))), None)
        if not floor or not alone or len(runs) < FEW_RUNS:
            return found
        rates = [key for key in keys if key.endswith((".memory", ".compute"))]
        fixed = {key: known.value for key, known in found.items() if key not in (*rates, floor)}

        def scaled(numbers: Mapping[str, float]) -> dict[str, float]:
            shares = {key: min(1.0, found[key].value * numbers[LEVEL]) for key in rates}
            return fixed | shares | {floor: numbers[floor]}

        level = Parameter(LEVEL, 1.0, 1e-2, 1e2, True)
        again = self._solve(
            runs,
            [level, self._parameter(floor, runs)],
            lambda numbers: predicted(runs, self._with(scaled(numbers))),
        )
        final = scaled({name: known.value for name, known in again.items()})
        own = again[LEVEL]
        return {
            key: replace(
                again[floor] if key == floor else own,
                value=value,
                error=again[floor].error if key == floor else hypot(own.error, found[key].error),
            )
            if key in (*rates, floor)
            else found[key]
            for key, value in final.items()
        }

    def _all_of(self, kernel: str, benchmark: str) -> list[Sample]:
        here = [s for s in self._of(benchmark) + self._of(TECHNIQUES) if s.op.kernel == kernel]
        return [s for s in here if s.case.get("op") not in (SAMPLING, REST)]

    def _steps(self) -> None:
        """What a pass and each of its layers take besides ops; sampling is a pass's fixed time."""
        resident = [s for s in self._of(TECHNIQUES, op=REST) if not _offloads(s)]
        sampling = self._of(TECHNIQUES, op=SAMPLING, phase="decode")
        if len({s.case["layers"] for s in resident}) < 2 or not sampling:
            return
        layers = np.array([float(str(s.case["layers"])) for s in resident])
        rest = np.array([s.seconds for s in resident])
        fit = fit_ratio(
            lambda n: n["step"] + n["layer"] * layers,
            rest,
            [
                Parameter("step", float(rest.min()) / 2, 1e-7, 1e-1, True),
                Parameter("layer", float(rest.min() / layers.max()) / 2, 1e-8, 1e-2, True),
            ],
            robust=True,
        )
        off = float(np.median(np.abs(fit.residuals)))
        chosen = np.array([s.seconds for s in sampling]) - predicted(sampling, self.d)
        more = max(0.0, float(np.median(chosen)))
        for name, value in (("step", fit.values["step"] + more), ("layer", fit.values["layer"])):
            error = fit.errors[name] / value
            self.stack[f"time.{name}_s"] = Known(value, error, off, len(resident), TECHNIQUES)
        away = [
            (s.seconds - fit.values["step"]) / float(str(s.case["layers"]))
            for s in self._of(TECHNIQUES, op=REST)
            if _offloads(s)
        ]
        if away:
            value = max(0.0, float(np.median(away)) - fit.values["layer"])
            scatter = float(np.median(np.abs(np.array(away) - np.median(away))))
            error = scatter / value / len(away) ** 0.5 if value else np.inf
            scatter /= max(fit.values["layer"] + value, 1e-12)
            known = Known(value, error, scatter, len(away), TECHNIQUES)
            self.stack["time.offloaded_layer_s"] = known
        self._adopt()

    def _host(self) -> None:
        """The host's arithmetic from its products, then its attention."""
        products = self._of("host_gemm")
        if not products:
            raise _missing("host_gemm")
        key = "compute.cpu_fp32_FLOPps"
        keys = [key, "kernel.cpu.floor_s"]
        found = self._solve(products, [self._parameter(k, products) for k in keys])
        self.hardware[key] = found[key]
        self._adopt()
        self._kernel("cpu", "host_attention", "memory", "compute", "floor_s")

    def _link(self, link: str) -> None:
        here = self._of(link, memory="pinned")
        if not here:
            raise _missing(link)
        keys = [f"{link}.bandwidth_Bps", f"{link}.latency_s"]
        self.hardware |= self._solve(here, [self._parameter(key, here) for key in keys])
        pageable = self._of(link, memory="pageable")
        if pageable:
            found = self._solve(pageable, [self._parameter(key, pageable) for key in keys])
            self.rates[f"{link} pageable"] = found[keys[0]]
        self._adopt()

    def _rows(self) -> None:
        """What a row gathered from host memory costs beyond its bytes."""
        here = self._of("rows", way="gathered")
        if here:
            key = "copies.gather_row_s"
            self.stack |= self._solve(here, [self._parameter(key, here)])
            self._adopt()

    def _overlap(self) -> None:
        """The share of a copy that runs beside compute that is not shorter than the copy.

        With a share o hidden, both take ``compute + (1 - o) copy``. The fastest runs tell it, as
        copies beside compute are timed by a clock that other jobs move, and only ever forwards.
        Where they do not tell it, what the software says of itself stays.
        """
        shares, errors = [], []
        for beside in self._of("contention", way="both", compute="gemm"):
            pair = beside.case["pair"]
            alone = [self._of("contention", way=way, pair=pair) for way in ("copy", "compute")]
            if not all(alone):
                continue
            copy, compute = (found[0] for found in alone)
            shares.append(1 - (min(beside.runs) - min(compute.runs)) / min(copy.runs))
            noise = hypot(*(s.seconds * max(s.error, SURE / 10) for s in (beside, compute)))
            errors.append(noise / min(copy.runs))
        if not shares:
            return
        weight = np.array(errors) ** -2.0
        mean = float(weight @ np.array(shares) / weight.sum())
        off = float(np.median(np.abs(np.array(shares) - mean)))
        error = float(max(weight.sum() ** -0.5, off / np.sqrt(len(shares))))
        value = float(np.clip(mean, 0.0, 1.0)) if error <= BLIND else self.d.stack.overlap
        relative = error / value if value and error <= BLIND else np.inf
        self.stack["copies.overlap"] = Known(value, relative, off, len(shares), "contention")
        self._adopt()

    # how

    def _of(self, benchmark: str, **case: object) -> list[Sample]:
        return [
            s
            for s in self.samples
            if s.benchmark == benchmark and all(s.case.get(k) == v for k, v in case.items())
        ]

    def _solve(
        self,
        samples: list[Sample],
        free: list[Parameter],
        predict: Callable[[Mapping[str, float]], Array] | None = None,
    ) -> dict[str, Known]:
        """Numbers from samples; with fewer samples than numbers the last ones stay, marked."""
        unseen = {
            p.name: Known(self._value(p.name), np.inf, 0.0, len(samples), samples[0].benchmark)
            for p in free[len(samples) :]
        }
        free = free[: len(samples)]
        measured = np.array([s.seconds for s in samples])
        fits = [
            fit_ratio(
                predict or (lambda numbers: predicted(samples, self._with(numbers))),
                measured,
                start,
                robust=True,
            )
            for start in _starts(free)
        ]
        fit = min(fits, key=lambda f: float(np.sum(np.hypot(1, f.residuals / FAR_OFF))))
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

    def _parameter(self, key: str, samples: list[Sample]) -> Parameter:
        """A number with a start from the samples: the best rate seen, half the shortest time."""
        low, high = RANGES[next(end for end in RANGES if key.endswith(end))]
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

    def _with(self, numbers: Mapping[str, float]) -> Deployment:
        hard = {k: v for k, v in numbers.items() if _of_hardware(k)}
        soft = {k: v for k, v in numbers.items() if k not in hard}
        return replace(
            self.d,
            hardware=with_rates(self.d.hardware, hard),
            stack=with_numbers(self.d.stack, soft),
        )

    def _adopt(self) -> None:
        known = self.hardware | self.stack
        self.d = self._with({key: number.value for key, number in known.items()})


def _missing(benchmark: str) -> InputError:
    return InputError(
        f"no samples of {benchmark}, without which there is no profile; remove the samples and "
        f"measure again"
    )


def _offloads(s: Sample) -> bool:
    return str(s.case["technique"]).partition(":")[0] in ("offload", "kcache")


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
    """FLOPs, rows, or bytes through a channel."""
    if what in ("flops", "rows"):
        return float(np.asarray(getattr(op, what)))
    return float(np.asarray(op.bytes.get(what, 0.0)))  # type: ignore[call-overload]
