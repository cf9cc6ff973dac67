"""``kvsim plan --trace``: techniques for a request trace on one replica, proved by simulation."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvsim.errors import InfeasibleError, InputError
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.planner.admit import Admission
from kvsim.planner.candidates import options_of
from kvsim.planner.carry import ONE, Carried, ReplicaTargets, carry
from kvsim.planner.classes import Classes, classes_of
from kvsim.planner.load import loads_of
from kvsim.planner.question import FULL, check_objective
from kvsim.planner.settle import best_of
from kvsim.planner.verify import Simulated, simulated
from kvsim.planner.workload import PlanLimits
from kvsim.serving.rules import Rules
from kvsim.traces.requests import Requests

MARGIN = 0.5  # techniques whose estimate is this much worse than the best are not simulated
LEAST = 3  # but that many are
SETTINGS = 4  # further settings of the best technique that are simulated
FINE = 0.1  # if their estimate is no worse than this
SEVERAL = (2, 3)  # techniques on one replica, with a choice per class
ROUNDING = 1e-6  # of the solver, relative
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

    The programme of ``planner.carry`` ranks settings by estimates; the best of each promising
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
    served = requests.alone() if per_class else requests  # lanes model neither turns nor aborts
    search = _Search(deployment, served, objective, limits, rules, admission, tell)
    search.techniques()
    search.settings()
    if per_class:
        search.combinations()
    return search.answer()


class _Search:
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
        self.classes = classes_of(requests)
        self.targets = ReplicaTargets(limits.ttft, limits.tpot, max_seqs=rules.max_seqs)
        self.options = options_of(deployment, requests, limits, rules, admission)
        tell(f"estimating {len(self.options)} settings")
        self.loads = loads_of(self.options, self.classes, limits.ttft)
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
            if i < LEAST or self._near(carried, best[0], MARGIN) or self._is_full(carried):
                self._simulate(carried)

    def _is_full(self, carried: Carried) -> bool:
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
        for _ in range(min(SETTINGS, len(some) - 1)):
            carried = self._carry(some, cuts)
            if carried is None or not self._near(carried, first, FINE):
                return
            cuts += (carried,)
            self._simulate(self._named(carried, some))

    def combinations(self) -> None:
        """Techniques per class: the programme's best combinations of several, by their load."""
        best = min((s.estimate for s in self.done), key=lambda e: e.load)
        near = [s for s in self.done if s.estimate.load <= best.load * (1 + MARGIN)]
        some = sorted({o for s in near for o in s.estimate.options})
        cuts: tuple[Carried, ...] = ()
        for _ in range(SETTINGS):
            try:
                carried = carry(self.loads.only(some), self.bounds, SEVERAL, cuts=cuts)
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
        cuts: tuple[Carried, ...] = (),
        bounds: ReplicaTargets | None = None,
    ) -> Carried | None:
        """One of some options; that with the largest load where the trace is too much."""
        loads = self.loads.only(some)
        for fastest in (True, False) if self._fastest else (False,):
            try:
                carried = carry(loads, bounds or self.bounds, ONE, fastest, cuts)
            except InfeasibleError:
                continue
            self.seconds += carried.seconds
            return carried
        return None

    def _named(self, carried: Carried, some: list[int]) -> Carried:
        return replace(carried, option_of=tuple(some[o] for o in carried.option_of))

    def _best_settings(self) -> Iterator[Carried]:
        """Those of every technique."""
        for name in dict.fromkeys(costs.technique.name for costs in self.options):
            some = self._of(name)
            carried = self._carry(some)
            if carried is not None:
                yield self._named(carried, some)

    def _rank(self, carried: Carried) -> tuple[bool, float]:
        """Estimates in order: the load, or where the trace is carried the time per token."""
        if not self._fastest or carried.load > 1 + ROUNDING:
            return (True, carried.load)
        speed = float(carried.laps * self.loads.tokens[list(carried.option_of)].mean())
        return (False, 1 / speed if speed else 0.0)  # 0: nothing is decoded

    def _near(self, carried: Carried, best: Carried, margin: float) -> bool:
        (worse, value), (bad, goal) = self._rank(carried), self._rank(best)
        return worse == bad and value <= goal * (1 + margin)

    def _simulate(self, carried: Carried) -> None:
        names = " + ".join(str(self.options[o].technique) for o in carried.options)
        self.tell(f"simulating {names}")
        self.done.append(self._played(carried, self.requests))

    def _played(self, carried: Carried, requests: Requests) -> Simulated:
        args = self.options, self.loads, self.classes, carried, self.targets
        return simulated(requests, *args)

    def _chosen(self) -> Simulated:
        def play(found: Simulated, rate: float) -> Simulated:
            self.tell(f"simulating {rate:.2g} of the rate")
            return self._played(found.estimate, self.requests.scaled(rate))

        return best_of(self.done, self.objective, self.targets, play)

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
