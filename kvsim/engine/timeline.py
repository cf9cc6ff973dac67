"""Time of a step from idle, and of each step when steps follow one another.

How the ops of a step are played is in :mod:`kvsim.engine.playing`.
"""

from collections.abc import Callable

import numpy as np

from kvsim.engine.playing import Timeline
from kvsim.engine.roofline import seconds
from kvsim.engine.timed import latest, shared
from kvsim.graph import Group, Number, Op, Step
from kvsim.machines.deployment import Deployment


def makespan(step: Step, deployment: Deployment) -> Number:
    """Time of one step that starts on an idle machine, until its last copy has ended. [s]"""
    state, _ = Timeline(step, deployment).play(1)
    return latest(state.streams.values())


def steady(
    step: Step, deployment: Deployment, duration: Callable[[Op, Deployment], Number] = seconds
) -> Number:
    """Time each further step adds when steps follow one another. [s]

    Two steps less one, a third about to follow, but never less than the work of the busiest
    stream: a copy stream that falls behind delays no op within two steps, yet every op in the
    long run.
    """
    timeline = Timeline(step, deployment, duration)
    _, ends = timeline.play(2, endless=True)
    return latest([ends[1] - ends[0], *timeline.busy().values()])


def working(step: Step, deployment: Deployment) -> dict[str, Number]:
    """Time each stream works in one step, waits left out. [s]"""
    return Timeline(step, deployment).busy()


def least(
    layer: tuple[Op, ...],
    deployment: Deployment,
    duration: Callable[[Op, Deployment], Number] = seconds,
) -> Number:
    """GPU time that one layer adds at least, wherever it stands and whatever runs ahead of it. [s]

    What may run before the layer begins costs nothing here: prefetches, and copies that wait for
    nothing of this layer; so do launches, which the host may issue early.
    """
    kept: dict[str, Op] = {}
    for op in layer:
        if not op.ahead and (op.stream == "gpu" or any(name in kept for name in op.after)):
            kept[op.name] = op
    step = Step((Group((tuple(kept.values()),), 1),), ())
    state, _ = Timeline(step, deployment.issued_at_once, duration).play(1)
    return np.maximum(state.streams["gpu"], shared(layer, deployment))
