"""The pieces of a fleet's search, each by hand: what is allowed, near, certain, and who serves."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvsim.errors import InfeasibleError
from kvsim.evidence.ledger import KnownError
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import GIB
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.fleet import comparisons, offers, search
from kvsim.planner.fleet.comparisons import OtherFleet
from kvsim.planner.fleet.demand import ClassTarget, Demand, FleetTargets, Traffic
from kvsim.planner.fleet.offers import (
    CapacityQuestion,
    Configuration,
    FleetLimits,
    Rated,
    Spread,
    known_spread,
)
from kvsim.planner.fleet.play import Market, Played, quantile, replica_sets
from kvsim.planner.fleet.search import FleetSearch, neighbours, within_limits
from kvsim.serving.costs import StepCosts
from kvsim.serving.rules import Rules
from kvsim.techniques import parse
from tests.planner.test_fleet_programme import DEMAND, OFFERS

FREE = FleetLimits()


def counts(*replicas: int) -> np.ndarray:
    return np.array(replicas, np.int64)


# what is near


@pytest.mark.parametrize(
    ("replicas", "limits", "expected"),
    [
        (counts(1, 0), FREE, True),
        (counts(0, 1), FREE, True),
        (counts(0, 0), FREE, False),
        (counts(2, 1), FleetLimits(gpus=4), True),  # one GPU and two
        (counts(3, 1), FleetLimits(gpus=4), False),
        (counts(1, 1), FleetLimits(configurations=1), False),
        (counts(5, 0), FleetLimits(configurations=1), True),
        (counts(9, 1), FleetLimits(host=32e9), True),
        (counts(0, 2), FleetLimits(host=63e9), False),
        (counts(2, 1), FleetLimits(power=1500), True),
        (counts(3, 1), FleetLimits(power=1500), False),
        (counts(9, 1), FleetLimits(gpus_of={"h100-nvl": 2}), True),
        (counts(0, 2), FleetLimits(gpus_of={"h100-nvl": 2}), False),
    ],
)
def test_limits_on_what_is_rented(
    replicas: np.ndarray, limits: FleetLimits, expected: bool
) -> None:
    assert within_limits(OFFERS, replicas, limits) is expected


def test_neighbours_are_cheaper_and_come_cheapest_first() -> None:
    """Rents are 1 and 2 USD/h: one replica less, or the dear one for the cheap one."""
    found = [near.tolist() for near in neighbours(OFFERS, counts(2, 1), FREE)]
    assert found == [[2, 0], [1, 1], [3, 0]]
    assert [near.tolist() for near in neighbours(OFFERS, counts(1, 0), FREE)] == []


# who serves


def test_replicas_that_start_and_stop_are_sets_of_their_own() -> None:
    """One runs through, a second from the second window on, a third in the last alone."""
    running = counts(1, 2, 2, 3)
    window = np.array([0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3])
    sets, of = replica_sets(running, window)
    assert sets == [1, 1, 1]
    assert of[:2].tolist() == [0, 0]
    # multiples 0.31, 0.93, 0.55, 0.16 of an interval that the sets share evenly
    assert of[2:6].tolist() == [0, 1, 1, 0]
    assert of[6:8].tolist() == [0, 1]
    assert of[8:].tolist() == [0, 2, 1, 0]


def test_equal_replicas_that_stop_are_one_set_and_gaps_end_it() -> None:
    sets, of = replica_sets(counts(2, 0, 2, 2), np.array([0, 0, 2, 3, 3]))
    assert sets == [2, 2]
    assert of.tolist() == [0, 0, 1, 1, 1]
    sets, of = replica_sets(counts(3, 3), np.array([0, 1]))
    assert (sets, of.tolist()) == ([3], [0, 0])


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("size", [1, 2, 6, 100])
def test_quantile_lies_between_two_neighbours(size: int, share: float) -> None:
    values = np.random.default_rng(size).random(size)
    assert quantile(values, share) == pytest.approx(np.quantile(values, share), rel=1e-12)


def test_each_class_of_prompts_has_targets_of_its_own() -> None:
    prompt = np.array([10, 100, 101, 500, 501, 9000])
    targets = FleetTargets(1.0, 0.1, 0.5, (ClassTarget(100, 4.0, 0.2), ClassTarget(500, tpot=0.3)))
    assert targets.of(prompt).tolist() == [0, 0, 1, 1, 2, 2]
    assert [x.tolist() for x in targets.of_each(prompt)] == [
        [1, 1, 4, 4, np.inf, np.inf], [0.1, 0.1, 0.2, 0.2, 0.3, 0.3],
    ]  # fmt: skip
    assert targets.loosest == FleetTargets(np.inf, 0.3, 0.5)
    assert targets.times("tpot", 2.0).longer[1] == ClassTarget(500, np.inf, 0.6)
    ttft, tpot = np.array([0.5, 0.5, 3.0, 2.0, 50.0, 70.0]), np.full(6, 0.05)
    played = Played(ttft, tpot, ttft, np.zeros(6, np.int64), (), 1.0, prompt)
    assert played.over(targets) == (2.5 / 4, 0.5)
    assert played.meets(targets) and not played.meets(FleetTargets(1.0, 0.1, 0.5))
    assert played.good_share(targets) == 1.0
    tighter = replace(targets, longer=(ClassTarget(100, 2.0, 0.2), targets.longer[1]))
    assert not played.meets(tighter) and played.good_share(tighter) == pytest.approx(5 / 6)
    assert played.meets(tighter, prompt != 101)


def test_good_requests_are_within_both_targets() -> None:
    ttft = np.array([0.5, 0.5, 2.0, 2.0, np.inf])
    tpot = np.array([0.05, 0.2, 0.05, 0.2, np.nan])
    played = Played(ttft, tpot, ttft, np.zeros(5, np.int64), (), 1.0, np.full(5, 100))
    assert played.good_share(FleetTargets(1.0, 0.1)) == pytest.approx(1 / 5)
    assert played.good_share(FleetTargets()) == 1.0
    none = np.zeros(0)
    assert (
        Played(none, none, none, np.zeros(0, np.int64), (), 1.0, np.zeros(0, np.int64)).good_share(
            FREE_TARGETS
        )
        == 1.0
    )


FREE_TARGETS = FleetTargets()


# the search


def searched(load: float = 1.0) -> FleetSearch:
    traffic = cast(Traffic, SimpleNamespace(demand=DEMAND))
    asked = SimpleNamespace(
        traffic=traffic, targets=FREE_TARGETS, limits=FleetLimits(late=0.02), schedule=None
    )
    market = Market([], OFFERS, np.zeros(len(OFFERS)))
    return FleetSearch(cast(CapacityQuestion, asked), market, load=load)


def test_classes_are_divided_alike_in_every_window() -> None:
    share = searched().dispatch(counts(2, 1))
    assert share.shape == (2, 2, 2)  # windows, classes, kinds
    assert share.sum(axis=2) == pytest.approx(1.0)
    assert (share[0] == share[1]).all()
    assert share[0, 1].tolist() == pytest.approx([0.0, 1.0])  # the first kind cannot serve it


def test_a_load_is_of_the_load_that_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the trace with a quarter of headroom is two and a half times the trace."""
    loads: list[float] = []

    def play(*given: Any) -> None:
        loads.append(given[4])

    monkeypatch.setattr(search, "play", play)
    found = searched(2.0)
    assert (found.demand.rate == 2 * DEMAND.rate).all()
    found.played(np.tile(counts(2, 1), (2, 1)), np.full((2, 2, 2), 0.5))
    found.played(np.tile(counts(2, 1), (2, 1)), np.full((2, 2, 2), 0.5), 1.25)
    assert loads == [2.0, 2.5] and found.simulations == 2


# how certain


def error(width: float, seen: bool = True) -> KnownError:
    return KnownError(cast(Any, "a row") if seen else None, f"{width}", 1 / width, width, True)


@pytest.mark.parametrize(
    ("decode", "prefill", "whole", "widest"),
    [
        (error(1.2), error(1.4), error(3.0), 1.4),  # whole requests do not count beside both
        (error(1.5), error(1.4), error(3.0), 1.5),
        (error(1.5, False), error(1.4), error(3.0), 1.4),  # what was not measured does not count
        (error(1.2), error(4.0, False), error(3.0), 1.2),
        (error(4.0, False), error(4.0, False), error(3.0), 3.0),
    ],
)  # fmt: skip
def test_the_widest_of_what_was_measured_counts(
    decode: KnownError, prefill: KnownError, whole: KnownError, widest: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    said = {"decode": decode, "prefill": prefill, "request": whole}
    monkeypatch.setattr(offers, "evidence_for", lambda deployment, technique, kind: said[kind])
    one = SimpleNamespace(costs=SimpleNamespace(deployment=None), technique="full")
    found = known_spread([cast(Configuration, one)])
    assert found.sigma == pytest.approx(np.log(widest) / 1.2816)
    assert found.source == f"{widest}"


def test_what_derived_capacities_do_not_settle_is_measured_for_the_cheapest_six(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slower replicas carry less than in proportion; the six that cost least are played again."""
    cost = np.array([9.0, 2.0, 8.0, 3.0, 7.0, 1.0, 6.0, 4.0, 5.0])
    market = cast(Market, SimpleNamespace(cost_alone=cost))
    slow = cast(Market, SimpleNamespace())
    again: list[Any] = []

    def measured(rated: list[Any], traffic: Any, targets: Any, slowdowns: Any) -> Market:
        again.append(([x.configuration for x in rated], slowdowns.tolist()))
        return slow

    def cheapest(q: Any, some: Market, load: float, slower: bool) -> list[OtherFleet]:
        assert slower == (some is market)
        fleets = [cast(Any, SimpleNamespace(fleet=SimpleNamespace(cost=x))) for x in (30.0, 20.0)]
        return [OtherFleet("", fleet if some is slow else None, []) for fleet in fleets]

    monkeypatch.setattr(comparisons, "measure_market", measured)
    monkeypatch.setattr(comparisons, "_cheapest_robust", cheapest)
    spread = Spread(0.1, "a row")
    q = cast(
        CapacityQuestion, SimpleNamespace(limits=FREE, traffic=None, targets=None, spread=spread)
    )
    rated = cast(list[Rated], [SimpleNamespace(configuration=x) for x in range(9)])
    unsure = cast(Any, SimpleNamespace(sure=False))
    chosen = OtherFleet("", None, [])
    found = comparisons.find_robust_fleet(q, rated, market, 1.0, chosen, unsure, lambda _: None)
    assert again == [([5, 1, 3, 7, 8, 6], [spread.slowdown()] * 6)]
    far = cast(CapacityQuestion, SimpleNamespace(spread=Spread(10.0, "given")))
    market = cast(Market, SimpleNamespace(configurations=[]))
    none = comparisons.find_robust_fleet(far, rated, market, 1.0, chosen, unsure, lambda _: None)
    assert none.found is None and "1.39e+07 times as long" in none.reason
    assert found.found is not None and found.found.fleet.cost == 20.0


# one replica


@pytest.mark.parametrize("tp", [1, 2])
def test_host_memory_of_a_replica_is_its_blocks_and_its_sequences(tp: int) -> None:
    """Every GPU keeps its part of the sequences' caches there; prefix blocks are kept once."""
    d = Deployment(load_model("llama3-8b"), load_hardware("l40s"), load_stack("fused"), tp=tp)
    rules = Rules(max_seqs=4, max_tokens=512, host_cache=3 * GIB)
    costs = StepCosts(parse("offload"), d, rules, 1000, 500)
    tokens = np.ceil(1000 / rules.block_tokens) * rules.block_tokens
    kept = 2 * d.model.kv_width * d.model.layers * tokens
    host = Configuration(costs, "l40s", 1.0).host
    assert host == pytest.approx(3 * GIB + 4 * kept, rel=0.01)
    plain = Configuration(StepCosts(parse("full"), d, rules, 1000, 500), "l40s", 1.0)
    assert plain.host == 3 * GIB


def test_no_fleet_is_said_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise InfeasibleError("no fleet carries the demand within the limits")

    monkeypatch.setattr(comparisons, "search_of", none)
    market = Market([cast(Configuration, None)], OFFERS, np.ones(1))
    q = cast(CapacityQuestion, None)
    found = comparisons.fleet_for("tight", q, market, FREE, 1.0)
    assert found.found is None and found.reason == "no fleet carries the demand within the limits"
    empty = comparisons.fleet_for("none", q, market.only([]), FREE, 1.0)
    assert empty.reason == "none on the shortlist"


def test_demand_is_the_mean_over_hours() -> None:
    uneven = Demand(np.array([[4.0, 1.0], [1.0, 4.0]]), np.array([1.0, 3.0]))
    assert uneven.mean.tolist() == [1.75, 3.25]
