"""Accuracy tables of the papers, one row per model, setting and benchmark."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from kvsim.files import read_records
from kvsim.files.kinds import TABLE
from kvsim.frozen import frozen
from kvsim.quality.settings import PERPLEXITY, Harshness, harshness
from kvsim.techniques import parse


@frozen
class Row:
    """What a paper says of a setting.

    Attributes
    ----------
    model
        Of the catalogue.
    setting
        The technique's, as far as quality is concerned.
    measure
        ``score`` (larger is better), ``retrieval`` (a score of finding one thing in a long
        context), or ``perplexity``.
    score, baseline
        Of the setting and of full-precision KV, in the paper's unit.
    questions
        How many the score is a mean of; 0 where the paper does not say.
    context
        Longest context of the benchmark; 0 where the paper does not say. [tokens]
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
        """Relative to full-precision KV: of the score, or by how much perplexity grew."""
        if self.measure == "perplexity":
            return self.score / self.baseline - 1
        return 1 - self.score / self.baseline

    @property
    def error(self) -> float:
        """Standard error of the loss, as if the questions of both runs were different ones.

        They were the same, so that the true error is smaller; 0 where it is unknown.
        """
        if self.measure == "perplexity" or not self.questions:
            return 0.0
        share, base = self.score / 100, self.baseline / 100
        variance = (share * (1 - share) + base * (1 - base)) / self.questions
        return float(variance**0.5) / base

    @property
    def unit(self) -> str:
        """What the loss is a share of."""
        return PERPLEXITY if self.measure == "perplexity" else "relative score"


@cache
def published() -> tuple[Row, ...]:
    """Every row of every table."""
    folder = files("kvsim.quality") / "published"
    rows: list[Row] = []
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".csv"):
            rows += [_row(line) for _, line in read_records(str(file), TABLE)]
    return tuple(rows)


@cache
def published_by_kind() -> Mapping[str, tuple[Row, ...]]:
    """The rows by the kind of their setting, as only those of one kind speak for each other."""
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
