"""Steps of techniques at many points, and what it means that two of them are the same."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from kvsim.engine.roofline import all_ops, seconds
from kvsim.engine.timeline import makespan, steady_seconds
from kvsim.graph import Array, Number, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack, stack_names
from kvsim.models.configs import load_model
from kvsim.models.model import LayerShape
from kvsim.prediction.memory import TIERS, prefill_point
from kvsim.techniques.technique import Technique

EXACT = 1e-12  # relative
CLEAN = ("ideal", "fused")
AS_STATED = [name for name in stack_names() if not load_stack(name).time.counted_launches]
"""Stacks that issue one kernel per op; others' implementations differ where techniques agree."""
BATCH = np.array([[8.0], [32.0]])
CONTEXT = np.array([[300.0, 2049.0, 30000.0]])
DECODE = Point(BATCH, CONTEXT, 1.0, CONTEXT - 50, CONTEXT + 50)
PREFILL = prefill_point(BATCH, CONTEXT - 50, 100.0)
PHASES = {"prefill": PREFILL, "decode": DECODE}


@cache
def deployment(model: str, stack: str, gpu: str = "a6000") -> Deployment:
    return Deployment(load_model(model), load_hardware(gpu), load_stack(stack))


def step_of(t: Technique, d: Deployment, p: Point) -> Step:
    """The prompt's pass, or the only pass of a round."""
    (step,) = (t.prefill(d, p),) if p.prefill else t.cycle(d, p).steps
    return step


def total(step: Step, d: Deployment, *names: str) -> Array:
    """Time of the named ops of all layers. [s]"""
    times = [count * seconds(op, d) for op, count in all_ops(step) if op.name in names]
    return np.asarray(sum(times, np.zeros(())))


def assert_same(got: Number, expected: Number) -> None:
    apart = np.abs(np.asarray(got) - expected)
    assert (apart <= EXACT * np.abs(expected)).all()


def assert_same_time(
    one: Step,
    other: Step,
    d: Deployment,
    more: Number = 0.0,
    rule: Callable[..., Any] = assert_same,
) -> None:
    rule(steady_seconds(one, d), steady_seconds(other, d) + np.asarray(more))
    rule(makespan(one, d), makespan(other, d) + np.asarray(more))


def moving(step: Step, d: Deployment, more: Callable[[LayerShape], Number]) -> Step:
    """The step with more bytes of GPU memory moved by every layer's attention."""

    def changed(op: Op, shape: LayerShape) -> Op:
        if op.name != "attn":
            return op
        return replace(op, bytes={**op.bytes, "hbm": op.bytes["hbm"] + more(shape)})

    groups = tuple(
        replace(
            group,
            layers=tuple(
                tuple(changed(op, shape) for op in layer)
                for layer, shape in zip(group.layers, shapes, strict=True)
            ),
        )
        for group, (shapes, _) in zip(step.groups, d.shard.layout, strict=True)
    )
    return replace(step, groups=groups)


def assert_same_memory(
    one: Technique, other: Technique, d: Deployment, p: Point, but: str = ""
) -> None:
    """Equal by tier; a buffer of the first may be left out."""
    first, second = one.resident(d, p), other.resident(d, p)
    for tier in TIERS:
        sizes = [size for name, size in first.get(tier, {}).items() if name != but]
        assert_same(sum(sizes, 0.0), sum(second.get(tier, {}).values(), 0.0))
