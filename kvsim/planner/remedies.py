"""What would do where nothing keeps the targets of a service: the same search with limits freed.

Each remedy is played like a plan: longer times, other weights, more GPUs, another card, two of
these together, shorter prompts, less certainty. Of each kind the cheapest is named, with the
options that ask for it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import product
from math import ceil, floor, log2, log10

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment, list_layouts
from kvsim.machines.profiles import hardware_names, load_hardware
from kvsim.planner.alternatives import NoPlanError, PlanRemedy
from kvsim.planner.load import IDLE, Carried, Load, ServiceLevel, known_factors
from kvsim.planner.question import (
    DEFAULT_TPOT,
    DEFAULT_TTFT,
    GIB,
    Question,
    format_number,
    format_seconds,
    narrower_formats,
    needed_option,
    round_up,
    show_time,
)
from kvsim.planner.service import (
    LAYOUTS_TRIED,
    ROUGH_STEP,
    Candidate,
    PlayedOption,
    ServiceQuestion,
    ServiceSearch,
    engine_runs,
    full_weights,
)
from kvsim.quality.evidence import KNOWN_BAD, weights_evidence
from kvsim.serving.outcome import Outcome
from kvsim.techniques.released import FULL, engine_refusal, served_by

MORE_GPUS = (1, 2, 4, 8, 16, 32, 64)
TIGHT = 1.25  # times what a request takes alone: a shorter target leaves no room for others
RAISED = 2.0  # times what is reached at light load: defaults that were out of reach
SLOWEST_READING = 1.0  # per token [s]
TARGET_SLACKS = (2.0, 4.0)  # the same of targets that are tried instead
HALVINGS = 3  # of the prompt
WORTH_NAMING = 0.1  # of the rate of equal requests without gaps: less is hardly a service
LONG_TAIL = 2.0  # times the mean: the longest of drawn requests, beyond which a tail is named
LONG_ENOUGH = 1.5  # times the mean: requests that a server with experts in host memory takes
TRIED_FURTHER = 4  # changes after one that carries less
WORTH_FURTHER = 1.5  # times the rate, which a target twice as long must carry to be named
CARDS_TRIED = 16  # cards, the cheapest first
LOSSY_TRIED = 3  # techniques that lose more than was admitted, the mildest first


@frozen
class _Tried:
    """A remedy, the targets with it, and whether it carries so little that others outdo it."""

    remedy: PlanRemedy
    option: PlayedOption
    asked: ServiceLevel
    poor: bool

    @property
    def carried(self) -> Carried:
        """What an engine carries with it."""
        return self.option.carried

    def differs_in_times(self, other: "_Tried") -> bool:
        """Whether the two change the same but for how long the targets are."""
        mine, its = (
            {k: v for k, v in r.changes.items() if k not in ("ttft", "tpot")}
            for r in (self.remedy, other.remedy)
        )
        return mine == its

    def outdone(self, other: "_Tried") -> bool:
        """Whether fewer changes carry more within targets that are no longer."""
        return (
            set(other.remedy.changes) < set(self.remedy.changes)
            and other.asked.ttft <= self.asked.ttft
            and other.asked.tpot <= self.asked.tpot
            and other.carried.per_s * ROUGH_STEP >= self.carried.per_s  # rates are found to a step
            and other.carried.gpus <= self.carried.gpus
        )


@frozen
class _Freed:
    """A question with something changed."""

    changes: Mapping[str, str]
    question: ServiceQuestion
    lossy: bool = False


Change = Callable[[_Freed], Iterator[_Freed]]


def explain_no_service(
    question: ServiceQuestion,
    with_prompt: Callable[[float], Load] | None = None,
    fitting: tuple[PlanRemedy, PlayedOption] | None = None,
) -> NoPlanError:
    """Why nothing keeps the targets, and the cheapest change of each kind that does.

    Parameters
    ----------
    fitting
        A change with which what does not fit does, and what it carries; it is told first.
    with_prompt
        Draws the same requests with prompts of another mean; None where they are a trace's.
    """
    q = question.deployments[0]
    told = {tuple(sorted(r.remedy.changes.items())): r for r in _remedies(question, with_prompt)}
    every = list(told.values())  # several kinds of changes may come to the same
    some = [r for r in every if not r.poor] or every
    kept = [r for r in some if not any(map(r.outdone, some))]
    same = [r for r in every if set(r.remedy.changes) <= {"ttft", "tpot"}]  # whatever it carries
    nearest = next(iter([*same, *kept]), None)
    remedies = [r.remedy for r in ([] if nearest is None else [nearest])]
    remedies += [r.remedy for r in kept if r is not nearest]
    option = None if nearest is None else nearest.option
    if fitting is not None:
        remedies, option = [fitting[0], *remedies], fitting[1]
    return NoPlanError(
        f"no plan meets the targets: {describe_obstacle(question)}",
        remedies,
        q.deployment,
        asked=describe_asked(question),
        nearest=option,
    )


def raise_defaults(question: ServiceQuestion, given: Collection[str]) -> ServiceQuestion | None:
    """Raise default targets that cannot be met even at light load, as with very long prompts.

    Parameters
    ----------
    question
        The question, of which nothing meets the targets.
    given
        Names of the targets that the user has set, which are kept.

    Returns
    -------
    ServiceQuestion or None
        The same question with defaults `RAISED` times what is reached at light load on the first
        deployment that holds the model; None if no default is out of reach, or if tokens would come
        more slowly than anybody reads.
    """
    times = (idle_times(question, where) for where in question.deployments)
    least = next((found for found in times if found is not None), None)
    if least is None:
        return None
    raised = {
        name: round_up(RAISED * value)
        for name, value in least.items()
        if name not in given and getattr(question.asked, name) < value < np.inf
    }
    if not raised or raised.get("tpot", 0.0) > SLOWEST_READING:
        return None
    return replace(question.under(**raised), raised=tuple(sorted(raised)))


def describe_asked(question: ServiceQuestion) -> str:
    """Which targets are kvsim's own, as none were given, and what the requests look like."""
    asked, usual = question.asked, {"ttft": DEFAULT_TTFT, "tpot": DEFAULT_TPOT}
    own = {
        k: f"{k.upper()} {format_seconds(v)}" for k, v in usual.items() if getattr(asked, k) == v
    }
    said = ""
    if own:
        many = len(own) > 1
        said = (
            f"{' and '.join(own.values())} {'are' if many else 'is'} kvsim's default "
            f"target{'s' if many else ''}; {' and '.join(f'--{k}' for k in own)} "
            f"set{'' if many else 's'} your own. "
        )
    return f"{said}Requests: {question.load.words}. {question.load.caution}".rstrip()


def describe_obstacle(question: ServiceQuestion) -> str:
    """What stands in the way on the first deployment on which anything fits."""
    q = question.deployments[0]
    least, where = None, ""
    for other in question.deployments:
        least = idle_times(question, other)
        if least is not None:
            where = _differing(q.deployment, other.deployment)
            break
    if least is None:
        known = list(ServiceSearch(question).candidates(q))
        if known and FULL not in {t.name for t in q.admission.candidates()}:
            return too_lossy(q, known)
        d = q.deployment
        if refused := q.admission.describe_refusals(d) or not_served(q):
            return refused
        tried = ServiceSearch(question).table(q).table.evidence
        harmful = [found for found in tried if q.admission.harm(found) > KNOWN_BAD]
        if harmful and FULL not in {t.name for t in q.admission.candidates()}:
            mildest = min(harmful, key=lambda found: found.column)
            admits = "" if mildest.unknown else f"; {needed_option(mildest)} admits it"
            return f"all named techniques may lose more than --lossy admits{admits} ({mildest})"
        if lossy := _weights_too_lossy(question):
            return lossy
        load = question.load
        tailed = _has_tail(load)
        need = "the longest request drawn, of" if tailed else "a sequence of"
        need = f"{need} {load.longest:,} tokens{',' if tailed else ''} does not fit"
        q = min(question.deployments, key=lambda q: full_weights(q.deployment))
        where = _differing(replace(d, weights=q.deployment.weights), q.deployment)
        d = q.deployment
        weights, size = full_weights(d), format_number(full_weights(d) / GIB)
        gib = f"{format_number(q.limits.gpu_memory / GIB)} GiB are usable"
        if weights >= q.limits.gpu_memory:
            need = f"the {d.weights} weights of {d.model.name} need {size} GiB per GPU"
            text = f"{need}{where}, and {gib}"
            hosted = _experts_may_move(q)
            options = "--stack llamacpp --n-cpu-moe auto"
            return f"{text} ({options} keeps experts in host memory)" if hosted else text
        text = f"{need}{where} next to {size} GiB of {d.weights} weights per GPU ({gib})"
        tail = "one --prompt is a mean of lengths with a long tail, which --lengths equal lacks"
        return f"{text}; {tail}" if tailed else text
    if np.inf in least.values() and (o := _play_idle(question, other)) is not None:
        return (
            f"{100 * o.refused.mean():.2g} % of requests do not fit in the KV cache{where}, so "
            f"fewer than the {100 * question.asked.share:g} % asked can be served"
        )
    found = []
    for name, value in least.items():
        limit = getattr(question.asked, name)
        if value > limit:
            found.append(
                f"even at light load{where}, {name.upper()} p{100 * question.asked.share:g} would "
                f"be {format_seconds(value)}, above the target of {format_seconds(limit)}"
            )
    sure = question.asked.sure
    if found and sure > 0.5:
        found[-1] += f" (with a margin for {100 * sure:g} % probability)"
    some = f"{100 * question.asked.share:g} % of requests"
    return "; ".join(found) or f"{some} cannot meet both targets, even at light load"


def _weights_too_lossy(question: ServiceQuestion) -> str:
    """That weights which fit lose more than is admitted, and what admits the gentlest of them."""
    unjudged = [
        replace(q, admission=replace(q.admission, judges_weights=False))
        for q in question.deployments
        if q.weights_lose
    ]
    known = [
        (q.weights_evidence, q.deployment.weights)
        for q in unjudged
        if idle_times(question, q) is not None
    ]
    if not known:
        return ""
    found, weights = min(known, key=lambda x: x[0].column)
    most = "unmeasured" if found.unknown else f"at most {100 * found.bound:.2g} % of scores"
    return (
        "the weights that fit may lose more quality than is admitted; "
        f"{needed_option(found)} admits {weights} ({most})"
    )


def _has_tail(load: Load) -> bool:
    """Whether the longest of drawn requests is far above their mean."""
    return load.traffic is not None and load.longest > LONG_TAIL * (load.prompt + load.generate)


def _experts_may_move(question: Question) -> bool:
    """Whether llama.cpp, which was not asked for, could keep the model's experts on the host."""
    d = question.deployment
    return bool(d.model.experts) and not question.admission.engine and "host" not in d.stack.kernels


def find_fitting(question: ServiceQuestion) -> Mapping[str, str]:
    """Options with which a model may fit that does not, or requests of which the longest does not.

    Parameters
    ----------
    question
        The question, of which nothing meets the targets.

    Returns
    -------
    dict
        Values by option: experts in host memory, or requests of equal lengths; empty where
        neither would help or anything fits.
    """
    load = question.load
    first = question.deployments[0]
    if any(idle_times(question, q) is not None for q in question.deployments):
        return {}
    if first.admission.describe_refusals(first.deployment) or not_served(first):
        return {}
    if _weights_too_lossy(question):
        return {}
    mean = load.prompt + load.generate
    q = min(question.deployments, key=lambda q: full_weights(q.deployment))
    if full_weights(q.deployment) < q.limits.gpu_memory:
        return {"lengths": "equal"} if _has_tail(load) else {}
    if not _experts_may_move(q):
        return {}
    length = min(2 ** ceil(log2(LONG_ENOUGH * mean)), q.deployment.model.max_context)
    hosted = {"stack": "llamacpp", "weights": "q4_k_m", "n_cpu_moe": "auto"}
    return hosted | {"max_model_len": str(length)}


def not_served(question: Question) -> str:
    """Why no engine starts the model there, if the engine of the times refuses it."""
    d, asked = question.deployment, question.admission
    if asked.engine or asked.only or served_by(FULL, d):
        return ""
    return engine_refusal(d.stack.family, d)


def _differing(first: Deployment, other: Deployment) -> str:
    """In what another deployment differs from the first: its weights and its layout."""
    parts = [f"{other.weights} weights"] if other.weights != first.weights else []
    mine, its = asdict(first.parallelism), asdict(other.parallelism)
    parts += [f"--{k} {its[k]}" for k in its if its[k] != mine[k]]
    return f" with {' '.join(parts)}" if parts else ""


def too_lossy(where: Question, known: list[Candidate]) -> str:
    """That everything loses too much, and what would admit the mildest.

    Parameters
    ----------
    where
        The deployment and its limits.
    known
        What can run there.
    """
    most = 100 * where.limits.loss
    text = f"nothing that can run here is known to lose at most {most:g} %"
    text = text if most else "no lossless technique can run here"
    mildest = min(known, key=lambda c: (c.evidence.column, -c.value))
    return f"{text}; {mildest.needs} admits {mildest.technique} ({mildest.evidence})"


def _play_idle(question: ServiceQuestion, where: Question) -> Outcome | None:
    """What happens at light load; None where nothing fits."""
    search, q = ServiceSearch(question), where
    c = search.plain_or_best(q)
    if c is None:
        return None
    try:
        costs = search.costs(c)
        assert costs.capacity > 0
    except InputError:
        return None
    slower = known_factors(q.deployment, c.technique, question.asked.sure).apply(costs)
    o = search.rates.play(slower, IDLE)
    return o if o.finished.any() else None


def idle_times(question: ServiceQuestion, where: Question) -> dict[str, float] | None:
    """TTFT and TPOT that enough requests keep at light load; None where nothing fits. [s]

    Infinite where more requests are larger than the cache than may be late.
    """
    o = _play_idle(question, where)
    if o is None:
        return None
    share, refused = question.asked.share, float(o.refused.mean())
    if refused > 1 - share:
        return {"ttft": np.inf, "tpot": np.inf}
    able = share / (1 - refused)  # of the others
    return {
        "ttft": float(np.nanquantile(o.ttft_s, able)),
        "tpot": float(np.nanquantile(o.tpot_s, able)) if np.isfinite(o.tpot_s).any() else 0.0,
    }


def _remedies(
    question: ServiceQuestion, with_prompt: Callable[[float], Load] | None
) -> Iterator[_Tried]:
    """The first change of each kind that does, and of several together where no part does alone."""
    start, done = _Freed({}, question), list[set[str]]()
    for kinds in CHANGED_TOGETHER:
        if any(some <= set(kinds) for some in done):
            continue
        found = _first_known_loss([CHANGES[kind] for kind in kinds], start)
        if found is not None:
            done += [] if found.poor else [set(kinds)]
            yield found
            alone = {"weights"} in done or {"weights", "times"} in done
            if "gpus" in kinds and "weights" not in kinds and not alone:
                changed = [_narrower, *(CHANGES[kind] for kind in kinds)]
                yield from _fewer_gpus(found, _apply(changed, start))
    cards = _first(_other_cards(start)) or _first(_apply([_other_cards, _longer_times], start))
    for found in (cards, _first(_less_sure(start))):
        if found is not None:
            yield found
    if with_prompt is not None:
        shorter = _first(_shorter(question, with_prompt))
        if shorter is not None:
            yield shorter


def _first_known_loss(kinds: list[Change], start: _Freed) -> _Tried | None:
    """The first change that does without an unknown loss of quality, else the first with one."""
    found = _first(x for x in _apply(kinds, start) if "lossy" not in x.changes)
    if (found is None or found.poor) and _more_loss in kinds:
        found = _first(x for x in _apply(kinds, start) if "lossy" in x.changes) or found
    return found


def _fewer_gpus(alone: _Tried, freed: Iterable[_Freed]) -> Iterator[_Tried]:
    """Narrower weights on fewer GPUs than the weights asked for need, the gentlest of the fewest.

    Parameters
    ----------
    alone
        What more GPUs alone carry.
    freed
        Questions with both changed.
    """
    some = [x for x in freed if x.question.deployments[0].deployment.gpus < alone.carried.gpus]
    found = _first(sorted(some, key=lambda x: x.question.deployments[0].deployment.gpus))
    if found is not None:
        yield found


def _apply(kinds: list[Change], start: _Freed) -> Iterator[_Freed]:
    """Every change of the first kind with every change of the next, and so on."""
    if not kinds:
        yield start
        return
    for one in kinds[0](start):
        yield from _apply(kinds[1:], one)


def _first(freed: Iterable[_Freed]) -> _Tried | None:
    """The first change that does.

    Where all carry hardly any load, that which carries most. A target twice as long must carry
    clearly more, as another target may leave no use for it.
    """
    poor: _Tried | None = None
    left = TRIED_FURTHER
    for one in freed:
        found = ServiceSearch(one.question).best_of_first()
        if found is not None:
            changes = dict(one.changes)
            d = found.carried.deployment
            if "tp" in changes:
                given = {"tp": d.tp, "pp": d.pp, "dp": d.dp, "ep": d.ep}
                changes |= {k: str(n) for k, n in given.items() if n > 1 or k == "tp"}
            little = found.carried.each_per_s < WORTH_NAMING * found.candidate.guess
            known = found.candidate.evidence if one.lossy else None
            caution = str(known or "")
            remedy = PlanRemedy(changes, "", found.carried, caution=caution, evidence=known)
            tried = _Tried(remedy, found, one.question.asked, little)
            if not little:
                return tried
            gain = WORTH_FURTHER if poor is not None and tried.differs_in_times(poor) else 1.0
            if poor is None or tried.carried.per_s > gain * poor.carried.per_s:
                poor = tried
        left -= poor is not None
        if not left:
            break
    return poor


def _longer_times(before: _Freed) -> Iterator[_Freed]:
    """Round targets that leave room for load, the smallest first."""
    question = before.question
    asked = question.asked
    some = [replace(question, deployments=(q,)) for q in question.deployments[:LAYOUTS_TRIED]]
    known = [(one, idle_times(one, one.deployments[0])) for one in some]
    for slack, (one, least) in product(TARGET_SLACKS, known):
        times = {k: v for k, v in (least or {}).items() if np.isfinite(v)}
        needed = {k: v for k, v in times.items() if v * TIGHT > getattr(asked, k)}
        longer = {k: round_up(v * slack) for k, v in needed.items()}
        if longer:
            said = {k: show_time(v) for k, v in longer.items()}
            freed = one.under(**longer)
            yield replace(before, changes={**before.changes, **said}, question=freed)


def _narrower(before: _Freed) -> Iterator[_Freed]:
    """Weights of fewer bits, named by the user and so not judged by the limit of loss."""
    question = before.question
    able = [(q, narrower_formats(q.deployment)) for q in question.deployments]
    for name in dict.fromkeys(name for _, formats in able for name in formats):
        some = tuple(
            replace(
                q,
                deployment=replace(q.deployment, weights=name),
                admission=replace(q.admission, judges_weights=False),
            )
            for q, formats in able
            if name in formats
        )
        lossy = weights_evidence(some[0].deployment.model, name).kind != "lossless"
        changes = {**before.changes, "weights": name}
        yield _Freed(changes, replace(question, deployments=some), lossy)


def _more_loss(before: _Freed) -> Iterator[_Freed]:
    """The techniques that lose more than was admitted, the mildest first."""
    q = before.question.deployments[0]
    known = [c for c in ServiceSearch(before.question).candidates(q) if "loss" in c.needs]
    for c in sorted(known, key=lambda c: (c.evidence.column, -c.value))[:LOSSY_TRIED]:
        name, _, value = c.needs[2:].partition(" ")
        admission = replace(q.admission, techniques=(c.technique,), unmeasured=True)
        one = replace(q, admission=admission).with_limits(loss=c.evidence.column)
        changes = {**before.changes, name.replace("-", "_"): value}
        free = replace(before.question, deployments=(one,))
        yield _Freed(changes, free, lossy=True)


def _more_gpus(before: _Freed) -> Iterator[_Freed]:
    """More GPUs per replica, the fewest first."""
    question = before.question
    q = question.deployments[0]
    base = replace(q.deployment, tp=1, pp=1, dp=1, ep=1)
    most = question.total_gpus or max(x.deployment.gpus for x in question.deployments)
    for count in MORE_GPUS:
        if count <= most:
            continue
        layouts = [d for d in list_layouts(base, count) if d.gpus == count and engine_runs(q, d)]
        some = tuple(replace(q, deployment=d) for d in layouts)
        if some:
            total = count if question.total_gpus else 0
            free = replace(question, deployments=some, total_gpus=total)
            what = {"total_gpus": str(count)} if total else {"tp": ""}
            yield replace(before, changes={**before.changes, **what}, question=free)


def _other_cards(before: _Freed) -> Iterator[_Freed]:
    """Other cards with the same layout, the cheapest first."""
    question = before.question
    q = question.deployments[0]
    mine = q.deployment.hardware
    known = [load_hardware(name) for name in hardware_names()]
    priced = [h for h in known if h.price is not None and h.name != mine.name]
    quicker = [
        h
        for h in priced
        if h.gpu_memory > mine.gpu_memory or h.flops["fp16"] > 1.3 * mine.flops["fp16"]
    ]
    for hardware in sorted(quicker, key=lambda h: h.price or 0.0)[:CARDS_TRIED]:
        try:
            d = replace(q.deployment, hardware=hardware)
        except InputError:
            continue
        if not engine_runs(q, d):
            continue
        share = q.limits.gpu_memory / mine.gpu_memory
        moved = replace(q, deployment=d).with_limits(
            gpu_memory=share * hardware.gpu_memory, host_memory=hardware.host_memory
        )
        yield _Freed({"gpu": hardware.name}, replace(question, deployments=(moved,)))


def _less_sure(before: _Freed) -> Iterator[_Freed]:
    """The targets only if predictions are exact."""
    question = before.question
    if question.asked.sure > 0.5:
        yield _Freed({"sure": "0.5"}, replace(question, asked=replace(question.asked, sure=0.5)))


def _shorter(question: ServiceQuestion, with_prompt: Callable[[float], Load]) -> Iterator[_Freed]:
    """Prompts of half the length, and again."""
    prompt = question.load.prompt
    for _ in range(HALVINGS):
        prompt /= 2
        if prompt < 16:
            return
        digits = 10 ** max(floor(log10(prompt)) - 1, 0)
        mean = floor(prompt / digits) * digits
        yield _Freed({"prompt": str(mean)}, with_prompts(question, mean, with_prompt))


CHANGES: Mapping[str, Change] = {
    "times": _longer_times,
    "weights": _narrower,
    "loss": _more_loss,
    "gpus": _more_gpus,
}
CHANGED_TOGETHER = (
    ("times",), ("weights",), ("loss",), ("gpus",),
    ("weights", "times"), ("loss", "times"), ("weights", "loss"), ("weights", "loss", "times"),
    ("weights", "gpus"), ("gpus", "times"), ("weights", "gpus", "times"),
)  # fmt: skip
"""Limits that are freed together, after those that are freed alone."""


@frozen
class Otherwise:
    """What is chosen where one thing about a question is otherwise.

    Attributes
    ----------
    option
        The option with its other value.
    choice
        None where nothing keeps the targets.
    """

    option: str
    choice: PlayedOption | None


def explain_choice(
    search: ServiceSearch, with_prompt: Callable[[float], Load] | None = None
) -> Iterator[Otherwise]:
    """Answer a question again with targets and prompts of half and of twice their size.

    Parameters
    ----------
    search
        The search that answered the question; its predictions are used again.
    with_prompt
        Draws the same requests with prompts of another mean; None where they are a trace's.
    """
    question = search.q
    for name in ("ttft", "tpot"):
        limit = getattr(question.asked, name)
        for value in (limit / 2, 2 * limit) if np.isfinite(limit) else ():
            choice = search.under(**{name: value}).choose()
            yield Otherwise(f"--{name} {show_time(value)}", choice)
    for factor in (0.5, 2.0) if with_prompt is not None else ():
        assert with_prompt is not None
        mean = max(round(factor * question.deployments[0].workload.prompt), 1)
        if mean + question.load.generate <= question.deployments[0].deployment.model.max_context:
            changed = without_refused(with_prompts(question, mean, with_prompt))
            yield Otherwise(f"--prompt {mean}", ServiceSearch(changed, search).choose())


def with_prompts(
    question: ServiceQuestion, mean: int, draw: Callable[[float], Load]
) -> ServiceQuestion:
    """The question with prompts of another mean."""
    changed = question.with_each(lambda q: replace(q, workload=replace(q.workload, prompt=mean)))
    return replace(changed, load=draw(mean))


def without_refused(question: ServiceQuestion) -> ServiceQuestion:
    """Return the question without lossy techniques for deployments that admit no loss.

    Parameters
    ----------
    question
        The question, with the limits on loss.
    """

    def lossless(q: Question) -> Question:
        exact = tuple(t for t in q.admission.candidates() if t.exact)
        admits = q.limits.loss > 0 or q.admission.unmeasured or not exact
        return q if admits else replace(q, admission=replace(q.admission, techniques=exact))

    return question.with_each(lossless)
