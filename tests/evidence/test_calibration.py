"""A machine whose numbers are known is found again from noisy samples of the real suite's ops."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsim.engine.roofline import seconds
from kvsim.errors import InputError
from kvsim.evidence.leastsquares import Parameter, fit_ratio
from kvsim.evidence.machine.fit import Calibration, fit_samples
from kvsim.evidence.machine.profile import (
    Machine,
    find_datasheet,
    hardware_text,
    shortfalls,
    stack_text,
    with_error,
)
from kvsim.evidence.machine.samples import Log, Sample, read_samples
from kvsim.evidence.machine.solve import Known, with_rates
from kvsim.graph import Channel, Op
from kvsim.machines.deployment import Deployment, basis
from kvsim.machines.profiles import load_hardware, load_stack, number_of, with_numbers
from kvsim.models.configs import load_model

torch = pytest.importorskip("torch")

from kvsim.validate.bench import compute  # noqa: E402
from kvsim.validate.bench.suite import plan  # noqa: E402
from kvsim.validate.bench.work import Bench  # noqa: E402

NOISE = 0.05  # of a run
RUNS = 9


def numbers(text: str) -> dict[str, float]:
    """Names and values, separated by commas."""
    return {name: float(value) for name, value in map(str.split, text.split(","))}


RATES = {
    "gpu": numbers(
        "hbm.bandwidth_Bps 3e+12, dram.bandwidth_Bps 2.1e+11, compute.fp16_FLOPps 7.4e+14, "
        "compute.bf16_FLOPps 7.2e+14, compute.fp32_FLOPps 5.5e+13, compute.cpu_fp32_FLOPps "
        "3.1e+12, h2d.bandwidth_Bps 5.4e+10, h2d.latency_s 4.1e-06, d2h.bandwidth_Bps 5.1e+10, "
        "d2h.latency_s 4.6e-06"
    ),
    "cpu": numbers(
        "hbm.bandwidth_Bps 2.7e+10, dram.bandwidth_Bps 2.6e+10, compute.fp16_FLOPps 4.3e+11, "
        "compute.fp32_FLOPps 9.2e+10, compute.cpu_fp32_FLOPps 9e+10, h2d.bandwidth_Bps 1.1e+10, "
        "h2d.latency_s 2.2e-05, d2h.bandwidth_Bps 1.2e+10, d2h.latency_s 2e-05"
    ),
}
SOFTWARE = {
    "gpu": numbers(
        "time.launch_s 5.2e-06, time.gap_s 1.2e-06, time.sync_s 1.8e-05, kernel.gemm.memory 0.83, "
        "kernel.gemm.half_size 95, kernel.gemm.floor_s 6.1e-06, kernel.attention.memory 0.78, "
        "kernel.attention.floor_s 1.4e-05, kernel.prompt.compute 0.45, kernel.prompt.floor_s "
        "2.1e-05, kernel.lowbit.memory 0.35, kernel.lowbit.floor_s 2.9e-05, "
        "kernel.pointwise.memory 0.8, kernel.pointwise.floor_s 9e-06, kernel.quantise.memory 0.5, "
        "kernel.quantise.floor_s 1.2e-05, kernel.topk.memory 0.3, kernel.topk.floor_s 2.2e-05, "
        "kernel.gather.memory 0.6, kernel.gather.floor_s 7e-06, kernel.cpu.memory 0.5, "
        "kernel.cpu.floor_s 1.3e-05, selection.gather_row_s 3.1e-09, offload.overlap 0.85"
    ),
    "cpu": numbers(
        "time.gap_s 2.1e-06, kernel.gemm.memory 0.8, kernel.gemm.half_size 14, "
        "kernel.gemm.floor_s 1.6e-05, kernel.attention.memory 0.09, kernel.attention.floor_s "
        "3e-05, kernel.prompt.compute 0.3, kernel.prompt.floor_s 5e-05, kernel.lowbit.compute "
        "0.012, kernel.lowbit.floor_s 0.0004, kernel.pointwise.memory 0.3, kernel.quantise.memory "
        "0.03, kernel.quantise.floor_s 0.00015, kernel.topk.memory 0.01, kernel.topk.floor_s "
        "0.0002, kernel.gather.memory 0.4, kernel.gather.floor_s 1e-05, kernel.cpu.memory 0.4, "
        "kernel.cpu.floor_s 2e-05, selection.gather_row_s 4e-08, offload.overlap 0.6"
    ),
}
WAYS = {"read": 1.0, "copy": 0.93, "write": 0.88}
PLACES = {
    "gpu": Bench(torch.device("cuda"), False, 50 * 2**20, 2**33),
    "cpu": Bench(torch.device("cpu"), False, 2**25, 2**31),
}


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU multiplies in, without one to ask."""
    known = {"cuda": ["fp16", "bf16", "fp32"], "cpu": ["fp16", "fp32"]}
    monkeypatch.setattr(compute, "formats", lambda place: known[place.device.type])


def truth(kind: str) -> Deployment:
    hardware = with_rates(load_hardware("h100"), RATES[kind])
    stack = with_numbers(load_stack("ideal"), {"kernel.attention.compute": 0.5} | SOFTWARE[kind])
    return Deployment(load_model("llama2-7b"), hardware, stack)


def further_floors(op: Op, d: Deployment) -> float:
    """Those of a layer's small kernels but the first, which the op states as fixed."""
    if op.name != "pointwise":
        return 0.0
    return max(float(op.launches) - 1.0, 0.0) * d.stack.kernel("pointwise").floor


def exact_seconds(d: Deployment, benchmark: str, case: dict[str, object], op: Op) -> float:
    """What the machine takes for one sample."""
    own = d.stack.time
    if benchmark == "launch":
        each = {"eager": own.launch or own.gap, "graph": own.gap, "sync": own.sync}
        return each[str(case["way"])] * float(op.launches)
    if benchmark in ("memory", "host"):
        quick = 3.0 if case["cached"] == "yes" else 1.0
        plain = replace(d, stack=with_numbers(load_stack("ideal"), {"time.gap_s": own.gap}))
        return float(seconds(op, plain)) / WAYS[str(case["way"])] / quick
    if benchmark == "contention" and case["way"] == "both":
        through: tuple[Channel, ...] = ("h2d", "hbm", "dram")
        copied = dict.fromkeys(through, float(str(case["bytes"])))
        copy = float(seconds(Op("copy", "h2d", "copy", bytes=copied), d))
        return float(seconds(op, d)) + (1 - d.stack.offload.overlap) * copy
    return float(seconds(op, d)) + further_floors(op, d)


def samples(kind: str, noise: float, outliers: float = 0.0, seed: int = 0) -> Iterator[Sample]:
    """Every work of the full suite, run as often as the suite makes sure of; some far off."""
    d, random = truth(kind), np.random.default_rng(seed)
    for name, works in plan(PLACES[kind]):
        for work in works:
            exact = exact_seconds(d, name, dict(work.case), work.op)
            runs = exact * np.exp(noise * random.standard_normal(RUNS))
            runs *= 3.0 if random.random() < outliers else 1.0
            yield Sample(name, work.case, work.op, tuple(runs.tolist()))


def off(found: Calibration, kind: str) -> dict[str, float]:
    """Relative error of every number that was found and said to be known."""
    known = {**found.hardware, **found.stack}
    wanted = RATES[kind] | SOFTWARE[kind]
    return {k: known[k].value / v - 1 for k, v in wanted.items() if known[k].identified}


@pytest.mark.usefixtures("formats")
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_without_noise_every_number_is_found(kind: str) -> None:
    found = fit_samples(list(samples(kind, 0.0)))
    errors = off(found, kind)
    assert errors.keys() == (RATES[kind] | SOFTWARE[kind]).keys()
    assert {k: e for k, e in errors.items() if abs(e) > 0.01} == {}


@pytest.mark.usefixtures("formats")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_with_five_percent_noise_every_identified_number_is_within_five_percent(
    kind: str, seed: int
) -> None:
    found = fit_samples(list(samples(kind, NOISE, seed=seed)))
    errors = off(found, kind)
    assert {k: round(e, 3) for k, e in errors.items() if abs(e) > 0.05} == {}
    assert len(errors) >= 0.5 * len(RATES[kind] | SOFTWARE[kind])
    assert {"hbm.bandwidth_Bps", "compute.fp16_FLOPps", "kernel.gemm.memory"} <= errors.keys()


@pytest.mark.usefixtures("formats")
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_samples_far_off_do_not_move_what_many_samples_tell(kind: str) -> None:
    found = fit_samples(list(samples(kind, NOISE, outliers=0.05, seed=5)))
    known = {**found.hardware, **found.stack}
    for key in ("compute.fp16_FLOPps", "kernel.gemm.memory", "kernel.attention.memory"):
        assert known[key].value == pytest.approx((RATES[kind] | SOFTWARE[kind])[key], rel=0.06)


@pytest.mark.usefixtures("formats")
def test_real_runs_set_the_level_of_a_class() -> None:
    """Ops of techniques at 0.6 of the kernel's rates and with a floor of their own."""
    shown = list(samples("cpu", 0.0))
    d, alone = truth("cpu"), SOFTWARE["cpu"]
    level = {
        "kernel.lowbit.compute": 0.6 * alone["kernel.lowbit.compute"],
        "kernel.lowbit.floor_s": 9.0e-4,
    }
    within = replace(d, stack=with_numbers(d.stack, level))
    for s in [s for s in shown if s.benchmark == "lowbit"][::4]:
        took = float(seconds(s.op, within))
        case = {"technique": "kivi", "phase": "decode", "layers": 2, "op": "attn"}
        shown.append(Sample("techniques", case, s.op, (took,) * RUNS))
    found = fit_samples(shown).stack
    assert {key: found[key].value for key in level} == pytest.approx(level, rel=0.01)
    assert found["kernel.lowbit.floor_s"].benchmark == "techniques"
    other = fit_samples([s for s in shown if s.benchmark != "techniques"]).stack
    same = "kernel.attention.memory"
    assert found[same].value == pytest.approx(other[same].value, rel=1e-3)


@pytest.mark.usefixtures("formats")
def test_what_no_sample_depends_on_is_marked() -> None:
    shown = [
        s
        for s in samples("gpu", NOISE)
        if s.benchmark != "gemm" or s.op.size <= 2 or s.op.dtype == "fp32"
    ]
    known = fit_samples(shown).stack["kernel.gemm.half_size"]
    assert known.verdict == "not identified"


@pytest.mark.usefixtures("formats")
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_fewer_samples_than_numbers_give_a_profile_with_those_marked(
    kind: str, tmp_path: Path
) -> None:
    few: dict[object, Sample] = {}
    for sample in samples(kind, 0.0):
        case = sample.case
        ways = (case.get("way"), case.get("cached"), sample.op.dtype)
        few.setdefault((sample.benchmark, *ways), sample)
    found = fit_samples(list(few.values()))
    known = {**found.hardware, **found.stack}
    for key in ("h2d.latency_s", "kernel.attention.floor_s", "kernel.gemm.floor_s"):
        assert known[key].verdict == "not identified"
    machine = Machine("x", 2**34, 2**34, 2**29, 2**25)
    for name, text in (("F.toml", hardware_text), ("F.stack.toml", stack_text)):
        (tmp_path / name).write_text(text(found, machine, "2026-01-02"))
    assert load_hardware(tmp_path / "F.toml").links["h2d"].latency == 0.0
    assert load_stack(tmp_path / "F.stack.toml").kernels["attention"].floor == 0.0
    with pytest.raises(InputError, match="samples have none of h2d"):
        fit_samples([s for s in few.values() if s.benchmark != "h2d"])


@pytest.mark.usefixtures("formats")
def test_what_other_jobs_hide_of_the_overlap_is_not_made_up() -> None:
    every = list(samples("cpu", 0.0))
    noisy = [
        replace(s, runs=tuple(r * (1.0 if i % 2 else 9.0) for i, r in enumerate(s.runs)))
        if s.benchmark == "contention"
        else s
        for s in every
    ]
    hidden = fit_samples(noisy).stack["offload.overlap"]
    assert hidden.verdict == "not identified" or hidden.value == pytest.approx(0.6, abs=0.05)


@pytest.mark.usefixtures("formats")
def test_files_load_and_say_how_well_every_number_is_known(tmp_path: Path) -> None:
    found = fit_samples(list(samples("gpu", NOISE)))
    machine = Machine('NVIDIA "H100"\n80GB', 80 * 2**30, 2**40, 2**29, 2**25, ("driver 1",))
    profile, stack = tmp_path / "F.toml", tmp_path / "F.stack.toml"
    profile.write_text(hardware_text(found, machine, "2026-01-02"))
    stack.write_text(stack_text(found, machine, "2026-01-02"))
    hardware, software = load_hardware(profile), load_stack(stack)
    for key, number in found.hardware.items():
        if key.endswith("bandwidth_Bps"):
            assert hardware.links[key.split(".")[0]].bandwidth == pytest.approx(
                number.value, rel=1e-5
            )
        assert "2026-01-02" in hardware.sources[key]
    assert number_of(software, "kernel.gemm.memory") == pytest.approx(
        found.stack["kernel.gemm.memory"].value, rel=1e-5
    )
    assert hardware.device == software.device == 'NVIDIA "H100" 80GB'
    grounds = basis(Deployment(load_model("llama2-7b"), hardware, software))
    assert grounds["kind"] == "calibrated"
    stack.write_text(with_error(stack.read_text(), 'held out: "3 %"'))
    assert load_stack(stack) == replace(software, error='held out: "3 %"')
    assert grounds["calibrated"] == f"on {hardware.device} at 2026-01-02"
    other = replace(hardware, device="another")
    assert basis(Deployment(load_model("llama2-7b"), other, software))["kind"] == "carried over"


def test_a_log_is_read_back(tmp_path: Path) -> None:
    path, header = tmp_path / "F.samples.jsonl", {"device": "x"}
    kept = [s for s in samples("cpu", 0.0) if s.benchmark in ("launch", "host_gemm")]
    log = Log(path, header).resume()
    for name in ("launch", "host_gemm"):
        log.append(name, [s for s in kept if s.benchmark == name])
    assert Log(path, header).resume().items == kept
    assert read_samples(path) == (header, kept)


def test_a_log_of_another_machine_or_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "F.samples.jsonl"
    Log(path, {"device": "x", "quick": True}).resume()
    with pytest.raises(InputError, match="quick was 'True'"):
        Log(path, {"device": "x", "quick": False}).resume()
    path.write_text("my notes\n")
    with pytest.raises(InputError, match="another file"):
        Log(path, {"device": "x"}).resume()
    assert path.read_text() == "my notes\n"


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, "h100"),
        ("NVIDIA H100 PCIe", 79.6, "h100-pcie"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40g"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80g-pcie"),
        ("NVIDIA GeForce RTX 3090", 23.7, "rtx3090"),
        ("NVIDIA RTX 6000 Ada Generation", 47.5, "rtx6000-ada"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16g"),
        ("NVIDIA A10G", 22.0, "a10g"),
        ("AMD EPYC, 2 cores", 24.0, None),
    ],
)
def test_a_card_is_compared_with_its_own_data_sheet(
    name: str, gib: float, expected: str | None
) -> None:
    sheet = find_datasheet(name, gib * 2**30)
    assert (sheet and sheet.name) == expected


def test_a_slow_link_is_pointed_out() -> None:
    sheet = load_hardware("h100")
    rates = {"hbm.bandwidth_Bps": 3.0e12, "h2d.bandwidth_Bps": 1.3e10}
    found = {key: Known(rate, 0.01, 0.01, 9, "x") for key, rate in rates.items()}
    (text,) = shortfalls(found, sheet)
    assert text.startswith("h2d.bandwidth_Bps is 1.3e+10")


def test_numbers_that_rows_tell_together_alone_have_no_small_errors() -> None:
    work = np.geomspace(1.0, 9.0, 12)
    free = [Parameter(name, 2.0, 1e-3, 1e3, True) for name in ("rate", "share")]
    noisy = work * np.exp(0.02 * np.sin(np.arange(12.0)))
    found = fit_ratio(lambda n: work / (n["rate"] * n["share"]), noisy, free, robust=True)
    assert set(found.unknown) == {"rate", "share"} and found.confused
