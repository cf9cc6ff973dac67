"""``kvsim calibrate --from-run``: what was fitted, and how far it is off on what it did not see."""

from dataclasses import replace
from datetime import date
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import numpy as np

from kvsim.evidence import run as fromrun
from kvsim.evidence.leastsquares import Fit
from kvsim.evidence.logs import MeasuredRun
from kvsim.evidence.stackfile import fitted_text
from kvsim.files import replace_text
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import with_numbers
from kvsim.report import units
from kvsim.report.answer import Answer, show_rest, show_verdict, verdict
from kvsim.report.json import Row, number
from kvsim.report.result import Result
from kvsim.report.screen import Screen
from kvsim.report.table import Column, Table, words
from kvsim.serving.rules import Rules
from kvsim.techniques.technique import Technique

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NAMES = {
    "ttft_mean": "mean TTFT",
    "ttft_p50": "median TTFT",
    "tpot_mean": "mean TPOT",
    "latency_p90": "E2E p90",
}
"""Statistics of a run that predictions are compared in."""

MEANINGS = {
    "kernel.gemm.memory": "share of the memory bandwidth that matrix products reach",
    "kernel.gemm.compute": "share of the arithmetic rate that matrix products reach",
    "time.step_s": "time of a pass besides its kernels",
}
"""Of what a run can tell of a stack."""


@frozen
class CalibratedRun(Result):
    """A stack fitted to a run.

    Attributes
    ----------
    row
        All of it under its contract names, as ``--json`` has it.
    """

    row: Row
    quantiles: Row  # of unseen requests: measured, predicted before and after [s]

    def figures(self) -> list[tuple[str, "Figure"]]:
        """The pictures of the page with their titles."""
        from kvsim.report import calibrate_page

        return calibrate_page.of_run(self.row, self.quantiles)

    @property
    def fields(self) -> Row:
        """The command's own fields as ``--json`` has them."""
        return self.row

    @property
    def title(self) -> str:
        """The stack that was fitted, and the run it was fitted to."""
        return f"{self.row['stack']} fitted to a run of {self.row['model']} on {self.row['gpu']}"

    @property
    def tables(self) -> list[Table]:
        """Fitted numbers, and the errors on seen and unseen requests."""
        numbers = [{"key": key} | found for key, found in self.row["numbers"].items()]
        columns = [
            words("parameter", lambda row: row["key"]),
            Column("fitted", lambda row: _written(row, "value"), lambda row: row["value"]),
            Column("±", lambda row: _written(row, "error"), lambda row: row["error"]),
            words("means", lambda row: MEANINGS[row["key"]], rank=1),
        ]
        if not all(row["known"] for row in numbers):
            columns.append(words("", lambda row: "" if row["known"] else "not determined"))
        unseen, before = self.row["error_not_seen"], self.row["error_before"]
        errors = [
            {"key": key, "fitted": value, "unseen": unseen[key], "before": before[key]}
            for key, value in self.row["error_fitted"].items()
        ]
        heads = (
            words("predicted / measured − 1", lambda row: NAMES[row["key"]]),
            _error("fitted requests %", "fitted"),
            _error("other requests %", "unseen"),
            _error("other requests, before the fit %", "before"),
        )
        return [Table(columns, numbers), Table(heads, errors)]


def _written(row: Row, part: str) -> str:
    """A fitted number or its error: a time with its unit, else a share."""
    value = row[part]
    if value is None:
        return units.DASH
    return units.seconds(value) if row["key"].endswith("_s") else f"{value:.4f}"


def _error(heading: str, key: str) -> Column:
    return Column(heading, lambda row: f"{100 * row[key]:+.1f}", lambda row: 100 * row[key])


def calibrated(
    run: MeasuredRun, technique: Technique, deployment: Deployment, rules: Rules, first: int,
    stack: str, out: Path | None, command: str,
) -> CalibratedRun:  # fmt: skip
    """Fit a stack to a run's first requests, check it on the others, and write it if asked.

    Parameters
    ----------
    stack : the name of the stack that is fitted, which the written file extends.

    Raises
    ------
    InputError
        If there are too few requests, or the place cannot be written.
    """
    fit = fromrun.fit_run(run, technique, deployment, rules, first)
    fitted = replace(deployment, stack=with_numbers(deployment.stack, fit.values))
    found = fromrun.simulated(run, technique, fitted, rules)
    seen = fromrun.errors(run, found, slice(0, first))
    unseen = fromrun.errors(run, found, slice(first, None))
    plain = fromrun.simulated(run, technique, deployment, rules)
    before = fromrun.errors(run, plain, slice(first, None))
    count = len(run.requests)
    if out is not None:
        errors = ", ".join(f"{name} {100 * value:+.1f} %" for name, value in unseen.items())
        rows = f"the first {first} of {count} requests"
        told = f"on the other {count - first} requests of the run: {errors}"
        kept = replace(fit, residuals=fit.residuals[:0])  # hundreds of them tell a reader nothing
        replace_text(out, fitted_text(deployment.stack, stack, kept, rows, told, str(date.today())))
    row = fit_row(fit, seen, unseen, before, first, count)
    row |= {"model": deployment.model.name, "gpu": deployment.hardware.name, "stack": stack}
    late = slice(first, None)
    curves = {
        "measured": run.first[late] - run.requests.arrival[late],
        "after the fit": found.ttft_s[late],
        "before the fit": plain.ttft_s[late],
    }
    times = {name: np.quantile(v, np.linspace(0, 1, 101)).tolist() for name, v in curves.items()}
    answer = _answered(row, deployment, "" if out is None else str(out))
    return CalibratedRun(command, answer, [row], row | {"answer": answer.row()}, times)


def _answered(row: Row, deployment: Deployment, place: str) -> Answer:
    unseen, before = row["error_not_seen"], row["error_before"]
    errors = ", ".join(
        f"{NAMES[key]} {100 * value:+.1f} % (before: {100 * before[key]:+.1f} %)"
        for key, value in unseen.items()
    )
    vague = [key for key, n in row["numbers"].items() if not n["known"]]
    return Answer(
        verdict(
            [
                f"Fitted to {row['fitted_requests']:,} requests on {deployment.hardware.name}. On "
                f"the other {row['checked_requests']:,} predictions are off by: {errors}.",
                f"Use it with --stack {quote(str(place))}." if place else "",
            ],
            [f"The run does not determine {', '.join(vague)}." if vague else ""],
        ),
        figures={"error_not_seen": unseen, "error_before": before},
    )


def fit_row(
    fit: Fit,
    seen: dict[str, float],
    unseen: dict[str, float],
    before: dict[str, float],
    first: int,
    count: int,
) -> Row:
    """A fit to a run under its contract names."""
    return {
        "fitted_requests": first,
        "checked_requests": count - first,
        "numbers": {
            key: {"value": value, "error": number(fit.errors[key]), "known": key not in fit.unknown}
            for key, value in fit.values.items()
        },
        "confused": [list(pair) for pair in fit.confused],
        "error_fitted": seen,
        "error_not_seen": unseen,
        "error_before": before,
    }


def show_fit(found: CalibratedRun, path: str) -> None:
    """The verdict, fitted numbers, which of them the run does not determine, and the errors."""
    out = Screen()
    show_verdict(out, found.answer)
    for table in found.tables:
        out.table(table)
    for pair in found.row["confused"]:
        out.say(f"The run does not separate {pair[0]} from {pair[1]}.")
    show_rest(out, found.answer)
    out.say(f"Written to {path}.")
