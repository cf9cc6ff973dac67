"""Numbers of a machine and its software fitted to microbenchmarks, kernel class by kernel class.

A sample's op is predicted by ``kvsim.engine.roofline`` on the machine as known so far; each stage
frees the few numbers that its benchmark is about. What the data cannot tell is kept, and marked.
"""

from collections.abc import Sequence
from dataclasses import field, replace
from math import hypot

import numpy as np

from kvsim.errors import InputError
from kvsim.evidence.leastsquares import BLIND
from kvsim.evidence.machine.samples import Sample
from kvsim.evidence.machine.solve import (
    MAX_CERTAIN_ERROR,
    REST,
    RUNS_BENCHMARK,
    SAMPLING,
    Known,
    Solver,
    predict_samples,
    technique_of,
)
from kvsim.frozen import frozen
from kvsim.graph import Array

REQUIRED = frozenset({"fp16", "fp32"})  # formats that no profile is without
ATTENTION_CLASSES = ("attention", "prompt", "attention-masked", "attention-fp8")
KERNEL_BENCHMARKS = dict.fromkeys(ATTENTION_CLASSES, "attention") | {"lowbit": "lowbit"}
"""Kernel classes of attention, and the benchmarks that hold their kernels."""


@frozen
class Calibration:
    """Numbers of a machine and its software, as its microbenchmarks determine them.

    Attributes
    ----------
    hardware
        Numbers of the machine, by key of its profile.
    stack
        Numbers of the software, by key of the stack file.
    rates
        Other measured rates that are reported but used nowhere, such as those of pageable copies.
    """

    hardware: dict[str, Known]
    stack: dict[str, Known]
    rates: dict[str, Known] = field(default_factory=dict)


def fit_samples(samples: Sequence[Sample]) -> Calibration:
    """Fit a machine's profile and software stack to the samples of its benchmarks.

    Parameters
    ----------
    samples
        Samples of all finished benchmarks.

    Returns
    -------
    Calibration
        Numbers of the machine and of its software, with their errors.

    Raises
    ------
    InputError
        If a benchmark that a profile cannot do without has no samples.
    """
    return _Fitter(samples).fit_all()


class _Fitter(Solver):
    """The stages that make a machine known."""

    def fit_all(self) -> Calibration:
        """Run all stages of the fit in order; each uses the numbers of the stages before it."""
        self._launches()
        self._channel("hbm", "memory")
        self._channel("dram", "host")
        if "time.launch_s" in self.stack:
            self._kernel("pointwise", "pointwise", "memory", "floor_s")
        else:  # issuing its many kernels is all the time that its bytes do not take
            keys = ["time.gap_s", "kernel.pointwise.memory"]
            self._class("pointwise", "pointwise", keys)
        self._products()
        for kernel, benchmark in KERNEL_BENCHMARKS.items():
            names: tuple[str, ...] = ("memory", "compute", "half_size", "floor_s")
            if kernel == "lowbit" and "time.launch_s" in self.stack:  # bound by what it widens
                names = ("unpack_ops", "floor_s", "memory")
            self._kernel(kernel, benchmark, *names)
        for kernel in ("quantise", "topk", "gather"):
            self._kernel(kernel, kernel, "memory", "floor_s")
        self._issuing()
        self._steps()
        self._host()
        for link in ("h2d", "d2h"):
            self._link(link)
        self._rows()
        self._overlap()
        self._power_limit()
        return Calibration(self.hardware, self.stack, self.rates)

    # stages

    def _launches(self) -> None:
        """Kernels issued one by one, replayed as a graph, and a synchronisation."""
        for way, key in (("graph", "time.gap_s"), ("eager", "time.launch_s")):
            self._slope(key, self.select("launch", way=way))
        self._slope("time.sync_s", self.select("launch", way="sync"))
        gap, eager = self.stack.get("time.gap_s"), self.stack.get("time.launch_s")
        if eager and not gap:  # nothing runs ahead of anything: the host's time is the device's
            del self.stack["time.launch_s"]
            self.stack["time.gap_s"] = eager
        self.adopt()

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
        samples = self.select(benchmark, cached="no")
        ways = sorted({str(s.case["way"]) for s in samples})
        if not ways:
            raise _missing(benchmark)
        key = f"{channel}.bandwidth_Bps"
        for way in ways:
            here = [s for s in samples if s.case["way"] == way]
            found = self.solve(here, [self.parameter(key, here)])  # too large for a floor to tell
            self.rates[f"{channel} {way}"] = found[key]
        best = max((self.rates[f"{channel} {way}"] for way in ways), key=lambda k: k.value)
        self.hardware[key] = best
        self.adopt()

    def _products(self) -> None:
        """Peaks are what large products approach, so their own share of them is one."""
        measured = {s.op.dtype for s in self.select("gemm")}
        for dtype in REQUIRED - measured:
            raise _missing(f"gemm in {dtype}")
        for dtype in sorted(measured, key=lambda t: (t != "fp16", t)):
            here = [s for s in self.all_of("gemm", "gemm") if s.op.dtype == dtype]
            peak = f"compute.{dtype}_FLOPps"
            first = dtype == "fp16"  # the format of the simulator's products; others share the rest
            names = ("half_size", "memory", "floor_s") if first else ("half_size",)
            keys = [peak, *(f"kernel.gemm.{name}" for name in names)]
            found = self.as_run(here, keys)
            self.hardware[peak] = found.pop(peak)
            if first:
                self.stack |= found
                top = self.hardware[peak]
                self.stack["kernel.gemm.compute"] = replace(top, value=1.0, error=0.0)
            self.adopt()

    def _kernel(self, kernel: str, benchmark: str, *names: str) -> None:
        self._class(kernel, benchmark, [f"kernel.{kernel}.{name}" for name in names])

    def _class(self, kernel: str, benchmark: str, keys: Sequence[str]) -> None:
        """A kernel class by itself and as techniques run it."""
        here = self.all_of(kernel, benchmark)
        if kernel == "pointwise" and "time.launch_s" in self.stack:
            here = [_kernel_by_kernel(s) for s in here]
        if here:
            self.stack |= self.as_run(here, keys)
            self.adopt()

    def _issuing(self) -> None:
        """What the host takes around each kernel of a class, besides launching it.

        Ops of one class differ in their kernels, and the host's time with them: to pack a cache is
        50 kernels for a prompt, and 17 for a token.
        """
        launch = self.stack.get("time.launch_s")
        by_class: dict[str, list[float]] = {}
        for s in self.select(RUNS_BENCHMARK) if launch else ():
            if s.host_s and s.op.stream == "gpu" and s.case.get("op") not in (SAMPLING, REST):
                each = s.host_s / float(s.op.launches) - (launch.value if launch else 0.0)
                by_class.setdefault(s.op.kernel, []).append(each)
        for kernel, times in by_class.items():
            value = max(0.0, float(np.median(times)))
            off = float(np.median(np.abs(np.array(times) - value))) / max(value, 1e-12)
            error = 1.2533 * 1.4826 * off / len(times) ** 0.5 if value else np.inf
            known = Known(value, error, off, len(times), RUNS_BENCHMARK)
            self.stack[f"kernel.{kernel}.launch_s"] = known
        self.adopt()

    def _steps(self) -> None:
        """What a pass and each of its layers take besides ops; sampling is a pass's fixed time."""
        rests = self.select(RUNS_BENCHMARK, op=REST)
        resident = [s for s in rests if not self.copies_beside(s)]
        sampling = self.select(RUNS_BENCHMARK, op=SAMPLING, phase="decode")
        if len({s.case["layers"] for s in resident}) < 2 or not sampling:
            return
        layers = np.array([float(str(s.case["layers"])) for s in resident])
        rest = np.array([_rest(s) for s in resident])
        fit = _line(layers, rest)
        off = float(np.median(np.abs(rest - fit["step"][0] - fit["layer"][0] * layers)))
        off /= max(float(np.median(rest)), 1e-12)
        chosen = np.array([s.seconds for s in sampling]) - predict_samples(sampling, self.d)
        more = max(0.0, float(np.median(chosen)))
        layer, keys = fit["layer"][0], {"step": "time.step_s", "layer": "time.layer_s"}
        if any(s.host_s for s in resident):  # the host's, which a GPU that has work does not see
            keys["layer"] = "kernel.pointwise.host_s"
            spread = float(np.std(chosen)) / len(chosen) ** 0.5
            self.stack["time.sampling_s"] = Known(
                more, spread / more if more else np.inf, off, len(chosen), RUNS_BENCHMARK
            )
            more = -fit["layer"][0]  # sampling is an op of that class too
        step = max(0.0, fit["step"][0] + more)
        for name, value in (("step", step), ("layer", layer)):
            error = fit[name][1] / value if value else np.inf
            self.stack[keys[name]] = Known(value, error, off, len(resident), RUNS_BENCHMARK)
        copied = [s for s in rests if _only_copies(s)]
        if copied:
            depths = np.array([float(str(s.case["layers"])) for s in copied])
            away = (np.array([_rest(s) for s in copied]) - fit["step"][0]) / depths
            mean = float(np.average(away, weights=depths))
            value = max(0.0, mean - fit["layer"][0])
            scatter = float(np.median(np.abs(away - mean)))
            error = scatter / value / len(away) ** 0.5 if value else np.inf
            scatter /= max(fit["layer"][0] + value, 1e-12)
            known = Known(value, error, scatter, len(away), RUNS_BENCHMARK)
            on_host = keys["layer"] == "kernel.pointwise.host_s"
            self.stack["offload.host_s" if on_host else "offload.layer_s"] = known
        self.adopt()

    def _host(self) -> None:
        """The host's arithmetic from its products, then its attention."""
        products = self.select("host_gemm")
        if not products:
            raise _missing("host_gemm")
        key = "compute.cpu_fp32_FLOPps"
        keys = [key, "kernel.cpu.floor_s"]
        found = self.solve(products, [self.parameter(k, products) for k in keys])
        self.hardware[key] = found[key]
        self.adopt()
        self._kernel("cpu", "host_attention", "memory", "compute", "floor_s")

    def _link(self, link: str) -> None:
        here = self.select(link, memory="pinned")
        if not here:
            raise _missing(link)
        keys = [f"{link}.bandwidth_Bps", f"{link}.latency_s"]
        self.hardware |= self.solve(here, [self.parameter(key, here) for key in keys])
        pageable = self.select(link, memory="pageable")
        if pageable:
            found = self.solve(pageable, [self.parameter(key, pageable) for key in keys])
            self.rates[f"{link} pageable"] = found[keys[0]]
        self.adopt()

    def _rows(self) -> None:
        """What a row gathered from host memory costs beyond its bytes."""
        here = self.select("rows", way="gathered")
        if here:
            key = "selection.gather_row_s"
            self.stack |= self.solve(here, [self.parameter(key, here)])
            self.adopt()

    def _overlap(self) -> None:
        """The share of a copy that runs beside compute that is not shorter than the copy.

        With a share o hidden, both take ``compute + (1 - o) copy``. The fastest runs tell it, as
        copies beside compute are timed by a clock that other jobs move, and only ever forwards.
        Where they do not tell it, what the software says of itself stays.
        """
        shares, errors = [], []
        for beside in self.select("contention", way="both", compute="gemm"):
            pair = beside.case["pair"]
            alone = [self.select("contention", way=way, pair=pair) for way in ("copy", "compute")]
            if not all(alone):
                continue
            copy, compute = (found[0] for found in alone)
            shares.append(1 - (min(beside.runs) - min(compute.runs)) / min(copy.runs))
            noise = hypot(
                *(s.seconds * max(s.error, MAX_CERTAIN_ERROR / 10) for s in (beside, compute))
            )
            errors.append(noise / min(copy.runs))
        if not shares:
            return
        weight = np.array(errors) ** -2.0
        mean = float(weight @ np.array(shares) / weight.sum())
        off = float(np.median(np.abs(np.array(shares) - mean)))
        error = float(max(weight.sum() ** -0.5, off / np.sqrt(len(shares))))
        value = float(np.clip(mean, 0.0, 1.0)) if error <= BLIND else self.d.stack.offload.overlap
        relative = error / value if value and error <= BLIND else np.inf
        self.stack["offload.overlap"] = Known(value, relative, off, len(shares), "contention")
        self.adopt()

    def _power_limit(self) -> None:
        """The share of a GPU's rates that its power limit leaves, and after how long.

        Products back to back take ``t`` each until ``boost``, then ``t / sustained``.
        """
        runs = sorted(self.select("sustained"), key=lambda s: float(s.op.launches))
        if len(runs) < 3:
            return
        first, *_, middle, last = runs
        t = first.seconds / float(first.op.launches)
        extra = [s.seconds - float(s.op.launches) * t for s in (middle, last)]
        added = t * float(last.op.launches - middle.op.launches)
        slower = max(0.0, (extra[1] - extra[0]) / added)
        full = float(middle.op.launches) * t
        boost = full - extra[0] / slower if slower else full
        error = hypot(*(s.error for s in (first, middle, last)))
        known = Known(1.0 / (1.0 + slower), error, error, len(runs), "sustained")
        self.hardware["compute.sustained"] = known
        boost = float(np.clip(boost, first.seconds, full))
        self.hardware["compute.boost_s"] = replace(known, value=boost)


def _missing(benchmark: str) -> InputError:
    return InputError(
        f"the samples have none of {benchmark}, which a profile needs: they were cut off, or are "
        f"of another version; give another --out, which measures everything again"
    )


def _kernel_by_kernel(s: Sample) -> Sample:
    """A layer's small kernels as one of them, run as often: each has a floor."""
    count = float(s.op.launches)
    if s.op.name != "pointwise" or count <= 1.0:
        return s
    moved = {channel: n / count for channel, n in s.op.bytes.items()}
    return replace(s, op=replace(s.op, bytes=moved, launches=1.0, times=count))


def _only_copies(s: Sample) -> bool:
    """Whether a cache that is copied explains what a pass takes besides ops.

    Where some of it is recomputed, the host does a part of the moving within that op. Where
    weights are copied too, it also waits for them.
    """
    places = [parts.placement for parts in technique_of(str(s.case["technique"])).parts]
    return any(
        np.any(np.asarray(p.v_host) > 0) and not p.recomputes and not p.streams_weights
        for p in places
    )


def _rest(s: Sample) -> float:
    """What a pass takes besides ops; below 0 where its noise is larger. [s]"""
    return s.seconds - float(str(s.case.get("ops_s", 0.0)))


def _line(layers: Array, rest: Array) -> dict[str, tuple[float, float]]:
    """A pass's and each layer's share of what passes take, neither below 0, with their errors. [s]

    The rest of a pass is a difference of two large times, whose noise does not shrink with it; most
    passes count, whatever a few do.
    """
    from scipy.optimize import least_squares

    sides = np.stack([np.ones_like(layers), layers], 1)
    scale = 1.4826 * float(np.median(np.abs(rest - np.median(rest)))) or 1e-9

    def scaled_residuals(found: Array) -> Array:
        return (sides @ found * 1e-3 - rest) / scale  # in thousandths of a second

    best = least_squares(scaled_residuals, (0.1, 0.1), bounds=(0.0, np.inf), loss="soft_l1")
    residuals = sides @ best.x * 1e-3 - rest
    spare = max(len(rest) - 2, 1)
    variance = len(rest) / spare * (1.4826 * float(np.median(np.abs(residuals)))) ** 2
    errors = np.sqrt(np.diag(np.linalg.inv(sides.T @ sides)) * variance)
    return {
        name: (float(best.x[i]) * 1e-3, float(errors[i]))
        for i, name in enumerate(("step", "layer"))
    }
