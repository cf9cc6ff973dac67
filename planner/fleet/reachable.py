"""Targets that can be met at all, where those that are asked for cannot."""

from collections.abc import Callable

import numpy as np

from kvsim.planner.fleet.configurations import Configuration
from kvsim.planner.fleet.play import FleetTargets, play
from kvsim.planner.fleet.shortlist import Rated
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
    best: tuple[float, FleetTargets, Configuration] | None = None
    for x in rated:
        reached = _at_rest(x, traffic, targets)
        over = max(reached.ttft / targets.ttft, reached.tpot / targets.tpot)
        if best is None or over < best[0]:
            best = over, reached, x.configuration
    assert best is not None
    _, reached, configuration = best
    loose = FleetTargets(
        max(targets.ttft, ROOM * reached.ttft),
        max(targets.tpot, ROOM * reached.tpot),
        targets.share,
    )
    missed = [
        f"{name} p{100 * targets.share:g} of {1e3 * asked:.4g} ms cannot be met: "
        f"{configuration.name} comes nearest with {1e3 * can:.4g} ms and hardly any load"
        for name, asked, can in (
            ("TTFT", targets.ttft, reached.ttft),
            ("TPOT", targets.tpot, reached.tpot),
        )
        if can > asked
    ]
    return loose, "; ".join(missed) or "the targets are met by no replica under load"


def _at_rest(rated: Rated, traffic: Traffic, targets: FleetTargets) -> FleetTargets:
    """What a configuration reaches when its replicas wait for requests."""
    needed = float(rated.needed[np.isfinite(rated.needed)].sum())
    count = min(max(int(np.ceil(LIGHT * needed)), LIGHT), 8 * LIGHT)
    shape = (len(traffic.demand.rate), traffic.classes, 1)
    running = np.full((shape[0], 1), count)
    light = min(count / max(LIGHT * needed, 1e-9), 1.0)
    played = play(traffic, [rated.configuration], running, np.ones(shape), max(light, 1e-3))
    return played.reached(targets.share)
