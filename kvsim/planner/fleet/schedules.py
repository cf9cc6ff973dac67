"""The cheapest schedule over the day that meets the targets when it plays the trace.

Windows are played alone on mixes of replicas: those that the fleet programme proposes, those of the
fleet that always runs, each kind by itself, and then the mixes near the best ones. A schedule's
late requests are about those of its windows, each played by itself from idle replicas, so a few
plays of single windows say much about very many schedules. A second programme chooses one mix for
each window:

    chosen_w_i         window w runs its i-th mix                                   0 or 1
    running_w_j        replicas of kind j in window w
    both_i             two mixes that were played one after the other are again      0 to 1

    least cost         as the fleet programme counts it
    one_w              sum over i of chosen_w_i = 1
    runs_w_j           running_w_j = sum over i of chosen_w_i replicas_ij
    late_t             sum over w, i of chosen_w_i late_wi + sum of both_i delayed_i <= may be late
    survives_l_t       the same with what the mixes leave when replicas l are lost
    not_i              a schedule that missed the targets is not chosen again

Where no schedule is within them, the one that is least beyond them is chosen. The whole trace is
then played on it. Where that misses a target, what the play added to its windows is noted, and the
programme chooses again. No schedule is dearer than the fleet that always runs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvsim import solver
from kvsim.errors import InfeasibleError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.fleet.demand import Counts, Demand, FleetTargets, Traffic
from kvsim.planner.fleet.milp import (
    FleetPlan,
    FleetProgramme,
    even_shares,
    limit_rented,
    pay_by_window,
    possible_losses,
    propose,
    run_solver,
    undominated,
    utilisation,
)
from kvsim.planner.fleet.offers import Configuration, FleetLimits, Offers, Schedule
from kvsim.planner.fleet.play import Played, play
from kvsim.planner.fleet.search import (
    CHEAPER,
    FleetSearch,
    SearchResult,
    SimulatedFleet,
    within_limits,
)

# windows played alone

Mix = tuple[int, ...]
"""Replicas of each kind that run at once. (j,)"""
Late = NDArray[np.int64]
"""Requests that miss TTFT, then those that miss TPOT, of each class of targets. (t,)"""
# How busy a kind that serves some classes worse may be, of how busy the others are.
WORSE_KIND_LOAD = 0.5


class WindowPlays:
    """The windows of a trace, and what was seen of mixes there.

    Attributes
    ----------
    plays
        How many were simulated.
    """

    def __init__(
        self,
        traffic: Traffic,
        configurations: list[Configuration],
        offers: Offers,
        targets: FleetTargets,
        late: float,
        load: float = 1.0,
        slowdown: Callable[[Counts], float] = lambda _: 1.0,
    ) -> None:
        """Remember the windows; none is played.

        Parameters
        ----------
        late : share of all requests that may miss a target.
        load : the trace so many times as fast, where classes are divided for it.
        slowdown : what some replicas do takes so many times as long.
        """
        windows = range(len(traffic.demand.rate))
        self.parts = [traffic.of_window(w) for w in windows]
        self.configurations, self.offers, self.targets = configurations, offers, targets
        self.most_late, self.load, self.slowdown, self.plays = late, load, slowdown, 0
        self.busiest: dict[tuple[int, Mix], float] = {}
        self.shares: dict[tuple[int, Mix], Array] = {}
        self.seen: dict[tuple[int, Mix, float], Late] = {}

    def busy(self, window: int, mix: Mix) -> float:
        """How busy the busiest kind of a mix would be by what its replicas carry."""
        known = self.busiest.get((window, mix))
        if known is None:
            demand = self.parts[window].demand
            known = self.busiest[window, mix] = _least_busy(self.offers, demand, mix, 1.0)[0]
        return known

    def share(self, window: int, mix: Mix) -> Array:
        """Shares of the classes with which the fewest requests were late. (c, j)"""
        if (window, mix) not in self.shares:
            self.late(window, mix, self.load)
        return self.shares[window, mix]

    def late(self, window: int, mix: Mix, load: float) -> Late:
        """Requests of a window that miss a target of theirs on a mix."""
        known = self.seen.get((window, mix, load))
        if known is not None:
            return known
        if load == self.load:
            each = list(self._divisions(window, mix))
            found = []
            for share in each:
                found.append(self._played(window, mix, share, load))
                if not found[-1].any():
                    break
            best = min(range(len(found)), key=lambda i: (found[i].max(), found[i].sum()))
            self.shares[window, mix], few = each[best], found[best]
        else:
            few = self._played(window, mix, self.share(window, mix), load)
        self.seen[window, mix, load] = few
        return few

    def _played(self, window: int, mix: Mix, share: Array, load: float) -> Late:
        part = self.parts[window]
        if not len(part.requests):
            return np.zeros(2 * len(self.targets.each), np.int64)
        self.plays += 1
        running = np.array([mix])
        played = play(part, self.configurations, running, share[None], load, self.slowdown(running))
        return np.asarray(late_by_window(played, self.targets, part.window, 1)[0])

    def _divisions(self, window: int, mix: Mix) -> Iterator[Array]:
        """Shares that keep the busiest kind least busy.

        First with few late requests where replicas carry that, then where each class goes only to
        kinds that serve it about as well as the best one there does, and again with those that
        serve some classes worse half as busy as the others, as they are slow for all classes. Last
        every class by what the kinds carry of it.
        """
        offers, demand, used = self.offers, self.parts[window].demand, np.array(mix) > 0
        evenly = even_shares(offers, np.array(mix))
        busy, share = _least_busy(offers, demand, mix, self._late_at_least(demand))
        if busy > 1:
            busy, share = _least_busy(offers, demand, mix, 1.0)
        yield np.where(share.sum(axis=1, keepdims=True) > 0, share, evenly)
        serves = (offers.capacity > 0) & used
        least = np.where(serves, offers.late, np.inf).min(axis=1, keepdims=True)
        well = serves & (offers.late <= least + self.most_late)
        worse = (serves & ~well).any(axis=0)
        each = np.where(well, offers.capacity, 0.0)
        for part in (1.0, WORSE_KIND_LOAD) if worse.any() else ():
            some = replace(offers, capacity=each * np.where(worse, part, 1.0))
            busy, share = _least_busy(some, demand, mix, 1.0)
            if np.isfinite(busy):
                yield np.where(share.sum(axis=1, keepdims=True) > 0, share, evenly)
        if used.sum() > 1:
            carried = offers.capacity * np.array(mix)
            total = carried.sum(axis=1, keepdims=True)
            yield np.where(total > 0, carried / np.where(total > 0, total, 1.0), evenly)

    def _late_at_least(self, demand: Demand) -> float:
        """Share of a window's requests that may be late, or what no replica does without."""
        offers, rate = self.offers, demand.rate[0]
        served = np.where(offers.capacity > 0, offers.late, np.inf).min(axis=1)
        asked = (rate > 0) & np.isfinite(served)
        least = float(rate[asked] @ served[asked] / rate.sum()) if asked.any() else 0.0
        return max(self.most_late, least)


def _least_busy(offers: Offers, demand: Demand, mix: Mix, late: float) -> tuple[float, Array]:
    """The lowest utilisation of the busiest kind, and the shares that reach it. (c, j)

    Classes that none of them serves within the targets are left out: a few requests may be late.
    """
    used = np.flatnonzero(mix)
    rate = np.where((offers.capacity[:, used] > 0).any(axis=1), demand.rate, 0.0)
    if used.size != 1:
        return utilisation(offers, Demand(rate, demand.hours), np.array(mix), late)
    come, share = rate[0] > 0, np.zeros((offers.classes, len(offers)))
    share[:, used] = 1.0
    return float((rate[0, come] / offers.capacity[come, used[0]]).sum() / mix[used[0]]), share


def late_by_window(
    played: Played, targets: FleetTargets, window: NDArray[np.int64], windows: int
) -> Late:
    """Requests that miss TTFT, then those that miss TPOT, of each class of targets. (w, t)"""
    classes = len(targets.each)
    place = window * classes + targets.of(played.prompt)
    ttft, tpot = targets.of_each(played.prompt)
    found = [
        np.bincount(place[late], minlength=windows * classes).reshape(windows, classes)
        for late in (played.ttft > ttft, played.tpot > tpot)
    ]
    return np.concatenate(found, axis=1)


def may_be_late(traffic: Traffic, targets: FleetTargets) -> Late:
    """The most requests of the whole trace that may miss each target. (t,)"""
    of, classes = targets.of(traffic.requests.prompt), len(targets.each)
    every = np.bincount(of, minlength=classes)
    several = np.bincount(of[traffic.requests.generate > 1], minlength=classes)
    count = np.maximum(np.concatenate([every, several]) - 1, 0)
    return np.asarray(count - np.floor(targets.share * count + 1e-9).astype(np.int64))


# prices and neighbours of schedules


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


def schedules_with_less(
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
            if not within_limits(offers, less.max(axis=0), limits):
                continue
            found.append((scheduled_cost(offers, demand, schedule, less, kept), less, kept))
    return sorted(found, key=lambda x: x[0])


# the programme that chooses a mix for each window

COST_WEIGHT = 1e-3  # weight of the cost where targets cannot be kept


@dataclass
class SeenMixes:
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
class ChosenSchedule:
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


def choose_schedule(
    seen: SeenMixes, offers: Offers, demand: Demand, limits: FleetLimits, schedule: Schedule
) -> ChosenSchedule:
    """The cheapest schedule of mixes that were seen.

    Raises
    ------
    InfeasibleError
        If the limits allow none.
    """
    try:
        return _solve_choice(seen, offers, demand, limits, schedule, False)
    except InfeasibleError:
        return _solve_choice(seen, offers, demand, limits, schedule, True)


def _solve_choice(
    seen: SeenMixes,
    offers: Offers,
    demand: Demand,
    limits: FleetLimits,
    schedule: Schedule,
    beyond: bool,
) -> ChosenSchedule:
    problem = solver.create_problem("schedule")
    kinds, windows = range(len(offers)), range(len(demand.rate))
    most = np.max([mix for some in seen.late for mix in some], axis=0).tolist()
    replicas = [problem.add_variable(f"replicas_{j}", lowBound=0, upBound=most[j]) for j in kinds]
    programme = FleetProgramme(problem, replicas, {}, [], {}, most)
    pay_by_window(programme, offers, demand, schedule)
    chosen = {
        (w, mix): problem.add_variable(f"chosen_{w}_{i}", cat=solver.BINARY)
        for w in windows
        for i, mix in enumerate(seen.late[w])
    }
    for w in windows:
        mine = [(mix, chosen[w, mix]) for mix in seen.late[w]]
        problem.addConstraint(solver.add_up(v for _, v in mine) == 1, f"one_{w}")
        for j in kinds:
            here = solver.add_up(mix[j] * v for mix, v in mine if mix[j])
            problem.addConstraint(programme.running[w, j] == here, f"runs_{w}_{j}")
    excess = _add_late_rows(problem, seen, chosen, beyond)
    for i, mixes in enumerate(seen.missed):
        same = [chosen[w, mix] for w, mix in enumerate(mixes) if (w, mix) in chosen]
        if len(same) == len(windows):
            problem.addConstraint(solver.add_up(same) <= len(windows) - 1, f"not_{i}")
    limit_rented(programme, offers, limits)
    if beyond:
        dear = float(np.dot(most, np.where(np.isfinite(offers.rent), offers.rent, 0.0))) or 1.0
        problem.setObjective(solver.add_up(excess) + COST_WEIGHT / dear * problem.objective)
    run_solver(problem)
    running = np.array(
        [
            next(mix for mix in seen.late[w] if (chosen[w, mix].value() or 0.0) > 0.5)
            for w in windows
        ]
    )
    reserved = np.array([round(v.value() or 0.0) for v in programme.reserved], np.int64)
    cost = scheduled_cost(offers, demand, schedule, running, reserved)
    return ChosenSchedule(running, reserved, cost, beyond)


def _add_late_rows(
    problem: solver.Problem,
    seen: SeenMixes,
    chosen: dict[tuple[int, Mix], solver.Variable],
    beyond: bool,
) -> Sequence[solver.Variable]:
    """Rows that keep the late requests; what may be beyond them, in parts of what may be late."""
    both = {}
    for i, (w, before, mix) in enumerate(seen.delayed):
        if (w - 1, before) in chosen and (w, mix) in chosen:
            variable = problem.add_variable(f"both_{i}", lowBound=0)
            pair = chosen[w - 1, before], chosen[w, mix]
            problem.addConstraint(variable >= solver.add_up(pair) - 1, f"both_{i}")
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
            most = solver.add_up([float(scale * seen.may_be[t])])
            if beyond:
                excess.append(problem.add_variable(f"beyond_{row}_{t}", lowBound=0))
                most += excess[-1]
            problem.addConstraint(solver.add_up(total) <= most, f"late_{row}_{t}")
    return excess


# search

MIX_KINDS = 5  # of replica that mixes are made of, besides those of the fleets to begin with
LADDER_STEPS = 3  # replicas of a kind by itself that are tried, from what it is thought to need
MIXES_PER_ROUND = 3  # new ones in a window, times the rounds of a search, at most
OVERFULL_MIX = 2.0  # utilisation above which a mix is not worth a simulation in its window
# Late requests of windows alone, of those that may be, that are worth a play.
WORTHWHILE_LATE = 1.25
ROUNDS_PER_THIN_PLAY = 4  # one in so many rounds of a search plays a schedule with one replica less
# Late requests of a mix, of all that may be, beyond which none of fewer is played.
HOPELESS_LATE = 2.0


class ScheduleSearch(FleetSearch):
    """The search for a schedule of one trace; the classes are divided anew in each window."""

    def run(self) -> SearchResult:
        """Search.

        Raises
        ------
        InfeasibleError
            If no schedule within the limits is found that meets the targets.
        """
        assert self.schedule is not None
        self.seen = SeenMixes(
            [{} for _ in self.demand.rate], may_be_late(self.traffic, self.targets)
        )
        best, plan = self._always(), self._planned(self.schedule)
        if plan is None and best is None:
            raise InfeasibleError("no fleet carries the demand within the targets and limits")
        self.kinds = self._kinds([x.running for x in (best, plan) if x is not None])
        self._begin([x.running for x in (best, plan) if x is not None])
        best = self._cheapest(best, self.schedule)
        if best is None:
            raise InfeasibleError(f"none of {self.proposals} schedules met the targets when played")
        best = self._thinned(best, self.schedule)
        bound = best.cost if plan is None else min(plan.relaxed, best.cost)
        gap = 0.0 if plan is None else max(best.cost - plan.bound, 0.0) / best.cost
        return SearchResult(
            best,
            self.current,
            bound,
            self.proposals,
            self.simulations,
            gap,
            self.seconds,
            self.windows.plays,
        )

    @cached_property
    def windows(self) -> WindowPlays:
        """What is seen of the windows."""
        return WindowPlays(
            self.traffic,
            self.configurations,
            self.current,
            self.targets,
            self.limits.late,
            self.load * (1 + self.limits.headroom),
            self.slowdown,
        )

    def _always(self) -> SimulatedFleet | None:
        """The cheapest fleet that always runs."""
        search = FleetSearch(
            replace(self.question, schedule=None),
            self.market,
            self.limits,
            self.load,
            self.tell,
            self.rounds,
            self.spreads,
        )
        search.factor = self.factor.copy()
        try:
            return search.run().fleet
        except InfeasibleError:
            return None
        finally:
            self.proposals += search.proposals
            self.simulations += search.simulations

    def _planned(self, schedule: Schedule) -> FleetPlan | None:
        """The fleet programme's schedule, by what replicas carry."""
        try:
            return propose(self.current, self.demand, self.limits, schedule, (), ())
        except InfeasibleError:
            return None

    def _kinds(self, fleets: list[Counts]) -> list[int]:
        """The kinds that mixes are made of: those of some fleets, and the cheapest for a class."""
        mean = self.demand.mean
        serves = (self.offers.capacity > 0) & (mean > 0)[:, None]
        each = np.where(
            serves, self.offers.rent / np.where(serves, self.offers.capacity, 1), np.inf
        )
        come = mean > 0
        dearer = each[come] / each[come].min(axis=1, keepdims=True)
        some = [j for j in undominated(self.offers, self.limits) if np.isfinite(dearer[:, j]).any()]
        some.sort(key=lambda j: (float(mean[come] @ dearer[:, j]), float(dearer[:, j].min())))
        used = np.flatnonzero(np.any([x.any(axis=0) for x in fleets], axis=0)).tolist()
        return sorted({*used, *some[:MIX_KINDS]})

    def _begin(self, fleets: list[Counts]) -> None:
        """The mixes of some fleets, and each kind by itself."""
        kinds = len(self.offers)
        for w in range(len(self.demand.rate)):
            for running in fleets:
                self._see(w, as_mixes(running)[w])
            for j in self.kinds:
                one = tuple(int(i == j) for i in range(kinds))
                count = max(int(np.ceil(self.windows.busy(w, one))), 1)
                for n in range(max(count - 1, 1), count + LADDER_STEPS):
                    some = tuple(n * i for i in one)
                    if self._try(w, some) and not self.seen.late[w][some].any():
                        break

    def _cheapest(self, best: SimulatedFleet | None, schedule: Schedule) -> SimulatedFleet | None:
        """Schedules of the mixes that were seen, until none is cheaper."""
        left = MIXES_PER_ROUND * self.rounds * len(self.seen.late)
        for _ in range(self.rounds):
            choice, left = self._chosen(best, schedule, left)
            if choice is None:
                break
            best = self._proven(choice) or best
        return best

    def _thinned(self, best: SimulatedFleet, schedule: Schedule) -> SimulatedFleet:
        """The best schedule without replicas that it does not need, as far as a few plays show.

        Windows alone are about what they are in the trace, so what misses by little is tried too.
        """
        left = self.rounds // ROUNDS_PER_THIN_PLAY
        while True:
            for cost, running, reserved in schedules_with_less(
                self.offers, self.demand, schedule, self.limits, best.running, best.reserved
            ):
                thin = ChosenSchedule(running, reserved, cost, True)
                if cost >= best.cost * (1 - CHEAPER) or not self._worth_a_play(thin):
                    continue
                if not left:
                    return best
                left -= 1
                proven = self._proven(thin)
                if proven is not None:
                    best = proven
                    break
            else:
                return best

    def _worth_a_play(self, choice: ChosenSchedule) -> bool:
        """Whether a schedule of mixes that were seen was not tried and may meet the targets."""
        mixes, seen = choice.mixes, self.seen
        if mixes in seen.missed or any(x not in seen.late[w] for w, x in enumerate(mixes)):
            return False
        late = sum(seen.late[w][x][0] for w, x in enumerate(mixes)) + sum(
            seen.delayed.get((w, mixes[w - 1], x), 0) for w, x in enumerate(mixes)
        )
        return bool((late <= WORTHWHILE_LATE * seen.may_be).all())

    def _chosen(
        self, best: SimulatedFleet | None, schedule: Schedule, left: int
    ) -> tuple[ChosenSchedule | None, int]:
        """The cheapest schedule of mixes, if it is cheaper; all that are near it were seen.

        Parameters
        ----------
        left : simulations of mixes, at most; what is left of them is returned.
        """
        while True:
            try:
                choice = choose_schedule(self.seen, self.offers, self.demand, self.limits, schedule)
            except InfeasibleError:
                return None, left
            cheaper = best is None or choice.cost < best.cost * (1 - CHEAPER)
            better = cheaper and (best is None or not choice.beyond)
            known = self.windows.plays
            new = self._grow(choice.running if better or best is None else best.running, left)
            left -= self.windows.plays - known
            if not new:
                return (choice if better and not choice.beyond else None), left

    def _grow(self, running: Counts, left: int) -> int:
        """Play mixes near those of a schedule; how many are new."""
        near: list[tuple[float, int, Mix]] = []
        mixes = as_mixes(running)
        for w, mix in enumerate(mixes):
            beside = {mixes[w - 1], mixes[(w + 1) % len(mixes)]}
            late = mix not in self.seen.late[w] or bool(self.seen.late[w][mix].any())
            price = self._price(mix)
            some = {x for x in beside if late or self._price(x) < price}
            some.update(self._near(mix, late), self._kept(w, mix, beside))
            near += [(self._price(x) - price, w, x) for x in some - self.seen.late[w].keys()]
        new, before = 0, self.windows.plays
        for _, w, mix in sorted(near):
            if self.windows.plays - before >= left:
                break
            new += self._try(w, mix)
        return new

    def _near(self, mix: Mix, late: bool) -> Iterator[Mix]:
        """One replica less, or of one kind in place of one or two of another, if that is cheaper.

        Where requests are late, one replica more or of a dearer kind too.
        """
        own, price = np.array(mix), self._price(mix)
        unit = np.eye(len(mix), dtype=np.int64)
        used = np.flatnonzero(own)
        steps = [-unit[j] for j in used] + [unit[k] for k in self.kinds if late]
        for j in used:
            for k in (k for k in self.kinds if k != j):
                steps += [unit[k] - unit[j], 2 * unit[k] - unit[j], unit[k] - 2 * unit[j]]
        for step in steps:
            near = own + step
            if (near >= 0).all() and near.any():
                found = as_mixes(near[None])[0]
                if self._price(found) < price or (late and step.max() < 2 and step.min() > -2):
                    yield found

    def _kept(self, window: int, mix: Mix, beside: set[Mix]) -> Iterator[Mix]:
        """A replica more that runs before or after, where it is reserved or dear to start."""
        assert self.schedule is not None
        dear = self.schedule.start_up >= self.demand.hours[window]
        for j in (j for j in self.kinds if dear or np.isfinite(self.offers.reserved[j])):
            if max(x[j] for x in beside) > mix[j]:
                yield tuple(n + (i == j) for i, n in enumerate(mix))

    def _price(self, mix: Mix) -> float:
        return float(sum(n * x for n, x in zip(mix, self.offers.rent, strict=True) if n))

    def _try(self, window: int, mix: Mix) -> bool:
        """Play a mix in a window, if it is new, within the limits and may be of use."""
        known = self.seen.late[window]
        some = replace(self.limits, mixed=False)
        if mix in known or not within_limits(self.offers, np.array(mix), some):
            return False
        if self.windows.busy(window, mix) > OVERFULL_MIX:
            return False
        most = HOPELESS_LATE * np.maximum(self.seen.may_be, 1)
        for other, late in known.items():
            smaller = all(n <= m for n, m in zip(mix, other, strict=True))
            alike = all((n > 0) == (m > 0) for n, m in zip(mix, other, strict=True))
            if smaller and alike and (late[0] > most).any():
                return False
        return self._see(window, mix)

    def _see(self, window: int, mix: Mix) -> bool:
        """Note the late requests of a mix, and of all that losses may leave of it."""
        failures = self.limits.failures
        rows = [self.windows.late(window, mix, self.windows.load)]
        every = np.full(len(mix), failures)
        for lost in possible_losses(every, failures) if failures else ():
            left = tuple(max(n - m, 0) for n, m in zip(mix, lost, strict=True))
            if not any(left):
                return False
            rows.append(self.windows.late(window, left, self.load))
        self.seen.late[window][mix] = np.array(rows)
        return True

    def divided(self, running: Counts) -> Array:
        """Shares of the classes in each window. (w, c, j)"""
        return np.stack([self.windows.share(w, m) for w, m in enumerate(as_mixes(running))])

    def _proven(self, choice: ChosenSchedule) -> SimulatedFleet | None:
        """Play the trace on a schedule and note it; None if it misses the targets."""
        self.proposals += 1
        self.tell(f"schedule {self.proposals}: {choice.cost:.2f} USD/h {self.named(choice.most)}")
        share, headroom = self.divided(choice.running), self.limits.headroom
        slowdown = self.slowdown(choice.running)
        played = self.played(choice.running, share, 1 + headroom, slowdown)
        self._note(choice.mixes, played)
        if played.meets(self.targets):
            proven = played
            if headroom:
                proven = self.played(choice.running, share, slowdown=slowdown)
            if proven.meets(self.targets) and self._survives(choice.running, share):
                return SimulatedFleet(choice.running, choice.reserved, share, choice.cost, proven)
        self.seen.missed.append(choice.mixes)
        return None

    def _note(self, mixes: tuple[Mix, ...], played: Played) -> None:
        """How many more or fewer requests were late than with the mixes of the windows alone."""
        windows = len(self.seen.late)
        found = late_by_window(played, self.targets, self.traffic.window, windows)
        self.seen.late[0][mixes[0]][0] = found[0]
        for w in range(1, windows):
            before, mix = mixes[w - 1], mixes[w]
            self.seen.delayed[w, before, mix] = found[w] - self.seen.late[w][mix][0]
