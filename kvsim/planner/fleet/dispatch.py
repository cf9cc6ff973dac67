"""Which kind of replica serves how much of each class."""

from collections.abc import Iterator
from itertools import combinations_with_replacement

import numpy as np
import pulp

from kvsim.errors import InfeasibleError
from kvsim.graph import Array
from kvsim.planner.fleet.arrays import Counts, Demand, FleetLimits, Offers
from kvsim.planner.fleet.survival import Losses

GAP = 1e-9  # of the solver, relative
PATIENCE = 20.0  # of the solver; what it has found by then is returned with its bound [s]


def serve(
    problem: pulp.LpProblem,
    name: str,
    offers: Offers,
    limits: FleetLimits,
    peaks: Array,
    mean: Array,
    running: list[pulp.LpVariable],
) -> dict[tuple[int, int], pulp.LpVariable]:
    """Shares with which some replicas carry some peaks; returns them by class and kind."""
    share = {
        (c, int(j)): problem.add_variable(f"share_{name}_{c}_{j}", lowBound=0, upBound=1)
        for c in range(offers.classes)
        for j in np.flatnonzero(offers.capacity[c] > 0)
        if mean[c] > 0
    }
    for c in np.flatnonzero(mean > 0):
        served = pulp.lpSum(v for (i, _), v in share.items() if i == c)
        problem.addConstraint(served == 1, f"served_{name}_{c}")
    more = 1 + limits.headroom
    for j in range(len(offers)):
        for p, rate in enumerate(peaks):
            load = pulp.lpSum(
                float(more * rate[c] / offers.capacity[c, i]) * v
                for (c, i), v in share.items()
                if i == j
            )
            problem.addConstraint(load <= running[j], f"capacity_{name}_{p}_{j}")
    total = float(mean.sum())
    late = [float(mean[c] * offers.late[c, j] / total) * v for (c, j), v in share.items()]
    if offers.late.any() and np.isfinite(limits.late):
        problem.addConstraint(pulp.lpSum(late) <= limits.late, f"late_{name}")
    return share


def run(problem: pulp.LpProblem) -> float:
    """Solve; the bound on the cost."""
    solver = pulp.HiGHS(msg=False, threads=1, gapRel=GAP, timeLimit=PATIENCE)
    status = problem.solve(solver)
    if (
        pulp.LpStatus[status] not in ("Optimal", "Not Solved")
        or problem.variables()[0].value() is None
    ):
        raise InfeasibleError("no fleet carries the demand within the targets and limits")
    found = float(pulp.value(problem.objective))
    info = getattr(problem.solverModel, "getInfo", None)
    bound = float(info().mip_dual_bound) if info is not None else found
    return min(bound, found) if np.isfinite(bound) else found


def losses_of(running: Counts, failures: int) -> Iterator[Losses]:
    """Every way to lose that many replicas, or all there are."""
    kinds = np.flatnonzero(running)
    count = min(failures, int(running.sum()))
    for lost in combinations_with_replacement(kinds.tolist(), count):
        losses = np.bincount(np.array(lost, np.int64), minlength=len(running))
        if (losses <= running).all():
            yield tuple(losses.tolist())


def utilisation(
    offers: Offers, demand: Demand, replicas: Counts, late: float
) -> tuple[float, Array]:
    """The lowest utilisation of the busiest kind of replica, and the shares that reach it.

    Returns
    -------
    Infinite, and no shares, if some class cannot be served. Shares: (c, j)
    """
    share = np.zeros((offers.classes, len(offers)))
    used = [int(j) for j in np.flatnonzero(replicas)]
    mean, peaks = demand.mean, demand.peaks
    if (
        not (offers.capacity[np.ix_(np.flatnonzero(mean > 0), np.array(used, int))] > 0)
        .any(axis=1)
        .all()
    ):
        return np.inf, share
    problem = pulp.LpProblem("dispatch", pulp.LpMinimize)
    busiest = problem.add_variable("busiest", lowBound=0)
    some, limits = offers.only(used), FleetLimits(late=late)
    room = [int(replicas[j]) * busiest for j in used]
    shares = serve(problem, "0", some, limits, peaks, mean, room)
    problem.setObjective(busiest)
    try:
        run(problem)
    except InfeasibleError:
        return np.inf, share
    for (c, i), variable in shares.items():
        share[c, used[i]] = variable.value() or 0.0
    return float(busiest.value() or 0.0), share
