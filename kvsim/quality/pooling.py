"""Losses of quality pooled over benchmarks of a kind, and an upper end that harm does not pass.

One benchmark of a few hundred questions says little, so the benchmarks of a kind (short answers,
retrieval, long generation, perplexity) are pooled, weighted by their questions. A model's own
pooled loss is shrunk towards that of other models, for caches those with the same kind of
attention, as far as these agree with each other; a model without scores of its own gets theirs,
with the spread between them, if there are two or more. What is admitted is the upper end of the
worst kind, and no single benchmark may be worse beyond doubt. Too few questions are no evidence.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from math import sqrt
from typing import ClassVar

from kvsim.files import TABLE, read_records
from kvsim.frozen import frozen

UPPER = 1.64  # standard errors to the upper end: nineteen of twenty losses are below
NO_EVIDENCE = 0.05  # standard error of a pooled loss from which on it says nothing
LEAST_OTHERS = 2  # models without which nothing is said of another
QUESTIONS = {
    "mmlu": 14042, "gsm8k": 1319, "ceval": 1346, "c-eval": 1346, "humaneval": 164, "triviaqa": 500,
    "race": 1436, "hellaswag": 10042, "arc_easy": 2376, "arc_challenge": 1172, "boolq": 3270,
    "piqa": 1838, "winogrande": 1267, "openbookqa": 500, "truthfulqa": 817, "lambada": 5153,
    "longbench": 200, "aime": 300, "gpqa": 198, "livecodebench": 175, "math500": 500,
    "ifeval": 541, "mean": 10000, "mrcr": 800, "needle": 100,
}  # fmt: skip
"""Questions of a benchmark's usual test set, where a table does not print them."""
FEW_QUESTIONS = 200  # of a benchmark that the table above has not


def usual_questions(benchmark: str) -> float:
    """Questions of a benchmark's usual test set.

    Parameters
    ----------
    benchmark
        Its name, as a table has it.
    """
    name = benchmark.lower()
    return float(next((n for key, n in QUESTIONS.items() if key in name), FEW_QUESTIONS))


@frozen
class Pooled:
    """What one model loses in one format over the benchmarks of one kind.

    Attributes
    ----------
    model, attention
        The model, and how its heads share keys and values.
    part, format
        Weights or cache, and the format in kvsim's words.
    kind
        Short answers, retrieval, long generation or perplexity.
    loss, error
        Pooled relative loss and its standard error.
    questions, benchmarks
        How many it rests on.
    least, worst
        The largest lower end of a single benchmark's loss, and its name.
    source
        Short names of the pages.
    """

    model: str
    attention: str
    part: str
    format: str
    kind: str
    loss: float
    error: float
    questions: int
    benchmarks: int
    least: float
    worst: str
    source: str

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "model", "attention", "part", "format", "kind", "loss", "error", "questions",
        "benchmarks", "least", "worst", "source",
    )  # fmt: skip

    def line(self) -> str:
        """A line of the table."""
        cells = [getattr(self, name) for name in self.COLUMNS]
        text = [f"{x:.5f}" if isinstance(x, float) else str(x) for x in cells]
        return ",".join(f'"{x}"' if "," in x else x for x in text)


@frozen
class LossBound:
    """What is known of a loss, over all kinds that have evidence.

    Attributes
    ----------
    loss, bound
        Of the kind with the largest upper end: its likeliest loss and that end.
    kind
        That kind.
    kinds
        All kinds with evidence.
    own
        Whether the model itself was measured.
    models, questions
        How many the worst kind rests on.
    beyond_doubt
        The largest lower end of a single benchmark, and its name.
    source
        Short names of the pages.
    """

    loss: float
    bound: float
    kind: str
    kinds: tuple[str, ...]
    own: bool
    models: int
    questions: int
    beyond_doubt: tuple[float, str]
    source: str


Score = tuple[str, str, str, str, str, float, float, float, str, str]
"""Model, attention, part, format, kind; loss, its standard error, questions; benchmark, source."""


def pool_scores(scores: Iterable[Score]) -> list[Pooled]:
    """Pool the losses of each model, format and kind, weighted by questions.

    Parameters
    ----------
    scores
        One of each benchmark.
    """
    groups: dict[tuple[str, ...], list[Score]] = {}
    for score in scores:
        groups.setdefault(score[:5], []).append(score)
    found = []
    for (model, attention, part, form, kind), some in groups.items():
        weight = sum(n for *_, n, _, _ in some)
        loss = sum(s[7] * s[5] for s in some) / weight
        error = sqrt(sum((s[7] * s[6]) ** 2 for s in some)) / weight
        least, worst = max((s[5] - UPPER * s[6], s[8]) for s in some)
        sources = " ".join(sorted({s[9] for s in some}))
        rest = round(weight), len(some), least, worst, sources
        found.append(Pooled(model, attention, part, form, kind, loss, error, *rest))
    return found


def bound_loss(
    every: Iterable[Pooled], model: str, attention: str, part: str, form: str
) -> LossBound | None:
    """Bound a loss by the model's own scores and those of others.

    Parameters
    ----------
    every
        Pooled losses.
    model, attention
        The model, and how its heads share keys and values, which counts for caches alone.
    part, form
        Weights or cache, and the format.

    Returns
    -------
    LossBound or None
        None where neither the model nor two others of its attention were measured.
    """
    rows = [p for p in every if (p.part, p.format) == (part, form)]
    alike = [p for p in rows if part == "weights" or p.attention == attention]
    found: list[LossBound] = []
    for kind in dict.fromkeys(p.kind for p in rows):
        own = [p for p in rows if p.kind == kind and p.model == model]
        others = [p for p in alike if p.kind == kind and p.model != model]
        bound = _bound_kind(own, others)
        if bound is not None:
            found.append(bound)
    doubt = max((b.beyond_doubt for b in found), default=(-1.0, ""))
    telling = [b for b in found if b.bound - b.loss <= UPPER * NO_EVIDENCE]
    found = telling or [b for b in found if b.loss > UPPER * NO_EVIDENCE]
    if not found:
        return None
    worst = max(found, key=lambda b: b.bound)
    return LossBound(
        worst.loss, max(worst.bound, doubt[0]), worst.kind, tuple(b.kind for b in found),
        any(b.own for b in found), worst.models, worst.questions, doubt, worst.source,
    )  # fmt: skip


def _bound_kind(own: Sequence[Pooled], others: Sequence[Pooled]) -> LossBound | None:
    """The upper end of one kind."""
    if not own and len(others) < LEAST_OTHERS:
        return None
    prior = _between(others) if len(others) >= LEAST_OTHERS else None
    used = [*own, *(others if prior else ())]
    if own:
        loss, variance = own[0].loss, own[0].error ** 2
        if prior is not None:
            mean, spread = prior
            share = spread / (spread + variance) if spread + variance else 1.0
            loss, variance = mean + share * (loss - mean), share * variance
    else:
        assert prior is not None
        loss, variance = prior
    doubt = max(((p.least, p.worst) for p in own), default=(-1.0, ""))
    sources = " ".join(dict.fromkeys(s for p in used for s in p.source.split()))
    return LossBound(
        loss, loss + UPPER * sqrt(variance), used[0].kind, (), bool(own), len(used),
        sum(p.questions for p in used), doubt, sources,
    )  # fmt: skip


def _between(others: Sequence[Pooled]) -> tuple[float, float]:
    """Mean loss of other models, and the variance of a further one's [#f1]_.

    References
    ----------
    .. [#f1] R. DerSimonian and N. Laird, "Meta-analysis in clinical trials", 1986.
    """
    weights = [1 / max(p.error**2, 1e-8) for p in others]
    total = sum(weights)
    mean = sum(w * p.loss for w, p in zip(weights, others, strict=True)) / total
    spread = sum(w * (p.loss - mean) ** 2 for w, p in zip(weights, others, strict=True))
    excess = spread - (len(others) - 1)
    between = max(excess / (total - sum(w * w for w in weights) / total), 0.0)
    weights = [1 / (p.error**2 + between + 1e-8) for p in others]
    mean = sum(w * p.loss for w, p in zip(weights, others, strict=True)) / sum(weights)
    return mean, between + 1 / sum(weights)


@cache
def shipped_formats() -> tuple[Pooled, ...]:
    """The summaries that ship, made by ``benchmarks.quality_formats``."""
    table = files("kvsim.quality") / "formats.csv"
    kinds = {"loss": float, "error": float, "questions": int, "benchmarks": int, "least": float}
    return tuple(
        Pooled(**{k: kinds.get(k, str)(v) for k, v in row.items()})
        for _, row in read_records(str(table), TABLE)
    )
