"""The evidence of a setting's loss on a model, and whether that is enough to choose it.

Evidence is, in this order: measured on this checkpoint; published for this model; published for
other models of its attention kind; none. Measured and published losses have different units, and
one verdict never mixes them. Eviction must also pass a test of retrieval.
"""

from collections.abc import Sequence
from functools import cache
from shlex import quote
from typing import Literal, get_args

from kvsim.frozen import frozen
from kvsim.models.model import Model
from kvsim.quality.measured import QualityRun, Row, published_by_kind, shipped
from kvsim.quality.settings import Harshness, harshness
from kvsim.techniques.technique import Technique, compose

Kind = Literal["lossless", "measured", "expected", "published", "published elsewhere", "none"]
EVIDENCE_KINDS: tuple[Kind, ...] = get_args(Kind)

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
    """

    kind: Kind
    loss: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    unit: str = ""
    worst: str = ""
    source: str = ""
    missing: str = ""

    @property
    def column(self) -> float:
        """As a limit sees it: 0 without loss, infinite where nothing is known."""
        if self.kind == "lossless":
            return 0.0
        return float("inf") if self.missing or self.kind == "none" else max(self.loss, 0.0)

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
        return self.loss <= most

    def __str__(self) -> str:
        """The evidence of the loss, in one sentence."""
        if self.kind == "lossless":
            return "same tokens as full-precision KV"
        if self.kind == "none":
            return f"no evidence: {self.missing}"
        low, loss, high = (f"{100 * share:.1f} %" for share in (self.low, self.loss, self.high))
        interval = f", {low} to {high}" if self.high > self.low else ""
        text = f"loses {loss} {self.unit}{interval} ({self.worst}; {self.source})"
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
    own = [r for r in rows if r.model == model.name]
    found = _published(mine, own, length, "published")
    if found is not None:
        return found
    alike = [r for r in rows if r.model != model.name and _same_kind(r.model, model)]
    found = _published(mine, alike, length, "published elsewhere")
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
    nearest = [min(covers, key=lambda r: r.loss)] if covers else []
    worst = max([*nearest, *against], key=lambda r: r.loss)
    missing = "" if covers else UNTRIED
    if mine.family == "eviction" and not all(r.retrieval for r in nearest):
        missing = "eviction also needs a test of retrieval, which this run has not"
    low, high = worst.loss - WITHIN * worst.error, worst.loss + WITHIN * worst.error
    return Evidence(
        "measured", worst.loss, low, high, worst.unit, worst.technique, worst.source, missing
    )


def _published(mine: Harshness, rows: Sequence[Row], length: float, kind: Kind) -> Evidence | None:
    """The worst benchmark of the worst model; scores of retrieval count for eviction only."""
    if mine.family != "eviction":
        rows = [r for r in rows if r.measure != "retrieval"]
    covers = [r for r in rows if mine.at_least_as_gentle(r.setting) and _reaches(mine, r, length)]
    against = [r for r in rows if r.setting.at_least_as_gentle(mine)]
    if not covers and not against:
        return None
    nearest: dict[tuple[str, str], Row] = {}
    for r in covers:
        key = (r.model, r.benchmark)
        if key not in nearest or r.loss < nearest[key].loss:
            nearest[key] = r
    worst = max([*nearest.values(), *against], key=lambda r: r.loss)
    missing = "" if covers else UNTRIED
    if covers and mine.family == "eviction" and all(r.measure != "retrieval" for r in covers):
        missing = "eviction also needs a test of retrieval, which no table has"
    low, high = worst.loss - WITHIN * worst.error, worst.loss + WITHIN * worst.error
    where = f"{worst.technique}, {worst.benchmark}, {worst.model}"
    return Evidence(kind, worst.loss, low, high, worst.unit, where, worst.source, missing)


def _reaches(mine: Harshness, found: QualityRun | Row, length: float) -> bool:
    """Whether evidence at one context speaks for another."""
    return mine.family == "packing" or not found.context or length <= REACH * found.context


def _same_kind(name: str, model: Model) -> bool:
    """Whether a published model keeps its cache as this one does."""
    return _kind_of(name) == attention_kind(model)


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
