"""Time of a step from idle, and of each step when steps follow one another.

How the ops of a step are played is in :mod:`kvsim.engine.playing`.
"""

from collections.abc import Callable

import numpy as np

from kvsim.engine.playing import Timeline
from kvsim.engine.roofline import all_ops, seconds
from kvsim.engine.timed import latest, shared
from kvsim.graph import Group, Number, Op, Step
from kvsim.machines.deployment import Deployment


def makespan(step: Step, deployment: Deployment) -> Number:
    """Time of one step that starts on an idle machine, until its last copy has ended. [s]"""
    alone = _in_turn(step, deployment, seconds)
    if alone is not None:
        return alone
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
    alone = _in_turn(step, deployment, duration)
    if alone is not None:
        last = step.head[-1] if step.head else None
        if last is None or not last.sync:
            return alone
        # the host issues the next step when it knows that this one has ended
        return alone + deployment.stack.time.sync * np.greater(duration(last, deployment), 0.0)
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
    at_once, moved = deployment.issued_at_once, shared(layer, deployment)
    alone = _in_turn(step, at_once, duration)
    if alone is not None:
        return np.maximum(alone, moved)
    state, _ = Timeline(step, at_once, duration).play(1)
    return np.maximum(state.streams["gpu"], moved)


def _in_turn(
    step: Step, deployment: Deployment, duration: Callable[[Op, Deployment], Number]
) -> Number | None:
    """Time of all ops together if they run one right after another on the GPU; None if not. [s]

    They do where nothing is issued early, and where the host is never late but behind the last op.
    """
    stack = deployment.stack
    if stack.time.launch > 0 or stack.eager or stack.offload.tile_sync:
        return None
    every, last = list(all_ops(step)), step.head[-1] if step.head else None
    if any(op.stream != "gpu" or op.ahead or (op.sync and op is not last) for op, _ in every):
        return None
    total: Number = 0.0
    for op, count in every:
        total = total + count * duration(op, deployment)
    return total
