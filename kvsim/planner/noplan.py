"""Why there is no plan, the smallest relaxation of each limit, and what would meet all of them."""

from collections.abc import Iterator
from dataclasses import replace
from shlex import quote

import numpy as np

from kvsim.frozen import frozen
from kvsim.machines.hardware import Hardware
from kvsim.machines.profiles import hardware_names, load_hardware
from kvsim.planner.advice import (
    Advice,
    NoPlanError,
    changes,
    narrower,
    on,
    quick,
    three,
    undominated,
    wider,
)
from kvsim.planner.choose import best, nearest, relaxed
from kvsim.planner.engines import lacks
from kvsim.planner.improve import Placements
from kvsim.planner.needs import needs
from kvsim.planner.outlook import LABELS
from kvsim.planner.question import FULL, Question, Search
from kvsim.planner.rivals import spoken
from kvsim.planner.workload import GIB, TPOT, TTFT, PlanLimits
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import KNOWN_BAD
from kvsim.techniques import parse

LITTLE = 2.0  # times a target: what is missed by less is loosened first


def explain(question: Question, search: Search) -> NoPlanError:
    """Why there is no plan, the smallest relaxation of each limit, and what meets all of them."""
    table, limits = search.table, question.limits
    if not table.technique:
        hint = "; see `kvsim techniques`"
        text = f"no technique can run this model, batch and hardware{hint}"
        return NoPlanError(text, {}, list(remedies(question)))
    allowed = (table.columns["loss"] <= limits.loss) & (table.columns["assumed"] <= limits.assumed)
    if not allowed.any():
        return NoPlanError(_too_lossy(question, search), {}, [])
    hard = limits.hard()
    columns = {k: table.columns[k][allowed] for k in hard}
    alone = {k: v for k, v in relaxed(columns, hard).items() if v > hard[k] * (1 + 1e-9)}
    looser = longer_times(question)
    if looser is not None and len(looser.least) == 1:  # mixed placements are not in the table
        alone |= {k: min(v, alone.get(k, np.inf)) for k, v in looser.least.items()}
    parts = [f"{LABELS[k]} would have to be {_instead(question, k, v)}" for k, v in alone.items()]
    text = " or ".join(parts)
    if not parts:
        text = "no limit alone is in the way; " + _together(question, columns, hard)
    advice = list(remedies(question, search, looser))
    if advice:
        text += ". What meets every limit: " + "; ".join(str(a) for a in advice)
    return NoPlanError(f"no plan meets the limits: {text}", alone, advice)


def _too_lossy(question: Question, search: Search) -> str:
    """That everything loses too much, and what would admit the mildest, or all."""
    table, most = search.table, question.limits.loss
    text = f"nothing that can run here is known to lose at most {100 * most:g} %"
    if not most:
        text = "no lossless technique can run here"
    finite = np.flatnonzero(np.isfinite(table.columns["loss"]) & (table.columns["loss"] > most))
    if not finite.size:
        return f"{text}; --lossy admits techniques whose loss is not known"
    row = int(finite[np.argmin(table.columns["loss"][finite])])
    option = " ".join(needs(question, search, row))
    return f"{text}; {option} admits {table.technique[row]}, which {table.evidence[row]}"


def _instead(question: Question, name: str, value: float) -> str:
    """What a limit would have to be, and what it is."""
    limit = getattr(question.limits, name)
    usual = "the default " if {"ttft": TTFT, "tpot": TPOT}.get(name) == limit else ""
    text = f"{amount(name, value)} instead of {usual}{amount(name, limit)}"
    capacity = question.deployment.hardware.gpu_memory
    if name == "gpu_memory" and value > capacity > limit:
        text += f" (of {amount(name, capacity)})"
    return text


def _together(q: Question, columns: dict[str, np.ndarray], hard: dict[str, float]) -> str:
    row, excess = nearest(columns, hard)
    return "together " + " and ".join(
        f"{LABELS[k]} would have to be {_instead(q, k, float(columns[k][row]))}" for k in excess
    )


def amount(name: str, value: float) -> str:
    """A limit with its unit."""
    return f"{three(value / GIB)} GiB" if name.endswith("memory") else spoken(value)


def remedies(
    question: Question, search: Search | None = None, looser: "LooserTimes | None" = None
) -> Iterator[Advice]:
    """Changes that meet every limit: of times, quality, batch, weights, GPUs, the GPU, the context.

    The smallest comes first: targets that are missed by little.
    """
    limits = question.limits
    if looser is not None and looser.little:
        yield looser.advice
    if search is not None:
        for option, wide in (
            ("--lossy", replace(limits, loss=max(limits.loss, KNOWN_BAD))),
            ("--acceptance", replace(limits, assumed=1.0)),
        ):
            found = _admitting(question, search, option, wide)
            if found is not None:
                yield Advice(option, "other techniques", found)
        if question.workload.batch is not None and question.workload.batch > 1:
            free = replace(question, workload=replace(question.workload, batch=None))
            smaller = quick(free)
            if smaller is not None:
                option = f"--batch {float(smaller.batch[0]):.0f}"
                yield Advice(option, "a smaller batch", smaller)
    alone = list(undominated(question, changes(question)))
    yield from alone
    other = next(_other_gpus(question), None)
    if other is not None:
        yield other
    if not alone and (looser is None or len(looser.least) > 1):
        yield from with_longer_ttft(question)
    if looser is not None and not looser.little:
        yield looser.advice
    shorter = longest_prompt(question)
    if shorter is not None:
        yield shorter


@frozen
class LooserTimes:
    """The shortest targets that would do, one lifted if one is enough, and what they bring."""

    advice: Advice
    least: dict[str, float]  # what the quickest plan takes [s]
    little: bool  # whether that is less than ``LITTLE`` times what was asked for


def longer_times(question: Question) -> LooserTimes | None:
    """The times that the quickest plan without targets takes, and the plan that those allow."""
    for names in (("ttft",), ("tpot",), ("ttft", "tpot")):
        asked = {name: getattr(question.limits, name) for name in names}
        if not all(map(np.isfinite, asked.values())):
            continue
        free = question.with_limits(**dict.fromkeys(names, np.inf))
        quickest = replace(free, objective="latency")
        found = quick(quickest) or _placed(quickest)
        if found is not None:
            times = {"ttft": float(found.ttft_s[0]), "tpot": float(found.tpot_s[0])}
            least = {name: times[name] for name in names}
            above = {name: _above(value) for name, value in least.items()}
            within = question.with_limits(**{k: v for k, (v, _) in above.items()})
            said = " ".join(f"--{name} {text}" for name, (_, text) in above.items())
            little = all(value < LITTLE * asked[name] for name, value in least.items())
            plan = quick(within) or _placed(within) or found
            return LooserTimes(Advice(said, "looser targets", plan), least, little)
    return None


def with_longer_ttft(question: Question) -> Iterator[Advice]:
    """Narrower weights, and more GPUs, that would do if prompts alone were given longer."""
    d = question.deployment
    weights = [(f"--weights {name}", replace(d, weights=name)) for name in narrower(d)]
    gpus = [(f"--tp {n}", replace(d, tp=n)) for n in wider(d)]
    caution = narrower(d)
    for ways in (weights, gpus):
        for option, other in ways:
            looser = longer_times(on(question, other))
            if looser is not None and set(looser.least) == {"ttft"}:
                said = f"{option} {looser.advice.option}"
                why = caution.get(other.weights, "")
                yield replace(looser.advice, option=said, what="both together", caution=why)
                break


def _placed(q: Question) -> Prediction | None:
    """The best mix of placements, where no single technique fits."""
    placements = Placements(q)
    found = list(placements.better_than(np.inf, placements.bounds()))
    return found[-1].prediction if found else None


def _above(value: float) -> tuple[float, str]:
    """A time rounded up to two digits, and as the command line takes it. [s]"""
    unit, name = (1.0, "s") if value > 0.99 else (1e-3, "ms")
    step = 10.0 ** (np.floor(np.log10(value / unit)) - 1)
    rounded = float(np.ceil(value / unit / step - 1e-9) * step)
    return rounded * unit, f"{rounded:g}{name}"


def _admitting(q: Question, search: Search, option: str, wide: PlanLimits) -> Prediction | None:
    """The best row if lossy techniques, or assumed acceptances, were admitted."""
    table = search.table
    columns = dict(table.columns)
    if option == "--lossy":
        unknown = replace(q.admission, unmeasured=True)
        columns["loss"] = np.array([unknown.loss(e) for e in table.evidence])
    row = best(columns[q.objective], columns, wide.finite())
    return None if row is None else search.replay(row)


def _other_gpus(q: Question) -> Iterator[Advice]:
    """GPUs of the catalogue that meet all limits, the cheapest or else the smallest first."""

    def order(h: Hardware) -> tuple[float, float]:
        return (h.price if h.price is not None else np.inf, h.gpu_memory)

    known = [load_hardware(name) for name in hardware_names()]
    for hardware in sorted(known, key=order):
        if hardware.gpu_memory <= q.deployment.hardware.gpu_memory:
            continue
        if q.admission.engine and lacks(
            q.admission.engine, replace(q.deployment, hardware=hardware)
        ):
            continue
        other = on(q, replace(q.deployment, hardware=hardware))
        room = other.limits.gpu_memory, other.limits.host_memory
        if q.workload.largest(parse(FULL), other.deployment, *room) < (q.workload.batch or 1):
            continue
        found = quick(other, (FULL,))
        if found is not None:
            yield Advice(f"--gpu {quote(hardware.name)}", hardware.title, found)


def longest_prompt(question: Question) -> Advice | None:
    """The longest prompt for which there is a plan, to a twentieth, in round numbers."""
    w = question.workload

    def plan(prompt: int) -> Prediction | None:
        return quick(replace(question, workload=replace(w, prompt=prompt)))

    low, high = 0, w.prompt
    found = None
    while high - low > max(1, low // 20):
        middle = max(1, (low + high) // 2) if low else max(1, high // 4)
        tried = plan(middle)
        if tried is None:
            high = middle
        else:
            low, found = middle, tried
        if high <= 64:
            return None
    if found is None:
        return None
    step = 10 ** int(np.log10(max(low / 20, 1)))
    shorter = plan(low - low % step) if low % step else None
    low, found = (low, found) if shorter is None else (low - low % step, shorter)
    return Advice(f"--prompt {low}", "a shorter prompt", found)
