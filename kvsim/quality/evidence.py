"""The evidence of a setting's loss on a model, and whether that is enough to choose it.

Evidence is measured on this checkpoint, or published for this model and others of its attention
kind, pooled as ``quality.pooling`` says; weights and caches are held to one rule. Admitted is what
stays within the limit at the upper end of its loss. Eviction must also pass a test of retrieval.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from shlex import quote
from typing import Literal, get_args

from kvsim.frozen import frozen
from kvsim.models.model import Model
from kvsim.quality.measured import QualityRun, Row, published_by_kind, shipped
from kvsim.quality.pooling import (
    UPPER,
    LossBound,
    Score,
    bound_loss,
    pool_scores,
    shipped_formats,
    usual_questions,
)
from kvsim.quality.settings import PERPLEXITY, Harshness, harshness
from kvsim.techniques.technique import Technique, compose

Kind = Literal["lossless", "measured", "expected", "published", "published elsewhere", "none"]
EVIDENCE_KINDS: tuple[Kind, ...] = get_args(Kind)

QUALITY_KINDS = ("short answers", "retrieval", "long generation", "perplexity")
ATTENTION_WORDS = {"grouped queries": "GQA", "one cache per head": "MHA", "latent (MLA)": "MLA"}
REACH = 4.0  # times the context of the evidence; what packing loses does not grow with it
WITHIN = 1.96  # standard errors of an interval
UNTRIED = "that is a gentler setting or a shorter context, and this one was not measured"
KNOWN_BAD = 0.1  # a loss that `--lossy` alone does not admit


@frozen
class Evidence:
    """The evidence of one setting's loss on one model.

    Attributes
    ----------
    loss, low, high
        Relative loss and its 95 % interval, in ``unit``; NaN where nothing is known. Of kind "none"
        a warning: the least that models of other kinds lose.
    worst
        The benchmark and model, or the run, that the loss is of.
    missing
        What would have to be measured before this counts, if anything.
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
    def bound(self) -> float:
        """The upper end of the loss."""
        return self.high if self.high == self.high else self.loss

    @property
    def column(self) -> float:
        """As a limit sees it: the upper end, 0 without loss, infinite where nothing is known."""
        if self.kind == "lossless":
            return 0.0
        return float("inf") if self.missing or self.kind == "none" else max(self.bound, 0.0)

    def admitted(self, most: float, unknown: bool) -> bool:
        """Whether a plan may choose it.

        Parameters
        ----------
        most : the largest loss that the user accepts.
        unknown : whether settings are welcome of which nothing is known.
        """
        if self.kind == "lossless":
            return True
        if self.kind == "none" or self.missing:
            return unknown and not self.loss > most
        return self.bound <= most

    def __str__(self) -> str:
        """The evidence of the loss, in one sentence."""
        if self.kind == "lossless":
            return "same tokens as full-precision KV"
        if self.kind == "none":
            return f"no evidence: {self.missing}"
        shares = (f"{100 * share:.1f} %" for share in (self.low, self.loss, self.high))
        low, loss, high = (text.replace("-0.0", "0.0") for text in shares)
        interval = f" (95 % interval {low} to {high})" if self.high > self.low else ""
        text = f"loss of {self.unit} {loss}{interval}; {self.worst}; {self.source}"
        return f"{text}; {self.missing}" if self.missing else text


def evidence(
    technique: Technique, model: Model, length: float, runs: Sequence[QualityRun] | None = None
) -> Evidence:
    """The evidence of a technique's loss on a model with contexts of some length.

    Parameters
    ----------
    length : longest context. [tokens]
    runs : measured ones; those that ship if not given.
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
        f"model{warning}; `kvsim validate --quality --model {quote(model.name)} "
        f"--techniques {technique.name} --out mine.json` does, and `plan --quality mine.json` "
        f"reads it",
    )


FORMAT_FAMILIES = {
    "fp8": "fp8", "fp8-dynamic": "fp8", "fp8-block": "fp8", "int8": "int8", "int4": "int4",
    "int4-g32": "int4", "awq": "int4", "mxfp4": "mxfp4", "nvfp4": "nvfp4",
}  # fmt: skip
"""Formats of ``--weights`` by what the summaries of published scores call them."""


def weights_evidence(model: Model, weights: str) -> Evidence:
    """The evidence of what weights in a format lose on a model.

    Parameters
    ----------
    model
        The model.
    weights
        Format of its weights, in the notation of ``--weights``.
    """
    if weights in ("fp16", "bf16", "f16", model.released):
        return Evidence("lossless")
    found = _by_format(model, "weights", FORMAT_FAMILIES.get(weights, weights))
    if found is not None:
        return found
    return Evidence("none", missing=f"no scores of {weights} weights are known for such a model")


def _by_format(model: Model, part: str, form: str) -> Evidence | None:
    """What published scores say of weights, or of a cache, in a format."""
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
    """The least that models of other kinds lose with this setting or a gentler one.

    That admits nothing, but what ruins every model so far is not recommended for another; 0 if
    none was tried.
    """
    losses: dict[str, float] = {}
    for r in rows:
        if r.setting.at_least_as_gentle(mine):
            losses[r.model] = max(losses.get(r.model, 0.0), r.loss)
    return min(losses.values(), default=0.0)


def combine(pieces: Sequence[Evidence]) -> Evidence:
    """Combine the evidence of several changes to one cache, whose losses add up.

    Parameters
    ----------
    pieces
        Evidence of each change.
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
        max((e.kind for e in lossy), key=EVIDENCE_KINDS.index), loss, loss - spread, loss + spread,
        lossy[0].unit, " and ".join(e.worst for e in lossy),
        " and ".join(dict.fromkeys(e.source for e in lossy)), missing,
    )  # fmt: skip


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
        missing = "eviction also needs a test of retrieval, which this run has not"
    low, high = worst.loss - WITHIN * worst.error, worst.loss + WITHIN * worst.error
    return Evidence(
        "measured", worst.loss, low, high, worst.unit, worst.technique, worst.source, missing
    )


def _published(
    mine: Harshness, rows: Sequence[Row], model: Model, length: float
) -> Evidence | None:
    """What papers say of a setting, pooled by kind of benchmark.

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
        missing = "eviction also needs a test of retrieval, which no table has"
    return replace(known, missing=missing)


def _gentler(one: Row, other: Row) -> bool:
    """Whether a row's setting is gentler than another's."""
    mine, its = one.setting, other.setting
    return mine.at_least_as_gentle(its) and not its.at_least_as_gentle(mine)


def _score(row: Row) -> Score:
    """A row of a paper as a score to pool."""
    kind = {"perplexity": "perplexity", "retrieval": "retrieval"}.get(row.measure, "short answers")
    asked = float(row.questions) or usual_questions(row.benchmark)
    error = row.error or (0.002 if kind == "perplexity" else _error_of(row, asked))
    where = row.benchmark, row.source
    form = row.setting.kind
    return (
        row.model, _kind_of(row.model), "cache", form, kind, row.loss, error,
        1.0 if kind == "perplexity" else asked, *where,
    )  # fmt: skip


def _error_of(row: Row, questions: float) -> float:
    """The standard error of a row's loss if its score were a mean of so many questions."""
    return replace(row, questions=round(questions)).error


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
    """
    if model.latent:
        return "latent (MLA)"
    return "grouped queries" if model.queries_per_kv > 1 else "one cache per head"
