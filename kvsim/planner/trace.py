"""``kvsim plan --trace``: techniques for a request trace on one replica, proved by simulation.

The programme of ``planner.replica`` ranks settings by estimates; the best of each promising
technique play the whole trace, and what that says decides.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from kvsim.errors import InfeasibleError, InputError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.planner.alternatives import format_seconds
from kvsim.planner.question import (
    FULL,
    Admission,
    PlanLimits,
    check_objective,
    known_difference,
    simplicity_rank,
)
from kvsim.planner.replica import (
    ATTAINED,
    ONE_LANE,
    Classes,
    Loads,
    ReplicaCapacity,
    ReplicaTargets,
    group_requests,
    list_step_costs,
    load_coefficients,
    solve_replica,
)
from kvsim.planner.table import best_row, nearest_row
from kvsim.search import smallest_count
from kvsim.serving.costs import StepCosts
from kvsim.serving.lanes import Lane, simulate_lanes
from kvsim.serving.outcome import QUANTILES, Outcome, Targets
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.techniques.technique import Technique
from kvsim.traces.requests import Requests

# a choice, simulated

BATCH_TRIALS = 6  # batches tried where the TPOT target asks for a smaller one


@frozen
class Simulated:
    """Techniques on a replica, and what simulating the trace says of them."""

    lanes: tuple[StepCosts, ...]
    lane_of_class: tuple[int, ...]
    estimate: ReplicaCapacity
    outcome: Outcome

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """The technique of each lane."""
        return tuple(costs.technique for costs in self.lanes)

    @property
    def exact(self) -> bool:
        """Whether all lanes give the tokens of full-precision KV."""
        return all(t.exact for t in self.techniques)

    @property
    def max_seqs(self) -> int:
        """Sequences in a batch at most, for the engine's settings."""
        costs = self.lanes[0]
        return -(-costs.rules.max_seqs // costs.deployment.dp)  # every rank is told its own

    def measures(self) -> dict[str, float]:
        """What limits and objectives are about, all to be small; infinite where there is none."""
        o = self.outcome
        hung_up = o.aborted & np.isnan(o.ttft_s)  # without a token
        good = float(o.meets_targets.sum())
        latency = o.latency_s[o.finished]
        usd = o.usd
        tokens = float(o.run.requests.generate[o.meets_targets].sum())
        return {
            "throughput": o.duration_s / good if good else np.inf,
            "latency": float(latency.mean()) if latency.size else np.inf,
            "cost": usd / tokens * 1e6 if usd is not None and tokens else np.inf,
            "ttft": attained_quantile(np.where(hung_up, np.inf, o.ttft_s)[o.finished | hung_up]),
            "tpot": attained_quantile(o.tpot_s[o.finished]),
            "refused": float(o.refused.sum()),
        }


def measure_all(done: list[Simulated]) -> dict[str, Array]:
    """What each of several measures, by name."""
    every = [s.measures() for s in done]
    return {name: np.array([m[name] for m in every]) for name in every[0]}


def attained_quantile(values: np.ndarray) -> float:
    """What ``ATTAINED`` of the values are within; 0 if there are none."""
    known = values[~np.isnan(values)]
    if not known.size:
        return 0.0
    if not np.isfinite(known).all():  # between a number and infinity lies no number
        return float(np.quantile(known, QUANTILES[ATTAINED], method="higher"))
    return float(np.quantile(known, QUANTILES[ATTAINED]))


def simulate_choice(
    requests: Requests,
    options: list[StepCosts],
    loads: Loads,
    classes: Classes,
    carried: ReplicaCapacity,
    targets: ReplicaTargets,
) -> Simulated:
    """Play the trace with what the programme chose.

    Where a token takes longer than its target, the batch is made smaller until it does not: the
    programme knows means, a trace has bursts. If requests then wait too long for their first token,
    the batch stays as it was where that comes nearer to both targets.
    """

    def play(max_seqs: int) -> Simulated:
        return _play_trace(requests, options, loads, classes, carried, targets, max_seqs)

    found = play(targets.max_seqs)
    if not found.measures()["tpot"] > targets.tpot:
        return found
    low, high = 1, int(min(targets.max_seqs, np.ceil(_peak_batch(found))))
    best = found
    for _ in range(BATCH_TRIALS):
        middle = round(np.sqrt(low * high))
        if middle in (low, high) and middle != 1:
            break
        tried = play(middle)
        if tried.measures()["tpot"] <= targets.tpot:
            low, best = middle, tried
        else:
            high = middle
            best = tried if best is found else best
        if high <= low + 1:
            break
    both = [best, found]
    return both[nearest_row(measure_all(both), targets.times)[0]]


def _peak_batch(found: Simulated) -> float:
    """Largest mean batch of any stretch of the timeline."""
    bins = found.outcome.run.bins
    busy, running = bins.seconds[0], bins.running[0]
    return float(np.max(running[busy > 0] / busy[busy > 0], initial=2.0)) + 1


def _play_trace(
    requests: Requests,
    options: list[StepCosts],
    loads: Loads,
    classes: Classes,
    carried: ReplicaCapacity,
    targets: ReplicaTargets,
    max_seqs: int,
) -> Simulated:
    used = carried.options
    lane_of_class = tuple(used.index(o) for o in carried.option_of)
    lanes = [
        Lane(options[o].with_fewer(max_seqs), share)
        for o, share in zip(used, _memory_shares(loads, carried), strict=True)
    ]
    if requests.depends and len(lanes) == 1:
        run = simulate(requests, lanes[0].costs)
    else:
        run = simulate_lanes(
            requests.without_sessions(), lanes, np.array(lane_of_class)[classes.of]
        )
    outcome = Outcome(run, Targets(targets.ttft, targets.tpot))
    return Simulated(tuple(lane.costs for lane in lanes), lane_of_class, carried, outcome)


def _memory_shares(loads: Loads, carried: ReplicaCapacity) -> list[float]:
    """Memory of each lane: its longest request, and of the rest what its sequences need."""
    used = carried.options
    if len(used) == 1:
        return [1.0]
    needs = np.array(
        [
            sum(float(loads.gpu[c, o]) for c, o in enumerate(carried.option_of) if o == lane)
            for lane in used
        ]
    )
    first = np.array([float(loads.longest[o] / loads.room[o]) for o in used])
    left = max(1.0 - float(first.sum()), 0.0)
    return [float(s) for s in first + left * needs / max(float(needs.sum()), 1e-300)]


# where nothing keeps the targets

IDLE_RATE = 1e-4  # of a trace's rate, at which requests do not meet
TRIED_TECHNIQUES = 3  # techniques
MAX_REPLICAS = 64  # replicas
Play = Callable[[Simulated, float], Simulated]
"""What was simulated, played again at a share of the trace's rate."""


def explain_missed_targets(done: list[Simulated], bounds: dict[str, float], play: Play) -> str:
    """Why nothing is within the targets, and what would be: more replicas, or looser targets.

    Parameters
    ----------
    done : what was simulated, of which nothing is within the targets.
    bounds : the targets that 9 in 10 requests are to keep. [s]
    """
    every = _order_by_excess(done, bounds)
    some = sorted(every, key=lambda s: {t.name for t in s.techniques} != {FULL})[:TRIED_TECHNIQUES]
    idle = [play(s, IDLE_RATE) for s in some]
    for found, rested in zip(some, idle, strict=True):
        if _keeps_targets(rested, bounds):
            carried = partial(_carries_share, found, bounds, play)
            count = smallest_count(carried, guess=2, most=MAX_REPLICAS, below=1)
            if count:
                missed = _describe_missed(found, bounds)
                return (
                    f"no plan meets the targets on this trace: {missed}. It keeps them at "
                    f"1/{count} of the rate (--rate {1 / count:.2g}), so that {count} "
                    f"such replicas carry the trace; `kvsim capacity` plans them"
                )
    best = _order_by_excess(idle, bounds)[0]
    if _keeps_targets(best, bounds):
        return f"no plan meets the targets on this trace, nor on 1/{MAX_REPLICAS} of it"
    missed = _describe_missed(best, bounds)
    return f"no plan meets the targets on this trace at any rate: {missed}, each request alone"


def _order_by_excess(some: list[Simulated], bounds: dict[str, float]) -> list[Simulated]:
    """The nearest to the targets first."""
    left, found = list(some), []
    while left:
        found.append(left.pop(nearest_row(measure_all(left), bounds)[0]))
    return found


def _keeps_targets(found: Simulated, bounds: dict[str, float]) -> bool:
    measures = found.measures()
    return all(measures[name] <= limit for name, limit in bounds.items())


def _carries_share(found: Simulated, bounds: dict[str, float], play: Play, replicas: int) -> bool:
    """Whether each of so many replicas keeps the targets on its share of the rate."""
    return _keeps_targets(play(found, 1 / replicas), bounds)


def _describe_missed(found: Simulated, bounds: dict[str, float]) -> str:
    measures = found.measures()
    late = " and ".join(
        f"{name.upper()} of 9 in 10 requests is {format_seconds(measures[name])} "
        f"instead of {format_seconds(limit)}"
        for name, limit in bounds.items()
        if measures[name] > limit
    )
    names = " + ".join("full KV" if t.name == FULL else str(t) for t in found.techniques)
    return f"{late or 'too few requests are served'} with {names}"


# which one is chosen

OBJECTIVE_TIE = 0.005  # objectives this near are equal, and the mean latency decides


def choose_simulated(
    done: list[Simulated], objective: str, targets: ReplicaTargets, play: Play
) -> Simulated:
    """The simplest that is within the targets and as good as the best within the known error.

    Of settings of one technique that are equal, that with the smallest mean latency.

    Parameters
    ----------
    play : plays what was simulated at another rate, to say at which it would do.

    Raises
    ------
    InfeasibleError
        If none is.
    """
    if not done:
        raise InfeasibleError("no technique serves all requests within the targets")
    columns, bounds = measure_all(done), targets.times
    within = bounds | {"refused": float(columns["refused"].min())}
    first = best_row(columns[objective], columns, within)
    if first is None:
        raise InfeasibleError(explain_missed_targets(done, bounds, play))
    value = float(columns[objective][first])
    error = np.array([_known_difference(done[first], s) for s in done])
    within["behind"] = value
    columns["behind"] = columns[objective] - error * abs(value)
    ranks = np.array([_simplicity(s) for s in done], dtype=float)
    lowest = best_row(ranks, columns, within)
    assert lowest is not None
    simplest = {"rank": ranks}
    mine = best_row(columns[objective], columns | simplest, within | {"rank": float(ranks[lowest])})
    assert mine is not None
    value = float(columns[objective][mine])
    equal = within | {objective: value + OBJECTIVE_TIE * abs(value), "rank": float(ranks[lowest])}
    row = best_row(columns["latency"], columns | simplest, equal)
    assert row is not None
    return done[row]


def _known_difference(one: Simulated, other: Simulated) -> float:
    """Known relative error between what two plans run."""
    d = one.lanes[0].deployment
    return max(known_difference(d, x, y) for x in one.techniques for y in other.techniques)


def _simplicity(s: Simulated) -> int:
    """How simple: lossless before lossy, one technique before several, full KV before others."""
    lossy, moved = (max(simplicity_rank(t)[i] for t in s.techniques) for i in (0, 1))
    return 4 * lossy + 2 * (len(s.techniques) > 1) + moved


# the search

# Techniques whose estimate is this much worse than the best are not simulated.
TECHNIQUE_MARGIN = 0.5
MIN_SIMULATED = 3  # but that many are
MORE_SETTINGS = 4  # further settings of the best technique that are simulated
SETTINGS_MARGIN = 0.1  # if their estimate is no worse than this
SEVERAL_LANES = (2, 3)  # techniques on one replica, with a choice per class
LOAD_ROUNDING = 1e-6  # of the solver, relative
Tell = Callable[[str], None]


@frozen
class TracePlan:
    """The answer: the best of what was simulated, and what it is compared with."""

    objective: str
    limits: PlanLimits
    classes: Classes
    choice: Simulated
    baseline: Simulated | None  # full KV
    others: list[Simulated]  # best of each other technique or combination, best first
    options: int  # settings that were considered
    simulations: int
    seconds: float  # of the solver, in all


def make_trace_plan(
    deployment: Deployment,
    requests: Requests,
    objective: str,
    limits: PlanLimits,
    admission: Admission,
    rules: Rules,
    per_class: bool = False,
    tell: Tell = lambda _: None,
) -> TracePlan:
    """Choose a technique and its settings for a trace, or one for each class of its requests.

    The programme of ``planner.replica`` ranks settings by estimates; the best of each promising
    technique play the whole trace, and what that says decides.

    Parameters
    ----------
    tell : is told what is being simulated.

    Raises
    ------
    InputError
        For an unknown objective, costs without a price, an empty trace, or no room for a cache.
    InfeasibleError
        If nothing simulated is within the limits; says by how much.
    """
    check_objective(objective, deployment)
    if not len(requests):
        raise InputError("--trace: no requests; expected at least one")
    served = (
        requests.without_sessions() if per_class else requests
    )  # lanes model neither turns nor aborts
    search = _TraceSearch(deployment, served, objective, limits, rules, admission, tell)
    search.techniques()
    search.settings()
    if per_class:
        search.combinations()
    return search.answer()


class _TraceSearch:
    """What has been simulated so far, and what comes next."""

    def __init__(
        self,
        deployment: Deployment,
        requests: Requests,
        objective: str,
        limits: PlanLimits,
        rules: Rules,
        admission: Admission,
        tell: Tell,
    ) -> None:
        self.requests, self.objective, self.limits, self.tell = requests, objective, limits, tell
        self.classes = group_requests(requests)
        self.targets = ReplicaTargets(limits.ttft, limits.tpot, max_seqs=rules.max_seqs)
        self.options = list_step_costs(deployment, requests, limits, rules, admission)
        tell(f"estimating {len(self.options)} settings")
        self.loads = load_coefficients(self.options, self.classes, limits.ttft)
        self.bounds = self.targets  # of the estimate
        self.done: list[Simulated] = []
        self.seconds = 0.0

    def techniques(self) -> None:
        """The best settings of each technique that is not hopeless."""
        best = sorted(self._best_settings(), key=self._rank)
        if not best:  # what is simulated then says how far off the targets are
            self.bounds = ReplicaTargets(max_seqs=self.targets.max_seqs)
            best = sorted(self._best_settings(), key=self._rank)
        if not any(self._is_full(carried) for carried in best) and (mine := self._of(FULL)):
            full = self._carry(mine, bounds=ReplicaTargets(max_seqs=self.targets.max_seqs))
            best += [] if full is None else [self._named(full, mine)]
        for i, carried in enumerate(best):
            if (
                i < MIN_SIMULATED
                or self._near(carried, best[0], TECHNIQUE_MARGIN)
                or self._is_full(carried)
            ):
                self._simulate(carried)

    def _is_full(self, carried: ReplicaCapacity) -> bool:
        return self.options[carried.option_of[0]].technique.name == FULL

    def settings(self) -> None:
        """Other settings of the best technique."""
        name = self._chosen().techniques[0].name
        some = self._of(name)
        cuts = tuple(
            replace(s.estimate, option_of=tuple(some.index(o) for o in s.estimate.option_of))
            for s in self.done
            if s.techniques[0].name == name
        )
        first = cuts[0]
        for _ in range(min(MORE_SETTINGS, len(some) - 1)):
            carried = self._carry(some, cuts)
            if carried is None or not self._near(carried, first, SETTINGS_MARGIN):
                return
            cuts += (carried,)
            self._simulate(self._named(carried, some))

    def combinations(self) -> None:
        """Techniques per class: the programme's best combinations of several, by their load."""
        best = min((s.estimate for s in self.done), key=lambda e: e.load)
        near = [s for s in self.done if s.estimate.load <= best.load * (1 + TECHNIQUE_MARGIN)]
        some = sorted({o for s in near for o in s.estimate.options})
        cuts: tuple[ReplicaCapacity, ...] = ()
        for _ in range(MORE_SETTINGS):
            try:
                carried = solve_replica(
                    self.loads.only(some), self.bounds, SEVERAL_LANES, cuts=cuts
                )
            except InfeasibleError:
                return
            self.seconds += carried.seconds
            cuts += (carried,)
            self._simulate(self._named(carried, some))

    def answer(self) -> TracePlan:
        """The best of what was simulated."""
        choice = self._chosen()
        full = [s for s in self.done if {t.name for t in s.techniques} == {FULL}]
        return TracePlan(
            objective=self.objective,
            limits=self.limits,
            classes=self.classes,
            choice=choice,
            baseline=full[0] if full else None,
            others=self._others(choice),
            options=len(self.options),
            simulations=len(self.done),
            seconds=self.seconds,
        )

    # how

    @property
    def _fastest(self) -> bool:
        return self.objective == "latency"

    def _of(self, name: str) -> list[int]:
        return [i for i, costs in enumerate(self.options) if costs.technique.name == name]

    def _carry(
        self,
        some: list[int],
        cuts: tuple[ReplicaCapacity, ...] = (),
        bounds: ReplicaTargets | None = None,
    ) -> ReplicaCapacity | None:
        """One of some options; that with the largest load where the trace is too much."""
        loads = self.loads.only(some)
        for fastest in (True, False) if self._fastest else (False,):
            try:
                carried = solve_replica(loads, bounds or self.bounds, ONE_LANE, fastest, cuts)
            except InfeasibleError:
                continue
            self.seconds += carried.seconds
            return carried
        return None

    def _named(self, carried: ReplicaCapacity, some: list[int]) -> ReplicaCapacity:
        return replace(carried, option_of=tuple(some[o] for o in carried.option_of))

    def _best_settings(self) -> Iterator[ReplicaCapacity]:
        """Those of every technique."""
        for name in dict.fromkeys(costs.technique.name for costs in self.options):
            some = self._of(name)
            carried = self._carry(some)
            if carried is not None:
                yield self._named(carried, some)

    def _rank(self, carried: ReplicaCapacity) -> tuple[bool, float]:
        """Estimates in order: the load, or where the trace is carried the time per token."""
        if not self._fastest or carried.load > 1 + LOAD_ROUNDING:
            return (True, carried.load)
        speed = float(carried.laps * self.loads.tokens[list(carried.option_of)].mean())
        return (False, 1 / speed if speed else 0.0)  # 0: nothing is decoded

    def _near(self, carried: ReplicaCapacity, best: ReplicaCapacity, margin: float) -> bool:
        (worse, value), (bad, goal) = self._rank(carried), self._rank(best)
        return worse == bad and value <= goal * (1 + margin)

    def _simulate(self, carried: ReplicaCapacity) -> None:
        names = " + ".join(str(self.options[o].technique) for o in carried.options)
        self.tell(f"simulating {names}")
        self.done.append(self._played(carried, self.requests))

    def _played(self, carried: ReplicaCapacity, requests: Requests) -> Simulated:
        args = self.options, self.loads, self.classes, carried, self.targets
        return simulate_choice(requests, *args)

    def _chosen(self) -> Simulated:
        def play(found: Simulated, rate: float) -> Simulated:
            self.tell(f"simulating {rate:.2g} of the rate")
            return self._played(found.estimate, self.requests.scaled(rate))

        return choose_simulated(self.done, self.objective, self.targets, play)

    def _others(self, choice: Simulated) -> list[Simulated]:
        """The best of every other technique or combination."""
        groups: dict[tuple[str, ...], list[Simulated]] = {}
        for s in self.done:
            groups.setdefault(tuple(t.name for t in s.techniques), []).append(s)
        mine = tuple(t.name for t in choice.techniques)
        best = [
            min(group, key=lambda s: s.measures()[self.objective])
            for names, group in groups.items()
            if names != mine
        ]
        return sorted(best, key=lambda s: s.measures()[self.objective])
