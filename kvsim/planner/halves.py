"""Times of half a batch in one layer, where GPU and CPU work on the halves in turn."""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.roofline import seconds
from kvsim.frozen import frozen
from kvsim.graph import Array, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.planner.planes import Stretches
from kvsim.planner.shares import Shares, placed
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.steps import layer_ops, part_of


@frozen
class Halves:
    """Times of half a batch in one layer, by phase and shape of layer; nothing where no CPU works.

    Attributes
    ----------
    option
        The option whose layers the CPU answers for.
    attention, longest
        Of the CPU, nowhere above its mean over a phase, and nowhere below. (q, k) [s]
    around
        From a copy's end to the CPU's attention, and from that to the next copy. (q, k) [s]
    before
        From the beginning of a run to its first attention, and the answer's way back. (q, k) [s]
    spared
        What the end of a step may spare. (q,) [s]
    others
        Layers of other shapes between two neighbouring ones of a shape, at least. (k,)
    """

    option: int
    attention: Array
    longest: Array
    around: Array
    before: Array
    spared: Array
    others: NDArray[np.int64]


def others_between(shapes: Sequence[Hashable]) -> NDArray[np.int64]:
    """By shape, the least number of layers between two that have it, the last before the first."""
    found = []
    for shape in dict.fromkeys(shapes):
        places = np.flatnonzero([s == shape for s in shapes])
        found.append(np.diff(places, append=places[0] + len(shapes)).min() - 1)
    return np.array(found)


def half_times(deployment: Deployment, point: Point, shape: LayerShape, prompt: int) -> Array:
    """Of half a batch in one layer, at all points: attention, around, before, behind. (4, b, c) [s]

    ``behind`` is the GPU's work once the CPU's answer has come.
    """
    parts = placed(Shares(cpu=1.0), prompt, streamed=1.0, parts=2).parts[0]
    layer = [op for op in layer_ops(LayerPass(deployment, part_of(point, parts), shape, parts))
             if not op.prefetch]  # fmt: skip
    grid = np.broadcast_shapes(np.shape(point.batch), np.shape(point.context), (1, 1))
    took = {op.name: np.broadcast_to(np.asarray(seconds(op, deployment)), grid) for op in layer}
    names = list(took)
    sent, answered = names.index("send_qkv"), names.index("return_out")
    copied = next(i for i, op in enumerate(layer) if "load_weights" in op.after)
    none = np.zeros(grid)
    products, first, behind = (
        sum((took[name] for name in some), none)
        for some in (names[copied:sent], names[:sent], names[answered + 1 :])
    )
    copies = took["send_qkv"] + took["return_out"]
    return np.stack([took["attn"], products + copies, first + copies, behind])


@frozen
class HalfTimes:
    """Nowhere above the mean of each phase, and nowhere below. (q, 4, k, b) [s]"""

    low: Array
    high: Array
    others: NDArray[np.int64]

    def halves(self, option: int, head: Array, index: int) -> Halves:
        """Of one batch; ``head`` is the GPU's work after all layers. (q,) [s]"""
        low, high = self.low[..., index], self.high[..., index]
        spared = high[:, 0].max(axis=-1) - low[:, 3].min(axis=-1) - head
        return Halves(
            option=option,
            attention=low[:, 0],
            longest=high[:, 0],
            around=low[:, 1],
            before=low[:, 2],
            spared=np.maximum(spared, 0.0),
            others=self.others,
        )


def all_half_times(
    deployment: Deployment,
    rounds: Point,
    over: Stretches,
    prompt: int,
    shapes: Sequence[LayerShape],
) -> HalfTimes:
    """Of every shape of layer, in the phases of a generation; the first reads the prompts."""
    found = np.stack([half_times(deployment, rounds, shape, prompt) for shape in shapes])
    cost = np.moveaxis(found, 3, 0).swapaxes(1, 2)
    low, high = over.below(cost), -over.below(-cost)
    none = np.zeros_like(low[:1])
    order = [s for block, count in deployment.shard.layout for s in block * count]
    return HalfTimes(
        np.concatenate([none, low]), np.concatenate([none, high]), others_between(order)
    )
