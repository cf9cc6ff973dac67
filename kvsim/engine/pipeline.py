"""What a replica's parallelism besides tensor parallelism adds to a pass.

Data-parallel ranks and micro-batches of a pipeline share the sequences evenly: a pass of each takes
as long as that with the most. Decoding ranks are padded to that one, as a CUDA graph is one for all
ranks; prompts are read outside graphs, and ranks without one have no tokens for the experts.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvsim.engine.formats import FP16_BYTES
from kvsim.engine.timeline import makespan
from kvsim.graph import Group, Number, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.parallel import NETWORK

PART = 8192.0  # tokens of prompts in a pass, vLLM's budget on these cards [tokens]


def divided_pass(deployment: Deployment, point: Point, forward: Callable[[Point], Step]) -> Step:
    """One pass of a replica, its sequences divided over ranks and micro-batches if it has any.

    Decoding has a micro-batch per stage. They follow one another, so that a round takes as many
    times the slowest stage as there are micro-batches, and never less than one way through all
    stages. Prompts go through in passes of some ``PART`` tokens until the last one is through.

    Parameters
    ----------
    point : of the whole replica.
    forward : the pass of one micro-batch on one rank.
    """
    d = deployment
    if point.prefill and d.stack.time.prompt_pass:
        return _in_parts(d, point, forward)
    if d.single_pass:
        return forward(point)
    each = np.ceil(point.batch / d.dp)
    own = np.ceil(each / d.pp)
    if point.prefill and d.pp > 1:
        own = np.minimum(own, np.maximum(1.0, PART // np.maximum(point.new, 1.0)))
    step = forward(replace(point, batch=own, ranks=point.batch / each if point.prefill else None))
    if d.pp == 1:
        return step
    send = _sending(d, FP16_BYTES * own * point.new * d.model.hidden)
    through = makespan(step, d) + (d.pp - 1) * send
    slowest = _slowest(step, d) + send
    if point.prefill:
        wait = (np.ceil(each / own) - 1) * slowest
    else:
        wait = np.maximum(0.0, np.minimum(float(d.pp), each) * slowest - through)
    stages = Op("stages", kernel="copy", fixed=(d.pp - 1) * send + wait, launches=0.0)
    return Step(step.groups, (*step.head, stages))


def _in_parts(d: Deployment, point: Point, forward: Callable[[Point], Step]) -> Step:
    """Prompts in passes of so many tokens, each through all stages.

    The passes are alike: of the mean length, at the mean context. The head runs once per prompt.
    """
    most = d.stack.time.prompt_pass
    parts = np.ceil(point.new / most)
    together = np.clip(np.floor(most / point.new), 1.0, point.batch)
    new = point.new / parts
    own = replace(point, batch=together, new=new, context=point.context + (point.new - new) / 2)
    step = forward(own)
    prompts = point.batch / together
    passes = parts * prompts
    head = _repeated(step.head, prompts)
    if d.pp == 1:
        groups = [
            Group(tuple(_repeated(layer, passes) for layer in group.layers), group.count)
            for group in step.groups
        ]
        return Step(tuple(groups), head)
    send = _sending(d, FP16_BYTES * own.tokens * d.model.hidden)
    through, slowest = makespan(step, d), _slowest(step, d) + send
    beside = slowest + (1 - d.stack.time.stage_overlap) * np.maximum(0.0, through - slowest)
    later = (d.pp - 1) * send + (passes - 1) * beside
    return Step(step.groups, (*head, Op("stages", kernel="copy", fixed=later, launches=0.0)))


def _repeated(ops: tuple[Op, ...], times: Number) -> tuple[Op, ...]:
    return tuple(replace(op, times=times * op.times) for op in ops)


def _sending(d: Deployment, data: Number) -> Number:
    """Time to bring hidden states to the next stage; each of its GPUs takes its part. [s]"""
    link = NETWORK if d.parallelism.stage >= d.domain else d.hardware.links["link"]
    return d.stack.time.stage + link.latency + data / d.tp / link.bandwidth


def _slowest(step: Step, d: Deployment) -> Number:
    """Time of the slowest stage: one with a layer more, or the last one, which has the head. [s]

    Layers are divided as evenly as can be; the last stage has no more than the others.
    """
    few, more = divmod(d.model.layers, d.pp)
    layers = step.groups[-1].layers[-1:]
    longest = makespan(Step((Group(layers, few + (more > 0)),), ()), d)
    return np.maximum(longest, makespan(Step((Group(layers, few),), step.head), d))
