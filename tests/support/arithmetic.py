"""Ops of one layer and what they move, as plain numbers for arithmetic by hand."""

import numpy as np

from kvsim.engine.roofline import all_ops
from kvsim.graph import Channel, Number, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.techniques import parse

B, S = 4, 1000  # sequences, cached tokens before the pass


def deployment(model: str, stack: str = "ideal") -> Deployment:
    return Deployment(load_model(model), load_hardware("a100-40g"), load_stack(stack))


def number(n: Number) -> float:
    return float(np.asarray(n).item())


def decoding(context: int = S, new: float = 1.0, prompt: int = S, most: int = S + 100) -> Point:
    return Point(B, context, new, prompt, most)


def last_layer(technique: str, d: Deployment, p: Point) -> dict[str, Op]:
    t = parse(technique)
    step = t.prefill(d, p) if p.prefill else t.cycle(d, p).steps[-1]
    return {op.name: op for op in step.groups[-1].layers[-1]}


def moved(op: Op, channel: Channel = "hbm") -> float:
    return number(op.bytes.get(channel, 0.0))


def through(step: Step, channel: Channel) -> float:
    """Bytes of a whole step through one channel."""
    return sum(count * moved(op, channel) for op, count in all_ops(step))


def gemms(layer: dict[str, Op]) -> list[Op]:
    return [op for op in layer.values() if op.kernel == "gemm"]
