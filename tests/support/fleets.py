"""Small fleets for tests, and the cheapest one by trying all."""

from itertools import product

import numpy as np
from scipy.optimize import linprog

from kvsim.planner.fleet.demand import Counts, Demand
from kvsim.planner.fleet.offers import FleetLimits, Offers

Instance = tuple[Offers, Demand, FleetLimits]
ROUNDING = 1e-7


def instance(seed: int) -> Instance:
    """Two or three kinds of replica, some classes and windows, and limits that sometimes bind."""
    rng = np.random.default_rng(seed)
    kinds, classes, windows = (int(rng.integers(low, 4)) for low in (2, 1, 1))
    capacity = rng.uniform(0.5, 4, (classes, kinds)) * (rng.random((classes, kinds)) > 0.15)
    late = np.where(rng.random((classes, kinds)) < 0.2, rng.uniform(0, 0.05, (classes, kinds)), 0)
    offers = Offers(
        capacity=capacity,
        late=late,
        price=rng.uniform(0.5, 4, kinds),
        reserved=np.where(rng.random(kinds) < 0.3, rng.uniform(0.3, 2, kinds), np.inf),
        gpus=rng.integers(1, 5, kinds),
        kind=tuple(rng.choice(["a", "b"], kinds)),
        host=rng.uniform(1, 5, kinds) * 1e9,
        power=rng.uniform(100, 700, kinds),
    )
    demand = Demand(rng.uniform(0, 3, (windows, classes)), rng.uniform(1, 8, windows))
    limits = FleetLimits(
        gpus=rng.choice([np.inf, 8, 12]),
        gpus_of={"a": 5} if rng.random() < 0.3 else {},
        host=rng.choice([np.inf, 1.5e10]),
        power=rng.choice([np.inf, 2500]),
        configurations=rng.choice([np.inf, 1, 2]),
        headroom=rng.choice([0, 0.2]),
        failures=int(rng.integers(0, 3)),
        late=0.02,
    )
    return offers, demand, limits


def cheapest(offers: Offers, demand: Demand, limits: FleetLimits, most: list[int]) -> float | None:
    """Price of the cheapest fleet with at most so many replicas of each kind, by trying all."""
    fleets = list(product(*(range(count + 1) for count in most)))
    for fleet in sorted(fleets, key=lambda replicas: float(np.dot(replicas, offers.rent))):
        if _within(offers, demand, limits, np.array(fleet)):
            return float(np.dot(fleet, offers.rent))
    return None


def _within(offers: Offers, demand: Demand, limits: FleetLimits, replicas: Counts) -> bool:
    if limits.mixed and np.count_nonzero(replicas) < 2:
        return False
    for of_each, most in (
        (offers.gpus, limits.gpus),
        (offers.host, limits.host),
        (offers.power, limits.power),
        (np.ones(len(offers)) * (replicas > 0) / np.maximum(replicas, 1), limits.configurations),
        *(
            (np.where(np.array(offers.kind) == kind, offers.gpus, 0), of_kind)
            for kind, of_kind in limits.gpus_of.items()
        ),
    ):
        if replicas @ of_each > most:
            return False
    if not _carries(offers, demand, replicas, limits, 1 + limits.headroom):
        return False
    lost = min(limits.failures, int(replicas.sum()))
    return all(
        _carries(offers, demand, replicas - np.array(losses), limits, 1.0)
        for losses in product(*(range(min(int(n), lost) + 1) for n in replicas))
        if lost and sum(losses) == lost
    )


def _carries(
    offers: Offers, demand: Demand, replicas: Counts, limits: FleetLimits, load: float
) -> bool:
    """Whether shares exist, by a linear programme that is written down once more."""
    mean = demand.mean
    kinds, classes = len(offers), np.flatnonzero(mean > 0)
    pairs = [(c, j) for c in classes for j in range(kinds) if offers.capacity[c, j] > 0]
    served = np.array([[float(c == i) for i, _ in pairs] for c in classes])
    if not served.any(axis=1).all():
        return False
    rows, most = [], []
    for rate in demand.rate:
        for kind in range(kinds):
            rows.append([load * rate[c] / offers.capacity[c, j] * (j == kind) for c, j in pairs])
            most.append(float(replicas[kind]))
    rows.append([mean[c] * offers.late[c, j] / mean.sum() for c, j in pairs])
    most.append(limits.late)
    found = linprog(
        np.zeros(len(pairs)), A_ub=rows, b_ub=np.array(most) + ROUNDING,
        A_eq=served, b_eq=np.ones(len(classes)), bounds=(0, 1),
    )  # fmt: skip
    return bool(found.status == 0)
