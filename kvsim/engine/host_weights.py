"""Layers whose weights are in host memory: computed there by the CPU, or copied to the GPU.

Of a few tokens the hidden states go to the host, where the CPU multiplies with the weights that
those tokens touch, and come back. Of many tokens the weights are copied to the GPU, which is then
quicker. Nothing runs beside either.
"""

from dataclasses import replace

import numpy as np

from kvsim.engine import ops
from kvsim.engine.buffers import expert_weights, layer_weights
from kvsim.graph import Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.parallel import left_idle
from kvsim.models.model import LayerShape

STATE_BYTES = 4.0  # of a hidden state's number as it travels: fp32 in llama.cpp [B]
EXCHANGES = ("experts_to", "experts_back")


def place(
    deployment: Deployment, point: Point, shape: LayerShape, found: tuple[Op, ...]
) -> tuple[Op, ...]:
    """Return the ops of a layer with those of weights in host memory done there.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The pass, or arrays of passes.
    shape
        Kind of the layer.
    found
        Its ops with all weights on the GPU, in issue order.
    """
    if not shape.home:
        return found
    own = [i for i, op in enumerate(found) if _is_away(op, shape)]
    if not own:
        return found
    before, after = found[: own[0]], [op for i, op in enumerate(found) if i > own[0]]
    moved = [found[i] for i in own]
    kept = [op for op in after if not _is_away(op, shape)]
    wide = _streamed(deployment, point)
    states = STATE_BYTES * point.tokens * deployment.shard.hidden
    if not before:  # in the GPU's queue, so that it waits for the layer and the step before
        before = (Op("give_states", bytes={"hbm": states}),)
    previous = (before[-1].name,)
    computed = _on_cpu(moved, states, 1.0 - wide, previous)
    copied = _on_gpu(deployment, point, shape, moved, wide, previous)
    return (*before, *computed, *copied, *kept)


def _is_away(op: Op, shape: LayerShape) -> bool:
    """Whether an op multiplies with what is in host memory."""
    if op.stream != "gpu" or op.kernel == "allreduce":
        return False
    experts = op.name.startswith("experts_") and op.name not in EXCHANGES
    if shape.home == "experts":
        return experts
    return shape.home == "layer" or experts or op.name in ("router", "up", "down")


def _streamed(deployment: Deployment, point: Point) -> Number:
    """1 where weights are copied to the GPU for a pass, 0 where the CPU multiplies."""
    way, least = deployment.host.way, deployment.stack.offload.stream
    if way != "auto" or not least:
        return 1.0 if way == "streamed" else 0.0
    return np.asarray(np.asarray(point.tokens) >= least, dtype=float)


def _on_cpu(moved: list[Op], states: Number, share: Number, previous: tuple[str, ...]) -> list[Op]:
    """The CPU multiplies with the same weights; hidden states go there and back."""
    if not np.any(share):
        return []
    flops = sum((op.flops for op in moved), np.zeros(()))
    read = sum((op.bytes.get("hbm", 0.0) for op in moved), np.zeros(()))
    product = Op(
        "host_product",
        "cpu",
        "host",
        share * flops,
        {"dram": share * read},
        after=("send_states_home",),
    )
    return [
        ops.copy("send_states_home", "d2h", share * states, kernel="copy", after=previous),
        product,
        ops.copy("return_states", "h2d", share * states, kernel="copy", after=("host_product",)),
        Op("take_states", bytes={"hbm": share * states}, after=("return_states",)),
    ]


def _on_gpu(
    deployment: Deployment,
    point: Point,
    shape: LayerShape,
    moved: list[Op],
    share: Number,
    previous: tuple[str, ...],
) -> list[Op]:
    """Weights are copied to the GPU, of experts those that any token touches."""
    if not np.any(share):
        return []
    size: Number = layer_weights(deployment, shape, on_host=True)
    if shape.routed:
        m = deployment.shard
        called, popularity = m.experts_active / m.experts, deployment.stack.sums.popularity
        size = size - expert_weights(deployment) * left_idle(called, point.tokens, popularity)
    load = ops.copy("load_host_weights", "h2d", share * size, kernel="copy", after=previous)
    load = replace(load, fixed=share * size * _staging(deployment))
    scaled = [
        replace(
            op,
            flops=share * op.flops,
            bytes={channel: share * n for channel, n in op.bytes.items()},
            fixed=share * op.fixed,
            unpacked=share * op.unpacked,
        )
        for op in moved
    ]
    first = replace(scaled[0], after=(*scaled[0].after, "load_host_weights"))
    return [load, first, *scaled[1:]]


def _staging(deployment: Deployment) -> float:
    """How much longer than over the link alone copies of memory take that is not pinned. [s/B]

    The driver copies it through a pinned buffer of its own, whose rate the host sets, not the link.
    """
    stack = deployment.stack
    if not stack.offload.pageable:
        return 0.0
    linked = 1.0 / (deployment.bandwidth["h2d"] * stack.kernel("copy").memory)
    return max(0.0, 1.0 / stack.offload.pageable - linked)
