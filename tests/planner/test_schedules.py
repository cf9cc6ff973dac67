"""Schedules over the day, held against every schedule of a few replicas."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kvsim.planner.fleet.comparisons import search_of
from kvsim.planner.fleet.demand import Demand
from kvsim.planner.fleet.offers import (
    CapacityQuestion,
    FleetLimits,
    Offers,
    Schedule,
    Terms,
    shortlist,
)
from kvsim.planner.fleet.play import Market, measure_market
from kvsim.planner.fleet.schedules import ScheduleSearch, SeenMixes, choose_schedule
from tests.support.schedules import cheapest_cost, cheapest_schedule, day

QUICK = (14, 35)  # days of the benchmark, in two windows


def market_of(q: CapacityQuestion) -> Market:
    terms = Terms(q.traffic, q.targets, q.rules, q.admission, q.largest_loss, q.utilisation)
    return measure_market(shortlist(q.rentable, terms), q.traffic, q.targets)


@pytest.mark.parametrize("seed", QUICK)
def test_no_schedule_of_a_small_day_is_cheaper(seed: int) -> None:
    question = day(seed)
    market = market_of(question)
    search = search_of(question, market)
    assert isinstance(search, ScheduleSearch)
    found = search.run()
    assert found.fleet.played.meets(question.targets)
    assert cheapest_schedule(search, below=found.fleet.cost) is None
    always = search_of(replace(question, schedule=None), market).run()
    assert found.fleet.cost <= always.fleet.cost + 1e-9


@pytest.mark.parametrize("seed", range(12))
def test_the_cheapest_of_seen_mixes_is_chosen(seed: int) -> None:
    """Held against all combinations of the mixes, with late requests drawn at random."""
    rng = np.random.default_rng(seed)
    windows, kinds = 3, 2
    offers = Offers(
        capacity=np.ones((1, kinds)), late=np.zeros((1, kinds)), price=rng.uniform(1, 4, kinds),
        reserved=np.where(rng.random(kinds) < 0.4, 0.7, np.inf), gpus=np.ones(kinds, np.int64),
        kind=("a", "b"), host=np.zeros(kinds), power=np.zeros(kinds),
    )  # fmt: skip
    demand = Demand(np.ones((windows, 1)), rng.uniform(0.5, 2, windows))
    schedule, limits = Schedule(float(rng.uniform(0, 1))), FleetLimits(gpus=5)
    mixes = [m for m in product(range(3), repeat=kinds) if any(m)]
    late = [
        {m: rng.integers(0, max(9 - 3 * sum(m), 1), (2, 2)) for m in mixes} for _ in range(windows)
    ]
    seen = SeenMixes(late, np.array([6, 4]))
    seen.delayed[1, (1, 1), (1, 0)] = np.array([2, -1])
    best = np.inf
    for _ in range(3):  # each one chosen is then excluded
        found = choose_schedule(seen, offers, demand, limits, schedule)
        best = min(
            cheapest_cost(offers, demand, schedule, np.array(some))
            for some in product(mixes, repeat=windows)
            if some not in seen.missed
            and np.max(some, axis=0).sum() <= limits.gpus
            and (_late_of(seen, some) <= seen.may_be).all()
        )
        assert found.cost == pytest.approx(best)
        assert not found.beyond
        seen.missed.append(found.mixes)
    none = choose_schedule(
        replace(seen, may_be=np.array([-1, -1])), offers, demand, limits, schedule
    )
    assert none.beyond


def _late_of(seen: SeenMixes, some: tuple[tuple[int, ...], ...]) -> np.ndarray:
    rows = np.array([seen.late[w][m] for w, m in enumerate(some)]).sum(axis=0)
    for w in range(1, len(some)):
        rows[0] += seen.delayed.get((w, some[w - 1], some[w]), 0)
    return np.asarray(rows)
