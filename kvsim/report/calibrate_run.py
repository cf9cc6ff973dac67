"""``kvsim calibrate --from-run``: what was fitted, and how far it is off on what it did not see."""

from kvsim.evidence.leastsquares import Fit
from kvsim.report import units
from kvsim.report.json import Row, number
from kvsim.report.screen import Screen
from kvsim.report.table import Column, Table, words


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


def show_fit(answer: Row, path: str) -> None:
    """Fitted numbers, which of them the run does not determine, and the errors."""
    out = Screen()
    numbers = [{"key": key} | found for key, found in answer["numbers"].items()]
    columns = (
        words("number", lambda row: row["key"]),
        Column("fitted", lambda row: units.short(row["value"])),
        Column("+-", lambda row: units.short(row["error"])),
        words("", lambda row: "" if row["known"] else "not determined"),
    )
    out.table(Table(columns, numbers))
    for pair in answer["confused"]:
        out.say(f"The run cannot tell {pair[0]} and {pair[1]} apart.")
    errors = [
        {"key": key, "fitted": value, "unseen": answer["error_not_seen"][key]}
        for key, value in answer["error_fitted"].items()
    ]
    heads = (
        words("predicted / measured - 1", lambda row: row["key"]),
        Column("fitted %", lambda row: f"{100 * row['fitted']:+.1f}"),
        Column("not seen %", lambda row: f"{100 * row['unseen']:+.1f}"),
    )
    out.table(Table(heads, errors))
    out.say(f"Written to {path}; use it with --stack {path}")
