"""How well predictions match measured rows, table by table."""

from collections.abc import Iterable

import numpy as np

from kvsim.evidence.predicted import PublishedRow
from kvsim.frozen import frozen
from kvsim.graph import Array


@frozen
class Score:
    """Relative errors of one metric of one published table; NaN where there is no such row.

    Attributes
    ----------
    paper, table, metric, stack
        Table, metric and stack to which the errors apply.
    rows
        Number of rows.
    fitted
        Mean and largest error of the rows that a stack was fitted to; 0.1 is 10 %.
    held_out
        Mean and largest error of the rows that no fit used.
    with_anomalies
        The same including the documented anomalies.
    skill
        1 for exact predictions; 0 if no better than the mean of the table's other rows.
    """

    paper: str
    table: str
    metric: str
    stack: str
    rows: int
    fitted: tuple[float, float]
    held_out: tuple[float, float]
    with_anomalies: tuple[float, float]
    skill: float


def error(row: PublishedRow, predicted: float) -> float:
    """Compute the relative error of one prediction.

    Parameters
    ----------
    row
        The published row.
    predicted
        The predicted value of its metric.

    Returns
    -------
    float
        Predicted over measured, less one; for yes-or-no rows 0 or 1.
    """
    if row.metric == "fits":
        return float(predicted != row.published)
    return predicted / row.published - 1


def score(rows: Iterable[PublishedRow], predicted: Iterable[float]) -> list[Score]:
    """Score predictions by table and metric.

    Parameters
    ----------
    rows
        Published rows.
    predicted
        The predicted value of each row.

    Returns
    -------
    list of Score
        One score per table and metric, in the order of the rows.
    """
    groups: dict[tuple[str, str, str], list[tuple[PublishedRow, float]]] = {}
    for row, value in zip(rows, predicted, strict=True):
        groups.setdefault((row.paper, row.table, row.metric), []).append((row, value))
    return [_score(*key, pairs) for key, pairs in groups.items()]


def _score(paper: str, table: str, metric: str, pairs: list[tuple[PublishedRow, float]]) -> Score:
    def errors(*uses: str) -> Array:
        return np.array([abs(error(r, v)) for r, v in pairs if r.use in uses])

    return Score(
        paper=paper,
        table=table,
        metric=metric,
        stack=", ".join(dict.fromkeys(row.stack for row, _ in pairs)),
        rows=len(pairs),
        fitted=_mean_and_worst(errors("fit")),
        held_out=_mean_and_worst(errors("check")),
        with_anomalies=_mean_and_worst(errors("check", "anomaly")),
        skill=_skill(pairs, errors("check")),
    )


def _mean_and_worst(errors: Array) -> tuple[float, float]:
    return (float(errors.mean()), float(errors.max())) if errors.size else (np.nan, np.nan)


def _skill(pairs: list[tuple[PublishedRow, float]], errors: Array) -> float:
    """Error saved against predicting each held-out row by the table's other rows' mean."""
    values = np.array([row.published for row, _ in pairs])
    trivial = [
        abs(np.delete(values, i).mean() / values[i] - 1)
        for i, (row, _) in enumerate(pairs)
        if row.use == "check" and values.size > 1 and values[i] > 0
    ]
    if not trivial or not errors.size or not np.mean(trivial):
        return np.nan
    return float(1 - errors.mean() / np.mean(trivial))
