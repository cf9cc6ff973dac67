"""The choice of one option under limits, as a mixed-integer programme over plain arrays.

Nothing here knows what an option is: a table of columns goes in, a row comes out.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pulp
from numpy.typing import NDArray

from kvsim.errors import InfeasibleError

Column = NDArray[np.floating]
Rows = NDArray[np.intp]
Programme = tuple[pulp.LpProblem, list[pulp.LpVariable], dict[str, pulp.LpVariable]]

WORST = 1e6  # times the least excess; rows beyond cannot be the nearest
TINY = 1e-9  # relative slack of a limit: rounding, far below what any prediction means


@dataclass(frozen=True)
class Choice:
    """The row chosen, and what the solver says of it."""

    row: int
    objective: float
    status: str
    gap: float  # between this objective and the best bound, relative
    seconds: float


def build(
    objective: Column,
    columns: Mapping[str, Column],
    limits: Mapping[str, float],
    elastic: bool = False,
) -> Programme:
    """One binary per row, one of them set; the chosen value of each limited column is within it.

    Columns are scaled by their limits, so that the solver's tolerances are relative. With
    ``elastic`` limits may be exceeded and the objective is the sum of the relative excesses.
    """
    problem = pulp.LpProblem("plan", pulp.LpMinimize)
    take = [problem.add_variable(f"take_{i}", cat=pulp.LpBinary) for i in range(objective.size)]
    excess = {
        name: problem.add_variable(f"excess_{name}", lowBound=0) for name in limits if elastic
    }
    scale = float(np.max(np.abs(objective), initial=0.0)) or 1.0
    goal = pulp.lpSum(excess.values()) if elastic else pulp.LpAffineExpression(
        zip(take, (objective / scale).tolist(), strict=True)
    )  # fmt: skip
    problem.setObjective(goal)
    problem.addConstraint(pulp.lpSum(take) == 1, "one_option")
    for name, limit in limits.items():
        unit = limit or 1.0
        used = pulp.LpAffineExpression(zip(take, (columns[name] / unit).tolist(), strict=True))
        problem.addConstraint(used - excess.get(name, 0) <= limit / unit, name)
    return problem, take, excess


def within(objective: Column, columns: Mapping[str, Column], limits: Mapping[str, float]) -> Rows:
    """The rows that no limit excludes and that have a value at all."""
    ok = np.isfinite(objective)
    for name, limit in limits.items():
        ok &= columns[name] <= limit * (1 + TINY)
    return np.flatnonzero(ok)


def choose(objective: Column, columns: Mapping[str, Column], limits: Mapping[str, float]) -> Choice:
    """The row with the smallest objective whose limited columns stay within their limits.

    Rows that exceed a limit by themselves cannot be chosen; leaving them out keeps the
    programme small and its tolerances harmless. Of rows that are equal but for rounding the first
    is chosen: tables begin with what is simplest.

    Raises
    ------
    InfeasibleError
        If no row is within all limits.
    """
    started = time.perf_counter()
    rows = within(objective, columns, limits)
    if not rows.size:
        raise InfeasibleError("no option is within all limits")

    def programme(some: Rows) -> Programme:
        return build(objective[some], {k: columns[k][some] for k in limits}, limits)

    row, status = _solve(objective, rows, programme)
    row = _first_equal(objective, rows, row)
    best = float(objective[rows].min())
    gap = abs(float(objective[row]) - best) / max(abs(best), 1e-300)
    return Choice(row, float(objective[row]), status, gap, time.perf_counter() - started)


def nearest(
    columns: Mapping[str, Column], limits: Mapping[str, float]
) -> tuple[int, dict[str, float]]:
    """The row that exceeds the limits least, by the sum of relative excesses, and by how much.

    Raises
    ------
    InfeasibleError
        If no row has a value for every limit.
    """
    finite = np.flatnonzero(np.all([np.isfinite(columns[k]) for k in limits], axis=0))
    if not finite.size:
        raise InfeasibleError("no option has a value for every limit")
    excess = {k: np.maximum(columns[k] - v, 0.0) / (v or 1.0) for k, v in limits.items()}
    goal = np.sum(list(excess.values()), axis=0)
    unit = float(goal[finite].min()) or 1.0  # a solver cannot tell 1e-3 from 2e-3 beside 1e12

    def programme(some: Rows) -> Programme:
        scaled = {name: values[some] / unit for name, values in excess.items()}
        return build(goal[some], scaled, dict.fromkeys(limits, 0.0), elastic=True)

    row, _ = _solve(goal, finite[goal[finite] <= WORST * unit], programme)
    row = _first_equal(goal, finite, row)
    over = {k: float(columns[k][row]) - limit for k, limit in limits.items()}
    return row, {k: v for k, v in over.items() if v > TINY * abs(limits[k])}


def _first_equal(goal: Column, rows: Rows, row: int) -> int:
    """The first of the rows that are as good as one, but for rounding."""
    return int(rows[goal[rows] <= goal[row] + TINY * abs(goal[row])][0])


def _solve(goal: Column, rows: Rows, programme: Callable[[Rows], Programme]) -> tuple[int, str]:
    """The row that a programme takes, and the solver's status.

    A solver stops within its tolerances, which hide small differences in a table of large
    numbers: as long as there are better rows than the one taken, it is asked again for those.
    """
    while True:
        problem, take, _ = programme(rows)
        status = problem.solve(pulp.HiGHS(msg=False, threads=1))
        taken = goal[rows[int(np.argmax([x.value() or 0.0 for x in take]))]]
        if not (goal[rows] < taken).any():
            return int(rows[np.argmax(goal[rows] == taken)]), pulp.LpStatus[status].lower()
        rows = rows[goal[rows] < taken]
