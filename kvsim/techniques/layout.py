"""Which layers do what: the model's layout cut where something else is done."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import pairwise

import numpy as np

from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.layers import Parts

Shapes = tuple[LayerShape, ...]
Layout = list[tuple[Shapes, int, Parts]]
"""Blocks of layers, how often each repeats, and what its layers do."""
Counted = list[tuple[LayerShape, int, Parts]]
"""Shapes of layers, how many there are, and what they do."""


def laid_out(
    deployment: Deployment, ranges: Sequence[tuple[int, int | None]], parts: Sequence[Parts]
) -> Layout:
    """The layout of a model whose ranges of layers (first, last or None) consist of ``parts``."""
    found: Layout = []
    rest = list(deployment.shard.layout)
    segments = [*_segments(deployment, ranges, parts)]
    firsts = [*(first for first, _ in segments), deployment.model.layers]
    for (first, following), (_, own) in zip(pairwise(firsts), segments, strict=True):
        before, rest = split_layout(rest, following - first)
        found += [(*block, own) for block in before]
    return found


def counted(layout: Layout) -> Counted:
    """How many layers of each shape do the same."""
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
        for begin in [first, *sorted(b for b in own.breaks(deployment) if first < b < end)]:
            now = own.at(begin, deployment)
            if latest is None or not alike(latest, now):
                yield begin, now
                latest = now


def split_layout(
    layout: list[tuple[Shapes, int]], first: int
) -> tuple[list[tuple[Shapes, int]], list[tuple[Shapes, int]]]:
    """The layout of the first layers, and that of the others."""
    before: list[tuple[Shapes, int]] = []
    after: list[tuple[Shapes, int]] = []
    for shapes, count in layout:
        whole, part = divmod(min(first, count * len(shapes)), len(shapes))
        first -= whole * len(shapes) + part
        before += [(shapes, whole)] if whole else []
        before += [(shapes[:part], 1)] if part else []
        after += [(shapes[part:], 1)] if part else []
        left = count - whole - (1 if part else 0)
        after += [(shapes, left)] if left else []
    return before, after


def alike(one: Parts, other: Parts) -> bool:
    """Whether two layers do the same, settings that are arrays included."""
    if one is other:
        return True
    pairs = zip(one.every(), other.every(), strict=True)
    return one.mlp == other.mlp and all(
        type(a) is type(b)
        and all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
        for a, b in pairs
    )
