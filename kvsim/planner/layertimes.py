"""Time of each resource in one layer of a pass, as the placement programme counts it."""

import numpy as np

from kvsim.engine.roofline import seconds
from kvsim.engine.timeline import minimum_layer_seconds
from kvsim.graph import Array, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.steps import Known, layer_ops

STREAMS = ("gpu", "h2d", "d2h", "cpu")
RESOURCES = (*STREAMS, "chain", "turn")
"""What layers occupy: streams, the GPU if nothing delays it, the CPU where it answers for it."""


class LayersOfPass:
    """Layers of one pass, whatever their options: ops that they share are made and timed once."""

    def __init__(self) -> None:
        self._known: Known = {}
        self._took: dict[int, tuple[Op, Number]] = {}  # by identity, with the op itself

    def resources(self, layer: LayerPass) -> Array:
        """Time of each stream, and of the chain, in one layer with all parts of the batch.

        (r, b, c) [s]
        """
        issued, tiles, point = layer_ops(layer, self._known), layer.placement.tiles, layer.p
        grid = np.broadcast_shapes(np.shape(point.batch), np.shape(point.context), (1, 1))
        found = np.zeros((len(RESOURCES), *grid))
        for op in issued:
            found[STREAMS.index(op.stream)] += tiles * np.asarray(self._seconds(op, layer.d))
        chain, turn = RESOURCES.index("chain"), RESOURCES.index("turn")
        found[chain] = found[turn] = tiles * np.asarray(
            minimum_layer_seconds(issued, layer.d, self._seconds)
        )
        if tiles > 1:  # the CPU's halves follow one another, and other layers wait for both
            found[turn] = np.maximum(found[chain], found[STREAMS.index("cpu")])
        return found

    def _seconds(self, op: Op, deployment: Deployment) -> Number:
        if id(op) not in self._took:
            self._took[id(op)] = op, seconds(op, deployment)
        return self._took[id(op)][1]
