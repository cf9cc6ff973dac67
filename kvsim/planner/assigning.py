"""Losses that differ by layer, as rows over counts of layers alone.

The least loss of some counts is a transport problem: every layer does one option, every option has
its layers. Its value is convex in the counts, so that its dual prices at any counts give a row that
is nowhere above it; as in Benders' decomposition such rows take the place of the assignment until
the counts that they allow keep the budget themselves.

References
----------
.. [1] J. F. Benders, "Partitioning procedures for solving mixed-variables programming problems",
   Numerische Mathematik 4, 1962.
"""

from typing import TYPE_CHECKING

import numpy as np
import pulp

from kvsim.frozen import frozen
from kvsim.graph import Array

if TYPE_CHECKING:
    from kvsim.planner.programme import Programme, Variables


@frozen
class LossRow:
    """Nowhere above the least loss of some counts: ``at_none`` and so much per layer. (o, k)"""

    at_none: float
    each: Array


@frozen
class Assigned:
    """The least loss of some counts, by which assignment, and its row."""

    loss: float
    layers: Array  # shares of options by layer, (l, o)
    row: LossRow


def budgeted(programme: Programme) -> bool:
    """Whether losses of layers have a budget."""
    return programme.loss is not None and bool(np.isfinite(programme.budget))


def assigned(programme: Programme, counts: Array) -> Assigned:
    """Layers share out the options of each shape with the least loss."""
    # few plans have losses by layer, and these take as long to import as the others to solve
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, eye_array, kron, vstack

    p = programme
    assert p.loss is not None and p.shape_of is not None
    layers, each = np.zeros_like(p.loss), np.zeros_like(counts)
    total = at_none = 0.0
    for k in range(p.layers.size):
        mine = np.flatnonzero(p.shape_of == k)
        cost, (rows, options) = p.loss[mine], (mine.size, counts.shape[0])
        one = kron(eye_array(rows), np.ones((1, options)))
        all_of = kron(np.ones((1, rows)), eye_array(options))
        found = linprog(
            cost.ravel(),
            A_eq=csr_array(vstack([one, all_of])),
            b_eq=np.concatenate([np.ones(rows), counts[:, k]]),
            method="highs",
        )
        assert found.status == 0, found.message
        prices = found.eqlin.marginals
        total += float(found.fun)
        at_none += float(prices[:rows].sum())
        each[:, k] = prices[rows:]
        layers[mine] = found.x.reshape(rows, options)
    return Assigned(total, layers, LossRow(at_none, each))


def add_loss_rows(
    problem: pulp.LpProblem,
    programme: Programme,
    counts: Variables,
    rows: tuple[LossRow, ...],
) -> None:
    """The budget over counts, as far as known rows tell."""
    unit = programme.budget or 1.0
    for i, row in enumerate(rows):
        lost = pulp.lpSum(float(row.each[key] / unit) * x for key, x in counts.items())
        limit = (programme.budget - row.at_none) / unit
        problem.addConstraint(lost <= limit, f"loss_{i}")
