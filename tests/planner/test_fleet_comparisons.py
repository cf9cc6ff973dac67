"""What is said of a fleet's likelihood and of the fleet that is 95 % certain is one statement."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvsim.planner.fleet import answer as capacity_answer
from kvsim.planner.fleet import search as fleet_search
from kvsim.planner.fleet.answer import CapacityAnswer
from kvsim.planner.fleet.comparisons import ROBUST, OtherFleet, relaxed_limits, search_of
from kvsim.planner.fleet.demand import Counts
from kvsim.planner.fleet.offers import SURE, CapacityQuestion, FleetLimits, Spread, known_spread
from kvsim.planner.fleet.play import Market
from kvsim.planner.fleet.search import (
    CHEAPER,
    FASTER_PLAYS,
    SLOWER_PLAYS,
    Certainty,
    FleetSearch,
    SlowedPlay,
)
from tests.support.commands import run
from tests.support.envelope import answer_in

COMMAND = (
    "capacity", "--trace", "sample:chat", "--model", "qwen2.5-7b", "--tp", "1",
    "--only", "full", "--tpot", "100ms", "--json",
)  # fmt: skip


def answered(monkeypatch: pytest.MonkeyPatch, *options: str) -> CapacityAnswer:
    """What `kvsim capacity` answers, before it is printed."""
    kept, make = [], capacity_answer.make_capacity

    def kept_too(question: CapacityQuestion, tell: Any) -> CapacityAnswer:
        kept.append(make(question, tell))
        return kept[-1]

    monkeypatch.setattr(capacity_answer, "make_capacity", kept_too)
    assert run(*COMMAND, *options).code == 0
    return kept[0]


def own(answer: CapacityAnswer, other: OtherFleet) -> Certainty:
    """What the answer would say of another fleet if it were the chosen one."""
    assert other.found is not None
    q = replace(answer.question, targets=answer.targets)
    market = Market(other.configurations, other.found.offers, np.array([]))
    fleet = other.found.fleet
    used = [other.configurations[j] for j in np.flatnonzero(fleet.replicas)]
    search = search_of(q, market, load=answer.load)
    return fleet_search.certainty(search, fleet, q.spread or known_spread(used))


@pytest.mark.parametrize(
    "options",
    [
        ("--gpus", "l40s", "--ttft", "2s"),
        ("--gpus", "l40s,h100", "--ttft", "500ms", "--failures", "1", "--headroom", "0.1"),
    ],
)
def test_the_fleet_that_is_95_percent_certain_is_so_by_the_chosen_ones_measure(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = answered(monkeypatch, *options)
    certain = next(x for x in answer.alternatives if x.label == ROBUST)
    assert certain.found is not None
    assert own(answer, certain).likely["both"] >= SURE - 1e-9
    assert certain.found.fleet.cost >= answer.fleet.cost * (1 - CHEAPER)
    same = certain.found.fleet.cost == answer.fleet.cost
    assert same == (answer.sure.likely["both"] >= SURE - 1e-9)
    # the chosen fleet's own batch limits change nothing that is said of it
    chosen = OtherFleet("", answer.found, answer.market.configurations)
    assert own(answer, chosen).likely["both"] >= answer.sure.likely["both"]


def sampled(met: Any, spread: Spread) -> Certainty:
    """A fleet that meets its targets at some slowdowns."""

    class Search(FleetSearch):
        def __init__(self) -> None:
            pass

    def slowed(search: FleetSearch, running: Counts, share: Any, slowdown: float) -> Any:
        over = 0.5 if met(slowdown) else 2.0
        played: Any = type("P", (), {"over": lambda _, targets: (over, 0.5), "groups": ()})()
        yield played

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_search, "_play_demanded", slowed)
        patch.setattr(Search, "targets", None, raising=False)
        fleet: Any = type("F", (), {"running": None, "share": None})()
        return fleet_search.certainty(Search(), fleet, spread)


@pytest.mark.parametrize("sigma", [0.05, 0.2, 1.0])
def test_the_likelihood_is_the_share_of_slowdowns_that_meet(sigma: float) -> None:
    """Also where a target is missed at some slowdowns and met at longer ones."""
    spread = Spread(sigma, "a row")
    for likely in (0.55, 0.8, SURE, 0.99):
        most = spread.slowdown(likely)
        found = sampled(most.__ge__, spread)
        assert found.likely["both"] == pytest.approx(likely, abs=0.5 / SLOWER_PLAYS + 1e-9)
        assert found.likely["tpot"] == 1.0
        assert found.sure == (likely >= SURE)
        assert found.met_up_to("ttft") <= most < found.met_up_to("tpot")
    first = sampled(lambda x: x <= 1, spread)  # 1 itself is known to meet
    assert first.likely["both"] == pytest.approx(0.5) and first.met_up_to("ttft") == 1.0
    low, high = spread.slowdown(0.6), spread.slowdown(0.7)
    found = sampled(lambda x: not low < x < high, spread)
    assert found.likely["both"] == pytest.approx(0.9)
    assert not found.sure and found.met_up_to("ttft") < low


def test_what_is_played_stands_for_all_of_the_spread() -> None:
    spread = Spread(0.2, "a row")
    every = sampled(lambda _: True, spread).slowed
    assert len(every) == FASTER_PLAYS + SLOWER_PLAYS and sum(
        x.weight for x in every
    ) == pytest.approx(1)
    assert [x.slowdown for x in every] == sorted((x.slowdown for x in every), reverse=True)
    mean = sum(x.weight * np.log(x.slowdown) for x in every)
    assert mean == pytest.approx(0, abs=0.01)


def test_no_more_is_played_than_shows_that_a_fleet_is_not_certain() -> None:
    played = 0

    def slowed(*_: Any) -> Any:
        nonlocal played
        for played in range(1, 56):
            yield SlowedPlay(2.0, 0.01, 2.0 if played <= 6 else 0.5, 0.5, {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_search, "play_slowed", slowed)
        nothing: Any = None
        assert not fleet_search.is_sure(nothing, nothing, nothing, nothing)
        assert played == 6


def test_no_comparison_is_cheaper_than_the_answer() -> None:
    """The search among all comes upon 3 x full KV here, that of several kinds upon two replicas."""
    asked = (
        "capacity", "--trace", "sample:chat", "--model", "llama3-8b", "--gpus", "l40s", "--tp", "1",
        "--ttft", "none", "--tpot", "60ms", "--rate", "4", "--lossy", "--only",
        "full,pyramidkv,snapkv", "--json",
    )  # fmt: skip
    found = answer_in(run(*asked).out)
    prices = {x["name"]: x["usd_per_hour"] for x in found["alternatives"]}
    assert min(prices.values()) == found["usd_per_hour"] < prices["full KV"]
    assert found["simulated"]["met"] and found["usd_per_hour"] == pytest.approx(
        sum(r["usd_per_hour"] for r in found["fleet"])
    )
    assert {r["name"] for r in found["fleet"]} <= {x["name"] for x in found["considered"]}
    assert all(x["usd_per_hour"] <= found["usd_per_hour"] for x in found["limits"])


def test_a_fleet_is_as_dear_as_another_within_the_solvers_rounding() -> None:
    def at(cost: float) -> OtherFleet:
        found: Any = SimpleNamespace(fleet=SimpleNamespace(cost=cost))
        return OtherFleet("", found, [])

    assert not at(16.74 * (1 - 1e-8)).cheaper(at(16.74)) and at(16.7).cheaper(at(16.74))
    assert at(9.0).cheaper(OtherFleet("", None, [])) and not OtherFleet("", None, []).cheaper(at(9))


def test_the_limits_that_were_set_are_named() -> None:
    limits = FleetLimits(gpus_of={"h100": 4}, failures=1, late=0.05)
    free = relaxed_limits(limits)
    assert [*free] == ["--max-gpus", "--failures"] and relaxed_limits(FleetLimits()) == {}
    assert free["--failures"] == FleetLimits(gpus_of={"h100": 4}, late=0.05)


@pytest.mark.parametrize(("other", "label"), [(None, "chosen"), (9.0, "chosen"), (0.5, "other")])
def test_less_load_needs_no_more_than_the_fleet_that_carries_it(
    other: float | None, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(name: str, cost: float | None) -> OtherFleet:
        found: Any = None if cost is None else SimpleNamespace(fleet=SimpleNamespace(cost=cost))
        return OtherFleet(name, found, [])

    chosen, nothing = at("", 1.0), cast(Any, SimpleNamespace(limits=None))
    monkeypatch.setattr(OtherFleet, "at", lambda *_: at("chosen", 1.0))
    monkeypatch.setattr(capacity_answer, "fleet_for", lambda *_: at("other", other))
    assert capacity_answer._fleet_at_load(nothing, nothing, chosen, 1, 0.5).label == label
    assert capacity_answer._fleet_at_load(nothing, nothing, chosen, 1, 2.0).label == "chosen"
