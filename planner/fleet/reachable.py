"""Targets that can be met at all, where those that are asked for cannot."""

from collections.abc import Callable

import numpy as np

from kvsim.planner.fleet.play import Played, play
from kvsim.planner.fleet.shortlist import Rated
from kvsim.planner.fleet.targets import ClassTarget, FleetTargets
from kvsim.planner.fleet.traffic import Traffic

ROOM = 1.2  # a target that cannot be met is replaced by what can, and so much more
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
    nearest = min(range(len(rated)), key=lambda i: max(played[i].over(targets)))
    reached = each[nearest]
    missed = [
        f"{name.upper()} p{100 * targets.share:g} of {1e3 * getattr(target, name):.4g} ms"
        f"{_whose(targets, target)} cannot be met"
        f"{_instead(rated, [x[target.above] for x in each], nearest, (name, target))}"
        for target in targets.each
        if target.above in reached
        for name in ("ttft", "tpot")
        if getattr(reached[target.above], name) > getattr(target, name)
    ]

    def loosened(target: ClassTarget) -> ClassTarget:
        can = reached.get(target.above, FleetTargets(0.0, 0.0))
        ttft, tpot = max(target.ttft, ROOM * can.ttft), max(target.tpot, ROOM * can.tpot)
        return ClassTarget(target.above, ttft, tpot)

    loose = targets.changed(loosened)
    return loose, "; ".join(missed) or "the targets are met by no replica under load"


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
        said = f": {rated[least].configuration.name} comes nearest with {1e3 * times[least]:.4g} ms"
    else:
        said = (
            f" together with the other targets: {rated[nearest].configuration.name}, the nearest "
            f"to all of them, has {1e3 * times[nearest]:.4g} ms"
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
