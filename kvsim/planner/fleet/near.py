"""Fleets that differ from another by one replica, all the time or in one window."""

from collections.abc import Iterator

import numpy as np

from kvsim.planner.fleet.arrays import Counts, Demand, FleetLimits, Offers, Schedule

CHEAPER = 1e-9  # relative


def neighbours(offers: Offers, replicas: Counts, limits: FleetLimits) -> Iterator[Counts]:
    """Cheaper fleets with one replica less, or one of another kind, within the limits."""
    cost = float(offers.rent @ replicas)
    found: set[tuple[float, tuple[int, ...]]] = set()
    for j in np.flatnonzero(replicas):
        for other in (None, *range(len(replicas))):
            near = replicas.copy()
            near[j] -= 1
            if other is not None:
                near[other] += 1
            price = float(offers.rent @ near)
            if other != j and price < cost * (1 - CHEAPER) and allowed(offers, near, limits):
                found.add((price, tuple(near.tolist())))
    for _, counts in sorted(found):
        yield np.array(counts, np.int64)


def allowed(offers: Offers, replicas: Counts, limits: FleetLimits) -> bool:
    """Whether a fleet is within the limits on what is rented."""
    used = replicas > 0

    def total(of_each: np.ndarray) -> float:
        return float(replicas[used] @ of_each[used])

    of_kind = {
        kind: total(np.where([kind == k for k in offers.kind], offers.gpus, 0))
        for kind in limits.gpus_of
    }
    return bool(
        used.any()
        and total(offers.gpus) <= limits.gpus
        and 1 + limits.mixed <= used.sum() <= limits.configurations
        and total(offers.host) <= limits.host
        and (not np.isfinite(limits.power) or total(offers.power) <= limits.power)
        and all(of_kind[kind] <= most for kind, most in limits.gpus_of.items())
    )


def scheduled_cost(
    offers: Offers, demand: Demand, schedule: Schedule, running: Counts, reserved: Counts
) -> float:
    """Mean price of replicas that start and stop, as the programme counts it. [USD/h]

    Parameters
    ----------
    running : by window and kind. (w, j)
    reserved : of each kind, paid always. (j,)
    """
    day = float(demand.hours.sum())
    demanded = running - reserved
    started = np.maximum(demanded - np.roll(demanded, 1, axis=0), 0).sum(axis=0)
    hours = demand.hours @ demanded + schedule.start_up * started
    used, kept = hours > 0, reserved > 0
    return float(hours[used] @ offers.price[used] / day + reserved[kept] @ offers.reserved[kept])


def fewer(
    offers: Offers,
    demand: Demand,
    schedule: Schedule,
    limits: FleetLimits,
    running: Counts,
    reserved: Counts,
) -> list[tuple[float, Counts, Counts]]:
    """Schedules with one replica less, always or in one window, and their costs, cheapest first."""
    windows, found = range(len(running)), []
    for j in np.flatnonzero(running.any(axis=0)):
        for some in ([*windows], *([w] for w in windows)):
            less, kept = running.copy(), reserved.copy()
            less[some, j] = np.maximum(less[some, j] - 1, 0)
            kept[j] = min(kept[j], less[:, j].min())
            if (less == running).all() or not less.any(axis=1).all():
                continue
            if not allowed(offers, less.max(axis=0), limits):
                continue
            found.append((scheduled_cost(offers, demand, schedule, less, kept), less, kept))
    return sorted(found, key=lambda x: x[0])
