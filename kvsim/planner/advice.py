"""What else would do: other weights, more GPUs, another GPU, a shorter context, looser limits."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvsim.errors import InfeasibleError, InputError
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.planner.question import FULL, Question, Search, tabulate_question
from kvsim.planner.question import spoken as named
from kvsim.planner.rivals import spoken
from kvsim.prediction.generate import Prediction

WORTH = 1.2  # times the objective: a change that brings less is not worth a line
FORMATS = ("fp8", "int8", "int4")
PUBLISHED = {"gpt_oss": "mxfp4", "deepseek_v3": "fp8-block"}
"""Formats in which families of models were published: nothing is lost by them."""
GPUS_PER_REPLICA = (1, 2, 4, 8)
QUICK = (FULL, "offload")  # what a first look at another deployment tries


@frozen
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
        batch, rate = float(p.batch[0]), three(float(p.output_tok_s[0]))
        name = "full KV" if p.technique.name == FULL else named(p.technique)
        count = f" on {p.deployment.gpus} GPUs" if p.deployment.gpus > 1 else ""
        return f"{self.option} ({name} at batch {batch:.0f}: {times}, {rate} tok/s{count})"


def three(value: float) -> str:
    """A number with three digits, or all of its whole ones."""
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
    search = Search(question, tabulate_question(question, names))
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
    """Other weights and more GPUs, the gentlest first, where they allow a plan.

    Both together where no weights do alone: on the fewest GPUs, if those are fewer than without.
    """
    d = question.deployment
    formats, counts = narrower(d), wider(d)
    alone = False
    for name, caution in formats.items():
        found = _try(question, replace(d, weights=name))
        if found is not None:
            alone = True
            yield Advice(f"--weights {name}", f"{name} weights", found, caution=caution)
    more = _first(question, [(n, d.weights) for n in counts])
    if not alone:
        room = [n for n in counts if more is None or n < more.deployment.gpus]
        gentlest = _first(question, [(n, name) for name in formats for n in room])
        fewest = _first(question, [(n, name) for n in room for name in formats])
        both = {
            (x.deployment.gpus, x.deployment.weights): x
            for x in (gentlest, fewest)
            if x is not None
        }
        for (n, name), found in both.items():
            what = f"{name} weights on {n} GPUs"
            yield Advice(f"--weights {name} --tp {n}", what, found, caution=formats[name])
    if more is not None:
        n = more.deployment.gpus
        yield Advice(f"--tp {n}", f"{n} GPUs", more)


def narrower(deployment: Deployment) -> dict[str, str]:
    """Formats of weights below 16 bits that the GPU takes, the gentlest first, with their price."""
    own = PUBLISHED.get(deployment.model.family)
    return {
        name: AS_PUBLISHED if name == own else NARROW
        for name in ((own, *FORMATS) if own else FORMATS)
        if deployment.weights == "fp16"
        and (not name.startswith("fp8") or "fp8" in deployment.hardware.flops)
    }


def wider(deployment: Deployment) -> list[int]:
    """Larger numbers of GPUs that the model can be split over."""
    d = deployment
    return [n for n in GPUS_PER_REPLICA if n > d.tp == d.gpus and not d.model.heads % n]


AS_PUBLISHED = "the weights as they were published"
NARROW = "narrower weights change the output; kvsim has no evidence of how much"


def _first(question: Question, tried: list[tuple[int, str]]) -> Prediction | None:
    """The plan of the first of some numbers of GPUs, with a format of weights, that allows one."""
    for count, weights in tried:
        d = replace(question.deployment, tp=count, weights=weights)
        found = _try(question, d)
        if found is not None:
            return found
    return None


def _try(q: Question, deployment: Deployment) -> Prediction | None:
    try:
        asked = on(q, deployment)
        return quick(asked, (FULL,)) or quick(asked)  # offloading where nothing else would do
    except (InputError, InfeasibleError):
        return None


def undominated(question: Question, every: Iterable[Advice]) -> Iterator[Advice]:
    """Changes, but no narrower weights that bring less than wider ones."""
    most = 0.0
    for advice in every:
        if advice.caution == NARROW and advice.prediction is not None:
            value = score(question, advice.prediction)
            if value <= most:
                continue
            most = value
        yield advice


def better(question: Question, choice: Prediction) -> list[Advice]:
    """Changes of weights or GPUs that would bring much more, per GPU, or meet what is missed."""
    found = []
    value = score(question, choice)
    for advice in undominated(question, changes(question)):
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
    return float(prediction.output_tok_s[0]) / prediction.deployment.gpus
