"""Replicas by window of the day, as a mixed-integer programme.

    reserved_j      replicas of kind j with a commitment, paid always                    whole
    demanded_w_j    replicas of kind j that run in window w besides, paid while they run whole
    started_w_j     of those, what did not run in the window before, paid while it starts

    least cost      reserved_j price + demanded_w_j hours price + started_w_j start-up price
    carried_w       sum over j of (reserved_j + demanded_w_j) / needed_w_j >= 1
    failures        as many replicas more, of the kinds that run
    limits          GPUs in all and of a kind, host memory, power

What a window needs of a kind alone comes from plays of that window; the search plays the whole day
on the schedule and asks again with more where a window misses.
"""

from collections.abc import Sequence

import numpy as np

from kvsim import solver
from kvsim.graph import Array
from kvsim.planner.fleet.demand import Counts
from kvsim.planner.fleet.offers import Configuration, FleetLimits

SOLVER_GAP, SOLVER_SECONDS = 1e-3, 10.0  # relative, and what it may take [s]


def scheduled_cost(
    kinds: Sequence[Configuration],
    hours: Array,
    start_up: float,
    running: Counts,
    reserved: Counts,
) -> float:
    """Mean price of replicas that start and stop, as the programme counts it. [USD/h]

    Parameters
    ----------
    kinds
        Kinds of replica.
    hours
        How long each window lasts. (w,) [h]
    start_up
        Time that a replica is paid for before it serves. [h]
    running
        By window and kind. (w, j)
    reserved
        Of each kind, paid always. (j,)
    """
    price, kept = (np.array([getattr(x, n) for x in kinds]) for n in ("price", "reserved"))
    day = float(hours.sum())
    demanded = np.maximum(running - reserved, 0)
    started = np.maximum(demanded - np.roll(demanded, 1, axis=0), 0).sum(axis=0)
    paid = hours @ demanded + start_up * started
    some, always = paid > 0, reserved > 0
    return float(paid[some] @ price[some] / day + reserved[always] @ kept[always])


def cheapest_schedule(
    kinds: Sequence[Configuration],
    hours: Array,
    start_up: float,
    needed: Array,
    limits: FleetLimits,
) -> tuple[Counts, Counts] | None:
    """Find the cheapest schedule by what windows need of each kind of replica alone.

    Parameters
    ----------
    kinds
        Kinds of replica.
    hours
        How long each window lasts. (w,) [h]
    start_up
        Time that a replica is paid for before it serves. [h]
    needed
        Replicas that each window needs of each kind alone; infinite where they cannot. (w, j)
    limits
        What may be rented.

    Returns
    -------
    tuple of two arrays, or None
        Replicas that run (w, j) and those that are reserved (j,); None if there is no schedule.
    """
    problem = solver.create_problem("schedule")
    day, windows = float(hours.sum()), range(len(hours))
    usable = [j for j in range(len(kinds)) if np.isfinite(needed[:, j]).any()]
    reserved, demanded, most = {}, {}, {}
    cost: list[solver.Expression | float] = []
    for j in usable:
        x = kinds[j]
        offered, paid = np.isfinite(x.reserved), np.isfinite(x.price)
        reserved[j] = problem.add_variable(
            f"reserved_{j}", lowBound=0, upBound=None if offered else 0, cat=solver.INTEGER
        )
        most[j] = problem.add_variable(f"most_{j}", lowBound=0)
        if offered:
            cost.append(float(x.reserved) * reserved[j])
        for w in windows:
            demanded[w, j] = problem.add_variable(
                f"demanded_{w}_{j}", lowBound=0, upBound=None if paid else 0, cat=solver.INTEGER
            )
            problem.addConstraint(reserved[j] + demanded[w, j] <= most[j], f"most_{w}_{j}")
            if paid:
                cost.append(float(x.price * hours[w] / day) * demanded[w, j])
        for w in windows if paid and start_up else ():
            started = problem.add_variable(f"started_{w}_{j}", lowBound=0)
            before = demanded[(w - 1) % len(hours), j]
            problem.addConstraint(started >= demanded[w, j] - before, f"start_{w}_{j}")
            cost.append(float(x.price * start_up / day) * started)
    for w in windows:
        able = [j for j in usable if np.isfinite(needed[w, j])]
        if not able:
            return None
        carried = [float(1 / needed[w, j]) * v for j in able for v in (reserved[j], demanded[w, j])]
        lost = limits.failures / min(needed[w, j] for j in able)
        least = float(1 + limits.headroom + lost)
        problem.addConstraint(solver.add_up(carried) >= least, f"carried_{w}")
    for name, bound, each in limits.list_amounts(kinds):
        total = solver.add_up(float(each[j]) * most[j] for j in usable)
        problem.addConstraint(total <= float(bound), f"limit_{name}")
    problem.setObjective(solver.add_up(cost))
    if not solver.solve(problem, SOLVER_GAP, SOLVER_SECONDS).has_values:
        return None
    running = np.zeros((len(hours), len(kinds)), np.int64)
    kept = np.zeros(len(kinds), np.int64)
    for j, variable in reserved.items():
        kept[j] = round(variable.value() or 0)
    for (w, j), variable in demanded.items():
        running[w, j] = kept[j] + round(variable.value() or 0)
    return running, kept
