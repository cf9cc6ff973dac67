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
                       worth_j (running_w_j - lost_w_j) >= 1
    cut_i              a fleet has so many replicas beyond one that missed the targets in
                       simulation: sum of beyond_i_j >= 1, or 1 + k

Without a schedule shares are the same in all windows and replicas always run. With one, a replica
is either reserved, paid always, or started on demand, paid while it runs and starts.

Whether some replicas carry the demand is a linear programme: the lowest utilisation of the busiest
kind is at most 1. Its dual solution prices a replica of each kind so that no replicas which carry
the demand are worth less than 1 in all (Benders, Numerische Mathematik 4, 1962,
https://doi.org/10.1007/BF01386316). One such row for a failure that a fleet would not survive
excludes that fleet and all others that fail for its reason.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement

import numpy as np
from scipy.optimize import linprog

from kvsim import solver
from kvsim.errors import InfeasibleError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.fleet.demand import Counts, Demand
from kvsim.planner.fleet.offers import FleetLimits, Offers, Schedule

# what it reads and answers


@frozen
class FleetCut:
    """A fleet that missed the targets in simulation, and so do those that are hardly larger.

    Attributes
    ----------
    replicas
        Of each kind. (j,)
    beyond
        Replicas that another fleet must have beyond these at least: one, or one more than may fail,
        as it would be left with these otherwise.
    """

    replicas: Counts
    beyond: int = 1

    def excludes(self, replicas: Counts) -> bool:
        """Whether a fleet is among them."""
        return int(np.maximum(replicas - self.replicas, 0).sum()) < self.beyond


Losses = tuple[int, ...]
"""Replicas of each kind that are lost. (j,)"""


@dataclass(frozen=True, order=True)
class FatalLoss:
    """Replicas that are lost in a window, and those that are left and do not carry it.

    Attributes
    ----------
    lost, left
        Replicas of each kind. (j,)
    """

    window: int
    lost: Losses
    left: tuple[int, ...]


@frozen
class FleetPlan:
    """A solution of the programme.

    Attributes
    ----------
    running
        Replicas that serve in each window. (w, j)
    reserved
        Replicas rented with a commitment. (j,)
    share
        Share of each class that each kind of replica serves in each window. (w, c, j)
    cost
        Mean price per hour. [USD/h]
    bound
        Price that no fleet of these offers can undercut, by the solver. [USD/h]
    relaxed
        Price if parts of replicas could be rented. [USD/h]
    seconds
        Time of the solver. [s]
    losses
        Failures that it was made to survive.
    """

    running: Counts
    reserved: Counts
    share: Array
    cost: float
    bound: float
    relaxed: float
    seconds: float
    losses: tuple["FatalLoss", ...] = ()

    @property
    def replicas(self) -> Counts:
        """The most that run at once. (j,)"""
        return np.asarray(self.running.max(axis=0))


# dispatch: which kind serves how much of each class

SOLVER_GAP = 1e-9  # of the solver, relative
SOLVER_SECONDS = 20.0  # of the solver; what it has found by then is returned with its bound [s]


def add_shares(
    problem: solver.Problem,
    name: str,
    offers: Offers,
    limits: FleetLimits,
    peaks: Array,
    mean: Array,
    running: list[solver.Variable],
) -> dict[tuple[int, int], solver.Variable]:
    """Shares with which some replicas carry some peaks; returns them by class and kind."""
    share = {
        (c, int(j)): problem.add_variable(f"share_{name}_{c}_{j}", lowBound=0, upBound=1)
        for c in range(offers.classes)
        for j in np.flatnonzero(offers.capacity[c] > 0)
        if mean[c] > 0
    }
    for c in np.flatnonzero(mean > 0):
        served = solver.add_up(v for (i, _), v in share.items() if i == c)
        problem.addConstraint(served == 1, f"served_{name}_{c}")
    more = 1 + limits.headroom
    for j in range(len(offers)):
        for p, rate in enumerate(peaks):
            load = solver.add_up(
                float(more * rate[c] / offers.capacity[c, i]) * v
                for (c, i), v in share.items()
                if i == j
            )
            problem.addConstraint(load <= running[j], f"capacity_{name}_{p}_{j}")
    total = float(mean.sum())
    late = [float(mean[c] * offers.late[c, j] / total) * v for (c, j), v in share.items()]
    if offers.late.any() and np.isfinite(limits.late):
        problem.addConstraint(solver.add_up(late) <= limits.late, f"late_{name}")
    return share


def run_solver(problem: solver.Problem) -> float:
    """Solve; the bound on the cost."""
    solution = solver.solve(problem, SOLVER_GAP, SOLVER_SECONDS)
    if not solution.has_values:
        raise InfeasibleError("no fleet carries the demand within the targets and limits")
    bound, found = solution.bound, solution.objective
    return min(bound, found) if np.isfinite(bound) else found


def possible_losses(running: Counts, failures: int) -> Iterator[Losses]:
    """Every way to lose that many replicas, or all there are."""
    kinds = np.flatnonzero(running)
    count = min(failures, int(running.sum()))
    for lost in combinations_with_replacement(kinds.tolist(), count):
        losses = np.bincount(np.array(lost, np.int64), minlength=len(running))
        if (losses <= running).all():
            yield tuple(losses.tolist())


def even_shares(offers: Offers, mix: Counts) -> Array:
    """Every class divided by the number of replicas. (c, j)"""
    weight = mix.astype(float) if mix.any() else np.ones(len(mix))
    return np.tile(weight / weight.sum(), (offers.classes, 1))


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
    problem = solver.create_problem("dispatch")
    busiest = problem.add_variable("busiest", lowBound=0)
    some, limits = offers.only(used), FleetLimits(late=late)
    room = [int(replicas[j]) * busiest for j in used]
    shares = add_shares(problem, "0", some, limits, peaks, mean, room)
    problem.setObjective(busiest)
    try:
        run_solver(problem)
    except InfeasibleError:
        return np.inf, share
    for (c, i), variable in shares.items():
        share[c, used[i]] = variable.value() or 0.0
    return float(busiest.value() or 0.0), share


# failures


def replica_worth(
    offers: Offers, peaks: Array, mean: Array, left: Array, late: float
) -> tuple[float, Array]:
    """The utilisation of the busiest kind, and the worth of one replica of each kind.

    Replicas that carry the demand are worth 1 at least.

    Parameters
    ----------
    peaks, mean : rates of the classes. (p, c), (c,) [1/s]
    left : replicas of each kind. (j,)
    late : share of all requests that may miss a target.

    Returns
    -------
    Infinite utilisation if a class cannot be served at all. Worth: (j,)
    """
    serves = (offers.capacity > 0) & (mean > 0)[:, None]
    none = np.flatnonzero((mean > 0) & ~(serves & (left > 0)).any(axis=1))
    if none.size:
        return np.inf, serves[none[0]].astype(float)
    c, j = np.nonzero(serves)
    each = np.where(serves, 1 / np.where(serves, offers.capacity, 1.0), 0.0)
    kinds, shares = len(offers), len(c)
    load = np.zeros((len(peaks), kinds, shares + 1))
    load[:, j, np.arange(shares)] = peaks[:, c] * each[c, j]
    load[:, :, -1] = -left
    of_all = mean[c] * offers.late[c, j] / mean.sum()
    rows = np.vstack([load.reshape(-1, shares + 1), [*of_all, 0.0]])
    served = np.zeros((len(mean), shares + 1))
    served[c, np.arange(shares)] = 1.0
    served = served[mean > 0]
    found = linprog(
        c=[*np.zeros(shares), 1.0],
        A_ub=rows,
        b_ub=[*np.zeros(len(rows) - 1), late],
        A_eq=served,
        b_eq=np.ones(len(served)),
        method="highs",
    )
    if found.status != 0:  # too many requests would be late, however many replicas there are
        return np.inf, np.where(left > 0, 0.0, 1.0)
    price = -np.asarray(found.ineqlin.marginals)
    of_class = np.zeros(len(mean))
    of_class[mean > 0] = found.eqlin.marginals
    value = price[:-1].reshape(len(peaks), kinds).sum(axis=0)
    gain = np.where(serves, of_class[:, None], 0.0)
    gain[c, j] -= price[-1] * of_all
    value = np.where(left > 0, value, np.minimum(value, _least_worth(offers, peaks, gain)))
    return float(found.fun), value / found.fun if found.fun > 0 else value


def _least_worth(offers: Offers, peaks: Array, gain: Array) -> Array:
    """The least worth of a kind that is not there, by the one peak that asks for least. (j,)

    Parameters
    ----------
    gain : what it saves to serve a class; its worth must cover that. (c, j)
    """
    wanted = np.where(gain > 0, gain * offers.capacity, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_peak = np.where(wanted > 0, wanted / peaks[:, :, None], 0.0)
    return np.asarray(by_peak.max(axis=1).min(axis=0))


# valid inequalities


def most_useful_replicas(
    offers: Offers, demand: Demand, limits: FleetLimits, cuts: tuple[FleetCut, ...]
) -> list[int]:
    """Replicas of each kind beyond which more of them change nothing but the price. (j,)

    So many carry all that the kind can serve, with headroom and after every failure, and are no
    fleet that is cut. Tight bounds make the programme quick to solve.
    """
    peak = demand.rate.max(axis=0)
    serves = offers.capacity > 0
    each = np.where(serves, peak[:, None] / np.where(serves, offers.capacity, 1.0), 0.0)
    needed = np.ceil((1 + limits.headroom) * each.sum(axis=0)) + limits.failures
    beyond = np.max([cut.replicas + cut.beyond for cut in cuts], axis=0, initial=1)
    return [int(n) for n in np.maximum(needed, beyond)]


def serving_kinds(offers: Offers, rate: Array) -> list[tuple[int, ...]]:
    """The sets of kinds that can serve some class, each once, without those that hold another.

    Parameters
    ----------
    rate : of each class; those that do not come need nothing. (c,) [1/s]
    """
    served = {
        tuple(np.flatnonzero(offers.capacity[c] > 0).tolist()) for c in np.flatnonzero(rate > 0)
    }
    return sorted(s for s in served if not any(set(t) < set(s) for t in served))


def exclude_cuts(
    problem: solver.Problem,
    replicas: list[solver.Variable],
    most: list[int],
    cuts: tuple[FleetCut, ...],
) -> None:
    """Rows that fleets which missed the targets, and those that are hardly larger, do not meet."""
    for i, cut in enumerate(cuts):
        beyond = []
        for j, rented in enumerate(replicas):
            if not cut.replicas[j]:
                beyond.append(rented)
                continue
            more = problem.add_variable(f"more_{i}_{j}", cat=solver.BINARY)
            extra = problem.add_variable(f"beyond_{i}_{j}", lowBound=0)
            problem.addConstraint(extra <= most[j] * more, f"cut_any_{i}_{j}")
            problem.addConstraint(extra <= rented - int(cut.replicas[j]) * more, f"cut_{i}_{j}")
            beyond.append(extra)
        problem.addConstraint(solver.add_up(beyond) >= cut.beyond, f"cut_{i}")


# rental rows


@dataclass
class FleetProgramme:
    """The programme and the variables that an answer is read from."""

    problem: solver.Problem
    replicas: list[solver.Variable]
    running: dict[tuple[int, int], solver.Variable]  # by window and kind; empty without a schedule
    reserved: list[solver.Variable]  # empty without a schedule
    share: dict[tuple[int, int, int], solver.Variable]  # by window, class and kind
    most: list[int]  # replicas of each kind at most
    at_least: dict[tuple[int, int], solver.Variable] = field(default_factory=dict)


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
            f"reserved_{j}", lowBound=0, upBound=None if offered else 0, cat=solver.INTEGER
        )
        programme.reserved.append(reserved)
        if offered:
            cost.append(float(offers.reserved[j]) * reserved)
        demanded = []
        for w in windows:
            extra = problem.add_variable(f"demanded_{w}_{j}", lowBound=0, cat=solver.INTEGER)
            if not np.isfinite(offers.price[j]):
                extra.upBound = 0
            else:
                cost.append(float(offers.price[j] * demand.hours[w] / day) * extra)
            running = problem.add_variable(f"running_{w}_{j}", lowBound=0, cat=solver.INTEGER)
            problem.addConstraint(running == reserved + extra, f"run_{w}_{j}")
            problem.addConstraint(running <= programme.replicas[j], f"most_{w}_{j}")
            programme.running[w, j] = running
            demanded.append(extra)
        if schedule.start_up and np.isfinite(offers.price[j]):
            for w in windows:
                started = problem.add_variable(f"started_{w}_{j}", lowBound=0)
                problem.addConstraint(started >= demanded[w] - demanded[w - 1], f"start_{w}_{j}")
                cost.append(float(offers.price[j] * schedule.start_up / day) * started)
    problem.setObjective(solver.add_up(cost))


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
        total = solver.add_up(
            float(known[j] / scale) * v for j, v in enumerate(replicas) if known[j]
        )
        if total:
            problem.addConstraint(total <= float(most / scale), name)

    at_most("gpus", offers.gpus.astype(float), limits.gpus)
    for kind, most in limits.gpus_of.items():
        mine = np.array([kind == other for other in offers.kind])
        at_most(f"gpus_of_{kind}".replace("-", "_"), np.where(mine, offers.gpus, 0.0), most)
    at_most("host_memory", offers.host, limits.host)
    at_most("power", offers.power, limits.power)
    if limits.configurations < len(offers) or limits.mixed:
        used = [problem.add_variable(f"used_{j}", cat=solver.BINARY) for j in range(len(offers))]
        for j, variable in enumerate(used):
            problem.addConstraint(replicas[j] <= programme.most[j] * variable, f"use_{j}")
        most = int(min(limits.configurations, len(offers)))
        problem.addConstraint(solver.add_up(used) <= most, "configurations")
        if limits.mixed:
            for j, variable in enumerate(used):
                serving = [v for (_, k), v in programme.running.items() if k == j]
                some = solver.add_up(serving or [replicas[j]])
                problem.addConstraint(some >= variable, f"used_if_{j}")
            problem.addConstraint(solver.add_up(used) >= 2, "mixed")


# the programme

INTEGRALITY = 1e-6  # how far from a whole number a solver's whole number may be


def build_programme(
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
    problem = solver.create_problem("fleet")
    kinds = range(len(offers))
    most = most_useful_replicas(offers, demand, limits, cuts)
    replicas = [
        problem.add_variable(f"replicas_{j}", lowBound=0, upBound=most[j], cat=solver.INTEGER)
        for j in kinds
    ]
    programme = FleetProgramme(problem, replicas, {}, [], {}, most)
    if schedule is None:
        problem.setObjective(solver.add_up(float(offers.rent[j]) * replicas[j] for j in kinds))
        running_in = [replicas]
    else:
        pay_by_window(programme, offers, demand, schedule)
        running_in = [[programme.running[w, j] for j in kinds] for w in range(len(demand.rate))]
    for window, (peaks, mean) in enumerate(_rates_by_window(demand, schedule)):
        running = running_in[window]
        for i, some in enumerate(serving_kinds(offers, mean) if limits.failures else []):
            left = solver.add_up(running[j] for j in some)
            problem.addConstraint(left >= 1 + limits.failures, f"enough_{window}_{i}")
        kept = limits if schedule is None else replace(limits, late=np.inf)
        share = add_shares(problem, f"{window}", offers, kept, peaks, mean, running)
        programme.share |= {(window, c, j): variable for (c, j), variable in share.items()}
        for i, loss in enumerate(x for x in losses if x.window == window):
            _, each = replica_worth(offers, peaks, mean, np.array(loss.left), min(kept.late, 1.0))
            left = [
                running[j]
                - solver.add_up(
                    _at_least_variable(programme, window, running, m, j) for m in range(1, n + 1)
                )
                for j, n in enumerate(loss.lost)
            ]
            worths = solver.add_up(float(w) * n for w, n in zip(each, left, strict=True) if w)
            problem.addConstraint(worths >= 1, f"survives_{window}_{i}")
    if schedule is not None and offers.late.any():
        asked = demand.hours[:, None] * demand.rate / (demand.hours @ demand.rate).sum()
        late = [
            float(asked[w, c] * offers.late[c, j]) * v for (w, c, j), v in programme.share.items()
        ]
        problem.addConstraint(solver.add_up(late) <= limits.late, "late")
    limit_rented(programme, offers, limits)
    exclude_cuts(problem, replicas, most, cuts)
    return programme


def _rates_by_window(demand: Demand, schedule: Schedule | None) -> list[tuple[Array, Array]]:
    """Peaks (p, c) and mean rates (c,) that the same shares must carry, for each set of shares."""
    if schedule is None:
        return [(demand.peaks, demand.mean)]
    return [(demand.rate[w : w + 1], demand.rate[w]) for w in range(len(demand.rate))]


def _at_least_variable(
    programme: FleetProgramme, window: int, running: list[solver.Variable], m: int, j: int
) -> solver.Variable:
    """1 if at least ``m`` replicas of kind ``j`` run, so that the m-th can be lost."""
    known = programme.at_least.get((m * len(running) + j, window))
    if known is not None:
        return known
    problem = programme.problem
    variable = problem.add_variable(f"at_least_{window}_{m}_{j}", cat=solver.BINARY)
    problem.addConstraint(running[j] >= m * variable, f"has_{window}_{m}_{j}")
    beyond = programme.most[j] - (m - 1)
    problem.addConstraint(running[j] <= m - 1 + beyond * variable, f"lacks_{window}_{m}_{j}")
    programme.at_least[m * len(running) + j, window] = variable
    return variable


def solve_programme(
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
        programme = build_programme(offers, demand, limits, schedule, cuts, losses)
        bound = run_solver(programme.problem)
        plan = _read_plan(programme, offers, demand, schedule, bound, time.perf_counter() - began)
        fatal = _fatal_losses(plan, offers, demand, limits, schedule)
        if not fatal:
            relaxed = _relaxed_cost(offers, demand, limits, schedule, losses)
            seconds = time.perf_counter() - began
            known = {"relaxed": relaxed, "seconds": seconds, "losses": losses}
            return FleetPlan(**{**vars(plan), **known})
        losses += fatal


def _relaxed_cost(
    offers: Offers,
    demand: Demand,
    limits: FleetLimits,
    schedule: Schedule | None,
    losses: tuple[FatalLoss, ...],
) -> float:
    """Cost if parts of replicas could be rented. [USD/h]"""
    problem = build_programme(offers, demand, limits, schedule, (), losses).problem
    for variable in problem.variables():
        variable.cat = solver.CONTINUOUS
    run_solver(problem)
    return solver.evaluate(problem.objective)


def _read_plan(
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
        rented = [_whole_value(variable) for variable in programme.replicas]
        running = np.tile(np.array(rented, np.int64), (windows, 1))
        reserved = np.where(offers.reserved < offers.price, running[0], 0)
    else:
        running = np.zeros((windows, kinds), np.int64)
        for (w, j), variable in programme.running.items():
            running[w, j] = _whole_value(variable)
        reserved = np.array([_whole_value(variable) for variable in programme.reserved], np.int64)
    cost = solver.evaluate(programme.problem.objective)
    return FleetPlan(running, reserved, share, cost, bound, bound, seconds)


def _whole_value(variable: solver.Variable) -> int:
    value = float(variable.value() or 0.0)
    if abs(value - round(value)) > INTEGRALITY:
        raise AssertionError(f"{variable.name} is {value}, which is not whole")
    return round(value)


def _fatal_losses(
    plan: FleetPlan, offers: Offers, demand: Demand, limits: FleetLimits, schedule: Schedule | None
) -> tuple[FatalLoss, ...]:
    """The losses of as many replicas as may fail that the fleet would not survive."""
    found = []
    late = limits.late if schedule is None else 1.0
    for window, (peaks, mean) in enumerate(
        _rates_by_window(demand, schedule) if limits.failures else []
    ):
        running = plan.running[window]
        for lost in possible_losses(running, limits.failures):
            left = running - np.array(lost)
            if replica_worth(offers, peaks, mean, left, late)[0] > 1 + INTEGRALITY:
                found.append(FatalLoss(window, lost, tuple(left.tolist())))
    return tuple(found)


# kinds worth a place in it


def propose(
    offers: Offers,
    demand: Demand,
    limits: FleetLimits,
    schedule: Schedule | None,
    cuts: tuple[FleetCut, ...],
    losses: tuple[FatalLoss, ...],
) -> FleetPlan:
    """The programme's fleet; arrays are as wide as the offers.

    Raises
    ------
    InfeasibleError
        If no fleet of these offers is within the limits.
    """
    some = undominated(offers, limits)
    kinds = len(offers)

    def wide(array: np.ndarray) -> np.ndarray:
        found = np.zeros((*array.shape[:-1], kinds), array.dtype)
        found[..., some] = array
        return found

    def counts(of_each: tuple[int, ...], change: Callable[[np.ndarray], np.ndarray]) -> Losses:
        return tuple(change(np.array(of_each)).tolist())

    def changed(x: FatalLoss, change: Callable[[np.ndarray], np.ndarray]) -> FatalLoss:
        return FatalLoss(x.window, counts(x.lost, change), counts(x.left, change))

    fewer = [changed(x, lambda of_each: of_each[some]) for x in losses]
    same = tuple(x for x, y in zip(fewer, losses, strict=True) if sum(x.lost) == sum(y.lost))
    plan = solve_programme(
        offers.only(some),
        demand,
        limits,
        schedule,
        tuple(replace(cut, replicas=cut.replicas[some]) for cut in cuts),
        same,
    )
    known = {*losses, *(changed(x, wide) for x in plan.losses)}
    return replace(
        plan,
        running=wide(plan.running),
        reserved=wide(plan.reserved),
        share=wide(plan.share),
        losses=tuple(sorted(known)),
    )


def undominated(offers: Offers, limits: FleetLimits) -> list[int]:
    """The kinds that no other equals or betters; of equal ones the first."""
    kinds = range(len(offers))
    if limits.mixed:  # which asks for several kinds, also where one would do
        return list(kinds)
    better = np.vstack(
        [
            -offers.capacity,
            offers.late,
            offers.price,
            offers.reserved,
            *([offers.gpus] if np.isfinite(limits.gpus) else []),
            *([offers.host] if np.isfinite(limits.host) else []),
            *([offers.power] if np.isfinite(limits.power) else []),
        ]
    )

    def beats(i: int, j: int) -> bool:
        """Whether kind i is no worse than kind j anywhere, and better or first."""
        if limits.gpus_of and (offers.kind[i] != offers.kind[j] or offers.gpus[i] > offers.gpus[j]):
            return False
        return bool(
            (better[:, i] <= better[:, j]).all() and (i < j or (better[:, i] < better[:, j]).any())
        )

    return [j for j in kinds if not any(beats(i, j) for i in kinds if i != j)]
