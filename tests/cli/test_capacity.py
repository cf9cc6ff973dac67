"""`kvsim capacity` as a user runs it."""

import json
import shlex
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.planner.fleet.demand import FleetTargets
from kvsim.planner.fleet.play import Played
from kvsim.report import capacity
from tests.support.commands import check, line, replaced, run
from tests.support.envelope import answer_in

COMMAND = (
    "capacity", "--trace", "sample:chat", "--model", "llama3-8b", "--gpus", "l40s,h100",
    "--tp", "1", "--only", "full,fp8",
)  # fmt: skip
TARGETS = ("--ttft", "2s", "--tpot", "100ms")


@cache
def ran() -> tuple[dict[str, Any], str]:
    """The answer, and its page."""
    with TemporaryDirectory() as folder:
        page = Path(folder) / "fleet.html"
        some = ("--percentile", "95", "--json", "--report", str(page))
        result = run(*COMMAND, *TARGETS, *some)
        assert result.code == 0, result
        return dict(answer_in(result.out)), page.read_text()


def answer() -> dict[str, Any]:
    return ran()[0]


def test_the_fleet_meets_the_targets_and_nothing_cheaper_is_named() -> None:
    found = answer()
    assert found["met"] and found["simulated"]["met"]
    assert found["simulated"]["ttft_s"]["at_target"] <= 2
    assert found["simulated"]["tpot_s"]["at_target"] <= 0.1
    assert found["usd_per_hour"] == pytest.approx(sum(r["usd_per_hour"] for r in found["fleet"]))
    same = [a for a in found["alternatives"] if a["usd_per_hour"] is not None]
    assert {a["name"] for a in same} >= {"one kind of replica", "this trace, times as predicted"}
    assert any(x.startswith("fp8, named with --only, was not") for x in found["assumed"])
    stretch = [a for a in same if a["name"] == "this trace, times as predicted"]
    rest = [a for a in same if a not in stretch]
    assert all(a["usd_per_hour"] >= found["usd_per_hour"] - 1e-9 for a in rest)
    assert all(a["usd_per_hour"] <= found["usd_per_hour"] + 1e-9 for a in stretch)
    assert found["search"]["bound_usd_per_hour"] <= found["usd_per_hour"] + 1e-9
    assert found["certainty"]["both_met"] >= 0.9
    assert found["at_load"].keys() == {"0.5", "1.5", "2"}
    good = [found["at_load"][load]["good_share"] for load in ("0.5", "1.5", "2")]
    assert good == sorted(good, reverse=True)


def test_other_loads_limits_and_prices_stand_beside_it() -> None:
    found = answer()
    needs = [found["fleet_at_load"][load]["usd_per_hour"] for load in ("0.5", "1.5", "2")]
    assert needs == sorted(needs)
    assert needs[0] <= found["usd_per_hour"] * (1 + 1e-6) <= needs[2] * (1 + 2e-6)
    assert [x["name"] for x in found["limits"]] == ["TTFT at most 4 s", "TPOT at most 200 ms"]
    assert all(x["usd_per_hour"] <= found["usd_per_hour"] * (1 + 1e-6) for x in found["limits"])
    for price in found["prices"]:
        alone = next(a for a in found["alternatives"] if a["name"] == f"{price['gpu']} alone")
        mine = [r for r in found["fleet"] if r["gpu"] == price["gpu"]]
        gpus = alone["usd_per_hour"] / price["usd_per_gpu_hour"]
        rest = found["usd_per_hour"] - sum(r["usd_per_hour"] for r in mine)
        more = gpus - sum(r["replicas"] * r["tp"] for r in mine)
        assert price["as_cheap_at"] == pytest.approx(rest / more)


def test_a_load_that_the_fleet_carries_needs_no_dearer_one() -> None:
    """Both rows are for the same probability."""
    found, surely = answer(), answer()["certainty"]["asked"]
    for load, case in found["at_load"].items():
        needs = found["fleet_at_load"][load]["usd_per_hour"] or inf
        assert case["met"] == (case["probability"] >= surely)
        more = needs / found["usd_per_hour"] - 1
        assert more <= 1e-9 if case["met"] else more >= -1e-9
    for case in found["after_loss"].values():
        assert case["met"] == (case["probability"] >= surely)


def test_any_replica_may_be_lost() -> None:
    """Also by the fleets it is compared with: one replica is not enough, however fast it is."""
    some = replaced((*COMMAND, *TARGETS), "--only", "full", "--percentile", "95")
    found = answer_in(run(*some, "--failures", "1", "--json").out)
    assert sum(r["replicas"] for r in found["fleet"]) >= 2
    assert all(times["met"] for times in found["after_loss"].values())
    assert found["after_loss"]
    for other in found["alternatives"]:
        if other["fleet"] is not None:
            assert not other["fleet"].startswith("1 x ") or " + " in other["fleet"]
    without = next(x for x in found["limits"] if x["name"] == "without --failures")
    assert without["usd_per_hour"] <= found["usd_per_hour"]


def test_host_memory_for_prefixes_is_tried_where_the_trace_names_them(tmp_path: Path) -> None:
    """Fifty long prompts in turn, more of them than GPUs keep."""
    place = tmp_path / "turns.jsonl"
    with place.open("w") as file:
        for i in range(600):
            ids = [i % 50 * 20 + k for k in range(20)]
            row = {"timestamp": 700 * i, "input_length": 10240, "output_length": 8, "hash_ids": ids}
            file.write(json.dumps(row) + "\n")
    some = replaced(
        (*COMMAND, *TARGETS), "--trace", str(place), "--gpus", "l40s", "--only", "full",
        "--model", "llama3.1-8b",
        "--percentile", "90", "--ttft", "4s", "--pools", "yes",
    )  # fmt: skip
    found = answer_in(run(*some, "--json").out)
    names = [x["name"] for x in found["considered"]]
    assert {"l40s full", "l40s full + 128 GiB host cache"} <= set(names)
    assert any("prefill" in name for name in names)
    alone = {x["name"]: x["replicas_alone"] for x in found["considered"]}
    assert alone["l40s full + 128 GiB host cache"] < alone["l40s full"]
    used = found["fleet"][0]
    assert used["host_cache_bytes"] == 0 or used["prefix_hits"]["host"] > 0
    labels = {a["name"]: a["usd_per_hour"] for a in found["alternatives"]}
    assert labels["GPU memory alone for prefixes"] >= found["usd_per_hour"] * (1 - 1e-6)
    assert "no prefill apart" in labels


def test_shares_add_up() -> None:
    for c in answer()["classes"]:
        assert sum(c["served_by"].values()) == pytest.approx(1)
    assert sum(r["share_of_requests"] for r in answer()["fleet"]) == pytest.approx(1)


def test_batch_limit_is_what_the_trace_needs() -> None:
    for replica in answer()["fleet"]:
        assert replica["most_running"] <= replica["max_seqs"] <= 256


def test_page_is_whole() -> None:
    text = ran()[1]
    assert "Cost of the fleet, of alternatives" in text and "<script src" not in text


def test_targets_that_nothing_meets_are_refused_with_the_nearest() -> None:
    result = run(*replaced(COMMAND, "--only", "full", "--ttft", "5ms", "--tpot", "100ms"))
    assert (result.code, result.out) == (1, "")
    check(result.err, r"no fleet meets TTFT p90 of 5 ms \(at least .* try --ttft \d+ms, or other")
    assert "TPOT" not in result.err  # which can be met


def test_a_refusal_in_json_has_the_targets_that_would_do() -> None:
    result = run(*replaced(COMMAND, "--ttft", "5ms", "--tpot", "100ms", "--only", "full", "--json"))
    found = answer_in(result.out)
    (advice,) = found["advice"]
    assert result.code == 1 and found["choice"] is None
    assert found["reason"] in result.err and f"try {advice['option']}, or" in found["verdict"]
    assert run(*shlex.split(advice["command"])[1:], "--sure", "0").code == 0
    classes = replaced(COMMAND, *TARGETS, "--class-targets", "300=5ms/none", "--only", "full")
    (advice,) = answer_in(run(*classes, "--json").out)["advice"]
    assert "for prompts above 300 tokens" in advice["option"] and advice["command"] is None


def test_those_who_wait_longer_are_said_first() -> None:
    ttft = np.array([0.5] * 990 + [1.0] * 4 + [12.0] * 6)
    kind = np.array([0] * 880 + [1] * 120)
    played = Played(ttft, np.full(1000, 0.05), ttft, kind, (), 1.0, np.full(1000, 100))
    goal = FleetTargets(2.0, 0.1, 0.99)
    assert played.meets(goal)
    assert capacity.describe_slower(played, goal, ["h100 full", "l4 full"]) == (
        "99 % of all requests meet the targets, but of the 12 % that l4 serves, only 95 % do."
    )
    assert (
        capacity.describe_slower(replace(played, kind=np.zeros(1000, int)), goal, ["h100 full"])
        == ""
    )


def test_targets_of_longer_prompts_are_met_by_each_class() -> None:
    classes = ("--class-targets", "300=3s/100ms,800=none/200ms")
    result = run(*replaced(COMMAND, *TARGETS, "--only", "full", *classes, "--json"))
    found = answer_in(result.out)
    rows = found["class_targets"]
    assert result.code == 0
    assert "--tpot 0.2s" in found["simulate"]  # of any class the longest, or none
    assert "--ttft" not in found["simulate"]
    assert [(r["prompt_above"], r["targets"]["ttft_s"]) for r in rows] == [
        (0, rows[0]["targets"]["ttft_s"]),
        (300, 3.0),
        (800, None),
    ]
    assert [r["prompt_up_to"] for r in rows] == [300, 800, None]
    for row in rows:
        assert row["met"] and row["requests"] > 0
        for key, most in row["targets"].items():
            assert most is None or row[key] <= most


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("--gpus", "h1000"), "unknown GPU|nearest"),
        (("--gpus", "v100-32g"), "--price|v100-32g|add --price"),
        (("--price", "h100"), "--price|GPU=NUMBER"),
        (("--price", "a10=1"), "--price|name one of --gpus"),
        (("--price", "h100=1,h100=2"), "--price|twice"),
        (("--reserved", "h100=x"), "--reserved|above 0"),
        (("--max-gpus", "many"), "--max-gpus|whole number"),
        (("--max-gpus", "a10=3"), "--max-gpus|a10"),
        (
            ("--gpus", "m2-ultra", "--price", "m2-ultra=1", "--max-power", "3"),
            "--max-power|m2-ultra|--watts",
        ),
        (("--class-targets", "8000=10s"), "--class-targets|8000=10s|N=TTFT/TPOT"),
        (("--class-targets", "8k=10s/1s"), "--class-targets|8k|whole number"),
        (("--class-targets", "80=10s/1s,80=9s/1s"), "--class-targets|80|twice"),
        (("--class-targets", "80=10000/1s"), "--class-targets|10000|without a unit"),
        (("--class-targets", "9999999=10s/1s"), "--class-targets|longest prompt|omit them"),
        (("--percentile", "100"), "--percentile|got '100'|expected a number from 50 to 99.99"),
        (("--ttft", "2000"), "--ttft|unit"),
        (("--gpus", "8"), "--gpus: got '8'|how many|--max-gpus N"),
        (("--find", "rate"), "--find|--max-gpus"),
        (("--find", "replicas", "--max-gpus", "2"), "--find replicas|anyway"),
        (("--find", "host-cache", "--max-gpus", "2"), "--find host-cache|hash blocks"),
        (("--only", "full", "--without", "full"), "leave no technique"),
        (("--gpu-memory-utilization", "0.1"), "leave no KV cache"),
        (("--host-cache", "100"), "--host-cache|no prefix blocks"),
    ],
)
def test_bad_input_is_one_line(changed: tuple[str, ...], words: str) -> None:
    check(line(*replaced((*COMMAND, *TARGETS), *changed)), words)


def test_the_largest_rate_of_one_gpu_is_one_that_it_just_keeps() -> None:
    found = kvsim.capacity(
        prompt="1k", generate=100, rate=2, hours=0.05, model="llama2-7b", gpus="a6000", tp=1,
        only="full", max_tokens=2048, ttft="2s", tpot="100ms", sure=0.5, max_gpus=1, find="rate",
    )  # fmt: skip
    assert not found.found.shortfall and found.found.fleet.total("gpus") == 1
    assert found.found.at_other_loads[1.5].fleet is None


def test_kinds_in_a_schedule_cost_what_the_fleet_does() -> None:
    some = ("--only", "full", "--tp", "1", "--gpus", "l40s", "--rate", "2", "--percentile", "95")
    more = ("--schedule", "--windows", "3", "--start-up", "10s", "--spread", "0.1", "--json")
    result = run(*replaced((*COMMAND, *TARGETS), *some[:6]), *some[6:], *more)
    found = answer_in(result.out)
    assert found["usd_per_hour"] == pytest.approx(sum(r["usd_per_hour"] for r in found["fleet"]))
    assert not found["prices"]  # GPUs are not paid all the time


@pytest.mark.parametrize(
    "asked",
    [
        "--prompt 1k --generate 100 --rate 12 --hours 0.03 --gpus l40s --tp 1,2 --only full",
        "--trace sample:conversation --rate 3x --gpus h100 --tp 1 --only full --pools no",
        "--prompt 2500 --cached 2k --generate 100 --rate 12 --hours 0.03 --gpus l40s --tp 1 "
        "--only full --pools no",
    ],
    ids=["drawn", "conversations", "common prefix"],
)
def test_the_command_that_plays_a_fleet_shows_its_figures(asked: str) -> None:
    """The router, the limits and the memories are those that were planned."""
    given = f"capacity --model llama3.1-8b --percentile 99 --sure 0 --ttft 3s --tpot 60ms {asked}"
    found = answer_in(run(*given.split(), "--json").out)
    played = answer_in(run(*shlex.split(found["simulate"])[1:], "--json").out)
    assert not found["shortfall"]
    for name in ("ttft_s", "tpot_s"):
        p99 = pytest.approx(found["simulated"][name]["p99"], rel=1e-3)  # of tables of pass times
        assert played[name]["p99"] == p99
    assert played["route"] == found["fleet"][0]["route"]
    assert played["replicas"] == found["fleet"][0]["replicas"]
