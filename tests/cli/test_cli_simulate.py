"""``kvsim simulate`` through the command line."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvsim.api.simulations import Sought, find_value
from tests.support.commands import run

BASE = ("simulate", "--model", "llama3.1-8b", "--gpu", "h100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "sample:chat", "--route", "random"), "--route"),
        (("--trace", "sample:chat", "--out", "x.csv"), "--out"),
        (("--trace", "sample:chat", "--gpu-memory", "10"), "leave no KV cache"),
        (("--trace", "sample:chat", "--technique", "quantspec", "--max-tokens", "2"), "--max-tok"),
        (
            ("--trace", "sample:conversation", "--technique", "streamingllm", "--prefix-caching"),
            "--prefix-caching",
        ),
        (("--trace", "sample:chat", "--find", "rate"), "--find: no target"),
        (("--trace", "sample:chat", "--find", "x", "--ttft", "2s"), "--find: got"),
        (("--trace", "sample:chat", "--find", "hit-rate", "--ttft", "2s"), "hit-rate: needs"),
        (
            ("--trace", "sample:chat", "--find", "host-cache", "--ttft", "2s"),
            "use a trace that has hash blocks",
        ),
        (
            ("--trace", "sample:chat", "--find", "prefill-replicas", "--ttft", "2s"),
            "got --replicas 1; expected 2 to 17",
        ),
        (
            ("--trace", "sample:chat", "--find", "rate", "--ttft", "2s", "--max-seqs", "8,16"),
            "--find: several runs",
        ),
    ],
)
def test_bad_input_gets_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = run(*BASE, *arguments)
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert message in done.err
    assert not done.out


class Sent(list[int]):
    """Requests whose trace names no prefix blocks."""

    block_ids = None


TRACE = {"workload": None, "requests": Sent(range(100)), "clock": False, "reuses": False}
DRAWN = TRACE | {"workload": SimpleNamespace(rate=4.0)}
GIB = 2.0**30


@pytest.mark.parametrize(
    ("find", "traffic", "given", "sought"),
    [
        ("rate", TRACE, {"rate": 2.0}, ("rate", 2.0, 0.5, 2000.0, False)),
        ("rate", TRACE, {}, ("rate", 1.0, 0.5, 1000.0, False)),
        ("rate", TRACE | {"requests": Sent(range(10**6))}, {}, ("rate", 1.0, 0.001, 20.0, False)),
        ("rate", TRACE | {"clock": True}, {}, ("rate", 1.0, 0.001, 1000.0, False)),
        ("rate", TRACE, {"req_s": 3.0}, ("req_s", 3.0, 0.003, 3000.0, False)),
        ("rate", DRAWN, {}, ("rate", 4.0, 0.004, 4000.0, False)),
        ("replicas", TRACE, {"replicas": 3}, ("replicas", 3, 1, 10_000, True, 1)),
        ("hit-rate", DRAWN, {}, ("hit_rate", 0.5, 0.0, 0.99, True, 0.01)),
        ("host-cache", DRAWN | {"reuses": True}, {},
         ("host_cache", 64 * GIB, 0.0, 100 * GIB, True, GIB)),
        ("prefill-replicas", TRACE, {"replicas": 8}, ("prefill_replicas", 1, 1, 7, True, 1)),
    ],
)  # fmt: skip
def test_a_search_begins_at_what_is_given_and_knows_its_bounds(
    find: str, traffic: dict[str, Any], given: dict[str, Any], sought: tuple[Any, ...]
) -> None:
    asked = SimpleNamespace(command="simulate", find=find, ttft=2.0, tpot=None)
    where = SimpleNamespace(hardware=SimpleNamespace(host_memory=100.5 * GIB))
    case = {"replicas": 1, "rate": None, "req_s": None} | given
    sent: Any = SimpleNamespace(**traffic)
    found = find_value(cast(Any, asked), sent, cast(Any, where), case)
    assert found == Sought(*sought)


@pytest.mark.parametrize(
    ("sought", "limit", "found"),
    [
        (Sought("rate", 1.0, 1 / 1024, 1024.0, False), 3.3, 3.3),
        (Sought("rate", 1.0, 1 / 1024, 1024.0, False), 0.02, 0.02),
        (Sought("rate", 1.0, 1 / 1024, 1024.0, False), 1e-9, None),
        (Sought("replicas", 1, 1, 10_000, True, 1), 37, 37),
        (Sought("replicas", 5, 1, 10_000, True, 1), 1, 1),
        (Sought("hit_rate", 0.5, 0.0, 0.99, True, 0.01), 0.37, 0.37),
        (Sought("hit_rate", 0.5, 0.0, 0.99, True, 0.01), 0.0, 0.0),
        (Sought("hit_rate", 0.5, 0.0, 0.99, True, 0.01), 2.0, None),
    ],
)
def test_what_just_keeps_the_targets_is_found(
    sought: Sought, limit: float, found: float | None
) -> None:
    """Whole numbers exactly, others to 2 %, in a few plays."""
    tried = list[float]()

    def keeps(value: float) -> bool:
        tried.append(value)
        return value >= limit - 1e-9 if sought.easier else value <= limit

    value = sought.search(keeps).found
    assert value == (None if found is None else pytest.approx(found, rel=0.02))
    assert len(set(tried)) == len(tried) <= 20
    if value is not None:
        assert value in sought.search(keeps).choose(sorted(set(tried)))


DRAWN_LOAD = ("--prompt", "2k", "--generate", "400")


def test_an_overload_is_told_with_the_replicas_that_keep_up() -> None:
    """The quotient of the rates is 2, but with 2 replicas the queue still grows."""
    load = ("--model", "gemma-2-27b", "--gpu", "h100", *DRAWN_LOAD, "--rate", "3")
    assert "; 3 replicas keep up." in " ".join(run("simulate", *load).out.split())
    listed = run("simulate", *load, "--replicas", "1,2,3,4").out
    assert "3 replicas are needed; 2 are overloaded." in listed


@pytest.mark.parametrize(
    ("replicas", "asked", "said"),
    [
        ("2", (), "completes 4.32 of 7.74 requests/s; 3 replicas keep up."),
        ("1,2", (), "More than 2 replicas are needed."),
        ("1,2", (), "so at least 3 replicas are needed."),
        ("1,2,3", (), "3 replicas are needed; 2 are overloaded."),
        ("4,8", (), "4 replicas are enough, the fewest tried."),
        ("1,8", (), "8 replicas are enough; 1 is overloaded."),
        ("1,2", ("--ttft", "130ms"), "2 replicas come closest, with 8.6 %."),
        ("1,2", ("--ttft", "1ms"), "with each, no request meets it. With 1 replica: TTFT p99"),
    ],
)
def test_a_queue_that_grows_over_a_short_run_is_an_overload(
    replicas: str, asked: tuple[str, ...], said: str
) -> None:
    """The median wait of two replicas is 0.35 s, as the run lasts 72 s."""
    load = ("--prompt", "2k", "--generate", "300", "--rate", "8", "--hours", "0.02")
    where = ("--model", "llama3.1-8b", "--gpu", "l40s", "--replicas", replicas)
    assert said in " ".join(run("simulate", *where, *load, *asked).out.split())


def test_one_replica_is_singular() -> None:
    load = (*DRAWN_LOAD, "--rate", "0.2", "--ttft", "2s", "--find", "replicas")
    assert "needs at least 1 replica of" in " ".join(run(*BASE, *load).out.split())


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ((), "Use --max-seqs 32: E2E p50 is"),
        (("--ttft", "5s", "--tpot", "50ms"), "Use --max-seqs 32: 100 %"),
        (("--ttft", "1ms", "--tpot", "50ms"), "No value of --max-seqs meets TTFT 1.00 ms"),
    ],
)
def test_the_smallest_of_equally_good_sizes_is_recommended(
    targets: tuple[str, ...], said: str
) -> None:
    load = (*DRAWN_LOAD, "--rate", "2", "--max-seqs", "1,32,64,128")
    assert said in run(*BASE, *load, *targets).out


def test_a_search_for_a_host_cache_shows_the_run_without_one() -> None:
    load = ("--prompt", "8k", "--generate", "300", "--rate", "0.5", "--turns", "4")
    asked = ("--find", "host-cache", "--ttft", "500ms", "--tpot", "1ms")
    done = run("simulate", "--model", "llama3.1-8b", "--gpu", "l40s", *load, *asked, "--json")
    rows = json.loads(done.out)["runs"]
    assert [row["case"]["host_cache"] for row in rows] == [0, 64, 512]
    assert rows[1]["ttft_s"]["mean"] < rows[0]["ttft_s"]["mean"]
    said = json.loads(done.out)["answer"]["verdict"]
    assert "64 GiB shorten mean TTFT from" in said
