"""Linear and mixed-integer programmes, written with PuLP and solved by HiGHS.

The only module that knows either library. PuLP 3 and 4 differ in how expressions are made and what
a solve returns, and HiGHS from 1.16 on prints a banner on standard output, so programmes are handed
to HiGHS here, with columns in the order of their names whatever the version.
"""

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pulp

from kvsim.frozen import frozen

if TYPE_CHECKING:
    from highspy import Highs

Variable: TypeAlias = pulp.LpVariable
Expression: TypeAlias = pulp.LpAffineExpression
Problem: TypeAlias = pulp.LpProblem

INTEGER = pulp.LpInteger

_STDOUT = Lock()


@frozen
class Solution:
    """Status of a solved programme; the values are stored in its variables.

    Attributes
    ----------
    status
        ``optimal`` within the gap, ``stopped`` at the time limit with a solution, ``infeasible``,
        ``unbounded``, or ``unsolved`` without a solution or a reason.
    objective
        Value of the objective; NaN without a solution.
    bound
        Proved bound below every solution; minus infinity if nothing is proved, as for programmes
        without whole numbers.
    """

    status: str
    objective: float
    bound: float

    @property
    def has_values(self) -> bool:
        """Whether variables hold a solution within all constraints."""
        return self.status in ("optimal", "stopped")


def create_problem(name: str) -> Problem:
    """Return an empty programme that minimises.

    Parameters
    ----------
    name
        Name of the programme.
    """
    return pulp.LpProblem(name, pulp.LpMinimize)


def weigh(terms: Iterable[tuple[Variable, float]]) -> Expression:
    """Return the sum of variables times their coefficients.

    Parameters
    ----------
    terms
        Pairs of a variable and its coefficient.
    """
    create = getattr(pulp.LpAffineExpression, "from_list", pulp.LpAffineExpression)
    return create(list(terms))


def add_up(terms: Iterable[Variable | Expression | float]) -> Expression:
    """Return the sum of variables and expressions.

    Parameters
    ----------
    terms
        Terms of the sum.
    """
    return pulp.lpSum(terms)


def evaluate(expression: Variable | Expression) -> float:
    """Return the value of a variable or an expression in the last solution.

    Parameters
    ----------
    expression
        The variable or expression.
    """
    return float(expression.value())


def solve(problem: Problem, gap: float, seconds: float = np.inf) -> Solution:
    """Solve a programme on one thread and set its variables.

    Parameters
    ----------
    problem
        It minimises.
    gap
        Relative distance between solution and bound at which the solver stops.
    seconds
        Time limit. [s]
    """
    from highspy import HighsModelStatus

    highs = _create_highs()
    for option, value in (("mip_rel_gap", gap), ("threads", 1), ("time_limit", float(seconds))):
        highs.setOptionValue(option, value)
    variables = sorted(_used_variables(problem), key=lambda variable: variable.name)
    _add_columns(highs, problem, variables)
    _add_rows(highs, problem, {variable.name: i for i, variable in enumerate(variables)})
    highs.run()
    ended = HighsModelStatus
    feasible = np.isfinite(highs.getObjectiveValue())
    status = {
        ended.kOptimal: "optimal",
        ended.kInfeasible: "infeasible",
        ended.kUnboundedOrInfeasible: "infeasible",
        ended.kUnbounded: "unbounded",
        ended.kTimeLimit: "stopped" if feasible else "unsolved",
        ended.kIterationLimit: "stopped" if feasible else "unsolved",
        ended.kInterrupt: "stopped" if feasible else "unsolved",
    }.get(highs.getModelStatus(), "unsolved")
    solution = Solution(status, np.nan, -np.inf)
    if not solution.has_values:
        return solution
    for variable, value in zip(variables, list(highs.getSolution().col_value), strict=True):
        variable.varValue = value
    bound = float(highs.getInfo().mip_dual_bound) + float(problem.objective.constant)
    objective = evaluate(problem.objective)
    return Solution(status, objective, bound if np.isfinite(bound) else -np.inf)


def _create_highs() -> "Highs":
    from highspy import Highs

    with _silenced():  # its banner comes before any option can be set
        highs = Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    return highs


@contextmanager
def _silenced() -> Iterator[None]:
    """Discard what C code prints on standard output."""
    with _STDOUT:
        try:
            kept = os.dup(1)
        except OSError:  # closed: nothing to keep clean
            yield
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        flush = ctypes.CDLL(None).fflush
        try:
            flush(None)
            os.dup2(nowhere, 1)
            yield
        finally:
            flush(None)
            os.dup2(kept, 1)
            os.close(kept)
            os.close(nowhere)


def _used_variables(problem: Problem) -> list[Variable]:
    """Variables in the objective or a constraint; PuLP 4's ``variables`` includes unused ones."""
    used = getattr(problem, "exported_variables", problem.variables)
    return list(used())


def _add_columns(highs: "Highs", problem: Problem, variables: list[Variable]) -> None:
    from highspy import HighsVarType, kHighsInf

    cost = {variable.name: value for variable, value in problem.objective.items()}
    for i, variable in enumerate(variables):
        low, high = variable.lowBound, variable.upBound
        highs.addCol(
            cost.get(variable.name, 0.0),
            -kHighsInf if low is None else low,
            kHighsInf if high is None else high,
            *(0, [], []),
        )
        if variable.cat == INTEGER:
            highs.changeColIntegrality(i, HighsVarType.kInteger)


def _add_rows(highs: "Highs", problem: Problem, column: dict[str, int]) -> None:
    from highspy import kHighsInf

    constraints: list[pulp.LpConstraint] = problem.constraints()
    for constraint in constraints:
        entries = [(column[v.name], value) for v, value in constraint.items() if value]
        low, high = constraint.getLb(), constraint.getUb()
        highs.addRow(
            -kHighsInf if low is None else low,
            kHighsInf if high is None else high,
            len(entries),
            [i for i, _ in entries],
            [value for _, value in entries],
        )
