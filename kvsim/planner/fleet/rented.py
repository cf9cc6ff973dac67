"""What is rented: replicas by the hour or always, and the limits on all of them, as rows."""

from dataclasses import dataclass, field

import numpy as np
import pulp

from kvsim.graph import Array
from kvsim.planner.fleet.arrays import Demand, FleetLimits, Offers, Schedule


@dataclass
class FleetProgramme:
    """The programme and the variables that an answer is read from."""

    problem: pulp.LpProblem
    replicas: list[pulp.LpVariable]
    running: dict[tuple[int, int], pulp.LpVariable]  # by window and kind; empty without a schedule
    reserved: list[pulp.LpVariable]  # empty without a schedule
    share: dict[tuple[int, int, int], pulp.LpVariable]  # by window, class and kind
    most: list[int]  # replicas of each kind at most
    at_least: dict[tuple[int, int], pulp.LpVariable] = field(default_factory=dict)


def pay_by_window(
    programme: FleetProgramme, offers: Offers, demand: Demand, schedule: Schedule
) -> None:
    """Replicas that run in each window, reserved or started on demand, and what they cost."""
    problem, kinds, windows = programme.problem, range(len(offers)), range(len(demand.rate))
    day = float(demand.hours.sum())
    cost = []
    for j in kinds:
        offered = np.isfinite(offers.reserved[j])
        reserved = problem.add_variable(
            f"reserved_{j}", lowBound=0, upBound=None if offered else 0, cat="Integer"
        )
        programme.reserved.append(reserved)
        if offered:
            cost.append(float(offers.reserved[j]) * reserved)
        demanded = []
        for w in windows:
            extra = problem.add_variable(f"demanded_{w}_{j}", lowBound=0, cat="Integer")
            if not np.isfinite(offers.price[j]):
                extra.upBound = 0
            else:
                cost.append(float(offers.price[j] * demand.hours[w] / day) * extra)
            running = problem.add_variable(f"running_{w}_{j}", lowBound=0, cat="Integer")
            problem.addConstraint(running == reserved + extra, f"run_{w}_{j}")
            problem.addConstraint(running <= programme.replicas[j], f"most_{w}_{j}")
            programme.running[w, j] = running
            demanded.append(extra)
        if schedule.start_up and np.isfinite(offers.price[j]):
            for w in windows:
                started = problem.add_variable(f"started_{w}_{j}", lowBound=0)
                problem.addConstraint(started >= demanded[w] - demanded[w - 1], f"start_{w}_{j}")
                cost.append(float(offers.price[j] * schedule.start_up / day) * started)
    problem.setObjective(pulp.lpSum(cost))


def limit_rented(programme: FleetProgramme, offers: Offers, limits: FleetLimits) -> None:
    """Limits on all that is rented."""
    problem, replicas = programme.problem, programme.replicas

    def at_most(name: str, of_each: Array, most: float) -> None:
        if not np.isfinite(most):
            return
        for j in np.flatnonzero(~np.isfinite(of_each)):
            problem.addConstraint(replicas[j] == 0, f"{name}_unknown_{j}")
        known = np.where(np.isfinite(of_each), of_each, 0.0)
        scale = max(float(known.max(initial=0.0)), 1.0)
        total = pulp.lpSum(float(known[j] / scale) * v for j, v in enumerate(replicas) if known[j])
        if total:
            problem.addConstraint(total <= float(most / scale), name)

    at_most("gpus", offers.gpus.astype(float), limits.gpus)
    for kind, most in limits.gpus_of.items():
        mine = np.array([kind == other for other in offers.kind])
        at_most(f"gpus_of_{kind}".replace("-", "_"), np.where(mine, offers.gpus, 0.0), most)
    at_most("host_memory", offers.host, limits.host)
    at_most("power", offers.power, limits.power)
    if limits.configurations < len(offers) or limits.mixed:
        used = [problem.add_variable(f"used_{j}", cat="Binary") for j in range(len(offers))]
        for j, variable in enumerate(used):
            problem.addConstraint(replicas[j] <= programme.most[j] * variable, f"use_{j}")
        most = int(min(limits.configurations, len(offers)))
        problem.addConstraint(pulp.lpSum(used) <= most, "configurations")
        if limits.mixed:
            for j, variable in enumerate(used):
                serving = [v for (_, k), v in programme.running.items() if k == j]
                some = pulp.lpSum(serving or [replicas[j]])
                problem.addConstraint(some >= variable, f"used_if_{j}")
            problem.addConstraint(pulp.lpSum(used) >= 2, "mixed")
