"""The fleet programme: its text, and that nothing cheaper carries the demand."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pulp
import pytest

from kvsim.errors import InfeasibleError
from kvsim.planner.fleet import milp
from kvsim.planner.fleet import schedules as fleet_schedules
from kvsim.planner.fleet.demand import Demand
from kvsim.planner.fleet.milp import (
    FatalLoss,
    FleetCut,
    build_programme,
    propose,
    replica_worth,
    solve_programme,
    undominated,
    utilisation,
)
from kvsim.planner.fleet.offers import FleetLimits, Offers, Schedule
from kvsim.planner.fleet.schedules import (
    SeenMixes,
    choose_schedule,
    scheduled_cost,
    schedules_with_less,
)
from tests.support.fleets import cheapest, instance

GOLDEN = Path(__file__).parent / "golden"
MOST = 7  # replicas of a kind in the exhaustive search
NOTHING = FleetLimits()

OFFERS = Offers(
    capacity=np.array([[2.0, 5.0], [0.0, 4.0]]),
    late=np.array([[0.0, 0.0], [0.0, 0.005]]),
    price=np.array([1.0, 3.0]),
    reserved=np.array([np.inf, 2.0]),
    gpus=np.array([1, 2]),
    kind=("l40s", "h100-nvl"),
    host=np.array([0.0, 32e9]),
    power=np.array([350.0, 800.0]),
)
DEMAND = Demand(np.array([[4.0, 1.0], [1.0, 2.0]]), np.array([12.0, 12.0]))


Asked = tuple[FleetLimits, Schedule | None, tuple[FleetCut, ...], tuple[FatalLoss, ...]]
ASKED: dict[str, Asked] = {
    "plain": (NOTHING, None, (), ()),
    "gpus": (FleetLimits(gpus=8), None, (), ()),
    "gpus_of": (FleetLimits(gpus_of={"h100-nvl": 4}), None, (), ()),
    "host": (FleetLimits(host=64e9), None, (), ()),
    "power": (FleetLimits(power=2000), None, (), ()),
    "configurations": (FleetLimits(configurations=1), None, (), ()),
    "mixed": (FleetLimits(mixed=True), None, (), ()),
    "headroom": (FleetLimits(headroom=0.25), None, (), ()),
    "failures": (
        FleetLimits(failures=1, headroom=0.25), None, (), (FatalLoss(0, (1, 0), (0, 1)),),
    ),
    "cuts": (NOTHING, None, (FleetCut(np.array([2, 1])),), ()),
    "schedule": (NOTHING, Schedule(0.5), (), ()),
}  # fmt: skip
UNKNOWN = replace(OFFERS, power=np.array([350.0, np.nan]))


def texts() -> dict[str, pulp.LpProblem]:
    """Programmes of a fleet that golden texts are of, and of who serves in one that is known."""
    found = {
        f"fleet_{name}": build_programme(OFFERS, DEMAND, *x).problem for name, x in ASKED.items()
    }
    found["fleet_power_unknown"] = build_programme(UNKNOWN, DEMAND, FleetLimits(power=2000)).problem
    seen: list[pulp.LpProblem] = []
    with patch.object(milp, "run_solver", seen.append):
        utilisation(OFFERS, DEMAND, np.array([1, 2]), 0.01)
    return found | {"dispatch": seen[0]} | schedules()


LATE = {(1, 0): [[3, 0], [4, 1]], (0, 1): [[0, 2], [0, 4]], (1, 1): [[0, 0], [1, 0]]}
SEEN = SeenMixes(
    late=[{mix: np.array(late) for mix, late in LATE.items()}] * 2,
    may_be=np.array([4, 2]),
    delayed={(1, (1, 0), (0, 1)): np.array([2, -1])},
    missed=[((1, 0), (1, 0))],
)


def schedules() -> dict[str, pulp.LpProblem]:
    """Programmes of mixes that were played: within the targets, and least beyond them."""
    built: list[pulp.LpProblem] = []

    def noted(problem: pulp.LpProblem) -> None:
        built.append(problem)
        milp.run_solver(problem)

    with patch.object(fleet_schedules, "run_solver", noted):
        for seen in (SEEN, replace(SEEN, may_be=np.array([-1, -1]))):
            choose_schedule(seen, OFFERS, DEMAND, FleetLimits(gpus=8), Schedule(0.5))
    return {"schedule_mixes": built[0], "schedule_mixes_beyond": built[-1]}


@pytest.mark.parametrize("name", texts())
def test_programme_is_the_golden_one(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.lp"
    texts()[name].writeLP(str(file))
    assert file.read_text() == (GOLDEN / f"{name}.lp").read_text()


def test_what_is_not_known_is_not_rented_where_it_is_limited() -> None:
    assert solve_programme(OFFERS, DEMAND, FleetLimits(power=4000)).replicas[1] > 0
    with pytest.raises(InfeasibleError):  # the other kind serves one class alone
        solve_programme(UNKNOWN, DEMAND, FleetLimits(power=4000))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", range(16))
def test_no_cheaper_fleet_carries_the_demand(seed: int, mixed: bool) -> None:
    offers, demand, limits = instance(seed)
    limits = replace(limits, mixed=mixed)
    expected = cheapest(offers, demand, limits, [MOST] * len(offers))
    try:
        found = solve_programme(offers, demand, limits)
    except InfeasibleError:
        assert expected is None
        return
    if expected is None:  # a fleet larger than those that were tried
        assert found.replicas.max() > MOST
        return
    assert found.cost == pytest.approx(expected, rel=1e-6)
    assert found.bound == pytest.approx(found.cost, rel=1e-6)
    assert found.relaxed <= found.cost * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_limits_never_make_a_fleet_cheaper(seed: int) -> None:
    offers, demand, limits = instance(seed)
    free = (
        solve_programme(offers, demand, NOTHING).cost
        if (offers.capacity > 0).any(axis=1).all()
        else 0.0
    )
    with suppress(InfeasibleError):
        assert solve_programme(offers, demand, limits).cost >= free - 1e-9


def test_schedule_pays_for_windows_and_for_starting() -> None:
    offers = replace(OFFERS, reserved=np.array([np.inf, np.inf]), late=np.zeros((2, 2)))
    flat = solve_programme(offers, DEMAND, NOTHING)
    free = solve_programme(offers, DEMAND, NOTHING, Schedule(0.0))
    slow = solve_programme(offers, DEMAND, NOTHING, Schedule(6.0))
    assert free.cost <= slow.cost + 1e-9 <= flat.cost + 2e-9
    assert free.running.shape == (2, 2)
    used = DEMAND.rate[:, :, None] * free.share / np.where(offers.capacity, offers.capacity, 1)
    assert (used.sum(axis=1) <= free.running + 1e-6).all()
    hours = DEMAND.hours @ free.running @ offers.price / DEMAND.hours.sum()
    assert free.cost == pytest.approx(hours)


def test_reserved_replicas_carry_what_is_always_there() -> None:
    one = Offers(
        capacity=np.array([[1.0]]), late=np.zeros((1, 1)), price=np.array([3.0]),
        reserved=np.array([2.0]), gpus=np.array([1]), kind=("a",), host=np.zeros(1),
        power=np.zeros(1),
    )  # fmt: skip
    demand = Demand(np.array([[2.0], [2.0], [5.0], [2.0]]), np.full(4, 6.0))
    found = solve_programme(one, demand, NOTHING, Schedule(0.0))
    assert found.reserved.tolist() == [2]
    assert found.running[:, 0].tolist() == [2, 2, 5, 2]
    assert found.cost == pytest.approx(2 * 2 + 3 * 3 / 4)


def test_schedules_with_one_replica_less_cost_what_the_programme_says() -> None:
    offers = replace(OFFERS, reserved=np.array([0.8, np.inf]), late=np.zeros((2, 2)))
    for schedule in (Schedule(0.0), Schedule(0.5), Schedule(6.0)):
        found = solve_programme(offers, DEMAND, NOTHING, schedule)
        known = scheduled_cost(offers, DEMAND, schedule, found.running, found.reserved)
        assert known == pytest.approx(found.cost)
        near = schedules_with_less(offers, DEMAND, schedule, NOTHING, found.running, found.reserved)
        assert [x[0] for x in near] == sorted(x[0] for x in near)
        for cost, running, reserved in near:
            gone = found.running - running
            assert (gone.max(), (gone.sum(axis=0) > 0).sum()) == (1, 1)
            assert running.any(axis=1).all() and (reserved <= running.min(axis=0)).all()
            assert cost == scheduled_cost(offers, DEMAND, schedule, running, reserved)


def test_several_kinds_of_replica_serve_in_a_schedule_too() -> None:
    found = solve_programme(OFFERS, DEMAND, replace(NOTHING, mixed=True), Schedule(0.0))
    assert (found.running.max(axis=0) > 0).all()


def test_a_lost_replica_is_covered_by_another_kind() -> None:
    even = replace(OFFERS, capacity=np.array([[2.0, 2.0], [2.0, 2.0]]), late=np.zeros((2, 2)),
                   price=np.array([1.0, 1.5]), reserved=np.full(2, np.inf),
                   gpus=np.array([1, 1]))  # fmt: skip
    demand = Demand(np.array([[3.0, 1.0]]), np.array([1.0]))
    found = solve_programme(even, demand, FleetLimits(failures=1, gpus_of={"l40s": 2}))
    assert found.replicas.tolist() == [2, 1]


def test_nothing_that_serves_a_class_is_infeasible() -> None:
    none = replace(OFFERS, capacity=np.array([[2.0, 5.0], [0.0, 0.0]]))
    with pytest.raises(InfeasibleError):
        solve_programme(none, DEMAND, NOTHING)


@pytest.mark.parametrize("seed", range(12))
def test_what_carries_the_demand_is_worth_at_least_one(seed: int) -> None:
    offers, demand, limits = instance(seed)
    rng = np.random.default_rng(seed)
    some = rng.integers(0, 3, (8, len(offers)))
    peaks, mean = demand.peaks, demand.mean
    for left in some:
        busiest, each = replica_worth(offers, peaks, mean, left, limits.late)
        expected, _ = utilisation(offers, demand, left, limits.late)
        assert busiest == pytest.approx(expected, rel=1e-6) or (busiest > 1 and expected > 1)
        if np.isfinite(busiest) and busiest > 0:  # so these are worth less where they do not
            assert each @ left == pytest.approx(1 / busiest, rel=1e-6)
        for other in some:
            if replica_worth(offers, peaks, mean, other, limits.late)[0] <= 1:
                assert each @ other >= 1 - 1e-7


def test_a_cut_excludes_what_a_loss_leaves_with_it() -> None:
    missed = FleetCut(np.array([1, 0]), 2)
    assert missed.excludes(np.array([2, 0])) and missed.excludes(np.array([1, 1]))
    assert not missed.excludes(np.array([3, 0])) and not missed.excludes(np.array([0, 2]))
    free = solve_programme(OFFERS, DEMAND, NOTHING)
    cut = FleetCut(free.replicas, 2)
    other = solve_programme(OFFERS, DEMAND, NOTHING, cuts=(cut,))
    assert not cut.excludes(other.replicas) and other.cost > free.cost


@pytest.mark.parametrize("seed", range(8))
def test_kinds_that_are_bettered_change_no_price(seed: int) -> None:
    offers, demand, limits = instance(seed)
    twice = offers.only([*range(len(offers)), 0])
    worse = replace(
        twice, price=twice.price * np.where(np.arange(len(twice)) == len(offers), 1.5, 1)
    )
    try:
        expected = solve_programme(worse, demand, limits).cost
    except InfeasibleError:
        return
    found = propose(worse, demand, limits, None, (), ())
    assert found.cost == pytest.approx(expected, rel=1e-6)
    assert len(undominated(worse, limits)) <= len(offers) or limits.mixed
    assert found.running.shape == (len(demand.rate), len(worse))
