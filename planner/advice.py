"""What else would do: other weights, more GPUs, another GPU, a shorter context, looser limits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvsim.errors import InfeasibleError, InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware
from kvsim.planner.choose import relaxed
from kvsim.planner.outlook import LABELS
from kvsim.planner.question import FULL, Question, Search
from kvsim.planner.rivals import spoken
from kvsim.planner.workload import GIB
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import KNOWN_BAD
from kvsim.techniques import parse

WORTH = 1.2  # times the objective: a change that brings less is not worth a line
FORMATS = ("fp8", "int8", "int4")
GPUS_PER_REPLICA = (1, 2, 4, 8)
QUICK = (FULL, "offload")  # what a first look at another deployment tries
STEPS = 10  # of the search for the longest context


@dataclass(frozen=True)
class Advice:
    """A change of the question, and the plan that it would bring.

    Attributes
    ----------
    option
        As on the command line: ``--weights int4``.
    what
        In words: "int4 weights".
    prediction
        The plan with it; None where only a number is known.
    gain
        Of the objective over the plan without it, relative; NaN where there is none.
    caution
        What the change itself costs.
    """

    option: str
    what: str
    prediction: Prediction | None
    gain: float = float("nan")
    caution: str = ""

    def __str__(self) -> str:
        """A clause: the option, and what it brings."""
        p = self.prediction
        if p is None:
            return f"{self.option} ({self.what})"
        times = f"TTFT {spoken(float(p.ttft_s[0]))}"
        if p.generate > 1:
            times += f", TPOT {spoken(float(p.tpot_s[0]))}"
        batch, rate = float(p.batch[0]), float(p.output_tok_s[0])
        return (
            f"{self.option} ({p.technique.name} at batch {batch:.0f}: {times}, {_rate(rate)} tok/s)"
        )


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class NoPlanError(InfeasibleError):
    """Nothing is within the limits.

    Attributes
    ----------
    relaxations
        The smallest value of each limit that, all others kept, would do; as stored in limits.
    advice
        Changes that would do, the smallest first.
    """

    def __init__(self, text: str, relaxations: dict[str, float], advice: list[Advice]) -> None:
        super().__init__(text)
        self.relaxations, self.advice = relaxations, advice


def quick(question: Question, some: tuple[str, ...] = QUICK) -> Prediction | None:
    """The plan that a few techniques allow, if they allow one."""
    every = tuple(t.name for t in question.admission.candidates())
    names = tuple(name for name in every if name in some) or every
    search = Search(question, question.table(names=names))
    if not search.table.technique:
        return None
    row = search.chosen(question.limits.finite())
    return None if row is None else search.replay(row)


def on(question: Question, deployment: Deployment) -> Question:
    """The same question on another deployment, with the same share of its memory."""
    before, after = question.deployment.hardware, deployment.hardware
    share = question.limits.gpu_memory / before.gpu_memory
    host = question.limits.host_memory if before is after else after.host_memory
    return replace(question, deployment=deployment).with_limits(
        gpu_memory=share * after.gpu_memory, host_memory=host
    )


def changes(question: Question) -> Iterator[Advice]:
    """Other weights and more GPUs, the gentlest first, where they allow a plan."""
    d = question.deployment
    for name in FORMATS:
        if d.weights == "fp16" and (name != "fp8" or "fp8" in d.hardware.flops):
            found = _try(question, replace(d, weights=name))
            if found is not None:
                yield Advice(f"--weights {name}", f"{name} weights", found, caution=NARROW)
    for count in GPUS_PER_REPLICA:
        if count > d.tp and not d.model.heads % count:
            found = _try(question, replace(d, tp=count))
            if found is not None:
                yield Advice(f"--tp {count}", f"{count} GPUs", found, caution=f"{count} GPUs")
                return


NARROW = "narrower weights change the output; kvsim has no evidence of how much"


def _try(q: Question, deployment: Deployment) -> Prediction | None:
    try:
        return quick(on(q, deployment))
    except (InputError, InfeasibleError):
        return None


def better(question: Question, choice: Prediction) -> list[Advice]:
    """Changes of weights or GPUs that would bring much more, per GPU, or meet what is missed."""
    found = []
    value = score(question, choice)
    for advice in changes(question):
        assert advice.prediction is not None
        other = score(question, advice.prediction)
        if other > WORTH * value:
            found.append(replace(advice, gain=other / value - 1))
    return found


def score(question: Question, prediction: Prediction) -> float:
    """The objective of a prediction, more is better; throughput and cost are per GPU."""
    if question.objective == "latency":
        return 1 / float(prediction.request_s[0])
    if question.objective == "cost":
        return 1 / float(prediction.usd_per_million()[0])
    return float(prediction.output_tok_s[0]) / prediction.deployment.tp


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
    from kvsim.planner.choose import nearest

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
    shorter = longest_prompt(question)
    if shorter is not None:
        yield shorter


def _admitting(q: Question, search: Search, option: str, wide: object) -> Prediction | None:
    """The best row if lossy techniques, or assumed acceptances, were admitted."""
    from kvsim.planner.choose import best

    table = search.table
    columns = dict(table.columns)
    if option == "--lossy":
        unknown = replace(q.admission, unmeasured=True)
        columns["loss"] = np.array([unknown.loss(e) for e in table.evidence])
    row = best(columns[q.objective], columns, wide.finite())  # type: ignore[attr-defined]
    return None if row is None else search.replay(row)


def _other_gpus(q: Question) -> Iterator[Advice]:
    """GPUs of the catalogue that meet all limits, the cheapest or else the smallest first."""
    from kvsim.machines.profiles import hardware_names, load_hardware

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
