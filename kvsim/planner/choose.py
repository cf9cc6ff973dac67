"""Choosing a row of a table: the best within limits, the simplest of those as good, the nearest.

Nothing here knows what a row is: columns of numbers go in, all to be small; a row comes out.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InfeasibleError

Column = NDArray[np.floating]
Rows = NDArray[np.intp]

TINY = 1e-9  # relative slack of a limit: rounding, far below what any prediction means


def distinct(values: Column) -> Column:
    """Each number once, in order; ``np.unique`` would import masked arrays, which takes longer."""
    ordered = np.sort(values)
    return ordered[np.diff(ordered, prepend=-np.inf) > 0]


def within(objective: Column, columns: Mapping[str, Column], limits: Mapping[str, float]) -> Rows:
    """The rows that no limit excludes and that have a value at all."""
    return np.flatnonzero(_kept(objective, columns, limits))


def within_of(
    objective: Column, columns: Mapping[str, Column], limits: Mapping[str, float], among: Rows
) -> Rows:
    """Those of some rows that no limit excludes and that have a value at all."""
    return among[_kept(objective, columns, limits)[among]]


def _kept(
    objective: Column, columns: Mapping[str, Column], limits: Mapping[str, float]
) -> NDArray[np.bool]:
    kept = np.isfinite(objective)
    for name, limit in limits.items():
        kept &= columns[name] <= limit * (1 + TINY)
    return kept


def best(
    objective: Column,
    columns: Mapping[str, Column],
    limits: Mapping[str, float],
    among: Rows | None = None,
) -> int | None:
    """The first row with the smallest objective within the limits, if there is one."""
    if among is None:
        rows = within(objective, columns, limits)
    else:
        rows = within_of(objective, columns, limits, among)
    if not rows.size:
        return None
    least = float(objective[rows].min())
    return int(rows[objective[rows] <= least + TINY * abs(least)][0])


def as_good(objective: Column, rows: Rows, value: float, error: float) -> Rows:
    """Those rows whose objective is no worse than a value by more than a relative error."""
    return rows[objective[rows] <= value + error * abs(value)]


def simplest(
    objective: Column,
    latency: Column,
    groups: Sequence[Hashable],
    rank: Callable[[int], tuple[int, ...]],
    size: Column,
    rows: Rows,
    between: Callable[[int, int], float],
    inside: float,
) -> int:
    """Of the rows that are as good as the best within the known error, the simplest.

    Groups within the error of the best compete: those with the lowest rank win, of these that
    whose smallest size has clearly the smallest latency, and otherwise the best. Within the group,
    the smallest size that is as good wins.

    Parameters
    ----------
    groups : what belongs together, by row; errors within a group nearly cancel.
    rank : simplicity of a row, equal within a group; lower is simpler.
    size : what a group's rows differ in, to be small.
    between : relative error between the groups of two rows, the first the best.
    inside : relative error within a group.
    """
    first = int(rows[np.argmin(objective[rows])])
    value = float(objective[first])
    members: dict[Hashable, list[int]] = {}
    for row in rows:
        members.setdefault(groups[row], []).append(int(row))
    near: dict[Hashable, int] = {}
    for group, some in members.items():
        mine = np.array(some)
        top = float(objective[mine].min())
        if top <= value + max(between(first, some[0]), TINY) * abs(value):
            good = as_good(objective, mine, top, inside)
            near[group] = int(min(good, key=lambda r: (size[r], latency[r], objective[r])))
    ranks = {row: rank(row) for row in near.values()}
    lowest = min(ranks.values())
    left = [row for row, own in ranks.items() if own == lowest]
    fastest = min(float(latency[row]) for row in left)
    quick = [row for row in left if latency[row] <= fastest * CLEARLY]
    return min(quick, key=lambda row: float(objective[row]))


CLEARLY = 1.1  # times a latency: what is slower than this is slower


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
    excess = [np.maximum(columns[k] - v, 0.0) / (v or 1.0) for k, v in limits.items()]
    goal = np.sum(excess, axis=0)
    least = float(goal[finite].min())
    row = int(finite[goal[finite] <= least + TINY * least][0])
    over = {k: float(columns[k][row]) - limit for k, limit in limits.items()}
    return row, {k: v for k, v in over.items() if v > TINY * abs(limits[k])}


def relaxed(columns: Mapping[str, Column], limits: Mapping[str, float]) -> dict[str, float]:
    """The smallest value of each limit that, all others kept, leaves a row; those that can."""
    found = {}
    for name in limits:
        others = {k: v for k, v in limits.items() if k != name}
        rows = within(columns[name], columns, others)
        if rows.size:
            found[name] = float(columns[name][rows].min())
    return found
