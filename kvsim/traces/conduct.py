"""Columns of a trace that say how requests hang together: turns, classes of priority, aborts.

Each may be missing in any row: such a request follows none, thinks for no time, is of class 0, or
waits to the end.
"""

from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.traces.requests import CLASSES, Floats, Integers
from kvsim.traces.rules import TraceColumn

DEFAULTS = {
    "id": np.nan, "parent": np.nan, "session": np.nan, "think": 0.0, "priority": 0.0,
    "abort_after": np.inf,
}  # fmt: skip
"""Roles of these columns, and what an empty value of each stands for."""

Conduct = dict[str, Floats]
"""By role: a value for each row. (n,)"""


def checked(role: str, column: TraceColumn) -> TraceColumn:
    """The column with empty values filled in, and those marked that break a rule."""
    column.values = column.values.copy()  # Arrow's are read-only
    for row, broken in list(column.broken.items()):
        if broken.rule == "missing":
            del column.broken[row]
            column.values[row] = DEFAULTS[role]
    values = column.values
    with np.errstate(invalid="ignore"):
        column.mark(np.isnan(values) & ~np.isnan(DEFAULTS[role]), "finite")
        if role == "priority":
            wrong = (values < 0) | (values >= CLASSES) | (values != np.floor(values))
            column.mark(wrong, "class")
        elif role == "think":
            column.mark(~(values >= 0) | np.isinf(values), "time")
        elif role == "abort_after":
            column.mark(~(values > 0), "abort")
    return column


def resolved(conduct: Conduct, name: str) -> dict[str, Any]:
    """What ``Requests`` takes: earlier rows as parents, and only columns that say something.

    Raises
    ------
    InputError
        If a turn stands before the one that it follows.
    """
    found: dict[str, Any] = {}
    if "session" in conduct:
        found["parent"] = _before(conduct["session"])
    elif "parent" in conduct:
        found["parent"] = _rows(conduct, name)
    if "parent" in found and (found["parent"] < 0).all():
        del found["parent"]
    if "parent" in found and conduct.get("think", np.zeros(1)).any():
        found["think"] = conduct["think"]
    if conduct.get("priority", np.zeros(1)).any():
        found["priority"] = conduct["priority"].astype(np.int64)
    if np.isfinite(conduct.get("abort_after", np.array([np.inf]))).any():
        found["abort_after"] = conduct["abort_after"]
    return found


def _before(session: Floats) -> Integers:
    """The last earlier row of the same session, or -1. (n,)"""
    parent = np.full(session.size, -1, np.int64)
    order = np.argsort(session, kind="stable")
    same = session[order][1:] == session[order][:-1]  # never for rows without a session
    parent[order[1:][same]] = order[:-1][same]
    return parent


def _rows(conduct: Conduct, name: str) -> Integers:
    """The row of each one's parent, or -1 where the trace has none. (n,)"""
    own, wanted = conduct["id"], conduct["parent"]
    order = np.argsort(own, kind="stable")
    place = np.minimum(np.searchsorted(own[order], wanted), own.size - 1)
    there = own[order[place]] == wanted
    parent = np.where(there, order[place], -1)
    late = np.flatnonzero(parent >= np.arange(own.size))
    if late.size:
        raise InputError(
            f"{name}, request {late[0] + 1}: follows request {parent[late[0]] + 1}, which is not "
            f"before it; expected a turn behind the one that it follows"
        )
    return parent.astype(np.int64)
