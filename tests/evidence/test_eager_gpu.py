"""An emulated GPU that eager PyTorch feeds: predicted from its calibration, host-bound or not."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvsim.engine.roofline import all_ops, seconds  # noqa: E402
from kvsim.evidence.machine.fit import Calibration, fit_samples  # noqa: E402
from kvsim.evidence.machine.samples import Sample  # noqa: E402
from kvsim.evidence.machine.solve import (  # noqa: E402
    REST,
    RUNS_BENCHMARK,
    with_rates,
)
from kvsim.graph import Op, Step  # noqa: E402
from kvsim.machines.deployment import Deployment  # noqa: E402
from kvsim.machines.profiles import with_numbers  # noqa: E402
from kvsim.prediction.generate import Prediction  # noqa: E402
from kvsim.prediction.memory import decode_point  # noqa: E402
from kvsim.techniques import parse  # noqa: E402
from kvsim.validate.bench import compute  # noqa: E402
from kvsim.validate.bench.suite import SUITE_GENERATED  # noqa: E402
from kvsim.validate.counts.expected import ops_by_name  # noqa: E402
from kvsim.validate.model.architecture import load_architecture  # noqa: E402
from tests.evidence.test_calibration import RATES, further_floors, samples, truth  # noqa: E402

LAUNCH = 5.2e-6  # of a kernel [s]
AROUND = {
    "gemm": 1.1e-5, "attention": 7e-5, "prompt": 7e-5, "lowbit": 1.5e-4, "pointwise": 6e-5,
    "quantise": 1.2e-4,
}  # fmt: skip
"""What Python takes around the kernels of an op. [s]"""
SUSTAINED, BOOST = 0.88, 0.03
"""What the power limit leaves of the rates, and after how long. [s]"""
LAYER, STEP = 4e-5, 3e-4
"""What it takes between ops, per layer and per round. [s]"""
MEASURED = (("smollm2-135m", 2), ("smollm2-135m", 8), ("llama2-7b", 2))
POINTS = (
    ("llama2-7b", 32, 64, 1024), ("llama2-7b", 32, 8, 8192), ("llama2-7b", 4, 1, 1024),
    ("smollm2-135m", 30, 8, 1024), ("smollm2-135m", 30, 64, 8192),
)  # fmt: skip
"""Model, layers, batch and prompt: bound by the GPU and by the host."""


def machine(model: str, layers: int) -> Deployment:
    """What there is: kernels with their floors, and nothing of the host."""
    d = truth("gpu")
    cut = load_architecture(model).cut(layers).model
    stack = with_numbers(d.stack, {"time.launch_s": 0.0})
    return Deployment(cut, d.hardware, stack)


def host_seconds(op: Op) -> float:
    """Of one op of a layer."""
    count = float(op.launches)
    return count * LAUNCH + min(1.0, count) * AROUND.get(op.kernel, 1e-5)


def emulated(step: Step, d: Deployment) -> float:
    """One round after another, op by op with two clocks. [s]"""
    host = gpu = 0.0
    ends = []
    for _ in range(3):
        for group in step.groups:
            for _ in range(group.count):
                for layer in group.layers:
                    host += LAYER
                    for op in layer:
                        host, gpu = _issued(op, d, host, gpu)
        for op in step.head:
            host, gpu = _issued(op, d, host, gpu)
        host = gpu = max(host, gpu) + STEP  # the next token is needed
        ends.append(host)
    return ends[-1] - ends[-2]


def _issued(op: Op, d: Deployment, host: float, gpu: float) -> tuple[float, float]:
    took = float(np.ravel(seconds(op, d))[0])
    if not took:
        return host, gpu
    host += host_seconds(op)
    return host, max(host, gpu) + took


def runs(text: str, model: str, layers: int, batch: int, prompt: int) -> Iterator[Sample]:
    """What ``validate.bench.suite`` would find there."""
    d, t = machine(model, layers), parse(text)
    for phase, step in (
        ("prefill", t.prefill(d, decode_point(batch, prompt, SUITE_GENERATED, 0.0))),
        (
            "decode",
            t.cycle(d, decode_point(batch, prompt, SUITE_GENERATED, SUITE_GENERATED / 2)).steps[0],
        ),
    ):
        case = {
            "technique": text, "phase": phase, "model": model, "layers": layers,
            "batch": batch, "prompt": prompt,
        }  # fmt: skip
        if phase == "prefill":
            continue
        for name, (op, _) in ops_by_name(step).items():
            if op.stream == "gpu":
                took = float(seconds(op, d)) + further_floors(op, d)
                own = {**case, "op": name}
                yield Sample(RUNS_BENCHMARK, own, op, (took,) * 3, host_seconds(op))
        rest = STEP + LAYER * layers
        yield Sample(
            RUNS_BENCHMARK, {**case, "op": REST}, Op(REST, launches=0.0), (rest,) * 3, rest
        )


@pytest.fixture(scope="module")
def found() -> Calibration:
    """What a calibration of the machine finds."""
    formats = compute.formats
    compute.formats = lambda place: ["fp16", "bf16", "fp32"]
    try:
        shown = [s for s in samples("gpu", 0.0) if s.benchmark != "launch"]
    finally:
        compute.formats = formats
    for way, each in (("eager", LAUNCH), ("graph", 1.2e-6), ("sync", 1.8e-5)):
        for count in (50.0, 200.0):
            op = Op("launch", bytes={"hbm": 16.0 * count}, launches=count)
            shown.append(Sample("launch", {"way": way}, op, (each * count,) * 3))
    for text in ("full", "kivi"):
        for model, layers in MEASURED:
            for prompt in (1536, 6144):
                shown += runs(text, model, layers, 4, prompt)
    shown = [s for s in shown if s.benchmark != "sustained"]
    for count in (2.0, 24.0, 96.0):
        op = Op("product", kernel="gemm", flops=1.9e12 * count, launches=count)
        whole = 2.5e-3 * count
        took = whole + max(0.0, whole - BOOST) * (1 / SUSTAINED - 1)
        shown.append(Sample("sustained", {"products": count}, op, (took,) * 3))
    return fit_samples(shown)


@pytest.fixture(scope="module")
def calibrated(found: Calibration) -> Deployment:
    """The machine as its calibration knows it."""
    d = truth("gpu")
    hardware = with_rates(d.hardware, {k: found.hardware[k].value for k in RATES["gpu"]})
    numbers = {key: known.value for key, known in found.stack.items()}
    return replace(d, hardware=hardware, stack=with_numbers(d.stack, numbers))


def test_the_power_limit_is_found(found: Calibration) -> None:
    assert found.hardware["compute.sustained"].value == pytest.approx(SUSTAINED)
    assert found.hardware["compute.boost_s"].value == pytest.approx(BOOST)


@pytest.mark.parametrize("text", ["full", "kivi"])
@pytest.mark.parametrize(("model", "layers", "batch", "prompt"), POINTS)
def test_tpot_is_within_five_percent(
    text: str, model: str, layers: int, batch: int, prompt: int, calibrated: Deployment
) -> None:
    there, t = machine(model, layers), parse(text)
    step = t.cycle(there, decode_point(batch, prompt, 9, 4.0)).steps[0]
    measured = emulated(step, there)
    d = replace(calibrated, model=there.model)
    predicted = float(Prediction(t, d, np.array([float(batch)]), prompt, 9).tpot_s[0])
    kernels = sum(n * float(np.ravel(seconds(op, there))[0]) for op, n in all_ops(step))
    bound = "the GPU" if kernels > 0.8 * measured else "the host"
    assert predicted == pytest.approx(measured, rel=0.05), f"bound by {bound}"
