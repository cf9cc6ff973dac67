"""Settings on which quality depends, and what `kvsim validate quality` measured of them.

Evidence about one setting speaks for every setting that is at least as gentle, and evidence that
a gentle setting loses much speaks against every harsher one.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from importlib.resources import files
from math import sqrt
from typing import get_args

import numpy as np

from kvsim.errors import InputError
from kvsim.files import TABLE, read_records
from kvsim.frozen import frozen
from kvsim.techniques import parse
from kvsim.techniques.axes.base import Family, Part
from kvsim.techniques.technique import Technique
from kvsim.traces.attention import AttentionTrace, Retrieval, shipped_traces

PERPLEXITY = "relative perplexity"
FACTS = "of the planted facts"
"""Units of a measured loss: what it is a share of."""

FAMILIES: tuple[Family, ...] = tuple(reversed(get_args(Family)))  # the harshest first


@frozen
class Harshness:
    """The settings of a technique that its quality loss depends on.

    Attributes
    ----------
    kind
        Name of the technique, or of a group of techniques with comparable losses.
    family
        Family of the selection; evidence never crosses from one family to another.
    numbers
        Settings by name; with each of them, a larger number loses less.
    """

    kind: str
    family: Family
    numbers: Mapping[str, float]

    def at_least_as_gentle(self, other: "Harshness") -> bool:
        """Tell whether this setting loses no more than another of the same kind.

        Parameters
        ----------
        other
            The setting to compare with.

        Returns
        -------
        bool
            True if every number is at least the other's; False also if the kinds differ.
        """
        return self.kind == other.kind and all(
            self.numbers[key] >= value for key, value in other.numbers.items()
        )


def family(technique: Technique) -> Family:
    """Return the family of a technique, in which its quality loss is comparable.

    A technique whose layers select tokens in different ways belongs to the family that loses most.

    Parameters
    ----------
    technique
        The KV-cache technique.

    Returns
    -------
    Family
        For example "eviction" or "packing".
    """
    found = {parts.selection.family for parts in technique.parts}
    return next(one for one in FAMILIES if one in found)


def harshness(technique: Technique, length: float, budget: float | None = None) -> Harshness:
    """Return the settings of a technique that its quality loss depends on.

    The class of the technique declares the direction in which each setting loses less
    (``gentler``), or the number of tokens that it attends to (``prompt_budget``). For a technique
    that declares neither, evidence applies only to the identical setting.

    Parameters
    ----------
    technique
        The KV-cache technique.
    length
        Cached tokens, to which the budget of an evicting technique is related. [tokens]
    budget
        Budget as a share of ``length``; None to compute it from the settings.

    Returns
    -------
    Harshness
        Kind, family and numbers of the setting.
    """
    kind, numbers = str(technique), {}
    if len(technique.terms) == 1:
        (term,) = technique.terms
        own = term.for_prompt(length) if isinstance(term, Part) else term
        attended = own.prompt_budget()
        if attended is not None:
            share = float(np.max(attended)) / length if budget is None else budget
            return Harshness(term.name, family(technique), {"budget": min(share, 1.0)})
        signs = {f.name: f.metadata["gentler"] for f in fields(term) if f.metadata["gentler"]}
        if signs:
            kind = term.evidence_kind or term.name
        numbers = {k: sign * float(np.max(term.settings[k])) for k, sign in signs.items()}
    return Harshness(kind, family(technique), numbers)


@frozen
class Row:
    """A published loss of a setting.

    Attributes
    ----------
    model
        Name in the catalogue.
    setting
        The settings that the loss depends on.
    technique
        The technique with all its settings.
    benchmark
        Name of the benchmark.
    measure
        ``score`` (larger is better), ``retrieval`` (score of finding one fact in a long
        context), or ``perplexity``.
    score, baseline
        Result with the setting, and with full-precision KV: a score from 0 to 100, or a
        perplexity.
    questions
        Number of questions that the score is a mean of; 0 if the paper does not say.
    context
        Longest context of the benchmark; 0 if the paper does not say. [tokens]
    source
        The paper.
    """

    model: str
    setting: Harshness
    technique: str
    benchmark: str
    measure: str
    score: float
    baseline: float
    questions: int
    context: float
    source: str

    @property
    def loss(self) -> float:
        """Loss relative to full-precision KV: of the score, or the growth of perplexity."""
        if self.measure == "perplexity":
            return self.score / self.baseline - 1
        return 1 - self.score / self.baseline

    @property
    def error(self) -> float:
        """Standard error of the relative loss; 0 where it is unknown.

        Both runs are taken to have answered different questions. They answered the same ones, so
        that the true error is smaller.
        """
        if self.measure == "perplexity" or not self.questions:
            return 0.0
        share, base = self.score / 100, self.baseline / 100
        variance = (share * (1 - share) + base * (1 - base)) / self.questions
        return float(variance**0.5) / base

    @property
    def unit(self) -> str:
        """Quantity that the loss is a share of."""
        return PERPLEXITY if self.measure == "perplexity" else "relative score"


@cache
def published() -> tuple[Row, ...]:
    """Return every published loss of the tables that ship with kvsim."""
    folder = files("kvsim.quality") / "published"
    rows: list[Row] = []
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".csv"):
            rows += [_row(line) for _, line in read_records(str(file), TABLE)]
    return tuple(rows)


@cache
def published_by_kind() -> Mapping[str, tuple[Row, ...]]:
    """Return the published losses by kind of setting; only losses of one kind are comparable.

    Returns
    -------
    dict of tuple of Row
        Published losses by ``Harshness.kind``.
    """
    rows: dict[str, list[Row]] = {}
    for row in published():
        rows.setdefault(row.setting.kind, []).append(row)
    return {kind: tuple(some) for kind, some in rows.items()}


@cache
def _setting(technique: str, length: float, budget: float | None) -> Harshness:
    """Tables have many rows of one setting."""
    return harshness(parse(technique), length, budget)


def _row(line: dict[str, str]) -> Row:
    context = float(line["context_tokens"] or 0)
    budget = float(line["budget"]) if line["budget"] else None
    return Row(
        model=line["model"],
        setting=_setting(line["technique"], context or 1.0, budget),
        technique=line["technique"] + (f" at {budget:g} of the context" if budget else ""),
        benchmark=line["benchmark"],
        measure=line["measure"],
        score=float(line["score"]),
        baseline=float(line["baseline"]),
        questions=int(line["questions"] or 0),
        context=context,
        source=line["source"],
    )


WINDOWS_READ = re.compile(r"(\d+) windows of (\d+) tokens, (\d+) scored")


@frozen
class QualityRun:
    """The measured loss of one setting on one checkpoint.

    Attributes
    ----------
    model
        Name in the catalogue.
    setting
        The settings that the loss depends on.
    technique
        The technique with all its settings.
    loss
        Relative growth of perplexity, or the share of planted facts that were lost; the larger of
        the two where both were measured.
    error
        Standard error of the loss. Both runs score the same tokens, and for similar distributions
        the variance of their log-ratio is about twice the KL divergence. Answers count as if they
        were independent.
    unit
        Quantity that the loss is a share of.
    retrieval
        Whether planted facts were asked for.
    context
        Length of the contexts. [tokens]
    source
        The trace and the run that measured it.
    """

    model: str
    setting: Harshness
    technique: str
    loss: float
    error: float
    unit: str
    retrieval: bool
    context: float
    source: str


def runs_of(trace: "AttentionTrace") -> tuple[QualityRun, ...]:
    """Return the loss of every setting that an attention trace measured.

    Parameters
    ----------
    trace
        An attention trace with quality.

    Returns
    -------
    tuple of QualityRun
        One run per setting.

    Raises
    ------
    InputError
        If the trace does not say how its text was read.
    """
    read = WINDOWS_READ.search(trace.settings)
    if read is None:
        raise InputError(
            f"quality of {trace.model}: its settings are {trace.settings[:60]!r}; expected "
            f"'N windows of N tokens, N scored ...', as `kvsim validate quality` writes them"
        )
    windows, prompt, scored = map(int, read.groups())
    runs = []
    for q in trace.quality:
        ratio = q.perplexity / trace.perplexity
        losses = [(ratio - 1, ratio * sqrt(2 * q.kl / (windows * scored)), PERPLEXITY)]
        if q.found is not None and trace.retrieval is not None and trace.retrieval.found:
            losses.append((*_lost(q.found, trace.retrieval), FACTS))
        loss, error, unit = max(losses)
        runs.append(
            QualityRun(
                model=trace.model,
                setting=harshness(parse(q.technique), prompt),
                technique=q.technique,
                loss=loss,
                error=error,
                unit=unit,
                retrieval=len(losses) > 1,
                context=prompt,
                source=f"{windows * scored} tokens of {trace.text.split(';')[0]}, {trace.date}",
            )
        )
    return tuple(runs)


def _lost(found: float, full: "Retrieval") -> tuple[float, float]:
    """Share of the facts that full KV finds which a technique does not, and its error."""
    variance = (found * (1 - found) + full.found * (1 - full.found)) / full.facts
    return 1 - found / full.found, sqrt(variance) / full.found


@cache
def shipped(model: str) -> tuple[QualityRun, ...]:
    """Return the measured runs on one model that ship with kvsim.

    Parameters
    ----------
    model
        Name in the catalogue.

    Returns
    -------
    tuple of QualityRun
        The runs; empty if the model was not measured.
    """
    path = shipped_traces().get(model)
    if path is None:
        return ()
    from kvsim.traces.attention import load  # only where there is something to read

    return runs_of(load(path))


def with_own(own: Iterable["AttentionTrace"]) -> tuple[QualityRun, ...]:
    """Join the user's measured runs with those that ship for other models.

    Parameters
    ----------
    own
        The user's attention traces.

    Returns
    -------
    tuple of QualityRun
        The user's runs first.
    """
    mine = [run for trace in own for run in runs_of(trace)]
    others = [model for model in shipped_traces() if model not in {run.model for run in mine}]
    return (*mine, *(run for model in others for run in shipped(model)))
