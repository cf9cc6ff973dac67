"""``kvsim calibrate --from-run``: what was fitted, and how far it is off on what it did not see."""

from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from kvsim.evidence import run as fromrun
from kvsim.evidence.leastsquares import Fit
from kvsim.evidence.logs import MeasuredRun
from kvsim.evidence.stackfile import fitted_text
from kvsim.files import replace_text
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import with_numbers
from kvsim.report import units
from kvsim.report.answer import Answer, show_rest, show_verdict, verdict
from kvsim.report.json import Row, number
from kvsim.report.result import Result
from kvsim.report.screen import Screen
from kvsim.report.table import Column, Table, words
from kvsim.serving.rules import Rules
from kvsim.techniques.base import Technique


@dataclass(frozen=True, repr=False)
class CalibratedRun(Result):
    """A stack fitted to a run.

    Attributes
    ----------
    row
        All of it under its contract names, as ``--json`` has it.
    """

    row: Row

    @property
    def tables(self) -> list[Table]:
        """Fitted numbers, and the errors on seen and unseen requests."""
        numbers = [{"key": key} | found for key, found in self.row["numbers"].items()]
        columns = (
            words("number", lambda row: row["key"]),
            Column("fitted", lambda row: units.short(row["value"]), lambda row: row["value"]),
            Column("+-", lambda row: units.short(row["error"]), lambda row: row["error"]),
            words("", lambda row: "" if row["known"] else "not determined"),
        )
        unseen = self.row["error_not_seen"]
        errors = [
            {"key": key, "fitted": value, "unseen": unseen[key]}
            for key, value in self.row["error_fitted"].items()
        ]
        heads = (
            words("predicted / measured - 1", lambda row: row["key"]),
            Column("fitted %", lambda row: f"{100 * row['fitted']:+.1f}"),
            Column("not seen %", lambda row: f"{100 * row['unseen']:+.1f}"),
        )
        return [Table(columns, numbers), Table(heads, errors)]


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
    count = len(run.requests)
    if out is not None:
        errors = ", ".join(f"{name} {100 * value:+.1f} %" for name, value in unseen.items())
        rows = f"the first {first} of {count} requests"
        told = f"on the other {count - first} requests of the run: {errors}"
        kept = replace(fit, residuals=fit.residuals[:0])  # hundreds of them tell a reader nothing
        replace_text(out, fitted_text(deployment.stack, stack, kept, rows, told, str(date.today())))
    row = fit_row(fit, seen, unseen, first, count)
    answer = _answered(row, deployment, "" if out is None else str(out))
    return CalibratedRun(command, answer, [row], row | {"answer": answer.row()})


def _answered(row: Row, deployment: Deployment, place: str) -> Answer:
    errors = ", ".join(f"{key} {100 * v:+.1f} %" for key, v in row["error_not_seen"].items())
    vague = [key for key, n in row["numbers"].items() if not n["known"]]
    return Answer(
        verdict(
            [
                f"On {row['checked_requests']:,} requests that the fit did not see, predictions "
                f"for {deployment.hardware.name} are off by: {errors} (predicted / measured - 1)."
            ],
            [f"The run does not determine {', '.join(vague)}." if vague else ""],
        ),
        settings=[f"Use it with --stack {place}."] if place else [],
    )


def fit_row(
    fit: Fit, seen: dict[str, float], unseen: dict[str, float], first: int, count: int
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
    }


def show_fit(found: CalibratedRun, path: str) -> None:
    """The verdict, fitted numbers, which of them the run does not determine, and the errors."""
    out = Screen()
    show_verdict(out, found.answer)
    for table in found.tables:
        out.table(table)
    for pair in found.row["confused"]:
        out.say(f"The run cannot tell {pair[0]} and {pair[1]} apart.")
    show_rest(out, found.answer)
    out.say(f"Written to {path}.")
