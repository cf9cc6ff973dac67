"""What else would do: other weights, more GPUs, another GPU, a shorter context, looser limits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvsim.errors import InfeasibleError, InputError
from kvsim.machines.deployment import Deployment
from kvsim.planner.question import FULL, Question, Search
from kvsim.planner.rivals import spoken
from kvsim.prediction.generate import Prediction

WORTH = 1.2  # times the objective: a change that brings less is not worth a line
FORMATS = ("fp8", "int8", "int4")
PUBLISHED = {"gpt_oss": "mxfp4", "deepseek_v3": "fp8-block"}
"""Formats in which families of models were published: nothing is lost by them."""
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
    own = PUBLISHED.get(d.model.family)
    for name in (own, *FORMATS) if own else FORMATS:
        if d.weights == "fp16" and (not name.startswith("fp8") or "fp8" in d.hardware.flops):
            found = _try(question, replace(d, weights=name))
            if found is not None:
                caution = "the weights as they were published" if name == own else NARROW
                yield Advice(f"--weights {name}", f"{name} weights", found, caution=caution)
    for count in GPUS_PER_REPLICA:
        if count > d.tp == d.gpus and not d.model.heads % count:
            found = _try(question, replace(d, tp=count))
            if found is not None:
                yield Advice(f"--tp {count}", f"{count} GPUs", found, caution=f"{count} GPUs")
                return


NARROW = "narrower weights change the output; kvsim has no evidence of how much"


def _try(q: Question, deployment: Deployment) -> Prediction | None:
    try:
        asked = on(q, deployment)
        return quick(asked, (FULL,)) or quick(asked)  # offloading where nothing else would do
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
    return float(prediction.output_tok_s[0]) / prediction.deployment.gpus
