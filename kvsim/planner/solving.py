"""Solving the programme of placement, and taking its mixes in the order of their bounds."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvsim import solver
from kvsim.errors import InfeasibleError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.assigning import LossRow, assigned, budgeted
from kvsim.planner.passes import work
from kvsim.planner.programme import Programme, build

EXACT = 1e-9  # relative gap where every mix counts
LOSS_ROWS = 60  # at most, before layers are assigned in the programme itself


@frozen
class Mix:
    """A solution.

    Attributes
    ----------
    counts
        Layers by option and shape. (o, k)
    corners
        Layers by corner and shape, fractions where shares are between corners. (v, k)
    streamed
        Layers' worth of streamed weights by option and shape. (o, k)
    bound
        Below the objective of every mix, as proved by the solver. [s]
    objective
        Of this solution, which replay will exceed. [s]
    """

    counts: Array
    corners: Array
    streamed: Array
    bound: float
    objective: float
    status: str
    seconds: float
    assigned: Array | None = None  # (l, o)


def solve(
    programme: Programme,
    whole: bool = True,
    gap: float = 1e-4,
    cuts: tuple[Array, ...] = (),
    seconds: float = 20.0,
    apart: bool = False,
    counts: Array | None = None,
    streamed: Array | None = None,
) -> Mix:
    """The best mix by the bounds; see ``programme.build`` for what may be decided already.

    Where layers differ in their losses, rows over counts take the place of their assignment.

    Raises
    ------
    InfeasibleError
        If no mix is within the limits.
    """
    args = programme, whole, gap, cuts, seconds, apart, counts, streamed
    if not (whole and counts is None and budgeted(programme)):
        return _solved(*args)
    started = time.perf_counter()
    relaxed = _solved(programme, False, gap, cuts, seconds, apart)
    rows: tuple[LossRow, ...] = (assigned(programme, relaxed.counts).row,)
    for _ in range(LOSS_ROWS):
        mix = _solved(*args, loss_rows=rows)
        found = assigned(programme, mix.counts)
        if found.loss <= programme.budget * (1 + EXACT):
            took = time.perf_counter() - started
            return replace(mix, assigned=found.layers, seconds=took)
        rows += (found.row,)
    return _solved(*args)


def _solved(
    programme: Programme,
    whole: bool,
    gap: float,
    cuts: tuple[Array, ...],
    seconds: float,
    apart: bool,
    counts: Array | None = None,
    streamed: Array | None = None,
    loss_rows: tuple[LossRow, ...] | None = None,
) -> Mix:
    started = time.perf_counter()
    built = build(programme, whole, cuts, apart, counts, streamed, loss_rows)
    solution = solver.solve(built.problem, gap, seconds)
    if not solution.found:
        raise InfeasibleError(f"no mix of placements is within the limits ({solution.status})")
    options, shapes = len(programme.names), programme.layers.size
    counts = np.array([[built.n[o, k].value() for k in range(shapes)] for o in range(options)])
    corners = np.array([[built.y[v, k].value() for k in range(shapes)]
                        for v in range(len(programme.option_of))])  # fmt: skip
    streamed = np.zeros((options, shapes))
    for key, x in built.w.items():
        streamed[key] = max(x.value(), 0.0)
    objective, bound = solution.objective, min(solution.bound, solution.objective)
    if not np.isfinite(bound):  # a programme without whole numbers
        bound = objective * (1 - gap)
    layers = None
    if built.x:
        assert programme.loss is not None
        layers = np.array([[built.x[i, o].value() for o in range(options)]
                             for i in range(len(programme.loss))])  # fmt: skip
    return Mix(
        counts=np.abs(np.round(counts)) if whole else counts,
        corners=np.maximum(corners, 0.0),
        streamed=streamed,
        bound=bound if whole else objective,
        objective=objective,
        status="optimal",
        seconds=time.perf_counter() - started,
        assigned=layers,
    )


def best_first(
    programme: Programme, evaluate: Callable[[Mix], float], most: int
) -> tuple[Mix | None, float, float]:
    """Mixes in the order of their bounds until none that is left can be better.

    Parameters
    ----------
    evaluate : the objective of a mix's counts as replay says it, infinite where they cannot be. [s]
    most : mixes to evaluate; with as many as there are counts the best is proved.

    Returns
    -------
    tuple
        The best mix with what replay says, and a bound below every mix. [s]
    """
    cuts: tuple[Array, ...] = ()
    best: tuple[Mix | None, float] = (None, np.inf)
    bound = -np.inf
    for _ in range(most):
        try:
            mix = solve(programme, gap=EXACT, cuts=cuts)
        except InfeasibleError:
            return (*best, best[1])
        bound = max(bound, mix.bound)
        if bound >= best[1] * (1 - EXACT):
            break
        value = evaluate(mix)
        if value < best[1]:
            best = mix, value
        cuts += (mix.counts,)
    return (*best, min(bound, best[1]))


def lower_bound(programme: Programme, corners: Array, streamed: Array | None = None) -> Array:
    """What the programme says of a mix, phase by phase, without solving. (q,) [s]

    Parameters
    ----------
    streamed : layers' worth of streamed weights, by shape. (k,)
    """
    took = work(programme, corners)
    if streamed is not None:
        took = took + programme.streaming.seconds @ streamed
    found: Array = took.max(axis=1)
    return found
