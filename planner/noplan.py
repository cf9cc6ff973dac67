"""Why there is no plan, the smallest relaxation of each limit, and what would meet all of them."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvsim.machines.hardware import Hardware
from kvsim.machines.profiles import hardware_names, load_hardware
from kvsim.planner.advice import Advice, NoPlanError, changes, on, quick
from kvsim.planner.choose import best, nearest, relaxed
from kvsim.planner.improve import Placements
from kvsim.planner.outlook import LABELS
from kvsim.planner.question import FULL, Question, Search
from kvsim.planner.rivals import spoken
from kvsim.planner.workload import GIB, PlanLimits
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import KNOWN_BAD
from kvsim.techniques import parse


def explain(question: Question, search: Search) -> NoPlanError:
    """Why there is no plan, the smallest relaxation of each limit, and what meets all of them."""
    table, limits = search.table, question.limits
    if not table.technique:
        hint = "; see `kvsim techniques`"
        text = f"no technique can run this model, batch and hardware{hint}"
        return NoPlanError(text, {}, list(remedies(question)))
    allowed = (table.columns["loss"] <= limits.loss) & (table.columns["assumed"] <= limits.assumed)
    if not allowed.any():
        return NoPlanError("no lossless technique can run here; --lossy admits the others", {}, [])
    hard = limits.hard()
    columns = {k: table.columns[k][allowed] for k in hard}
    alone = {k: v for k, v in relaxed(columns, hard).items() if v > hard[k] * (1 + 1e-9)}
    parts = [
        f"{LABELS[k]} would have to be {amount(k, v)} instead of {amount(k, hard[k])}"
        for k, v in alone.items()
    ]
    text = " or ".join(parts)
    if not parts:
        text = "no single limit is in the way; " + _together(columns, hard)
    advice = list(remedies(question, search))
    if advice:
        text += ". What meets every limit: " + "; ".join(str(a) for a in advice)
    return NoPlanError(f"no plan meets the limits: {text}", alone, advice)


def _together(columns: dict[str, np.ndarray], hard: dict[str, float]) -> str:
    row, excess = nearest(columns, hard)
    return "together " + " and ".join(
        f"{LABELS[k]} would have to be {amount(k, float(columns[k][row]))} instead of "
        f"{amount(k, hard[k])}"
        for k in excess
    )


def amount(name: str, value: float) -> str:
    """A limit with its unit."""
    return f"{value / GIB:.2f} GiB" if name.endswith("memory") else spoken(value)


def remedies(question: Question, search: Search | None = None) -> Iterator[Advice]:
    """Changes that meet every limit: of quality, batch, weights, GPUs, the GPU, the context."""
    limits = question.limits
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
    yield from changes(question)
    other = next(_other_gpus(question), None)
    if other is not None:
        yield other
    looser = longer_times(question)
    if looser is not None:
        yield looser
    shorter = longest_prompt(question)
    if shorter is not None:
        yield shorter


def longer_times(question: Question) -> Advice | None:
    """The times that the best plan without them takes, one target lifted if one is enough."""
    for names in (("ttft",), ("tpot",), ("ttft", "tpot")):
        if not all(np.isfinite(getattr(question.limits, name)) for name in names):
            continue
        free = question.with_limits(**dict.fromkeys(names, np.inf))
        free = replace(free, objective="latency")  # the least that is asked for
        found = quick(free) or _placed(free)
        if found is not None:
            times = {"ttft": found.ttft_s, "tpot": found.tpot_s}
            said = " ".join(f"--{name} {_above(float(times[name][0]))}" for name in names)
            return Advice(said, "looser targets", found)
    return None


def _placed(q: Question) -> Prediction | None:
    """The best mix of placements, where no single technique fits."""
    placements = Placements(q)
    found = list(placements.better_than(np.inf, placements.bounds()))
    return found[-1].prediction if found else None


def _above(value: float) -> str:
    """A time as the command line takes it, rounded up to two digits."""
    unit, name = (1.0, "s") if value >= 1 else (1e-3, "ms")
    digits = max(0, int(np.ceil(np.log10(value / unit))) - 2)
    return f"{np.ceil(value / unit / 10**digits) * 10**digits:.0f}{name}"


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
        other = on(q, replace(q.deployment, hardware=hardware))
        room = other.limits.gpu_memory, other.limits.host_memory
        if q.workload.largest(parse(FULL), other.deployment, *room) < (q.workload.batch or 1):
            continue
        found = quick(other, (FULL,))
        if found is not None:
            yield Advice(f"--gpu {hardware.name}", hardware.title, found)


def longest_prompt(question: Question) -> Advice | None:
    """The longest prompt for which there is a plan, to two digits."""
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
    return None if found is None else Advice(f"--prompt {low}", "a shorter prompt", found)
