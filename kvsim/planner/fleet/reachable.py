"""Targets that can be met at all, where those that are asked for cannot."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvsim.planner.fleet.play import Played, play
from kvsim.planner.fleet.shortlist import Rated
from kvsim.planner.fleet.targets import ClassTarget, FleetTargets, as_time
from kvsim.planner.fleet.traffic import Traffic

ROOM = 1.2  # a target that cannot be met is replaced by what can, and so much more
NAMES = ("ttft", "tpot")
LIGHT = 8  # times the replicas that a trace needs, to see what waiting leaves


def reachable(
    rated: list[Rated],
    traffic: Traffic,
    targets: FleetTargets,
    tell: Callable[[str], None],
) -> tuple[FleetTargets, str]:
    """The nearest targets that some configuration meets with hardly any load, and in words."""
    tell("looking for targets that can be met")
    played = [_at_rest(x, traffic) for x in rated]
    each = [_reached(one, targets) for one in played]
    alone = _alone(each, targets)
    if alone:  # one of the two targets need not change, so it does not
        changed: tuple[str, ...] = (min(alone, key=lambda name: alone[name][1]),)
        nearest = alone[changed[0]][0]
    else:
        changed = NAMES
        nearest = min(range(len(rated)), key=lambda i: max(played[i].over(targets)))
    reached = each[nearest]
    missed = [
        f"{name.upper()} p{100 * targets.share:g} of {as_time(getattr(target, name))}"
        f"{_whose(targets, target)} cannot be met"
        f"{_instead(rated, [x[target.above] for x in each], nearest, (name, target))}"
        for target in targets.each
        if target.above in reached
        for name in NAMES
        if getattr(reached[target.above], name) > getattr(target, name)
    ]

    def loosened(target: ClassTarget) -> ClassTarget:
        can = reached.get(target.above, FleetTargets(0.0, 0.0))
        longer = {x: max(getattr(target, x), ROOM * getattr(can, x)) for x in changed}
        return replace(target, **longer)

    why = "; ".join(missed) or "the targets are met by no replica under load"
    return targets.changed(loosened), f"{why}; {_which(alone, changed)}"


def _alone(
    each: list[dict[int, FleetTargets]], targets: FleetTargets
) -> dict[str, tuple[int, float]]:
    """For each target that would do alone if it were longer: who, and how many times as long."""
    found = {}
    for name, other in (NAMES, NAMES[::-1]):
        over = {
            i: max(
                ROOM * getattr(reached[t.above], name) / getattr(t, name)
                for t in targets.each
                if t.above in reached
            )
            for i, reached in enumerate(each)
            if all(
                ROOM * getattr(reached[t.above], other) <= getattr(t, other)
                for t in targets.each
                if t.above in reached
            )
        }
        who = min(over, key=lambda i: over[i], default=None)
        if who is not None and 1 < over[who] < np.inf:
            found[name] = who, over[who]
    return found


def _which(alone: dict[str, tuple[int, float]], changed: tuple[str, ...]) -> str:
    """Which of the targets was changed here, and whether the other would do instead."""
    if len(changed) > 1:
        return "no longer TTFT alone would do, nor a longer TPOT, so both are longer here"
    (name,) = changed
    said = f"{name.upper()} alone is {alone[name][1]:.3g} times as long here"
    others = [x for x in alone if x != name]
    if not others:
        return f"{said}, as a longer {_other(name)} alone would not do"
    return (
        f"{said}; {_other(name)} alone, {alone[others[0]][1]:.3g} times as long, would do as well"
    )


def _other(name: str) -> str:
    return NAMES[1 - NAMES.index(name)].upper()


def _reached(played: Played, targets: FleetTargets) -> dict[int, FleetTargets]:
    """What is reached of each class that has targets, by the length that it begins above."""
    return {
        target.above: played.reached(targets.share, rows)
        for rows, target in played.by_class(targets)
    }


def _instead(
    rated: list[Rated], reached: list[FleetTargets], nearest: int, missed: tuple[str, ClassTarget]
) -> str:
    """The least of a time that any configuration has, or that of the nearest to all targets."""
    name, target = missed
    times = [getattr(x, name) for x in reached]
    least = int(np.argmin(times))
    if times[least] > getattr(target, name):
        said = f": {rated[least].configuration.name} comes nearest with {as_time(times[least])}"
    else:
        said = (
            f" together with the other targets: {rated[nearest].configuration.name}, the nearest "
            f"to all of them, has {as_time(times[nearest])}"
        )
    return f"{said} and hardly any load"


def _whose(targets: FleetTargets, target: ClassTarget) -> str:
    """Which prompts a target is of, where it is not of all."""
    if not targets.longer:
        return ""
    bound = f"above {target.above:,}" if target.above else f"up to {targets.longer[0].above:,}"
    return f" for prompts {bound} tokens"


def _at_rest(rated: Rated, traffic: Traffic) -> Played:
    """What a configuration does when its replicas wait for requests."""
    needed = float(rated.needed[np.isfinite(rated.needed)].sum())
    count = min(max(int(np.ceil(LIGHT * needed)), LIGHT), 8 * LIGHT)
    shape = (len(traffic.demand.rate), traffic.classes, 1)
    running = np.full((shape[0], 1), count)
    light = min(count / max(LIGHT * needed, 1e-9), 1.0)
    return play(traffic, [rated.configuration], running, np.ones(shape), max(light, 1e-3))
