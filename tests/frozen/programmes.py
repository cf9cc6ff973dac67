"""Linear programmes that questions are turned into: families of rows and of variables.

A case is the command line. Of the first programmes each family of rows is summed with weights;
of all programmes of a question the families' names are kept.
"""

import re
import shlex
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pulp

from kvsim import solver
from tests.frozen.store import Answer, Kind
from tests.support.commands import run

MOST = 4  # programmes of a question that are summed


class EnoughError(BaseException):
    """Raised once enough programmes were seen."""


def summarise(case: str) -> Answer:
    """Return sums over the first programmes of a question."""
    found: list[dict[str, Any]] = []
    solve = solver.solve

    def noted(problem: pulp.LpProblem, *args: Any, **options: Any) -> Any:
        found.append(summary(problem))
        if len(found) == MOST:
            raise EnoughError
        return solve(problem, *args, **options)

    with patch.object(solver, "solve", noted), suppress(EnoughError):
        run(*shlex.split(case))
    return {f"programme {i}": each for i, each in enumerate(found)}


def summary(problem: pulp.LpProblem) -> dict[str, Any]:
    """Rows and variables by the words of their names, with sums that weigh each coefficient."""
    whole = problem.toDict()
    place = {v["name"]: i for i, v in enumerate(whole["variables"])}
    rows: dict[str, list[float]] = {}
    for row in [*whole["constraints"], whole["objective"] | {"constant": 0.0, "sense": 0}]:
        sums = rows.setdefault(family(row["name"]), [0.0] * 6)
        sums[0] += 1
        for entry in row["coefficients"]:
            value = entry["value"] * (1 + place[entry["name"]] % 7)
            sums[1 if value > 0 else 2] += value
        sums[3 if row["constant"] > 0 else 4] += row["constant"]
        sums[5] += row["sense"]
    columns: dict[str, list[float]] = {}
    for v in whole["variables"]:
        sums = columns.setdefault(family(v["name"]), [0.0] * 4)
        sums[0] += 1
        sums[1] += v["lowBound"] or 0.0
        sums[2] += v["upBound"] or 0.0
        sums[3] += v["cat"] == "Integer"
    return {"rows": rows, "variables": columns}


def family(name: str | None) -> str:
    """A name without its numbers."""
    return re.sub(r"\d+", "N", name or "objective")


PROGRAMMES = Kind("programmes", summarise, tolerance=1e-6, every=4, depth=3)
"""Later programmes rest on solutions of the first."""
