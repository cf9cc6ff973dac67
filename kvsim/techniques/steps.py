"""Passes through the model: the ops of its layers, one after another."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from kvsim.engine import attention, host_weights, ops, recurrence
from kvsim.engine.ops import output_ops
from kvsim.graph import Group, Number, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.models.kinds import split_layout
from kvsim.models.model import LayerShape
from kvsim.techniques.axes.base import Launches, LayerPass, Parts

Shapes = tuple[LayerShape, ...]
Layout = list[tuple[Shapes, int, Parts]]
"""Blocks of layers, how often each repeats, and what its layers do."""
Counted = list[tuple[LayerShape, int, Parts]]
"""Shapes of layers, how many there are, and what they do."""
RANKED_ALONE = 4096  # tokens that one program ranks, in ``validate/kernels/topk_triton.py``
MODEL_LAUNCHES = Launches(
    prefill={"sample": 3, "attn": 2}, draft={"sample": 3}, decode={"sample": 3}
)
"""Kernels of what every technique does in the same way."""
Pass = Literal["prefill", "draft", "decode"]
Known = dict[tuple[object, ...], list[Op]]
"""Ops around attention by what they depend on in one pass."""


def lay_out(
    deployment: Deployment, ranges: Sequence[tuple[int, int | None]], parts: Sequence[Parts]
) -> Layout:
    """Return the layout of a model whose ranges of layers do different things.

    Parameters
    ----------
    deployment : model, machine and software.
    ranges : first and last layer of each; None for the model's last.
    parts : what the layers of each range do.
    """
    found: Layout = []
    rest = list(deployment.shard.layout)
    segments = [*_segments(deployment, ranges, parts)]
    firsts = [*(first for first, _ in segments), deployment.model.layers]
    for (first, following), (_, own) in zip(pairwise(firsts), segments, strict=True):
        before, rest = split_layout(rest, following - first)
        found += [(*block, own) for block in before]
    return found


def count_layers(layout: Layout) -> Counted:
    """Return how many layers of each shape do the same.

    Parameters
    ----------
    layout : blocks of layers in order.
    """
    found: dict[tuple[int, LayerShape], tuple[int, Parts]] = {}
    for shapes, count, parts in layout:
        for shape in shapes:
            others, _ = found.get((id(parts), shape), (0, parts))
            found[id(parts), shape] = others + count, parts
    return [(shape, *some) for (_, shape), some in found.items()]


def _segments(
    deployment: Deployment, ranges: Sequence[tuple[int, int | None]], parts: Sequence[Parts]
) -> Iterator[tuple[int, Parts]]:
    """First layers from which on something else is done, and what."""
    latest: Parts | None = None
    for (first, last), own in zip(ranges, parts, strict=True):
        end = deployment.model.layers if last is None else min(last + 1, deployment.model.layers)
        for begin in [first, *sorted(b for b in own.boundaries(deployment) if first < b < end)]:
            now = own.for_layer(begin, deployment)
            if latest is None or not same_parts(latest, now):
                yield begin, now
                latest = now


def same_parts(one: Parts, other: Parts) -> bool:
    """Return whether two layers do the same, settings that are arrays included.

    Parameters
    ----------
    one, other : their parts.
    """
    if one is other:
        return True
    pairs = zip(one.by_axis(), other.by_axis(), strict=True)
    return one.mlp == other.mlp and all(
        a.name == b.name
        and all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
        for a, b in pairs
    )


def count_kernels(
    ops: Iterable[Op], tables: Iterable[Launches], kind: Pass, tokens: Number = 0.0
) -> tuple[Op, ...]:
    """Return ops with the kernels that kvsim's implementations issue for each of them.

    Parameters
    ----------
    tables : of the parts whose implementations run them.
    tokens : cached per sequence after the pass. [tokens]
    """
    stated = [getattr(table, kind) for table in (MODEL_LAUNCHES, *tables)]
    found = []
    for op in ops:
        few: Number = 0
        more = 0
        for table in stated:
            one, besides = pair if isinstance(pair := table.get(op.name, 0), tuple) else (pair, 0)
            few, more = few + one, more + besides
        if more:
            few = few + more * (np.asarray(tokens) > RANKED_ALONE)
        found.append(replace(op, launches=few * op.launches) if np.any(few) else op)
    return tuple(found)


def count_layer_kernels(at: LayerPass, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Return a layer's ops with the kernels that the stack issues for them.

    Parameters
    ----------
    at : the pass through the layer.
    ops : of the layer, in issue order.
    """
    if not at.d.stack.time.counted_launches:
        return ops
    kind: Pass = "prefill" if at.p.prefill else "decode" if at.parts.keeps else "draft"
    tables = (table for part in at.parts.by_axis() for table in part.launch_tables)
    return count_kernels(ops, tables, kind, at.p.length)


def forward(deployment: Deployment, point: Point, layout: Layout) -> Step:
    """Return one pass of the new tokens through the model.

    Parameters
    ----------
    deployment : model, machine and software.
    point : batch, context and new tokens of the pass.
    layout : what its layers do.
    """
    groups: list[Group] = []
    before: Parts | None = None
    known: Known = {}
    made: dict[tuple[int, LayerShape], tuple[Op, ...]] = {}  # layers that do the same are the same
    for shapes, count, parts in layout:
        tiles, part = parts.placement.tiles, tile_point(point, parts)
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
    head = output_ops(deployment, point)
    if deployment.stack.time.counted_launches:
        head = count_kernels(head, (), "prefill" if point.prefill else "decode")
    return Step(tuple(groups), head)


def _leaves_to_cpu(parts: Parts, point: Point) -> bool:
    """Whether the CPU still attends for the last part of the batch when a layer has been issued."""
    place = parts.placement
    return not point.prefill and place.tiles > 1 and bool(np.any(place.on_cpu))


def layer_ops(at: LayerPass, known: Known | None = None) -> tuple[Op, ...]:
    """Return the ops of one decoder layer in issue order.

    Parameters
    ----------
    at : the pass through the layer.
    known : what layers of the same pass have in common, found so far; filled.
    """
    place, known = at.placement, {} if known is None else known
    around = at.shape.window_free
    before = (place.tiles, around, place.weights_wait())
    answered = place.output_wait(at) if at.shape.attends else ()
    behind = (place.tiles, around, answered, at.parts.mlp)
    if before not in known:
        known[before] = ops.before_attention(at.d, at.p, at.shape, place.weights_wait())
    if behind not in known:
        known[behind] = ops.after_attention(at.d, at.p, at.shape, at.parts.mlp, answered)
    found = (*place.prefetch(at), *known[before], *mix_tokens(at), *known[behind])
    return count_layer_kernels(at, host_weights.place(at.d, at.p, at.shape, found))


def mix_tokens(at: LayerPass) -> list[Op]:
    """Return what mixes tokens in a layer, between its input and its output product.

    A technique acts where there is a cache. Layers with a state run as they are.

    Parameters
    ----------
    at : the pass through the layer.
    """
    if at.shape.mixer == "recurrent":
        return recurrence.ops(at.d, at.p)
    if not at.shape.attends:
        return [recurrence.end()]
    chosen = attention.indexer_ops(at.d, at.p, at.kept_tokens)
    own = at.selection.attend if at.shape.keeps else at.selection.borrow
    return [*chosen, *own(at)]


def _after_cpu(layer: tuple[Op, ...]) -> tuple[Op, ...]:
    """A layer that starts when the CPU has answered the one before."""
    start = next(i for i, op in enumerate(layer) if op.stream == "gpu")
    waiting = replace(layer[start], after=(*layer[start].after, "return_out@-1"))
    return (*layer[:start], waiting, *layer[start + 1 :])


def join_steps(steps: list[Step]) -> Step:
    """Return passes one after another as one.

    Parameters
    ----------
    steps : in order.
    """
    if len(steps) == 1:
        return steps[0]
    groups = tuple(group for step in steps for group in step.groups)
    return Step(groups, tuple(op for step in steps for op in step.head))


def tile_point(point: Point, parts: Parts) -> Point:
    """Return the point of one part of the batch, where layers serve it in parts.

    Parameters
    ----------
    point : of the whole batch.
    parts : what the layers do.
    """
    tiles = parts.placement.tiles
    return replace(point, batch=point.batch / tiles) if tiles > 1 else point
