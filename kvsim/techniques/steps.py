"""Passes through the model: the ops of its layers, one after another."""

from dataclasses import replace

import numpy as np

from kvsim.engine import indexer, ops, recurrence
from kvsim.engine.closing import closing
from kvsim.graph import Group, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.launches import dispatched, of_layer
from kvsim.techniques.layers import LayerPass, Parts
from kvsim.techniques.layout import Layout

Known = dict[tuple[object, ...], list[Op]]
"""Ops around attention by what they depend on in one pass."""


def forward(deployment: Deployment, point: Point, layout: Layout) -> Step:
    """One pass of the new tokens through the model."""
    groups: list[Group] = []
    before: Parts | None = None
    known: Known = {}
    made: dict[tuple[int, LayerShape], tuple[Op, ...]] = {}  # layers that do the same are the same
    for shapes, count, parts in layout:
        tiles, part = parts.placement.tiles, part_of(point, parts)
        built: dict[LayerShape, tuple[Op, ...]] = {}
        for s in dict.fromkeys(shapes):
            if (id(parts), s) not in made:
                made[id(parts), s] = layer_ops(LayerPass(deployment, part, s, parts), known)
            built[s] = made[id(parts), s]
        if len(built) == 1:
            shapes, count = shapes[:1], count * len(shapes) * tiles
        else:
            shapes = tuple(s for s in shapes for _ in range(tiles))
        if _leaves_to_cpu(parts, point):
            built |= {s: _after_cpu(ops) for s, ops in built.items() if not s.attends}
        block = tuple(built[s] for s in shapes)
        if before is not None and before is not parts and _leaves_to_cpu(before, point):
            groups.append(Group((_after_cpu(block[0]), *block[1:]), 1))
            count -= 1
        if count:
            groups.append(Group(block, count))
        before = parts
    head = closing(deployment, point)
    if deployment.stack.time.counted_launches:
        head = dispatched(head, (), "prefill" if point.prefill else "decode")
    return Step(tuple(groups), head)


def _leaves_to_cpu(parts: Parts, point: Point) -> bool:
    """Whether the CPU still attends for the last part of the batch when a layer has been issued."""
    place = parts.placement
    return not point.prefill and place.tiles > 1 and bool(np.any(place.on_cpu))


def layer_ops(at: LayerPass, known: Known | None = None) -> tuple[Op, ...]:
    """Ops of one decoder layer in issue order.

    ``known`` holds what layers of the same pass have in common, found so far.
    """
    place, known = at.placement, {} if known is None else known
    around = at.shape.around
    before = (place.tiles, around, place.weights_wait())
    answered = place.output_wait(at) if at.shape.attends else ()
    behind = (place.tiles, around, answered, at.parts.mlp)
    if before not in known:
        known[before] = ops.before_attention(at.d, at.p, at.shape, place.weights_wait())
    if behind not in known:
        known[behind] = ops.after_attention(at.d, at.p, at.shape, at.parts.mlp, answered)
    return of_layer(at, (*place.ahead(at), *known[before], *mixing(at), *known[behind]))


def mixing(at: LayerPass) -> list[Op]:
    """What mixes tokens in a layer, between its input and its output product.

    A technique acts where there is a cache. Layers with a state run as they are.
    """
    if at.shape.mixer == "recurrent":
        return recurrence.ops(at.d, at.p)
    if not at.shape.attends:
        return [recurrence.end()]
    chosen = indexer.ops(at.d, at.p, at.kept)
    own = at.selection.attend if at.shape.keeps else at.selection.borrow
    return [*chosen, *own(at)]


def _after_cpu(layer: tuple[Op, ...]) -> tuple[Op, ...]:
    """A layer that starts when the CPU has answered the one before."""
    start = next(i for i, op in enumerate(layer) if op.stream == "gpu")
    waiting = replace(layer[start], after=(*layer[start].after, "return_out@-1"))
    return (*layer[:start], waiting, *layer[start + 1 :])


def joined(steps: list[Step]) -> Step:
    """Passes one after another as one."""
    if len(steps) == 1:
        return steps[0]
    groups = tuple(group for step in steps for group in step.groups)
    return Step(groups, tuple(op for step in steps for op in step.head))


def part_of(point: Point, parts: Parts) -> Point:
    """The point of one part of the batch, where layers serve it in parts."""
    tiles = parts.placement.tiles
    return replace(point, batch=point.batch / tiles) if tiles > 1 else point
