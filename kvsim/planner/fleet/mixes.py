"""The cheapest schedule of mixes that were played, as a mixed-integer programme.

    chosen_w_i         window w runs its i-th mix                                   0 or 1
    running_w_j        replicas of kind j in window w
    both_i             two mixes that were played one after the other are again      0 to 1

    least cost         as planner/fleet/programme.py counts it
    one_w              sum over i of chosen_w_i = 1
    runs_w_j           running_w_j = sum over i of chosen_w_i replicas_ij
    late_t             sum over w, i of chosen_w_i late_wi + sum of both_i delayed_i <= may be late
    survives_l_t       the same with what the mixes leave when replicas l are lost
    not_i              a schedule that missed the targets is not chosen again

Where no schedule is within them, the one that is least beyond them is chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pulp

from kvsim.errors import InfeasibleError
from kvsim.frozen import frozen
from kvsim.planner.fleet.arrays import Counts, Demand, FleetLimits, Offers, Schedule
from kvsim.planner.fleet.dispatch import run
from kvsim.planner.fleet.near import scheduled_cost
from kvsim.planner.fleet.rented import FleetProgramme, limit_rented, pay_by_window
from kvsim.planner.fleet.windows import Late, Mix

CHEAP = 1e-3  # weight of the cost where targets cannot be kept


@dataclass
class Seen:
    """What is known of mixes and of schedules.

    Attributes
    ----------
    late
        Late requests of the mixes of each window, and of what losses leave of them. (r, t) each
    may_be
        The most that may be late. (t,)
    delayed
        By window, the mix before it and its own: how many more were late in the trace. (t,)
    missed
        Schedules that missed the targets.
    """

    late: list[dict[Mix, Late]]
    may_be: Late
    delayed: dict[tuple[int, Mix, Mix], Late] = field(default_factory=dict)
    missed: list[tuple[Mix, ...]] = field(default_factory=list)


@frozen
class Choice:
    """A schedule that was chosen.

    Attributes
    ----------
    beyond
        Whether more requests are late than may be, by what was seen of its windows.
    """

    running: Counts
    reserved: Counts
    cost: float
    beyond: bool

    @property
    def most(self) -> Counts:
        """The most that run at once. (j,)"""
        return np.asarray(self.running.max(axis=0))

    @property
    def mixes(self) -> tuple[Mix, ...]:
        """What runs in each window."""
        return as_mixes(self.running)


def as_mixes(running: Counts) -> tuple[Mix, ...]:
    """What runs in each window."""
    return tuple(tuple(int(n) for n in row) for row in running)


def choose(
    seen: Seen, offers: Offers, demand: Demand, limits: FleetLimits, schedule: Schedule
) -> Choice:
    """The cheapest schedule of mixes that were seen.

    Raises
    ------
    InfeasibleError
        If the limits allow none.
    """
    try:
        return _solved(seen, offers, demand, limits, schedule, False)
    except InfeasibleError:
        return _solved(seen, offers, demand, limits, schedule, True)


def _solved(
    seen: Seen,
    offers: Offers,
    demand: Demand,
    limits: FleetLimits,
    schedule: Schedule,
    beyond: bool,
) -> Choice:
    problem = pulp.LpProblem("schedule", pulp.LpMinimize)
    kinds, windows = range(len(offers)), range(len(demand.rate))
    most = np.max([mix for some in seen.late for mix in some], axis=0).tolist()
    replicas = [problem.add_variable(f"replicas_{j}", lowBound=0, upBound=most[j]) for j in kinds]
    programme = FleetProgramme(problem, replicas, {}, [], {}, most)
    pay_by_window(programme, offers, demand, schedule)
    chosen = {
        (w, mix): problem.add_variable(f"chosen_{w}_{i}", cat="Binary")
        for w in windows
        for i, mix in enumerate(seen.late[w])
    }
    for w in windows:
        mine = [(mix, chosen[w, mix]) for mix in seen.late[w]]
        problem.addConstraint(pulp.lpSum(v for _, v in mine) == 1, f"one_{w}")
        for j in kinds:
            here = pulp.lpSum(mix[j] * v for mix, v in mine if mix[j])
            problem.addConstraint(programme.running[w, j] == here, f"runs_{w}_{j}")
    excess = _late(problem, seen, chosen, beyond)
    for i, mixes in enumerate(seen.missed):
        same = [chosen[w, mix] for w, mix in enumerate(mixes) if (w, mix) in chosen]
        if len(same) == len(windows):
            problem.addConstraint(pulp.lpSum(same) <= len(windows) - 1, f"not_{i}")
    limit_rented(programme, offers, limits)
    if beyond:
        dear = float(np.dot(most, np.where(np.isfinite(offers.rent), offers.rent, 0.0))) or 1.0
        problem.setObjective(pulp.lpSum(excess) + CHEAP / dear * problem.objective)
    run(problem)
    running = np.array([
        next(mix for mix in seen.late[w] if (chosen[w, mix].value() or 0.0) > 0.5) for w in windows
    ])  # fmt: skip
    reserved = np.array([round(v.value() or 0.0) for v in programme.reserved], np.int64)
    cost = scheduled_cost(offers, demand, schedule, running, reserved)
    return Choice(running, reserved, cost, beyond)


def _late(
    problem: pulp.LpProblem,
    seen: Seen,
    chosen: dict[tuple[int, Mix], pulp.LpVariable],
    beyond: bool,
) -> Sequence[pulp.LpVariable]:
    """Rows that keep the late requests; what may be beyond them, in parts of what may be late."""
    both = {}
    for i, (w, before, mix) in enumerate(seen.delayed):
        if (w - 1, before) in chosen and (w, mix) in chosen:
            variable = problem.add_variable(f"both_{i}", lowBound=0)
            pair = chosen[w - 1, before], chosen[w, mix]
            problem.addConstraint(variable >= pulp.lpSum(pair) - 1, f"both_{i}")
            for k, one in enumerate(pair):
                problem.addConstraint(variable <= one, f"both_{i}_{k}")
            both[w, before, mix] = variable
    excess = []
    rows, each = next(iter(seen.late[0].values())).shape
    for row in range(rows):
        for t in range(each):
            scale = 1.0 / max(int(seen.may_be[t]), 1)
            total = [
                float(scale * seen.late[w][mix][row, t]) * v
                for (w, mix), v in chosen.items()
                if seen.late[w][mix][row, t]
            ]
            if row == 0:
                total += [
                    float(scale * seen.delayed[key][t]) * v
                    for key, v in both.items()
                    if seen.delayed[key][t]
                ]
            if not total:
                continue
            most = pulp.lpSum([float(scale * seen.may_be[t])])
            if beyond:
                excess.append(problem.add_variable(f"beyond_{row}_{t}", lowBound=0))
                most += excess[-1]
            problem.addConstraint(pulp.lpSum(total) <= most, f"late_{row}_{t}")
    return excess
