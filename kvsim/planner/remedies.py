"""What would do where nothing keeps the targets of a service: the same search with limits freed.

Each remedy is played like a plan: longer times, other weights, more GPUs, another card, two of
these together, shorter prompts, less certainty. Of each kind the cheapest is named, with the
options that ask for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from itertools import product
from math import ceil, floor, log2, log10

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment, list_layouts, move_fewest
from kvsim.machines.profiles import hardware_names, load_hardware
from kvsim.planner.alternatives import NoPlanError, PlanRemedy, ask_on
from kvsim.planner.load import Carried, Load
from kvsim.planner.question import (
    DEFAULT_TPOT,
    DEFAULT_TTFT,
    GGUF,
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
from kvsim.prediction.pool import LAYER_WEIGHTS
from kvsim.quality.evidence import KNOWN_BAD, weights_evidence
from kvsim.techniques import parse
from kvsim.techniques.released import FULL, engine_refusal, served_by

TARGETS = "ttft", "tpot"
MORE_GPUS = (1, 2, 4, 8, 16, 32, 64)
TIGHT = 1.25  # times what a request takes alone: a shorter target leaves no room for others
RAISED = 2.0  # times what is reached at light load: the least that default targets are
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


Ask = Callable[[Mapping[str, str]], ServiceQuestion | None]
"""Asks a question again with some options changed; None where they cannot be."""


class Freed:
    """A question with some options changed, what is carried then, and what may be changed further.

    Parameters
    ----------
    search
        The search that answers it, which shares the evaluations of all the others.
    ask
        Asks the question again with other options.
    changes
        The options that differ, with their values.
    lossy
        Whether they lose quality.
    """

    def __init__(
        self,
        search: ServiceSearch,
        ask: Ask,
        changes: Mapping[str, str] | None = None,
        lossy: bool = False,
    ) -> None:
        self.search, self.q, self.ask = search, search.q, ask
        self.changes, self.lossy = dict(changes or {}), lossy
        self._after: dict[str, list[Freed]] = {}

    def changed(
        self,
        to: ServiceQuestion | ServiceSearch,
        options: Mapping[str, str],
        lossy: bool = False,
    ) -> "Freed":
        """Return the question with further options changed, and the defaults that go with them."""
        search = to if isinstance(to, ServiceSearch) else ServiceSearch(to, self.search)
        changes = {**self.changes, **options}
        search = search if set(TARGETS) & set(changes) else raise_defaults(search)
        return Freed(search, self.ask, changes, self.lossy or lossy)

    def after(self, kind: str = "", *kinds: str) -> "Iterator[Freed]":
        """Yield the question after every change of one kind, then of the next, and so on."""
        if not kind:
            yield self
            return
        if kind not in self._after:
            self._after[kind] = list(CHANGES[kind](self))
        for one in self._after[kind]:
            yield from one.after(*kinds)

    @cached_property
    def found(self) -> PlayedOption | None:
        """What an engine carries; None where nothing keeps the targets."""
        return self.search.best_of_first()

    @property
    def carried(self) -> Carried:
        """What an engine carries.

        Raises
        ------
        LookupError
            If nothing keeps the targets.
        """
        if self.found is None:
            raise LookupError("nothing keeps the targets")
        return self.found.carried

    @property
    def poor(self) -> bool:
        """Whether so little is carried that it is hardly a service."""
        found = self.found
        little = WORTH_NAMING * found.candidate.guess if found else 0.0
        return self.carried.each_per_s < little

    @property
    def remedy(self) -> PlanRemedy:
        """The changes and what they bring."""
        d, changes = self.carried.deployment, dict(self.changes)
        if "tp" in changes:
            given = {"tp": d.tp, "pp": d.pp, "dp": d.dp, "ep": d.ep}
            changes |= {k: str(n) for k, n in given.items() if n > 1 or k == "tp"}
        known = self.found.candidate.evidence if self.found and self.lossy else None
        return PlanRemedy(changes, "", self.carried, caution=str(known or ""), evidence=known)

    def differs_in_times(self, other: "Freed") -> bool:
        """Whether the two change the same but for how long the targets are."""
        mine, its = (
            {k: v for k, v in x.remedy.changes.items() if k not in TARGETS} for x in (self, other)
        )
        return mine == its

    def outdone(self, other: "Freed") -> bool:
        """Whether fewer changes carry more within targets that are no longer."""
        mine, its = self.q.asked, other.q.asked
        return (
            set(other.remedy.changes) < set(self.remedy.changes)
            and its.ttft <= mine.ttft
            and its.tpot <= mine.tpot
            and other.carried.per_s * ROUGH_STEP >= self.carried.per_s  # rates are found to a step
            and other.carried.gpus <= self.carried.gpus
        )


def explain_no_service(search: ServiceSearch, ask: Ask) -> NoPlanError:
    """Why nothing keeps the targets, and the cheapest change of each kind that does.

    Parameters
    ----------
    search
        The search that found nothing.
    ask
        Asks the question again with other options.
    """
    start = Freed(search, ask)
    fitting = _first(start.after("fit"))
    told = {tuple(sorted(x.remedy.changes.items())): x for x in _remedies(start)}
    every = list(told.values())  # several kinds of changes may come to the same
    some = [x for x in every if not x.poor] or every
    kept = [x for x in some if not any(map(x.outdone, some))]
    kept.sort(key=lambda x: "lossy" in x.changes)  # an unknown loss of quality comes last
    same = [x for x in every if set(x.remedy.changes) <= set(TARGETS)]  # whatever it carries
    first = [x for x in (fitting, next(iter([*same, *kept]), None)) if x is not None]
    remedies = [x.remedy for x in (*first, *(x for x in kept if x not in first))]
    nearest = first[0].search.choose() if first else None
    if nearest is not None:  # whose layout may be another than that of the first estimate
        first[0].found = nearest
        remedies[0] = first[0].remedy
    return NoPlanError(
        f"no plan meets the targets: {describe_obstacle(search)}",
        remedies,
        search.q.deployments[0].deployment,
        asked=describe_asked(search.q),
        nearest=nearest,
    )


def raise_defaults(search: ServiceSearch) -> ServiceSearch:
    """Raise default targets that leave no room for load, as with very long prompts.

    Parameters
    ----------
    search
        A search under the targets of the question.

    Returns
    -------
    ServiceSearch
        The same search, whose default targets are at least `RAISED` times what the deployment with
        the shortest prefill reaches at light load. Unchanged where nothing fits, or where tokens
        would come more slowly than anybody reads.
    """
    question = search.q
    usual = {"ttft": DEFAULT_TTFT, "tpot": DEFAULT_TPOT}
    usual = {name: limit for name, limit in usual.items() if name not in question.given}
    some = [c for q in question.deployments if (c := search.plain_or_best(q)) is not None]
    quickest = min(some, key=lambda c: search.times_alone(c)["ttft"], default=None)
    least = (search.idle_times(quickest.question) if quickest is not None else None) or {}
    raised = {
        name: round_up(RAISED * least[name])
        for name, limit in usual.items()
        if limit < RAISED * least.get(name, 0.0) < np.inf
    }
    raised = {} if raised.get("tpot", 0.0) > SLOWEST_READING else raised
    targets = usual | raised
    if all(getattr(question.asked, name) == limit for name, limit in targets.items()):
        return search
    return search.under(targets, tuple(sorted(raised)))


def describe_asked(question: ServiceQuestion) -> str:
    """Which targets are kvsim's own, as none were given, and what the requests look like."""
    own = {
        name: f"{name.upper()} {format_seconds(getattr(question.asked, name))}"
        + (" (raised to twice that of an idle server)" if name in question.raised else "")
        for name in TARGETS
        if name not in question.given
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


def describe_obstacle(search: ServiceSearch) -> str:
    """What stands in the way on the first deployment on which anything fits."""
    question, q = search.q, search.q.deployments[0]
    least, where = None, ""
    for other in question.deployments:
        least = search.idle_times(other)
        if least is not None:
            where = _differing(q.deployment, other.deployment)
            break
    if least is None:
        known = list(search.candidates(q))
        if known and FULL not in {t.name for t in q.admission.candidates()}:
            return too_lossy(q, known)
        d = q.deployment
        if refused := q.admission.describe_refusals(d) or not_served(q):
            return refused
        tried = search.table(q).table.evidence
        harmful = [found for found in tried if q.admission.harm(found) > KNOWN_BAD]
        if harmful and FULL not in {t.name for t in q.admission.candidates()}:
            mildest = min(harmful, key=lambda found: found.column)
            admits = "" if mildest.unknown else f"; {needed_option(mildest)} admits it"
            return f"all named techniques may lose more than --lossy admits{admits} ({mildest})"
        if lossy := _weights_too_lossy(search):
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
    if np.inf in least.values() and (o := search.play_idle(other)) is not None:
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


def _weights_too_lossy(search: ServiceSearch) -> str:
    """That weights which fit lose more than is admitted, and what admits the gentlest of them."""
    unjudged = search.q.with_each(
        lambda q: replace(q, admission=replace(q.admission, judges_weights=False))
    )
    free = ServiceSearch(unjudged, search)
    known = [
        (q.weights_evidence, q.deployment.weights)
        for q, other in zip(search.q.deployments, unjudged.deployments, strict=True)
        if q.weights_lose and free.idle_times(other) is not None
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


def _fit(before: Freed) -> Iterator[Freed]:
    """What does not fit, with experts or layers on the host, or with requests of equal lengths."""
    search, question = before.search, before.q
    first, load = question.deployments[0], question.load
    if any(search.idle_times(q) is not None for q in question.deployments):
        return
    refused = first.admission.describe_refusals(first.deployment) or not_served(first)
    if refused or _weights_too_lossy(search):
        return
    q = min(question.deployments, key=lambda q: full_weights(q.deployment))
    changes: dict[str, str] = {}
    if full_weights(q.deployment) >= q.limits.gpu_memory:
        length = 2 ** ceil(log2(LONG_ENOUGH * (load.prompt + load.generate)))
        changes = _keep_on_host(q, min(length, q.deployment.model.max_context))
    elif _has_tail(load):
        changes = {"lengths": "equal"}
    asked = before.ask(changes) if changes else None
    if asked is None:
        return
    yield before.changed(asked, changes, "weights" in changes)


def _keep_on_host(question: Question, length: int) -> dict[str, str]:
    """Options that keep experts or layers in host memory; none where no engine asked for can.

    Parameters
    ----------
    length
        Of a request that has to fit. [tokens]
    """
    d = question.deployment
    longest = {"max_model_len": str(length)}
    if _experts_may_move(question):
        return {"stack": "llamacpp", "weights": LAYER_WEIGHTS, "n_cpu_moe": "auto"} | longest
    if d.model.experts or not d.stack.weights.gguf:
        return {}
    weights = d.weights if d.weights in GGUF else LAYER_WEIGHTS
    workload = replace(question.workload, prompt=length - 1, generate=1)

    def fits(where: Deployment) -> bool:
        found = workload.predict(parse(FULL), where, np.ones(1))
        return bool(found.gpu_bytes[0] <= question.limits.gpu_memory)

    hosted = move_fewest(replace(d, weights=weights), "layers", fits)
    kept = 0 if hosted is None else d.model.layers - len(hosted.host.layers)
    narrower = {} if weights == d.weights else {"weights": weights}
    return narrower | {"n_gpu_layers": str(kept)} | longest


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


def _remedies(start: Freed) -> Iterator[Freed]:
    """The first change of each kind that does, and of several together where no part does alone."""
    done = list[set[str]]()
    for kinds in CHANGED_TOGETHER:
        if any(some <= set(kinds) for some in done):
            continue
        found = _first_known_loss(start, kinds)
        if found is not None:
            done += [] if found.poor else [set(kinds)]
            yield found
            alone = {"weights"} in done or {"weights", "times"} in done
            if "gpus" in kinds and "weights" not in kinds and not alone:
                yield from _fewer_gpus(found, start.after("weights", *kinds))


def _first_known_loss(start: Freed, kinds: tuple[str, ...]) -> Freed | None:
    """The first change that does without an unknown loss of quality, else the first with one."""
    found = _first(x for x in start.after(*kinds) if "lossy" not in x.changes)
    if (found is None or found.poor) and "loss" in kinds:
        found = _first(x for x in start.after(*kinds) if "lossy" in x.changes) or found
    return found


def _fewer_gpus(alone: Freed, freed: Iterable[Freed]) -> Iterator[Freed]:
    """Narrower weights on fewer GPUs than the weights asked for need, the gentlest of the fewest.

    Parameters
    ----------
    alone
        More GPUs alone.
    freed
        Questions with both changed.
    """
    some = [x for x in freed if x.q.deployments[0].deployment.gpus < alone.carried.gpus]
    found = _first(sorted(some, key=lambda x: x.q.deployments[0].deployment.gpus))
    if found is not None:
        yield found


def _first(freed: Iterable[Freed]) -> Freed | None:
    """The first change that does.

    Where all carry hardly any load, that which carries most. A target twice as long must carry
    clearly more, as another target may leave no use for it.
    """
    poor: Freed | None = None
    left = TRIED_FURTHER
    for one in freed:
        if one.found is not None:
            if not one.poor:
                return one
            gain = WORTH_FURTHER if poor is not None and one.differs_in_times(poor) else 1.0
            if poor is None or one.carried.per_s > gain * poor.carried.per_s:
                poor = one
        left -= poor is not None
        if not left:
            break
    return poor


def _longer_times(before: Freed) -> Iterator[Freed]:
    """Round targets that leave room for load, the smallest first."""
    some = before.q.deployments[:LAYOUTS_TRIED]
    known = [(q, before.search.idle_times(q)) for q in some]
    for slack, (q, least) in product(TARGET_SLACKS, known):
        times = {k: v for k, v in (least or {}).items() if np.isfinite(v)}
        needed = {k: v for k, v in times.items() if v * TIGHT > getattr(before.q.asked, k)}
        longer = {k: round_up(v * slack) for k, v in needed.items()}
        if longer:
            one = ServiceSearch(replace(before.q, deployments=(q,)), before.search)
            said = {k: show_time(v) for k, v in longer.items()}
            yield before.changed(one.under(longer), said)


def _narrower(before: Freed) -> Iterator[Freed]:
    """Weights of fewer bits, named by the user and so not judged by the limit of loss."""
    able = [(q, narrower_formats(q.deployment)) for q in before.q.deployments]
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
        yield before.changed(replace(before.q, deployments=some), {"weights": name}, lossy)


def _more_loss(before: Freed) -> Iterator[Freed]:
    """The techniques that lose more than was admitted, the mildest first."""
    q = before.q.deployments[0]
    known = [c for c in before.search.candidates(q) if "loss" in c.needs]
    for c in sorted(known, key=lambda c: (c.evidence.column, -c.value))[:LOSSY_TRIED]:
        name, _, value = c.needs[2:].partition(" ")
        admission = replace(q.admission, techniques=(c.technique,), unmeasured=True)
        one = replace(q, admission=admission).with_limits(loss=c.evidence.column)
        free = replace(before.q, deployments=(one,))
        yield before.changed(free, {name.replace("-", "_"): value}, lossy=True)


def _more_gpus(before: Freed) -> Iterator[Freed]:
    """More GPUs per replica, the fewest first."""
    question, q = before.q, before.q.deployments[0]
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
            yield before.changed(free, {"total_gpus": str(count)} if total else {"tp": ""})


def _other_cards(before: Freed) -> Iterator[Freed]:
    """Other cards with the same layout, the cheapest first."""
    q = before.q.deployments[0]
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
            moved = ask_on(q, replace(q.deployment, hardware=hardware))
        except InputError:
            continue
        if engine_runs(q, moved.deployment):
            yield before.changed(replace(before.q, deployments=(moved,)), {"gpu": hardware.name})


def _less_sure(before: Freed) -> Iterator[Freed]:
    """The targets only if predictions are exact."""
    if before.q.asked.sure > 0.5:
        yield before.changed(
            replace(before.q, asked=replace(before.q.asked, sure=0.5)), {"sure": "0.5"}
        )


def _shorter(before: Freed) -> Iterator[Freed]:
    """Prompts of half the length, and again."""
    prompt = before.q.load.prompt
    for _ in range(HALVINGS):
        prompt /= 2
        if prompt < 16:
            return
        digits = 10 ** max(floor(log10(prompt)) - 1, 0)
        changes = {"prompt": str(floor(prompt / digits) * digits)}
        asked = before.ask(changes)
        if asked is not None:
            yield before.changed(asked, changes)


CHANGES: Mapping[str, Callable[[Freed], Iterator[Freed]]] = {
    "fit": _fit,
    "times": _longer_times,
    "weights": _narrower,
    "loss": _more_loss,
    "gpus": _more_gpus,
    "cards": _other_cards,
    "sure": _less_sure,
    "prompt": _shorter,
}
CHANGED_TOGETHER = (
    ("times",), ("weights",), ("loss",), ("gpus",),
    ("weights", "times"), ("loss", "times"), ("weights", "loss"), ("weights", "loss", "times"),
    ("weights", "gpus"), ("gpus", "times"), ("weights", "gpus", "times"),
    ("cards",), ("cards", "times"), ("fit", "times"), ("sure",), ("prompt",),
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


def explain_choice(search: ServiceSearch, ask: Ask) -> Iterator[Otherwise]:
    """Answer a question again with targets and prompts of half and of twice their size.

    Parameters
    ----------
    search
        The search that answered the question; its predictions are used again.
    ask
        Asks the question again with other options.
    """
    question = search.q
    for name in TARGETS:
        limit = getattr(question.asked, name)
        for value in (limit / 2, 2 * limit) if np.isfinite(limit) else ():
            choice = search.under({name: value}).choose()
            yield Otherwise(f"--{name} {show_time(value)}", choice)
    for factor in (0.5, 2.0):
        mean = max(round(factor * question.deployments[0].workload.prompt), 1)
        longest = question.deployments[0].deployment.model.max_context
        asked = ask({"prompt": str(mean)}) if mean + question.load.generate <= longest else None
        if asked is not None:
            other = raise_defaults(ServiceSearch(without_refused(asked), search))
            yield Otherwise(f"--prompt {mean}", other.choose())


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
