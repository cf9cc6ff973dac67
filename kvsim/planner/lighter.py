"""Where nothing keeps the targets on a trace: the part of its load that one replica does carry."""

from collections.abc import Callable
from functools import partial

from kvsim.planner.choose import nearest
from kvsim.planner.question import FULL
from kvsim.planner.rivals import spoken
from kvsim.planner.verify import Simulated, measured
from kvsim.search import fewest

IDLE = 1e-4  # of a trace's rate, at which requests do not meet
TRIED = 3  # techniques
MOST = 64  # replicas
Play = Callable[[Simulated, float], Simulated]
"""What was simulated, played again at a share of the trace's rate."""


def reason(done: list[Simulated], bounds: dict[str, float], play: Play) -> str:
    """Why nothing is within the targets, and what would be: more replicas, or looser targets.

    Parameters
    ----------
    done : what was simulated, of which nothing is within the targets.
    bounds : the targets that 9 in 10 requests are to keep. [s]
    """
    every = _by_excess(done, bounds)
    some = sorted(every, key=lambda s: {t.name for t in s.techniques} != {FULL})[:TRIED]
    idle = [play(s, IDLE) for s in some]
    for found, rested in zip(some, idle, strict=True):
        if _within(rested, bounds):
            carried = partial(_carried, found, bounds, play)
            count = fewest(carried, guess=2, most=MOST, below=1)
            if count:
                return (
                    f"no plan meets the targets on this trace: {_missing(found, bounds)}. It keeps "
                    f"them at 1/{count} of the rate (--rate {1 / count:.2g}), so that {count} "
                    f"such replicas carry the trace; `kvsim capacity` plans them"
                )
    best = _by_excess(idle, bounds)[0]
    if _within(best, bounds):
        return f"no plan meets the targets on this trace, nor on 1/{MOST} of it"
    return (
        f"no plan meets the targets on this trace at any rate: {_missing(best, bounds)}, each "
        f"request alone"
    )


def _by_excess(some: list[Simulated], bounds: dict[str, float]) -> list[Simulated]:
    """The nearest to the targets first."""
    left, found = list(some), []
    while left:
        found.append(left.pop(nearest(measured(left), bounds)[0]))
    return found


def _within(found: Simulated, bounds: dict[str, float]) -> bool:
    measures = found.measures()
    return all(measures[name] <= limit for name, limit in bounds.items())


def _carried(found: Simulated, bounds: dict[str, float], play: Play, replicas: int) -> bool:
    """Whether each of so many replicas keeps the targets on its share of the rate."""
    return _within(play(found, 1 / replicas), bounds)


def _missing(found: Simulated, bounds: dict[str, float]) -> str:
    measures = found.measures()
    late = " and ".join(
        f"{name.upper()} of 9 in 10 requests is {spoken(measures[name])} instead of {spoken(limit)}"
        for name, limit in bounds.items()
        if measures[name] > limit
    )
    names = " + ".join("full KV" if t.name == FULL else str(t) for t in found.techniques)
    return f"{late or 'too few requests are served'} with {names}"
