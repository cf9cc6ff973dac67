"""``kvsim plan``: the choice for equal requests, its replay, and what would change it."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, replace
from time import perf_counter

import numpy as np

from kvsim.errors import InfeasibleError, InputError
from kvsim.frozen import frozen
from kvsim.machines.deployment import WEIGHT_FORMATS, Deployment
from kvsim.planner.alternatives import (
    Alternative,
    Knee,
    NoPlanError,
    PlanRemedy,
    Waves,
    best_runnable,
    deployment_changes,
    find_advice,
    find_alternatives,
    find_baseline,
    find_knees,
    find_waves,
    quick_plan,
    score,
)
from kvsim.planner.compositions import add_compositions
from kvsim.planner.layers import add_placements
from kvsim.planner.local_search import UniformPlacements
from kvsim.planner.question import Admission, PlanLimits, Question, Workload
from kvsim.planner.sensitivity import (
    Binding,
    Breakpoint,
    TargetProbability,
    explain_no_plan,
    find_bindings,
    find_breakpoints,
    pareto_front,
    solve_prices,
    target_probability,
)
from kvsim.planner.table import Options, TableSearch, as_good_as_best, tabulate
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import Evidence
from kvsim.techniques.released import FULL, describe_cut, engines_running, served_by

ACROSS = 0.05  # of the objective, which another deployment must bring to be worth it
FINALISTS = 2  # deployments that are planned in full, of several


@frozen
class Solved:
    """How the choice was found."""

    options: int  # settings and batches that were evaluated
    solves: int  # of the placement programme, relaxed or whole
    replays: int  # of its mixes by the engine
    seconds: float
    optimum: Prediction  # the best there is, before simplicity counts
    given_up: float  # of the objective, for the simplest plan within the known error


@frozen
class ChosenPlan:
    """The answer: a replayed choice, what it is compared with, and what holds it back."""

    question: Question
    choice: Prediction
    evidence: Evidence
    baseline: Prediction | None  # full KV at its own best batch; None if it does not fit
    alternatives: list[Alternative]
    knees: list[Knee]
    waves: Waves | None
    binding: list[Binding]
    prices: dict[str, float]  # change -> relative gain of the objective
    advice: list[PlanRemedy]
    solver: Solved
    likely: TargetProbability  # how sure the targets are kept
    table: Options  # every option, for reports
    uniform: UniformPlacements  # those whose layers are alike, from which flips are searched
    engine_best: Prediction | None = (
        None  # of what released engines run, where none runs the choice
    )
    others: list[Prediction] = field(default_factory=list)  # on the other deployments asked
    impossible: list[Deployment] = field(default_factory=list)  # of those asked, without a plan
    too_lossy: list[Question] = field(default_factory=list)  # whose weights were not admitted
    restricted: bool = False  # to what engines run, as several formats of weights were asked for

    @property
    def objective(self) -> str:
        """What the plan makes as good as it can be."""
        return self.question.objective

    @property
    def limits(self) -> PlanLimits:
        """What the plan stays within."""
        return self.question.limits

    def hours_for(self, jobs: int) -> float:
        """Compute how long some requests take: full batches in turn, and a last smaller one.

        Parameters
        ----------
        jobs
            Number of requests.

        Returns
        -------
        float
            The duration. [h]
        """
        p = self.choice
        full, rest = divmod(jobs, int(p.batch[0]))
        seconds = full * float(p.request_s[0])
        if rest:
            parts = p.technique.tiles()
            size = np.array([float(-(-rest // parts) * parts)])
            w = self.question.workload
            seconds += float(w.predict(p.technique, p.deployment, size).request_s[0])
        return seconds / 3600

    def usd_for(self, hours: float) -> float | None:
        """What the GPUs cost for so long; None where their price is not known. [USD]

        Parameters
        ----------
        hours
            How long. [h]
        """
        d = self.choice.deployment
        return None if d.hardware.price is None else hours * d.hardware.price * d.gpus

    def flips(self) -> list[Breakpoint]:
        """Where another technique would be chosen; asks the planner again."""
        search = TableSearch(self.question, self.table)
        return find_breakpoints(self.question, search, self.choice.technique, self.uniform)

    def front(self) -> list[Prediction]:
        """Plans that no other beats in both TPOT and throughput, by TPOT."""
        search = TableSearch(self.question, self.table)
        limits = self.limits.finite(without="tpot")
        return [search.replay(row) for row in pareto_front(self.table, limits)]


def make_plan(
    deployment: Deployment,
    workload: Workload,
    objective: str,
    limits: PlanLimits,
    admission: Admission | None = None,
    error: float | None = None,
) -> ChosenPlan:
    """Choose technique, settings and batch for a workload.

    Parameters
    ----------
    error : relative, between any two techniques; what the ledger of errors says if None.

    Raises
    ------
    InputError
        For an unknown objective, and for costs on hardware without a price.
    NoPlanError
        If nothing is within the limits; says which stand in the way, and what would do.
    """
    q = Question(deployment, workload, objective, limits, admission or Admission())
    return answer(replace(q, error=error))


def answer(question: Question) -> ChosenPlan:
    """The plan for a question."""
    started = perf_counter()
    if cut := describe_cut(question.deployment.stack.family, question.deployment):
        remedies = list(deployment_changes(question))
        raise NoPlanError(f"no plan meets the limits: {cut}", remedies, question.deployment)
    search = TableSearch(question, tabulate(question))
    search.drafts()
    search.refine()
    limits = question.limits.finite()
    placed = add_placements(question, search)
    add_compositions(question, search, [p.technique for p in placed.uniform.best])
    row = search.chosen(limits) if search.table.technique else None
    if row is None:
        raise explain_no_plan(question, search)
    best = search.optimum(limits)
    assert best is not None
    choice = search.replay(row)
    seconds = perf_counter() - started
    # of the best there is: what is simpler gives up a little
    found = solve_prices(question, search, best, placed.uniform)
    top = search.value(best)
    return ChosenPlan(
        question=question,
        choice=choice,
        evidence=search.table.evidence[row],
        baseline=choice if choice.technique.name == FULL else find_baseline(question, search),
        alternatives=find_alternatives(question, search, row),
        knees=find_knees(question, search, row),
        waves=find_waves(question, choice),
        binding=find_bindings(question, search, best, found, placed.uniform),
        prices=found,
        advice=find_advice(question, choice),
        solver=Solved(
            options=len(search.table),
            solves=placed.solves,
            replays=placed.replays,
            seconds=seconds,
            optimum=search.replay(best),
            given_up=max(0.0, (search.value(row) - top) / abs(top)),
        ),
        likely=target_probability(question, choice),
        table=search.table,
        uniform=placed.uniform,
        engine_best=best_runnable(question, search, row),
    )


def plan_among(questions: list[Question]) -> ChosenPlan:
    """The best plan over questions that differ in weights, card or GPUs, the simplest first.

    Between deployments too, what is simpler wins within the known error. Of several formats of
    weights an engine runs what is chosen, where any of it keeps the limits.

    Raises
    ------
    NoPlanError
        If none has a plan: what the simplest would need.
    """
    too_lossy = [q for q in questions if q.weights_lose]
    questions = [q for q in questions if not q.weights_lose]
    if len(questions) == 1:
        return replace(answer(questions[0]), too_lossy=too_lossy)
    if len({q.deployment.weights for q in questions}) > 1:
        with suppress(NoPlanError):
            found = _best_among(list(map(_runnable, questions)))
            return replace(found, too_lossy=too_lossy, restricted=True)
    return replace(_best_among(questions), too_lossy=too_lossy)


def _runnable(question: Question) -> Question:
    """The question with those techniques alone that the engine asked for, or any server, runs."""
    d, admission = question.deployment, question.admission
    runs = engines_running if admission.engine else served_by
    some = tuple(t for t in admission.candidates() if runs(t.name, d))
    if not some:
        return question
    return replace(question, admission=replace(admission, techniques=some, layered={}))


def _best_among(questions: list[Question]) -> ChosenPlan:
    quick: dict[int, Prediction] = {}
    for i, q in enumerate(questions):
        with suppress(InputError, InfeasibleError):
            cut = describe_cut(q.deployment.stack.family, q.deployment)
            found = None if cut else quick_plan(q)
            quick |= {} if found is None else {i: found}

    def settle(some: Mapping[int, Prediction]) -> int:
        """The simplest of those deployments that are as good as the best."""
        return min(
            as_good_as_best(
                some,
                lambda i: -score(questions[i], some[i]),
                lambda i, best: _apart(questions[i], some[i], some[best]),
            )
        )

    order = sorted(quick, key=lambda i: -score(questions[i], quick[i]))[:FINALISTS]
    order = list(dict.fromkeys([*order, settle(quick)])) if quick else list(range(len(questions)))
    plans: dict[int, ChosenPlan] = {}
    problem: NoPlanError | None = None
    for i in order:
        try:
            plans[i] = answer(questions[i])
        except NoPlanError as none:
            problem = problem or none
    if not plans:
        assert problem is not None
        problem.deployment = questions[0].deployment
        raise problem
    index = settle({i: plan.choice for i, plan in plans.items()})
    planned = quick | {i: plan.choice for i, plan in plans.items()}
    others = [planned[i] for i in sorted(planned) if i != index]
    missing = [q.deployment for i, q in enumerate(questions) if i not in planned]
    return replace(plans[index], others=others, impossible=missing)


def _apart(question: Question, simpler: Prediction, best: Prediction) -> float:
    """What the best deployment must bring over a simpler one; narrower weights the known error."""
    mine, other = (WEIGHT_FORMATS[p.deployment.weights].bytes(4096, 4096) for p in (simpler, best))
    known = question.between(simpler.technique, best.technique)
    return max(ACROSS, known) if mine > other else ACROSS
