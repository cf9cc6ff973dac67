"""The cheapest fleet for a demand, as a mixed-integer programme.

    replicas_j         replicas of kind j that are rented, as many as any fleet
                       has a use for at most                                        whole
    running_w_j        replicas of kind j that serve in window w (with a schedule)  whole
    share_w_c_j        share of class c in window w that kind j serves              0 to 1

    least cost         sum over j of price_j replicas_j
    served_w_c         sum over j of share_w_c_j = 1
    capacity_w_j       (1 + headroom) sum over c of rate_wc share_w_c_j / capacity_cj <= running_w_j
    late               sum of rate_wc share_w_c_j late_cj <= late sum of rate_wc, of the whole trace
    enough_w_i         sum of running_w_j over the kinds that serve some class >= 1 + k
    limits             GPUs, GPUs of a kind, host memory, power, different kinds of replica (two at
                       least in a mixed fleet)
    survives_w_i       for every way to lose k replicas that a proposal does not survive: sum of
                       worth_j (running_w_j - lost_w_j) >= 1, see planner/fleet/survival.py
    cut_i              a fleet has so many replicas beyond one that missed the targets in
                       simulation: sum of beyond_i_j >= 1, or 1 + k

Without a schedule shares are the same in all windows and replicas always run. With one, a replica
is either reserved, paid always, or started on demand, paid while it runs and starts.
"""

import time
from dataclasses import replace

import numpy as np
import pulp

from kvsim.graph import Array
from kvsim.planner.fleet.arrays import (
    Demand,
    FleetCut,
    FleetLimits,
    FleetPlan,
    Offers,
    Schedule,
)
from kvsim.planner.fleet.dispatch import losses_of, run, serve
from kvsim.planner.fleet.rented import FleetProgramme, limit_rented, pay_by_window
from kvsim.planner.fleet.survival import FatalLoss, worth
from kvsim.planner.fleet.tight import exclude, most_useful, who_serves

WHOLE = 1e-6  # how far from a whole number a solver's whole number may be


def build(
    offers: Offers,
    demand: Demand,
    limits: FleetLimits,
    schedule: Schedule | None = None,
    cuts: tuple[FleetCut, ...] = (),
    losses: tuple[FatalLoss, ...] = (),
) -> FleetProgramme:
    """The programme.

    Parameters
    ----------
    cuts : fleets that are not to be chosen, nor those that are hardly larger.
    losses : failures that the fleet must survive.
    """
    problem = pulp.LpProblem("fleet", pulp.LpMinimize)
    kinds = range(len(offers))
    most = most_useful(offers, demand, limits, cuts)
    replicas = [
        problem.add_variable(f"replicas_{j}", lowBound=0, upBound=most[j], cat="Integer")
        for j in kinds
    ]
    programme = FleetProgramme(problem, replicas, {}, [], {}, most)
    if schedule is None:
        problem.setObjective(pulp.lpSum(float(offers.rent[j]) * replicas[j] for j in kinds))
        running_in = [replicas]
    else:
        pay_by_window(programme, offers, demand, schedule)
        running_in = [[programme.running[w, j] for j in kinds] for w in range(len(demand.rate))]
    for window, (peaks, mean) in enumerate(_asked(demand, schedule)):
        running = running_in[window]
        for i, some in enumerate(who_serves(offers, mean) if limits.failures else []):
            left = pulp.lpSum(running[j] for j in some)
            problem.addConstraint(left >= 1 + limits.failures, f"enough_{window}_{i}")
        kept = limits if schedule is None else replace(limits, late=np.inf)
        share = serve(problem, f"{window}", offers, kept, peaks, mean, running)
        programme.share |= {(window, c, j): variable for (c, j), variable in share.items()}
        for i, loss in enumerate(x for x in losses if x.window == window):
            _, each = worth(offers, peaks, mean, np.array(loss.left), min(kept.late, 1.0))
            left = [
                running[j]
                - pulp.lpSum(_at_least(programme, window, running, m, j) for m in range(1, n + 1))
                for j, n in enumerate(loss.lost)
            ]
            worths = pulp.lpSum(float(w) * n for w, n in zip(each, left, strict=True) if w)
            problem.addConstraint(worths >= 1, f"survives_{window}_{i}")
    if schedule is not None and offers.late.any():
        asked = demand.hours[:, None] * demand.rate / (demand.hours @ demand.rate).sum()
        late = [
            float(asked[w, c] * offers.late[c, j]) * v for (w, c, j), v in programme.share.items()
        ]
        problem.addConstraint(pulp.lpSum(late) <= limits.late, "late")
    limit_rented(programme, offers, limits)
    exclude(problem, replicas, most, cuts)
    return programme


def _asked(demand: Demand, schedule: Schedule | None) -> list[tuple[Array, Array]]:
    """Peaks (p, c) and mean rates (c,) that the same shares must carry, for each set of shares."""
    if schedule is None:
        return [(demand.peaks, demand.mean)]
    return [(demand.rate[w : w + 1], demand.rate[w]) for w in range(len(demand.rate))]


def _at_least(
    programme: FleetProgramme, window: int, running: list[pulp.LpVariable], m: int, j: int
) -> pulp.LpVariable:
    """1 if at least ``m`` replicas of kind ``j`` run, so that the m-th can be lost."""
    known = programme.at_least.get((m * len(running) + j, window))
    if known is not None:
        return known
    problem = programme.problem
    variable = problem.add_variable(f"at_least_{window}_{m}_{j}", cat="Binary")
    problem.addConstraint(running[j] >= m * variable, f"has_{window}_{m}_{j}")
    beyond = programme.most[j] - (m - 1)
    problem.addConstraint(running[j] <= m - 1 + beyond * variable, f"lacks_{window}_{m}_{j}")
    programme.at_least[m * len(running) + j, window] = variable
    return variable


def solve(
    offers: Offers,
    demand: Demand,
    limits: FleetLimits,
    schedule: Schedule | None = None,
    cuts: tuple[FleetCut, ...] = (),
    losses: tuple[FatalLoss, ...] = (),
) -> FleetPlan:
    """The cheapest fleet; failures that it would not survive are added until it survives all.

    Parameters
    ----------
    losses : failures that were added before, for the same offers or others that carry more or less.

    Raises
    ------
    InfeasibleError
        If no fleet of these offers is within the limits.
    """
    began = time.perf_counter()
    while True:
        programme = build(offers, demand, limits, schedule, cuts, losses)
        bound = run(programme.problem)
        plan = _read(programme, offers, demand, schedule, bound, time.perf_counter() - began)
        fatal = _fatal(plan, offers, demand, limits, schedule)
        if not fatal:
            relaxed = _relaxed(offers, demand, limits, schedule, losses)
            seconds = time.perf_counter() - began
            known = {"relaxed": relaxed, "seconds": seconds, "losses": losses}
            return FleetPlan(**{**vars(plan), **known})
        losses += fatal


def _relaxed(
    offers: Offers,
    demand: Demand,
    limits: FleetLimits,
    schedule: Schedule | None,
    losses: tuple[FatalLoss, ...],
) -> float:
    """Cost if parts of replicas could be rented. [USD/h]"""
    problem = build(offers, demand, limits, schedule, (), losses).problem
    for variable in problem.variables():
        variable.cat = "Continuous"
    run(problem)
    return float(pulp.value(problem.objective))


def _read(
    programme: FleetProgramme,
    offers: Offers,
    demand: Demand,
    schedule: Schedule | None,
    bound: float,
    seconds: float,
) -> FleetPlan:
    """The fleet that the solved programme rents, and the share of each class it serves."""
    windows, kinds = len(demand.rate), len(offers)
    share = np.zeros((windows, offers.classes, kinds))
    for (w, c, j), variable in programme.share.items():
        share[slice(None) if schedule is None else w, c, j] = variable.value() or 0.0
    if schedule is None:
        rented = [_whole(variable) for variable in programme.replicas]
        running = np.tile(np.array(rented, np.int64), (windows, 1))
        reserved = np.where(offers.reserved < offers.price, running[0], 0)
    else:
        running = np.zeros((windows, kinds), np.int64)
        for (w, j), variable in programme.running.items():
            running[w, j] = _whole(variable)
        reserved = np.array([_whole(variable) for variable in programme.reserved], np.int64)
    cost = float(pulp.value(programme.problem.objective))
    return FleetPlan(running, reserved, share, cost, bound, bound, seconds)


def _whole(variable: pulp.LpVariable) -> int:
    value = float(variable.value() or 0.0)
    if abs(value - round(value)) > WHOLE:
        raise AssertionError(f"{variable.name} is {value}, which is not whole")
    return round(value)


def _fatal(
    plan: FleetPlan, offers: Offers, demand: Demand, limits: FleetLimits, schedule: Schedule | None
) -> tuple[FatalLoss, ...]:
    """The losses of as many replicas as may fail that the fleet would not survive."""
    found = []
    late = limits.late if schedule is None else 1.0
    for window, (peaks, mean) in enumerate(_asked(demand, schedule) if limits.failures else []):
        running = plan.running[window]
        for lost in losses_of(running, limits.failures):
            left = running - np.array(lost)
            if worth(offers, peaks, mean, left, late)[0] > 1 + WHOLE:
                found.append(FatalLoss(window, lost, tuple(left.tolist())))
    return tuple(found)
