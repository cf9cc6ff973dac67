"""The suite on machines that are not here: what it measures, leaves out and refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvsim.errors import InputError  # noqa: E402
from kvsim.evidence.machine.samples import Log, Sample  # noqa: E402
from kvsim.validate.bench import suite  # noqa: E402
from kvsim.validate.bench.suite import (  # noqa: E402
    LEAST_REQUIRED,
    Cost,
    Speed,
    check_complete,
    list_units,
)
from kvsim.validate.bench.work import Bench, Work  # noqa: E402
from kvsim.validate.runner import Runner  # noqa: E402

CPU = torch.device("cpu")
MIB, GIB = 2**20, 2**30


def server(cores: int, cache: int, quick: bool, memory: int = 64 * GIB) -> tuple[Bench, Speed]:
    """A CPU as ``device.place`` and a rough probe would find it."""
    place = Bench(CPU, quick, cache, min(memory // 2, max(2 * GIB, 8 * cache)))
    bandwidth = 8e9 * min(cores, 24) ** 0.8
    return place, Speed(fill=min(4e9, bandwidth), moved=bandwidth, flops=2.5e10 * cores)


def fitting(
    planned: dict[str, list[Work]], place: Bench, speed: Speed, seconds: float
) -> dict[str, list[Work]]:
    """Works by benchmark that a plan made before anything is measured has time for."""
    units = list_units(planned, Cost(place, speed))
    plan = Runner(list(units), seconds, clock=lambda: 0.0).plan()
    assert sum(one.seconds for one in plan) <= seconds
    found: dict[str, list[Work]] = {}
    for one in plan:
        found.setdefault(one.unit.kind, []).extend(units[one.unit])
    return found


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("cache", [8, 32, 128, 480, 1024])
@pytest.mark.parametrize("cores", [2, 8, 32, 128])
def test_every_machine_has_a_suite_within_its_time(cores: int, cache: int, quick: bool) -> None:
    place, speed = server(cores, cache * MIB, quick)
    planned = {name: works for name, works in suite.plan(place) if works}
    check_complete(planned, place)
    kept = fitting(planned, place, speed, suite.SUITE_SECONDS[quick])
    for name, works in planned.items():
        assert len(kept.get(name, ())) >= min(LEAST_REQUIRED.get(name, 0), len(works))
    assert {w.case["cached"] for w in kept["memory"]} == {"yes", "no"}
    assert {w.op.dtype for w in kept["gemm"]} == {"fp16", "fp32"}
    uncached = [w for w in kept["memory"] if w.case["cached"] == "no"]
    assert {w.case["way"] for w in uncached} == {"read", "write", "copy"}
    for work in uncached:  # a copy has two of them
        moved = int(str(work.case["bytes"]))
        assert 2 * moved <= place.memory and moved >= 2 * place.cache
    ways = [w.case["way"] for w in kept["contention"]]
    assert ways.count("copy") == ways.count("compute") == ways.count("both") > 0


def test_a_cache_that_memory_cannot_outgrow_is_refused_at_once(tmp_path: Path) -> None:
    place, _ = server(2, GIB, True, memory=3 * GIB)
    with pytest.raises(InputError, match=r"memory cannot be measured here: the cache holds 1024"):
        check_complete({n: works for n, works in suite.plan(place) if works}, place)
    larger = replace(place, memory=4 * GIB)
    check_complete({n: works for n, works in suite.plan(larger) if works}, place)


def test_time_that_is_up_ends_a_benchmark_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Bench(CPU, True, 2**14, 2**22)
    parts = {name: suite.SUITE[name] for name in ("launch", "memory", "topk")}
    monkeypatch.setattr(suite, "SUITE", parts)
    monkeypatch.setattr(suite, "list_runs", lambda place: [])
    log, said = Log(Path(str(tmp_path)) / "s.jsonl", {}).resume(), list[str]()
    now = iter(range(0, 10**6, 10))  # every look at the clock is ten seconds later
    monkeypatch.setattr(suite, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(suite, "measure", lambda timer, calls, budget: (1e-4,) * 5)
    suite.run_suite(small, log, said.append)
    found = [sample.benchmark for sample in log.items]
    assert found.count("memory") >= LEAST_REQUIRED["memory"]  # no profile without it
    assert "topk" not in found
    assert any("left out, as they would take too long" in text for text in said)


@pytest.mark.parametrize("lacking", ["all of it", "one format"])
def test_what_a_profile_needs_and_cannot_run_ends_at_once(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run measures it again, and what was measured before it is kept."""
    small = Bench(CPU, True, 2**14, 2**22)
    monkeypatch.setattr(suite, "SUITE", {n: suite.SUITE[n] for n in ("launch", "gemm")})
    monkeypatch.setattr(suite, "check_complete", lambda suite, place: None)

    def sample(work: Work, name: str, clocks: object, budget: float) -> Sample | str:
        if name == "gemm" and (lacking == "all of it" or work.op.dtype == "fp16"):
            return "no kernel"
        return Sample(name, dict(work.case), work.op, (1e-3,))

    monkeypatch.setattr(suite, "_measured", sample)
    monkeypatch.setattr(suite, "list_runs", lambda place: [])
    log = Log(tmp_path / "samples.jsonl", {}).resume()
    words = r"gemm in .*fp16.* could not be measured.*no kernel.*run the same command again"
    with pytest.raises(InputError, match=words) as fault:
        suite.run_suite(small, log, lambda text: None)
    assert ("fp32" in str(fault.value)) is (lacking == "all of it")
    kept = {sample.benchmark for sample in Log(log.path, {}).resume().items}
    assert kept == {"launch"} if lacking == "all of it" else {"launch", "gemm"}
