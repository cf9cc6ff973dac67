"""The suite's clocks, works and refusals, on a CPU and with stand-ins for a GPU."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from triton.runtime.errors import OutOfResources  # noqa: E402

from kvsim.errors import InputError  # noqa: E402
from kvsim.evidence.machine.samples import Log  # noqa: E402
from kvsim.graph import Op  # noqa: E402
from kvsim.validate import transfer  # noqa: E402
from kvsim.validate.bench import compute, suite  # noqa: E402
from kvsim.validate.bench import device as devices  # noqa: E402
from kvsim.validate.bench import work as clocks  # noqa: E402
from kvsim.validate.bench.work import Bench, Call, Work  # noqa: E402
from kvsim.validate.times.clock import HOST_MARGIN  # noqa: E402

CPU = torch.device("cpu")
SMALL = Bench(CPU, True, 2**14, 2**22)  # a cache of 16 KB keeps all works small


def works(name: str) -> list[Work]:
    return list(suite.SUITE[name](SMALL))


@pytest.mark.parametrize("name", suite.SUITE)
def test_every_work_says_what_it_is_and_runs(name: str) -> None:
    cases = [tuple(w.case.items()) for w in works(name)]
    assert len(set(cases)) == len(cases)
    for work in [*works(name)[:3], *works(name)[-3:]]:
        numbers = [float(np.asarray(n)) for n in (work.op.flops, *work.op.bytes.values())]
        assert max(numbers) > 0 and min(numbers) >= 0
        with torch.inference_mode(), work.make() as calls:
            for call in calls[:2]:
                call()


def test_products_and_attention_know_their_flops_and_bytes() -> None:
    work = compute.product(SMALL, "fp16", 3, 5, 7)
    assert work.op.flops == 2 * 3 * 5 * 7
    assert work.op.bytes == {"hbm": 2.0 * (5 * 7 + 3 * 5 + 3 * 7)}
    decode = next(w for w in works("attention") if w.case["new"] == 1)
    batch, heads, kv_heads, dim, tokens = (
        int(str(decode.case[k])) for k in ("batch", "heads", "kv_heads", "dim", "tokens")
    )
    assert decode.op.flops == 4 * batch * heads * dim * tokens
    assert decode.op.bytes == {"hbm": 2.0 * 2 * batch * dim * (kv_heads * tokens + heads)}


def test_works_of_a_gpu_can_be_planned_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "formats", lambda place: ["fp16", "fp8"])
    here = Bench(torch.device("cuda"), False, 50 * 2**20, 2**33)
    planned = dict(suite.plan(here))
    assert {w.case["memory"] for w in planned["h2d"]} == {"pinned", "pageable"}
    assert {w.case["way"] for w in planned["launch"]} == {"eager", "graph", "sync"}
    assert max(w.op.flops for w in planned["gemm"]) > 1e11


def test_inputs_rotate_beyond_the_cache_and_within_memory() -> None:
    place = Bench(CPU, True, cache=1000, memory=10**6)
    sets = place.turns(lambda: (torch.zeros(50),))  # 200 B
    assert len(sets) == 10 and len({t.data_ptr() for (t,) in sets}) == 10
    assert len(replace(place, memory=1200).turns(lambda: (torch.zeros(50),))) == 3


class FakeTimer:
    """A clock that advances by a known time per call."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.groups = seconds, list[Sequence[Call]]()

    def __call__(self, calls: Sequence[Call]) -> float:
        self.groups.append(calls)
        return self.seconds * len(calls)


def test_short_calls_are_timed_in_groups_and_inputs_take_turns() -> None:
    calls = [lambda: None for _ in range(3)]
    fake = FakeTimer(1e-5)
    runs = clocks.measure(fake, calls, budget=0.01)
    assert runs == pytest.approx((1e-5,) * clocks.MOST)
    timed = fake.groups[3:]  # after the warm-up
    assert {len(group) for group in timed} == {20}
    assert [c for group in timed[:2] for c in group][:7] == [calls[i % 3] for i in range(7)]


def compute_some() -> None:
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass


def test_lanes_of_a_cpu_are_timed_by_what_their_threads_compute() -> None:
    """However long the machine lets them wait."""
    lanes = [transfer._ThreadLane(lambda work, after: work()) for _ in range(2)]

    def both() -> None:
        for mark in [lane(compute_some) for lane in lanes]:
            mark.wait()

    timer = clocks.threads_timer()
    some = [timer([both]) for _ in range(5)]  # a virtual machine may count what its host took
    assert min(some) >= 0.02 and min(some) < 0.03
    assert timer([lambda: time.sleep(0.02)]) < 0.01
    for lane in lanes:
        lane.shutdown()


def test_long_calls_are_timed_a_few_times_whatever_the_budget() -> None:
    fake = FakeTimer(2.0)
    assert len(clocks.measure(fake, [lambda: None], budget=0.1)) == clocks.FEWEST


def pretend_events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events of a GPU that is not there, 3 ms apart; what they are asked for."""
    said: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            said.append("record")

        def synchronize(self) -> None:
            said.append("synchronise")

        def elapsed_time(self, end: "Event") -> float:
            return 3.0  # ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return said


def test_the_clock_of_a_gpu_is_kept_waiting_then_read_between_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = pretend_events(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append("sleep"))
    time = clocks.cuda_timer(torch.device("cuda"))
    assert time([lambda: said.append("call")] * 2) == pytest.approx(3e-3)
    assert said == ["sleep", "record", "call", "call", "record", "synchronise"]


def broken(place: Bench) -> Iterator[Work]:
    def fails(problem: Exception) -> Call:
        raise problem

    missing = RuntimeError("no kernel image\nand more")
    for i, problem in enumerate((missing, OutOfResources(153600, 101376, "shared memory")), 1):
        yield Work(place, {"n": i}, Op("x", flops=1.0), partial(tuple, [problem]), fails)


def test_a_kernel_that_is_missing_is_skipped_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"broken": broken, "launch": suite.SUITE["launch"]}
    monkeypatch.setattr(suite, "SUITE", parts)
    monkeypatch.setattr(suite, "list_runs", lambda place: [])
    log, said = Log(tmp_path / "s.jsonl", {}).resume(), list[str]()
    suite.run_suite(SMALL, log, said.append)
    assert log.done["broken n=1"] == [] and len(log.items) == 3
    assert any("skipped" in text and "no kernel image" in text for text in said)
    assert any("skipped" in text and "shared memory" in text for text in said)
    assert "measurements left, about" in said[-1]
    before = log.path.read_bytes()
    suite.run_suite(SMALL, Log(log.path, {}).resume(), said.append)
    assert log.path.read_bytes() == before


SMI = (
    "NVIDIA H100 80GB HBM3, 550.1, 81559, {power}, 700.00, 1980, 1980, 2619, Enabled, "
    "{gen}, 5, {width}, 16, 34, 0x0"
)


@pytest.mark.parametrize(
    ("power", "gen", "width", "others", "expected"),
    [
        ("700.00", "5", "16", 0, []),
        ("500.00", "5", "16", 0, ["power is capped at 500 of 700 W"]),
        ("[N/A]", "3", "16", 0, ["the PCIe link runs at generation 3 of 5"]),
        ("700.00", "5", "8", 2, ["the PCIe link runs at width 8", "2 other processes"]),
    ],
)
def test_what_a_driver_says_is_read_and_judged(
    power: str, gen: str, width: str, others: int, expected: list[str]
) -> None:
    facts = devices.smi_facts(lambda fields: SMI.format(power=power, gen=gen, width=width))
    assert facts["driver_version"] == "550.1"
    found = devices.suspicions(devices.Device("NVIDIA H100 80GB HBM3", 0, facts, others))
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))


def test_a_driver_that_says_nothing_is_no_problem() -> None:
    assert devices.smi_facts(lambda fields: "") == {}
    assert devices.suspicions(devices.Device("x", 0, {})) == []


def test_too_little_memory_or_a_busy_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda device: 10**9)
    with pytest.raises(InputError, match=r"0\.9 GiB free"):
        devices.place(CPU, True)
    monkeypatch.setattr(devices, "free_memory", lambda device: 60 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 2**30, 80 * 2**30))
    with pytest.raises(InputError, match="another process holds 20"):
        devices.place(torch.device("cuda"), True)


def test_this_machine_is_described() -> None:
    found = devices.describe(CPU)
    assert found.memory > 2**30 and "cores" in found.name
    place = devices.place(CPU, False)
    assert 2**18 <= place.cache <= 2**31
    waits: Callable[[], int] = devices.compute_threads
    assert waits() >= 1


def test_a_field_that_the_driver_does_not_know_loses_that_one_alone() -> None:
    def ask(fields: Sequence[str]) -> str:
        if "clocks_throttle_reasons.active" in fields:
            return 'Field "clocks_throttle_reasons.active" is not a valid field to query.'
        return ", ".join("550.1" for _ in fields)

    facts = devices.smi_facts(ask)
    assert len(facts) == len(devices.QUERY) - 1 and facts["driver_version"] == "550.1"


@pytest.mark.parametrize(
    ("name", "bus", "alarm"),
    [
        ("NVIDIA H200", 0, False), ("NVIDIA A100-SXM4-80GB", 0, False), ("NVIDIA A10", 0, True),
        ("NVIDIA RTX A6000", 384, True), ("NVIDIA new card", 4096, False),
    ],
)  # fmt: skip
def test_ecc_is_an_alarm_where_it_costs_bandwidth(name: str, bus: int, alarm: bool) -> None:
    facts = {"ecc.mode.current": "Enabled", "memory kind": devices.memory_kind(name, bus)}
    assert bool(devices.suspicions(devices.Device(name, 0, facts))) == alarm


def test_samples_go_on_under_another_patch_of_the_driver() -> None:
    headers = [
        devices.header(devices.Device("NVIDIA H200", 1, {"driver_version": version}), True)
        for version in ("580.159.03", "580.159.04", "590.10")
    ]
    assert headers[0] == headers[1] != headers[2]


def test_a_gpu_waits_as_long_as_the_host_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_events(monkeypatch)
    slept: list[float] = []
    moments: list[float] = []

    def clock() -> float:  # the host takes 20 ms for four calls, and longer where they wait
        moments.append(sum(waits) + 0.02 * len(moments))
        return moments[-1]

    waits: list[float] = []
    monkeypatch.setattr(clocks, "keep_busy", slept.append)
    time = clocks.cuda_timer(torch.device("cuda"), clock)
    for _ in range(3):
        time([lambda: None] * 4)
    expected = [clocks.SLEEP, HOST_MARGIN * (0.02 - clocks.SLEEP), HOST_MARGIN * 0.02]
    assert slept == pytest.approx(expected)
    slept.clear()
    time = clocks.cuda_timer(torch.device("cuda"), clock)
    for _ in range(9):  # copies from pageable memory wait until the GPU wakes
        time([lambda: waits.append(slept[-1])])
    assert slept[1:] == pytest.approx([HOST_MARGIN * 0.02] * 8)
