"""Which of the techniques that were simulated on a trace is chosen."""

import numpy as np

from kvsim.errors import InfeasibleError
from kvsim.planner.carry import ReplicaTargets
from kvsim.planner.choose import best
from kvsim.planner.error import between
from kvsim.planner.lighter import Play, reason
from kvsim.planner.question import rank
from kvsim.planner.verify import Simulated, measured

TIE = 0.005  # objectives this near are equal, and the mean latency decides


def best_of(
    done: list[Simulated], objective: str, targets: ReplicaTargets, play: Play
) -> Simulated:
    """The simplest that is within the targets and as good as the best within the known error.

    Of settings of one technique that are equal, that with the smallest mean latency.

    Parameters
    ----------
    play : plays what was simulated at another rate, to say at which it would do.

    Raises
    ------
    InfeasibleError
        If none is.
    """
    if not done:
        raise InfeasibleError("no technique serves all requests within the targets")
    columns, bounds = measured(done), targets.times
    within = bounds | {"refused": float(columns["refused"].min())}
    first = best(columns[objective], columns, within)
    if first is None:
        raise InfeasibleError(reason(done, bounds, play))
    value = float(columns[objective][first])
    error = np.array([_between(done[first], s) for s in done])
    within["behind"] = value
    columns["behind"] = columns[objective] - error * abs(value)
    ranks = np.array([_simplicity(s) for s in done], dtype=float)
    lowest = best(ranks, columns, within)
    assert lowest is not None
    simplest = {"rank": ranks}
    mine = best(columns[objective], columns | simplest, within | {"rank": float(ranks[lowest])})
    assert mine is not None
    value = float(columns[objective][mine])
    equal = within | {objective: value + TIE * abs(value), "rank": float(ranks[lowest])}
    row = best(columns["latency"], columns | simplest, equal)
    assert row is not None
    return done[row]


def _between(one: Simulated, other: Simulated) -> float:
    """Known relative error between what two plans run."""
    d = one.lanes[0].deployment
    return max(between(d, x, y) for x in one.techniques for y in other.techniques)


def _simplicity(s: Simulated) -> int:
    """How simple: lossless before lossy, one technique before several, full KV before others."""
    lossy, moved = (max(rank(t)[i] for t in s.techniques) for i in (0, 1))
    return 4 * lossy + 2 * (len(s.techniques) > 1) + moved
