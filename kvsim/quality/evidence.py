"""The evidence of a setting's loss on a model, and whether that is enough to choose it.

Evidence is measured on this checkpoint, or published for this model and others of its attention
kind, pooled by ``bound_loss``; weights and caches are held to one rule. Admitted is what
stays within the limit at the upper end of its loss. Eviction must also pass a test of retrieval.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from importlib.resources import files
from math import sqrt
from shlex import quote
from typing import Literal, get_args

from kvsim.files import TABLE, read_records
from kvsim.frozen import frozen
from kvsim.models.model import Model
from kvsim.quality.measured import (
    FACTS,
    PERPLEXITY,
    Harshness,
    QualityRun,
    Row,
    harshness,
    published_by_kind,
    shipped,
)
from kvsim.techniques.technique import Technique, compose

UPPER = 1.64  # standard errors to the upper end: nineteen of twenty losses are below
NO_EVIDENCE = 0.05  # standard error of a pooled loss from which on it says nothing
LEAST_OTHERS = 2  # models without which nothing is said of another
FEW_QUESTIONS = 200  # of a benchmark that questions.csv does not have


def usual_questions(benchmark: str) -> float:
    """Return the number of questions in a benchmark's usual test set.

    Parameters
    ----------
    benchmark
        Name of the benchmark, as in a paper's table.

    Returns
    -------
    float
        Number of questions; ``FEW_QUESTIONS`` for an unknown benchmark.
    """
    name = benchmark.lower()
    return float(next((n for key, n in _usual_sets() if key in name), FEW_QUESTIONS))


@cache
def _usual_sets() -> tuple[tuple[str, int], ...]:
    """Benchmarks and the questions of their usual test sets, which a table may not print."""
    table = files("kvsim.quality") / "questions.csv"
    rows = (row for _, row in read_records(str(table), TABLE))
    return tuple((row["benchmark"], int(row["questions"])) for row in rows)


@frozen
class Pooled:
    """Pooled loss of one model in one format over the benchmarks of one kind.

    Attributes
    ----------
    model, attention
        The model, and how its heads share keys and values.
    part, format
        What is stored in the format ("weights" or "cache"), and the format as kvsim names it.
    kind
        Kind of benchmark: short answers, retrieval, long generation or perplexity.
    loss, error
        Pooled relative loss and its standard error; 0.01 is 1 %.
    questions, benchmarks
        Number of questions and of benchmarks that were pooled.
    least, worst
        Largest lower end of a single benchmark's confidence interval, and that benchmark's name.
    source
        Short names of the pages with the scores.
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

    def line(self) -> str:
        """Format the record as a line of the CSV table.

        Returns
        -------
        str
            Cells in the order of the attributes, separated by commas.
        """
        cells = [getattr(self, f.name) for f in fields(self)]
        text = [f"{x:.5f}" if isinstance(x, float) else str(x) for x in cells]
        return ",".join(f'"{x}"' if "," in x else x for x in text)


@frozen
class LossBound:
    """Upper bound of a loss over all kinds of benchmarks that were measured.

    Attributes
    ----------
    loss, bound
        Best estimate and upper bound of the relative loss, of the kind with the largest bound.
    kind
        The kind with the largest bound.
    kinds
        All kinds with evidence.
    own
        Whether this model was measured, not only others.
    models, questions
        Number of models and questions behind ``bound``.
    beyond_doubt
        Largest lower end of a single benchmark's interval, and that benchmark's name.
    source
        Short names of the pages with the scores.
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
        One score per benchmark.

    Returns
    -------
    list of Pooled
        One record per model, format and kind of benchmark.
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
        sources = "; ".join(sorted({s[9] for s in some}))
        rest = round(weight), len(some), least, worst, sources
        found.append(Pooled(model, attention, part, form, kind, loss, error, *rest))
    return found


def bound_loss(
    every: Iterable[Pooled], model: str, attention: str, part: str, form: str
) -> LossBound | None:
    """Bound the loss of a format on a model by its own scores and those of other models.

    Parameters
    ----------
    every
        Pooled losses of all models.
    model
        Name of the model.
    attention
        How its heads share keys and values. For cache formats only models alike in this count.
    part
        "weights" or "cache".
    form
        The format.

    Returns
    -------
    LossBound or None
        None if neither the model nor two others were measured.
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
        worst.loss,
        max(worst.bound, doubt[0]),
        worst.kind,
        tuple(b.kind for b in found),
        any(b.own for b in found),
        worst.models,
        worst.questions,
        doubt,
        worst.source,
    )


def _bound_kind(own: Sequence[Pooled], others: Sequence[Pooled]) -> LossBound | None:
    """The upper end of one kind."""
    if not own and len(others) < LEAST_OTHERS:
        return None
    prior = _pool_others(others) if len(others) >= LEAST_OTHERS else None
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
    sources = "; ".join(dict.fromkeys(s for p in used for s in p.source.split("; ")))
    return LossBound(
        loss,
        loss + UPPER * sqrt(variance),
        used[0].kind,
        (),
        bool(own),
        len(used),
        sum(p.questions for p in used),
        doubt,
        sources,
    )


def _pool_others(others: Sequence[Pooled]) -> tuple[float, float]:
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
    """Return the pooled losses that ship with kvsim, made by ``benchmarks.quality_formats``."""
    table = files("kvsim.quality") / "formats.csv"
    kinds = {"loss": float, "error": float, "questions": int, "benchmarks": int, "least": float}
    return tuple(
        Pooled(**{k: kinds.get(k, str)(v) for k, v in row.items()})
        for _, row in read_records(str(table), TABLE)
    )


Kind = Literal["lossless", "measured", "expected", "published", "published elsewhere", "none"]
EVIDENCE_KINDS: tuple[Kind, ...] = get_args(Kind)

QUALITY_KINDS = ("short answers", "retrieval", "long generation", "perplexity")
ATTENTION_WORDS = {"grouped queries": "GQA", "one cache per head": "MHA", "latent (MLA)": "MLA"}
REACH = 4.0  # times the context of the evidence; what packing loses does not grow with it
WITHIN = 1.96  # standard errors of an interval
UNTRIED = "measured at a gentler setting or a shorter context"
KNOWN_BAD = 0.1  # a loss that `--lossy` alone does not admit


@frozen
class Evidence:
    """The evidence for the quality loss of one setting on one model.

    Attributes
    ----------
    kind
        Kind of the evidence, from "lossless" to "none".
    loss, low, high
        Relative loss and its 95 % interval, in ``unit``; NaN if unknown. With kind "none" they are
        a warning: the least loss of other kinds of models.
    unit
        Quantity that the loss is a share of, such as a score or perplexity.
    worst
        Benchmark and model, or run, with the largest loss.
    source
        Where the loss comes from.
    missing
        Measurements that are needed before this evidence counts; empty if none are.
    untried
        Kinds of benchmarks without evidence.
    """

    kind: Kind
    loss: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    unit: str = ""
    worst: str = ""
    source: str = ""
    missing: str = ""
    untried: tuple[str, ...] = ()

    @property
    def unknown(self) -> bool:
        """Whether the loss of this setting was never measured."""
        return self.kind == "none" or bool(self.missing)

    @property
    def bound(self) -> float:
        """Upper end of the loss, or the loss itself if it has no interval."""
        return self.high if self.high == self.high else self.loss

    @property
    def most(self) -> float:
        """Upper end of the interval to print: scores and facts cannot fall by more than all."""
        return self.high if self.unit == PERPLEXITY else min(self.high, 1.0)

    @property
    def column(self) -> float:
        """Loss to compare with a limit: the upper bound; 0 if lossless, infinite if unknown."""
        if self.kind == "lossless":
            return 0.0
        return float("inf") if self.unknown else max(self.bound, 0.0)

    def __str__(self) -> str:
        """The evidence of the loss, in one sentence."""
        if self.kind == "lossless":
            return "same tokens as full-precision KV"
        if self.kind == "none":
            return f"no evidence: {self.missing}"
        shares = (f"{100 * share:.1f}" for share in (self.low, self.loss, self.most))
        low, loss, high = (text.replace("-0.0", "0.0") for text in shares)
        told = f"{loss} %"
        told += f" (95 % interval {low} to {high} %)" if self.high > self.low else ""
        text = {
            PERPLEXITY: f"perplexity higher by {told}",
            FACTS: f"planted facts found fewer by {told}",
        }.get(self.unit, f"scores lower by {told}")
        text = f"{text}: {self.worst} ({self.source})"
        return f"{text}; {self.missing}" if self.missing else text


def evidence(
    technique: Technique, model: Model, length: float, runs: Sequence[QualityRun] | None = None
) -> Evidence:
    """Find the evidence for a technique's quality loss on a model.

    Parameters
    ----------
    technique
        The KV-cache technique with its settings.
    model
        The model.
    length
        Longest context. [tokens]
    runs
        Measured runs; None for those that ship with kvsim.

    Returns
    -------
    Evidence
        The loss and where it comes from.
    """
    if technique.exact:
        return Evidence("lossless")
    if len(technique.terms) > 1:  # in some layers at most what each would lose in all of them
        pieces = {str(term): compose(term) for term in technique.terms}
        return combine([evidence(piece, model, length, runs) for piece in pieces.values()])
    mine = harshness(technique, length)
    measured = shipped(model.name) if runs is None else runs
    known = [r for r in measured if r.model == model.name]
    found = _measured(mine, known, length)
    if found is not None:
        return found
    rows = published_by_kind().get(mine.kind, ())
    found = _published(mine, rows, model, length) or _by_format(model, "cache", technique.name)
    if found is not None:
        return found
    warned = _warned(mine, [r for r in rows if r.model != model.name])
    warning = f"; other models lose {100 * warned:.0f} % or more" if warned > KNOWN_BAD else ""
    return Evidence(
        "none",
        loss=warned if warning else float("nan"),
        missing=f"{technique.name} was not measured at this setting on {model.name} or a similar "
        f"model{warning}; `kvsim validate quality --model {quote(model.name)} "
        f"--techniques {technique.name} --out mine.json` does, and `plan --quality mine.json` "
        f"reads it",
    )


FORMAT_FAMILIES = dict.fromkeys(("fp8", "fp8-dynamic", "fp8-block"), "fp8")
FORMAT_FAMILIES |= dict.fromkeys(("int4", "int4-g32", "awq"), "int4")
FORMAT_FAMILIES |= {name: name for name in ("int8", "mxfp4", "nvfp4")}
FORMAT_FAMILIES |= dict.fromkeys(("q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "q8_0"), "q4_k_m")
"""Formats of ``--weights`` by what the summaries of published scores call them."""


def weights_evidence(model: Model, weights: str) -> Evidence:
    """Find the evidence for the quality loss of a weight format on a model.

    Parameters
    ----------
    model
        The model.
    weights
        Format of its weights, as ``--weights`` names it.

    Returns
    -------
    Evidence
        The loss and where it comes from; "lossless" for the published format and 16 bits.
    """
    if weights in ("fp16", "bf16", "f16", model.released):
        return Evidence("lossless")
    if (model.released, weights) == ("mxfp4", "mxfp4_moe"):  # GGUF keeps the published blocks
        return Evidence("lossless")
    found = _by_format(model, "weights", FORMAT_FAMILIES.get(weights, weights))
    if found is not None:
        return found
    return Evidence("none", missing=f"no scores of {weights} weights are known for such a model")


def _by_format(model: Model, part: str, form: str) -> Evidence | None:
    """Evidence from published scores of weights or caches in a format."""
    attention = ATTENTION_WORDS[attention_kind(model)]
    found = bound_loss(shipped_formats(), model.name, attention, part, form)
    return None if found is None else _of_bound(found, f"{form} {part}", found.own)


def _of_bound(found: LossBound, what: str, own: bool) -> Evidence:
    """Evidence of a pooled loss; the interval reaches as far down as up."""
    unit = PERPLEXITY if found.kind == "perplexity" else "relative score"
    several = f"{found.models} models" if found.models > 1 else "one model"
    counted = "" if unit == PERPLEXITY else f", {found.questions:,} questions"
    return Evidence(
        "published" if own else "published elsewhere",
        found.loss,
        2 * found.loss - found.bound,
        found.bound,
        unit,
        f"{what}, {found.kind}, {several}{counted}",
        found.source,
        untried=tuple(k for k in QUALITY_KINDS if k not in found.kinds and k != "perplexity"),
    )


def _warned(mine: Harshness, rows: Sequence[Row]) -> float:
    """Smallest loss of models of other attention kinds at this or a gentler setting.

    That admits nothing, but what ruins every model so far is not recommended for another; 0 if
    none was tried.
    """
    losses: dict[str, float] = {}
    for r in rows:
        if r.setting.at_least_as_gentle(mine):
            losses[r.model] = max(losses.get(r.model, 0.0), r.loss)
    return min(losses.values(), default=0.0)


def combine(pieces: Sequence[Evidence]) -> Evidence:
    """Combine the evidence for several changes that are made together; their losses add up.

    Parameters
    ----------
    pieces
        Evidence for each change.

    Returns
    -------
    Evidence
        Evidence for all of them; unknown if that of any change is.
    """
    lossy = [e for e in pieces if e.kind != "lossless"]
    if len(lossy) < 2:
        return lossy[0] if lossy else Evidence("lossless")
    unknown = [e for e in lossy if e.kind == "none"]
    if unknown:
        return unknown[0]
    missing = "; ".join(filter(None, dict.fromkeys(e.missing for e in lossy)))
    if len({e.unit for e in lossy}) > 1:
        missing = "its parts were measured in different units, which do not add up"
    loss = sum(e.loss for e in lossy)
    spread = sum((e.high - e.loss) ** 2 for e in lossy) ** 0.5
    return Evidence(
        max((e.kind for e in lossy), key=EVIDENCE_KINDS.index),
        loss,
        loss - spread,
        loss + spread,
        lossy[0].unit,
        " and ".join(e.worst for e in lossy),
        " and ".join(dict.fromkeys(e.source for e in lossy)),
        missing,
    )


def _measured(mine: Harshness, known: Sequence[QualityRun], length: float) -> Evidence | None:
    covers = [r for r in known if mine.at_least_as_gentle(r.setting) and _reaches(mine, r, length)]
    against = [r for r in known if r.setting.at_least_as_gentle(mine)]
    if not covers and not against:
        return None
    nearest = [
        r
        for r in covers
        if not any(
            o.setting.at_least_as_gentle(r.setting) and not r.setting.at_least_as_gentle(o.setting)
            for o in covers
        )
    ]
    worst = max([*nearest, *against], key=lambda r: r.loss)
    missing = "" if covers else UNTRIED
    if mine.family == "eviction" and not all(r.retrieval for r in nearest):
        missing = "eviction also needs a retrieval test, which this run lacks"
    low, high = worst.loss - WITHIN * worst.error, worst.loss + WITHIN * worst.error
    return Evidence(
        "measured", worst.loss, low, high, worst.unit, worst.technique, worst.source, missing
    )


def _published(
    mine: Harshness, rows: Sequence[Row], model: Model, length: float
) -> Evidence | None:
    """Published evidence for a setting, pooled by kind of benchmark.

    The gentlest settings that are no gentler than this one speak for it; of those at least as
    gentle, what a single benchmark loses beyond doubt counts too.
    """
    attention = attention_kind(model)
    rows = [r for r in rows if r.model == model.name or _kind_of(r.model) == attention]
    covers = [r for r in rows if mine.at_least_as_gentle(r.setting) and _reaches(mine, r, length)]
    against = [r for r in rows if r.setting.at_least_as_gentle(mine)]
    nearest = [r for r in covers if not any(_gentler(o, r) for o in covers)]
    pooled = pool_scores(map(_score, nearest or against))
    found = bound_loss(pooled, model.name, attention, "cache", mine.kind)
    if found is None:
        return None
    worst = max(against, key=lambda r: r.loss - UPPER * r.error, default=None)
    doubt = 0.0 if worst is None else worst.loss - UPPER * worst.error
    if worst is not None and doubt > found.bound:  # a single benchmark, beyond doubt
        found = replace(found, bound=doubt, loss=doubt, kind=worst.benchmark)
    name = min(r.technique for r in (nearest or against))
    known = _of_bound(found, name, any(r.model == model.name for r in nearest))
    missing = "" if covers else UNTRIED
    if covers and mine.family == "eviction" and "retrieval" not in found.kinds:
        missing = "eviction also needs a retrieval test, which no table contains"
    return replace(known, missing=missing)


def _gentler(one: Row, other: Row) -> bool:
    """Whether a row's setting is gentler than another's."""
    mine, its = one.setting, other.setting
    return mine.at_least_as_gentle(its) and not its.at_least_as_gentle(mine)


def _score(row: Row) -> Score:
    """A row of a paper as a score to pool."""
    kind = {"perplexity": "perplexity", "retrieval": "retrieval"}.get(row.measure, "short answers")
    asked = float(row.questions) or usual_questions(row.benchmark)
    error = row.error or (
        0.002 if kind == "perplexity" else replace(row, questions=round(asked)).error
    )
    asked = 1.0 if kind == "perplexity" else asked
    group = (row.model, _kind_of(row.model), "cache", row.setting.kind, kind)
    return (*group, row.loss, error, asked, row.benchmark, row.source)


def _reaches(mine: Harshness, found: QualityRun | Row, length: float) -> bool:
    """Whether evidence at one context speaks for another."""
    return mine.family == "packing" or not found.context or length <= REACH * found.context


@cache
def _kind_of(name: str) -> str:
    from kvsim.models.configs import load_model

    return attention_kind(load_model(name))


def attention_kind(model: Model) -> str:
    """Describe how a model's heads share keys and values.

    Parameters
    ----------
    model
        The model.

    Returns
    -------
    str
        "latent (MLA)", "grouped queries" or "one cache per head".
    """
    if model.latent:
        return "latent (MLA)"
    return "grouped queries" if model.queries_per_kv > 1 else "one cache per head"
