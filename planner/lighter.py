"""Where nothing keeps the targets on a trace: the part of its load that one replica does carry."""

from collections.abc import Callable

from kvsim.planner.choose import nearest
from kvsim.planner.question import FULL
from kvsim.planner.rivals import spoken
from kvsim.planner.verify import Simulated, measured

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
    full = [s for s in every if {t.name for t in s.techniques} == {FULL}]
    asked = list(dict.fromkeys([*map(id, full), *map(id, every)]))[:TRIED]
    some = [next(s for s in every if id(s) == x) for x in asked]
    idle = [play(s, IDLE) for s in some]
    for found, rested in zip(some, idle, strict=True):
        if _within(rested, bounds):
            count = _replicas(found, bounds, play)
            if count is not None:
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


def _replicas(found: Simulated, bounds: dict[str, float], play: Play) -> int | None:
    """The fewest replicas of which each keeps the targets on its share of the rate."""
    low, high = 1, 2
    while not _within(play(found, 1 / high), bounds):
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if _within(play(found, 1 / middle), bounds):
            high = middle
        else:
            low = middle
    return high


def _missing(found: Simulated, bounds: dict[str, float]) -> str:
    measures = found.measures()
    late = " and ".join(
        f"{name.upper()} of 9 in 10 requests is {spoken(measures[name])} instead of {spoken(limit)}"
        for name, limit in bounds.items()
        if measures[name] > limit
    )
    names = " + ".join("full KV" if t.name == FULL else str(t) for t in found.techniques)
    return f"{late or 'too few requests are served'} with {names}"
