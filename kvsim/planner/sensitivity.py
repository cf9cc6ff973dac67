"""What would change a plan: prices, binding limits, breakpoints, and the chance that it holds.

Each is the question solved again with something changed: a little more memory, bandwidth or time, a
limit taken away, longer prompts or other batches, and where no plan exists the smallest relaxation
of each limit.

A prediction comes with an 80 % interval of measured over predicted times; each half of it is taken
for that of a normal distribution of their logarithm.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from math import isfinite, log

import numpy as np

from kvsim.evidence.ledger import WITHIN_80, KnownError, evidence_for, share_below
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware, Link
from kvsim.machines.profiles import hardware_names, load_hardware, with_drive
from kvsim.planner.alternatives import (
    LABELS,
    NoPlanError,
    PlanRemedy,
    admitting_options,
    ask_on,
    deployment_changes,
    drop_dominated,
    larger_tp,
    narrower_weights,
    quick_plan,
)
from kvsim.planner.layers import add_placements
from kvsim.planner.local_search import (
    PRICE_STRIDES,
    UniformPlacements,
    can_fill_drive,
    placement_kinds,
    search_from,
)
from kvsim.planner.question import (
    DEFAULT_TPOT,
    DEFAULT_TTFT,
    GIB,
    PlanLimits,
    Question,
    format_number,
    format_seconds,
    relative_gain,
    round_up,
    show_time,
    simplicity_rank,
    technique_label,
)
from kvsim.planner.table import (
    Options,
    TableSearch,
    best_row,
    nearest_row,
    relax_limits,
    rows_as_good,
    rows_within,
    tabulate_settings,
)
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point, weights_bytes
from kvsim.quality.evidence import KNOWN_BAD, Evidence
from kvsim.techniques import parse
from kvsim.techniques.released import FULL, engine_refusal
from kvsim.techniques.technique import Technique

# prices and binding limits

PRICE_STEP = 1.1  # times a bandwidth or a time
PRICE_REACH = 1.25  # techniques this far behind may win where something changes by a tenth
MIN_PRICE = 1e-3  # a gain below this is none
SAME_OBJECTIVE = 5e-3  # relative difference below which the simpler of two is named


@frozen
class Binding:
    """A target or quality limit without which the plan would be better.

    Attributes
    ----------
    limit
        Name of the limit, such as ``tpot``.
    gain_without
        Relative improvement of the objective if the limit is removed.
    technique
        Technique that would then be chosen; empty if none is found.
    option
        Command-line option that removes the limit; empty for latency targets.
    evidence
        Of the technique's loss of quality, where the limit is on that.
    """

    limit: str
    gain_without: float  # of the objective, relative, as solved without the limit
    technique: str  # what would then be chosen
    option: str = ""  # of the command line, which takes the limit away
    evidence: Evidence | None = None


def solve_prices(
    question: Question, search: TableSearch, row: int, uniform: UniformPlacements
) -> dict[str, float]:
    """Estimate how much the objective improves if a resource or limit is increased slightly.

    The plan is optimised again for one more GiB of GPU memory, for 16 GiB more host memory, and
    for 10 % more of each finite latency target, bandwidth and the arithmetic rate. Only techniques
    that are close to the best one are considered (see :func:`near_techniques`).

    Parameters
    ----------
    question
        The planning problem.
    search
        Table of the techniques and settings that were evaluated for it.
    row
        Row of the chosen plan in this table.
    uniform
        Best placements with the same settings in all layers, where the new searches start.

    Returns
    -------
    dict of str to float
        Relative improvement of the objective by description of the change, such as
        ``"one more GiB of GPU memory"``; 0 if there is none.
    """
    leaders, limits = near_techniques(search, row), question.limits
    known = _tabulate(question, leaders, limits.gpu_memory + GIB)
    known.refine()
    refined = _best_value(known)
    value = search.value(row) if refined is None else min(search.value(row), refined)
    starts = uniform.starts
    asked = {"one more GiB of GPU memory": known.under(gpu_memory=limits.gpu_memory + GIB)}
    more = question.with_limits(host_memory=limits.host_memory + 16 * GIB)
    uses_host = bool(known.table.columns["host_memory"].any())
    asked["16 GiB more host memory"] = _tabulate(more, leaders) if uses_host else known
    for name, label in (("ttft", "a 10 % looser TTFT"), ("tpot", "a 10 % looser TPOT")):
        limit = getattr(limits, name)
        if np.isfinite(limit):
            asked[label] = known.under(**{name: PRICE_STEP * limit})
    for label, links in (
        ("10 % more host link bandwidth", ("h2d", "d2h")),
        ("10 % more host memory bandwidth", ("dram",)),
        ("10 % more GPU memory bandwidth", ("hbm",)),
    ):
        d = with_faster_links(question.deployment, links)
        asked[label] = _tabulate(replace(question, deployment=d), leaders)
    d = with_faster_arithmetic(question.deployment)
    asked["10 % faster arithmetic on the GPU"] = _tabulate(replace(question, deployment=d), leaders)
    found: dict[str, float] = {}
    for label, other in asked.items():
        other.refine()
        for prediction in search_from(other.q, starts, PRICE_STRIDES):
            other.include(prediction)
        better = _best_value(other)
        found[label] = 0.0 if better is None else relative_gain(value, better)
    return found


def _tabulate(q: Question, leaders: list[Technique], *gpu: float) -> TableSearch:
    """Some techniques at every batch that the limits, or these GPU memories, allow. [B]"""
    return TableSearch(q, tabulate_settings(q, leaders, (q.limits.gpu_memory, *gpu)))


def _best_value(search: TableSearch) -> float | None:
    """The best objective within the limits."""
    row = search.optimum(search.q.limits.finite())
    return None if row is None else search.value(row)


def find_bindings(
    question: Question,
    search: TableSearch,
    row: int,
    found: dict[str, float],
    uniform: UniformPlacements,
) -> list[Binding]:
    """Find the latency targets and quality limits without which the plan would be better.

    Memory limits are not included; :func:`solve_prices` gives the value of more memory.

    Parameters
    ----------
    question
        The planning problem.
    search
        Table of the techniques and settings that were evaluated for it.
    row
        Row of the chosen plan in this table.
    found
        Relative improvements that :func:`solve_prices` returned.
    uniform
        Best placements with the same settings in all layers, where the new searches start.

    Returns
    -------
    list of Binding
        The binding limits; empty if no limit costs anything.
    """
    value, limits = search.value(row), []
    cheap = {"ttft": "a 10 % looser TTFT", "tpot": "a 10 % looser TPOT"}
    for name, label in cheap.items():
        if found.get(label, 0.0) > MIN_PRICE:
            limits.append(_solve_without(question, search, row, name, uniform))
    for name in ("loss", "assumed"):
        other = search.optimum(question.limits.finite(without=name) | {"harm": KNOWN_BAD})
        if other is None:
            continue
        technique = technique_label(search.table.technique[other])
        error = question.between(search.table.technique[other], search.table.technique[row])
        if relative_gain(value, search.value(other)) > max(MIN_PRICE, error):
            option = " ".join(admitting_options(question, search, other))
            gain, known = relative_gain(value, search.value(other)), search.table.evidence[other]
            limits.append(Binding(name, gain, technique, option, known))
    return limits


def _solve_without(
    q: Question, search: TableSearch, row: int, name: str, uniform: UniformPlacements
) -> Binding:
    """Solved without a target."""
    other = search.under(**{name: np.inf})
    for prediction in search_from(other.q, uniform.starts):
        other.include(prediction)
    limits, value = other.q.limits.finite(), search.value(row)
    found = other.optimum(limits)
    if found is None:
        return Binding(name, 0.0, "")
    best = other.value(found)
    return Binding(
        name, relative_gain(value, best), technique_label(_simplest_technique(other, limits, best))
    )


def _simplest_technique(search: TableSearch, limits: dict[str, float], best: float) -> Technique:
    """The simplest technique that is as good as the best but for ``EQUAL``."""
    goal, table = search.table.columns[search.q.objective], search.table
    rows = rows_as_good(goal, rows_within(goal, table.columns, limits), best, SAME_OBJECTIVE)
    some: list[Technique] = [table.technique[row] for row in rows]
    return min(some, key=simplicity_rank)


def near_techniques(search: TableSearch, row: int) -> list[Technique]:
    """Return the techniques, each with its best settings, that are at most 25 % behind a plan.

    A change of a resource by 10 % may make one of them the best.

    Parameters
    ----------
    search
        Table of the evaluated techniques and settings.
    row
        Row of the plan, whose technique is always included.
    """
    value, limits = search.value(row), search.q.limits.finite()
    goal, found = search.table.columns[search.q.objective], {row: None}
    for name in search.table.names:
        best = search.best(limits, name)
        if best is not None and relative_gain(float(goal[best]), value) < PRICE_REACH - 1:
            found[best] = None
    return [search.table.technique[i] for i in found]


def with_faster_links(
    deployment: Deployment, links: tuple[str, ...], factor: float = PRICE_STEP
) -> Deployment:
    """Return a deployment in which the bandwidth of some links is multiplied by a factor.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    links
        Names of the links, such as ``h2d``.
    factor
        Factor on their bandwidth.
    """
    changed = {
        name: Link(link.bandwidth * factor, link.latency) if name in links else link
        for name, link in deployment.hardware.links.items()
    }
    return replace(deployment, hardware=replace(deployment.hardware, links=changed))


def with_faster_arithmetic(deployment: Deployment) -> Deployment:
    """The deployment with all number formats of the GPU a tenth faster."""
    rates = {dtype: PRICE_STEP * rate for dtype, rate in deployment.hardware.flops.items()}
    return replace(deployment, hardware=replace(deployment.hardware, flops=rates))


# breakpoints

BREAKPOINT_FACTORS = (2.0, 4.0, 8.0, 0.5, 0.25, 0.125)
FRONT_ROUNDING = 1e-6  # of a TPOT or a throughput: what differs by less is equal
BREAKPOINT_HALVINGS = 4  # halvings of the interval in which the choice changes


@frozen
class Breakpoint:
    """A value of an input at which the planner starts to choose a different technique.

    Attributes
    ----------
    what
        Name of the input: ``prompt``, ``batch``, ``host link bandwidth`` or
        ``host memory bandwidth``.
    factor
        The value divided by that of the original question.
    value
        The value, in the unit of the input. [tokens, sequences or B/s]
    technique
        Technique that is chosen there. All combinations of placements share one name; empty if
        nothing meets the limits.
    """

    what: str
    factor: float
    value: float
    technique: str


def find_breakpoints(
    question: Question, search: TableSearch, chosen: Technique, uniform: UniformPlacements
) -> list[Breakpoint]:
    """Find the smallest changes of single inputs that change the chosen technique.

    Prompt length, host bandwidths and a fixed batch are increased and decreased by up to a factor
    of 8. Every technique competes with the settings that are best for the original question, and
    placements with the same settings in all layers are optimised again.

    Parameters
    ----------
    question
        The planning problem.
    search
        Table of the techniques and settings that were evaluated for it.
    chosen
        The chosen technique.
    uniform
        Best placements with the same settings in all layers, where the new searches start.

    Returns
    -------
    list of Breakpoint
        At most one for each input and direction.
    """
    limits = search.q.limits.finite()
    best = (search.best(limits, name) for name in search.table.names)
    rivals = [search.table.technique[row] for row in best if row is not None]
    w, d = question.workload, question.deployment
    kinds: list[tuple[str, float, Callable[[float], Question]]] = [
        ("prompt", w.prompt, lambda x: _with_prompt(question, x)),
        (
            "host link bandwidth",
            d.bandwidth["h2d"],
            lambda x: ask_on(question, with_faster_links(d, ("h2d", "d2h"), x)),
        ),
        (
            "host memory bandwidth",
            d.hardware.links["dram"].bandwidth,
            lambda x: ask_on(question, with_faster_links(d, ("dram",), x)),
        ),
    ]
    if w.batch is not None:
        batch = w.batch
        kinds.append(("batch", batch, lambda x: _with_batch(question, max(1, round(batch * x)))))
    name, found = technique_label(chosen), []
    for what, value, ask in kinds:
        for direction in (BREAKPOINT_FACTORS[:3], BREAKPOINT_FACTORS[3:]):
            flip = _first_breakpoint(ask, direction, lambda q: _winner(q, rivals, uniform), name)
            if flip is not None:
                found.append(Breakpoint(what, flip[0], value * flip[0], flip[1]))
    return found


def _first_breakpoint(
    ask: Callable[[float], Question],
    factors: tuple[float, ...],
    choose: Callable[[Question], str],
    name: str,
) -> tuple[float, str] | None:
    """The factor nearest to 1 in one direction with another choice, and that choice."""
    near = 1.0
    for far in factors:
        other = choose(ask(far))
        if other != name:
            for _ in range(BREAKPOINT_HALVINGS):
                middle = float(np.sqrt(near * far))
                tried = choose(ask(middle))
                if tried == name:
                    near = middle
                else:
                    far, other = middle, tried
            return far, other
        near = far
    return None


def _winner(q: Question, rivals: list[Technique], uniform: UniformPlacements) -> str:
    """What is chosen of some techniques and of placements, by name."""
    search = _tabulate(q, rivals)
    for prediction in search_from(q, uniform.starts):
        search.include(prediction)
    row = search.chosen(q.limits.finite())
    return "" if row is None else technique_label(search.table.technique[row])


def _with_prompt(q: Question, factor: float) -> Question:
    prompt = max(1, round(q.workload.prompt * factor))
    return replace(q, workload=replace(q.workload, prompt=prompt))


def _with_batch(q: Question, batch: int) -> Question:
    return replace(q, workload=replace(q.workload, batch=batch))


def pareto_front(table: Options, limits: dict[str, float]) -> list[int]:
    """Return the Pareto-optimal rows in TPOT and throughput among those within the limits.

    Of rows that are equal up to rounding, only the simplest technique is included.

    Parameters
    ----------
    table
        The evaluated techniques and settings.
    limits
        Largest admitted value by column name, in the unit of the column.

    Returns
    -------
    list of int
        Indices of the rows, by increasing TPOT.
    """
    columns = table.columns
    ok = np.ones(len(table), dtype=bool)
    for name, limit in limits.items():
        ok &= columns[name] <= limit * (1 + 1e-9)
    rows = np.flatnonzero(ok)
    tpot, goal = columns["tpot"], columns["throughput"]
    found: list[int] = []
    for row in rows[np.lexsort((goal[rows], tpot[rows]))].tolist():
        last = found[-1] if found else None
        if last is None or goal[row] < goal[last] - FRONT_ROUNDING * abs(goal[last]):
            equal = last is not None and tpot[row] <= tpot[last] * (1 + FRONT_ROUNDING)
            found[len(found) - equal :] = [row]
        elif goal[row] <= goal[last] + FRONT_ROUNDING * abs(goal[last]) and (
            tpot[row] <= tpot[last] * (1 + FRONT_ROUNDING)
            and simplicity_rank(table.technique[row]) < simplicity_rank(table.technique[last])
        ):
            found[-1] = row
    return found


# the probability that targets are kept

LIKELY_ENOUGH = 0.9  # what the upper end of an 80 % interval stays below
ERROR_KINDS = {"ttft": "prefill", "tpot": "decode"}


@frozen
class TargetProbability:
    """Probability that a plan meets its latency targets.

    Attributes
    ----------
    kept
        Probability that each target (``ttft``, ``tpot``) is met. Targets that are not set, or for
        which no prediction error was measured, are missing.
    safer
        The best batch of the same technique that meets each target with a probability of at least
        ``LIKELY_ENOUGH``. None if the plan does so itself, if the batch is fixed, or if no batch
        does.
    """

    kept: dict[str, float]
    safer: Prediction | None

    @property
    def sure(self) -> bool:
        """Whether the plan meets each target with a probability of at least ``LIKELY_ENOUGH``."""
        return all(share >= LIKELY_ENOUGH for share in self.kept.values())


def target_probability(question: Question, choice: Prediction) -> TargetProbability:
    """Estimate the probability that a plan meets its latency targets.

    The distribution of the prediction error comes from measurements on this or a similar machine.

    Parameters
    ----------
    question
        The planning problem.
    choice
        Prediction for the chosen plan.

    Returns
    -------
    TargetProbability
        Probability by target and, if one is too low, a smaller batch that is safe.
    """
    name = choice.technique.name
    known: dict[str, KnownError] = {}
    for target, kind in ERROR_KINDS.items():
        error = evidence_for(question.deployment, name, kind)
        if isfinite(getattr(question.limits, target)) and error.entry is not None:
            known[target] = error
    times = {"ttft": float(choice.ttft_s[0]), "tpot": float(np.nan_to_num(choice.tpot_s)[0])}
    kept = {
        target: probability_below(
            error, getattr(question.limits, target) / max(times[target], 1e-12)
        )
        for target, error in known.items()
    }
    found = TargetProbability(kept, None)
    return found if found.sure else TargetProbability(kept, _find_safer(question, choice, known))


def probability_below(error: KnownError, factor: float) -> float:
    """Compute the probability that a measured time is below a multiple of the predicted time.

    The ratio of the two is taken as log-normal with median 1; its spread above and below 1 comes
    from the two ends of the 80 % interval.

    Parameters
    ----------
    error
        Measured prediction error.
    factor
        Multiple of the predicted time.
    """
    reach = log(error.high) if factor >= 1 else -log(error.low)
    if reach == 0.0:
        return 1.0 if factor >= 1 else 0.0
    return share_below(factor, reach / WITHIN_80)


def _find_safer(
    question: Question, choice: Prediction, known: dict[str, KnownError]
) -> Prediction | None:
    """The best batch of the choice's technique with the upper end of each interval within."""
    if question.workload.batch is not None:
        return None
    limits = {name: getattr(question.limits, name) / error.high for name, error in known.items()}
    search = _tabulate(question.with_limits(**limits), [choice.technique])
    search.refine()
    row = search.optimum(search.q.limits.finite())
    return None if row is None else search.replay(row)


# no plan

MISSED_BY_LITTLE = 2.0  # times a target: what is missed by less is loosened first


def explain_no_plan(question: Question, search: TableSearch) -> NoPlanError:
    """Explain why no plan meets the limits, and what would help.

    Parameters
    ----------
    question
        The planning problem.
    search
        Table of the techniques and settings that were evaluated for it.

    Returns
    -------
    NoPlanError
        Error to be raised by the caller. Its message states what is infeasible: that no technique
        runs here, that all of them lose too much quality, or which limit is exceeded. It also has
        the smallest sufficient value of each single limit, if changing one is enough, and changes
        of the question with which all limits can be met (see :func:`find_remedies`).
    """
    table, limits = search.table, question.limits
    if not table.technique:
        text = question.admission.describe_refusals(question.deployment) or (
            "no technique can run this model, batch and hardware; see `kvsim techniques`"
        )
        return NoPlanError(text, list(find_remedies(question)), question.deployment)
    allowed = (table.columns["loss"] <= limits.loss) & (table.columns["assumed"] <= limits.assumed)
    if not allowed.any():
        return NoPlanError(_too_lossy(question, search), [], question.deployment)
    hard = limits.hard()
    columns = {k: table.columns[k][allowed] for k in hard}
    alone = {k: v for k, v in relax_limits(columns, hard).items() if v > hard[k] * (1 + 1e-9)}
    looser = longer_times(question)
    if looser is not None and len(looser.least) == 1:  # mixed placements are not in the table
        alone |= {k: min(v, alone.get(k, np.inf)) for k, v in looser.least.items()}
    parts = [
        f"{LABELS[k]} would have to be {_describe_limit(question, k, v)}" for k, v in alone.items()
    ]
    text = " or ".join(parts)
    if not parts:
        text = "several limits fail together; " + _describe_excess(question, columns, hard)
    remedies = list(find_remedies(question, search, looser))
    text = f"no plan meets the limits: {text}"
    return NoPlanError(text, remedies, question.deployment, alone)


def _too_lossy(question: Question, search: TableSearch) -> str:
    """That everything loses too much, and what would admit the mildest, or all."""
    table, most = search.table, question.limits.loss
    text = f"nothing that can run here is known to lose at most {100 * most:g} %"
    if not most:
        text = "no lossless technique can run here"
    finite = np.flatnonzero(np.isfinite(table.columns["loss"]) & (table.columns["loss"] > most))
    if not finite.size:
        return f"{text}; --lossy admits techniques with an unknown loss"
    row = int(finite[np.argmin(table.columns["loss"][finite])])
    option = " ".join(admitting_options(question, search, row))
    return f"{text}; {option} admits {table.technique[row]} ({table.evidence[row]})"


def _describe_limit(question: Question, name: str, value: float) -> str:
    """What a limit would have to be, and what it is."""
    limit = getattr(question.limits, name)
    usual = (
        "the default " if {"ttft": DEFAULT_TTFT, "tpot": DEFAULT_TPOT}.get(name) == limit else ""
    )
    needed, now = format_limit(name, value), format_limit(name, limit)
    text = f"{needed} instead of {usual}{now}"
    if needed == now and name.endswith("memory"):  # it is missed by less than is shown of it
        text = f"{format_number((value - limit) / 2**20)} MiB more than {now}"
    capacity = question.deployment.hardware.gpu_memory
    if name == "gpu_memory" and value > capacity > limit:
        text += f" (of {format_limit(name, capacity)})"
    return text


def _describe_excess(q: Question, columns: dict[str, np.ndarray], hard: dict[str, float]) -> str:
    row, excess = nearest_row(columns, hard)
    return "together " + " and ".join(
        f"{LABELS[k]} would have to be {_describe_limit(q, k, float(columns[k][row]))}"
        for k in excess
    )


def format_limit(name: str, value: float) -> str:
    """Format the value of a limit with its unit.

    Parameters
    ----------
    name
        Name of the limit, such as ``ttft`` or ``gpu_memory``.
    value
        Its value. [s or B]
    """
    return f"{format_number(value / GIB)} GiB" if name.endswith("memory") else format_seconds(value)


def find_remedies(
    question: Question, search: TableSearch | None = None, looser: "LooserTimes | None" = None
) -> Iterator[PlanRemedy]:
    """Yield changes of the question with which a plan meets all limits, roughly the smallest first.

    They include looser latency targets, lossy techniques, a smaller batch, narrower weights, more
    or other GPUs, an NVMe drive and a shorter prompt.

    Parameters
    ----------
    question
        The planning problem, for which there is no plan.
    search
        Table of the evaluated techniques and settings; None if no technique can run. Lossy
        techniques and smaller batches are tried only with a table.
    looser
        Result of :func:`longer_times`. It is yielded first if it exceeds the targets by less than
        a factor of ``MISSED_BY_LITTLE``, otherwise near the end.
    """
    limits = question.limits
    if looser is not None and looser.little:
        yield looser.remedy
    if search is not None:
        for option, wide in (
            ("lossy", replace(limits, loss=max(limits.loss, KNOWN_BAD))),
            ("acceptance", replace(limits, assumed=1.0)),
        ):
            found = _plan_admitting(question, search, option, wide)
            if found is not None:
                yield PlanRemedy({option: ""}, "other techniques", found)
        if question.workload.batch is not None and question.workload.batch > 1:
            free = replace(question, workload=replace(question.workload, batch=None))
            smaller = quick_plan(free)
            if smaller is not None:
                batch = {"batch": f"{float(smaller.batch[0]):.0f}"}
                yield PlanRemedy(batch, "a smaller batch", smaller)
    alone = list(drop_dominated(question, deployment_changes(question)))
    yield from alone
    if not any(set(r.changes) == {"weights"} for r in alone):
        yield from islice(_placed_narrower(question), 1)
    drive = _with_drive(question)
    if drive is not None:
        yield drive
    other = next(_other_gpus(question), None)
    if other is not None:
        yield other
    if not alone and (looser is None or len(looser.least) > 1):
        yield from remedies_with_longer_ttft(question)
    if looser is not None and not looser.little:
        yield looser.remedy
    shorter = longest_prompt(question)
    if shorter is not None:
        yield shorter


@frozen
class LooserTimes:
    """Latency targets that are just loose enough for a plan.

    Attributes
    ----------
    remedy
        The new targets, and the plan that meets them.
    least
        Latency of the fastest plan by target (``ttft``, ``tpot``); only targets to loosen. [s]
    little
        Whether each of these is below ``MISSED_BY_LITTLE`` times the requested target.
    """

    remedy: PlanRemedy
    least: dict[str, float]  # what the quickest plan takes [s]
    little: bool  # whether that is less than ``LITTLE`` times what was asked for


def longer_times(question: Question) -> LooserTimes | None:
    """Find the smallest latency targets for which there is a plan.

    TTFT alone is loosened if that is enough, otherwise TPOT alone, otherwise both.

    Parameters
    ----------
    question
        The planning problem, for which there is no plan.

    Returns
    -------
    LooserTimes or None
        The targets, rounded up; None if there is no plan even without them.
    """
    for names in (("ttft",), ("tpot",), ("ttft", "tpot")):
        asked = {name: getattr(question.limits, name) for name in names}
        if not all(map(np.isfinite, asked.values())):
            continue
        free = question.with_limits(**dict.fromkeys(names, np.inf))
        quickest = replace(free, objective="latency")
        found = quick_plan(quickest) or _best_placement(quickest)
        if found is not None:
            times = {"ttft": float(found.ttft_s[0]), "tpot": float(found.tpot_s[0])}
            least = {name: times[name] for name in names}
            above = {name: round_up(value) for name, value in least.items()}
            within = question.with_limits(**above)
            said = {name: show_time(value) for name, value in above.items()}
            little = all(value < MISSED_BY_LITTLE * asked[name] for name, value in least.items())
            plan = quick_plan(within) or _best_placement(within) or found
            return LooserTimes(PlanRemedy(said, "looser targets", plan), least, little)
    return None


def _with_drive(question: Question) -> PlanRemedy | None:
    """A drive with room for all weights, where GPUs and host memory are too small for them."""
    d, limits = question.deployment, question.limits
    one = decode_point(1.0, np.ones(1), 1.0, 0.0)
    weights = d.gpus * weights_bytes(parse(FULL).resident(d, one))
    if d.hardware.disk_memory or weights <= limits.gpu_memory * d.gpus + limits.host_memory:
        return None
    size = 1e9 * round_up(weights / 1e9)  # as --disk takes it
    driven = replace(d, hardware=with_drive(d.hardware, size))
    wider = replace(question, deployment=driven).with_limits(disk=size)
    if not can_fill_drive(wider):
        return None
    found = quick_plan(wider, ("flexgen",)) or _best_placement(wider)
    return (
        None if found is None else PlanRemedy({"disk": f"{size / 1e9:.0f}"}, "an NVMe drive", found)
    )


def _placed_narrower(question: Question) -> Iterator[PlanRemedy]:
    """Narrower weights, the gentlest first, of which a part stays on the host."""
    for name, caution in narrower_weights(question).items():
        asked = ask_on(question, replace(question.deployment, weights=name))
        found = _best_placement(asked) if placement_kinds(asked) else None
        if found is not None:
            yield PlanRemedy({"weights": name}, f"{name} weights", found, caution=caution)


def remedies_with_longer_ttft(question: Question) -> Iterator[PlanRemedy]:
    """Yield changes of the deployment that need a looser TTFT target as well.

    Parameters
    ----------
    question
        The planning problem, for which there is no plan.

    Yields
    ------
    PlanRemedy
        At most one with narrower weights, and one with a larger degree of tensor parallelism.
    """
    d = question.deployment
    caution = narrower_weights(question)
    weights = [({"weights": name}, replace(d, weights=name)) for name in caution]
    gpus = [({"tp": str(n)}, replace(d, tp=n)) for n in larger_tp(d)]
    for ways in (weights, gpus):
        for changes, other in ways:
            looser = longer_times(ask_on(question, other))
            if looser is not None and set(looser.least) == {"ttft"}:
                both = {**changes, **looser.remedy.changes}
                why = caution.get(other.weights, "")
                yield replace(looser.remedy, changes=both, what="both together", caution=why)
                break


def _best_placement(q: Question) -> Prediction | None:
    """The best placement, where no single technique fits."""
    search = TableSearch(q, Options())
    add_placements(q, search)
    row = search.optimum(q.limits.finite())
    return None if row is None else search.replay(row)


def _plan_admitting(
    q: Question, search: TableSearch, option: str, wide: PlanLimits
) -> Prediction | None:
    """The best row if lossy techniques, or assumed acceptances, were admitted."""
    table = search.table
    columns = dict(table.columns)
    if option == "lossy":
        unknown = replace(q.admission, unmeasured=True)
        columns["loss"] = np.array([unknown.loss(e) for e in table.evidence])
    row = best_row(columns[q.objective], columns, wide.finite())
    return None if row is None else search.replay(row)


def _other_gpus(q: Question) -> Iterator[PlanRemedy]:
    """GPUs of the catalogue that meet all limits, the cheapest or else the smallest first."""

    def order(h: Hardware) -> tuple[float, float]:
        return (h.price if h.price is not None else np.inf, h.gpu_memory)

    known = [load_hardware(name) for name in hardware_names()]
    for hardware in sorted(known, key=order):
        if hardware.gpu_memory <= q.deployment.hardware.gpu_memory:
            continue
        if q.admission.engine and engine_refusal(
            q.admission.engine, replace(q.deployment, hardware=hardware)
        ):
            continue
        other = ask_on(q, replace(q.deployment, hardware=hardware))
        room = other.limits.gpu_memory, other.limits.host_memory
        if q.workload.largest(parse(FULL), other.deployment, *room) < (q.workload.batch or 1):
            continue
        found = quick_plan(other, (FULL,))
        if found is not None:
            yield PlanRemedy({"gpu": hardware.name}, hardware.title, found)


def longest_prompt(question: Question) -> PlanRemedy | None:
    """Find the longest prompt for which there is a plan.

    Parameters
    ----------
    question
        The planning problem, for which there is no plan.

    Returns
    -------
    PlanRemedy or None
        A prompt length within about 5 % of the longest, rounded, and its plan; None if even a
        prompt of 64 tokens is too long.
    """
    w = question.workload

    def plan(prompt: int) -> Prediction | None:
        return quick_plan(replace(question, workload=replace(w, prompt=prompt)))

    low, high, found = 0, w.prompt, None
    while high > 64 and high - low > max(1, low // 20):
        middle = max(1, (low + high) // 2 if low else high // 4)
        tried = plan(middle)
        if tried is None:
            high = middle
        else:
            low, found = middle, tried
    if found is None or high <= 64:
        return None
    step = 10 ** int(np.log10(max(low / 20, 1)))
    shorter = plan(low - low % step) if low % step else None
    if shorter is not None:
        low, found = low - low % step, shorter
    return PlanRemedy({"prompt": str(low)}, "a shorter prompt", found)
