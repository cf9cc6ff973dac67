"""Numbers that are never above a cost: planes over shares in a box, means over a growing context.

Durations are maxima of affine functions of the shares, and what a layer adds is made of sums and
maxima of durations, so every cost is convex in the shares: a plane with the slope of one point is
nowhere above it. Over the context a cost is convex where a memory limits it, and concave where a
window or a saturating floor does.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.choose import distinct
from kvsim.planner.shares import Option, Shares

STEP = 1e-5  # of a share, by which a slope is taken
ROUNDED = 1e-13  # of a cost: differences below this are rounding
CONTEXTS = 3  # stretches of the growing context


@frozen
class Stretches:
    """The rounds of a generation in a few stretches of neighbouring contexts.

    Attributes
    ----------
    first, last
        Decoded tokens before the first and before the last round of each. (c,) [tokens]
    """

    first: Array
    last: Array

    @property
    def rounds(self) -> Array:
        """How many each has. (c,)"""
        return self.last - self.first + 1

    @property
    def tokens(self) -> Array:
        """Decoded tokens at which a cost is evaluated: middles, then both ends. (3c,) [tokens]"""
        return np.concatenate([(self.first + self.last) / 2, self.first, self.last])

    def below(self, cost: Array) -> Array:
        """At most the mean of each stretch, of a cost at ``tokens``. (3c, ...) to (c, ...)

        The mean of a convex cost is at least its middle, that of a concave one at least the mean
        of its ends.
        """
        middle, first, last = np.split(cost, 3)
        found: Array = np.minimum(middle, (first + last) / 2)
        return found


def stretches(rounds: int, kinks: Iterable[float] = ()) -> Stretches:
    """A few stretches of equal length, ended too where costs have a concave kink.

    Parameters
    ----------
    kinks : decoded tokens at which a window is full. [tokens]
    """
    edges: Array = np.round(np.linspace(0, rounds, min(rounds, CONTEXTS) + 1))
    inside = [np.ceil(k) for k in kinks if 0 < k < rounds]
    edges = distinct(np.concatenate([edges, inside]))
    return Stretches(edges[:-1], edges[1:] - 1)


def planes(
    options: Iterable[Option],
    cost: Callable[[Shares, int, list[int]], Array],
    prompt: int,
    held: Array,
) -> Array:
    """Planes below costs of all options. (q, r, k, b, corners)

    Where the CPU attends beside a recomputation, a chain bends where the GPU takes over. Its first
    plane is below the one part; the last resource, a chain too, has that of nothing recomputed,
    which is below the other.

    Parameters
    ----------
    cost : of shares and parts of the batch in some shapes of layers, by phase, resource, shape and
        batch. (q, r, k, b)
    held : the share of the prompt's tokens that is there to be recomputed, by shape. (k,)
    """
    found = []
    for option in options:
        splits = any(corner.split for corner in option.corners)
        shares = held if splits else np.ones_like(held)
        some: dict[int, Array] = {}
        for share in distinct(shares).tolist():
            shapes = np.flatnonzero(shares == share).tolist()

            def mine(at: Shares, parts: int = option.parts, among: list[int] = shapes) -> Array:
                return cost(at, parts, among)

            values = plane(own := option.held(share), mine, prompt)
            if any(corner.split and corner.cpu for corner in own.corners):
                alone = tuple(Shares(cpu=corner.cpu) for corner in own.corners)
                values[:, -1] = plane(replace(own, corners=alone), mine, prompt)[:, -1]
            some |= {k: values[:, :, i] for i, k in enumerate(shapes)}
        found.append(np.stack([some[k] for k in range(held.size)], axis=2))
    return np.concatenate(found, axis=-1)


def plane(
    option: Option, cost: Callable[[Shares], Array], prompt: int, touching: Shares | None = None
) -> Array:
    """A plane below a cost in the option's box, at its corners. (..., corners)

    Where the cost bends beside the point, the plane is lowered by what its slope may be off.

    Parameters
    ----------
    prompt : tokens, as a split is a whole number of them.
    touching : the point, inside the box; its middle if None.
    """
    middle = touching or option.middle
    if middle.split:  # where some tokens are recomputed: with none, no kernel starts
        middle = replace(middle, split=max(np.floor(middle.split * prompt), 2.0) / prompt)
    at = cost(middle)
    slopes: dict[str, tuple[Array, Array]] = {}
    for key, value in vars(middle).items():
        if all(getattr(c, key) == value for c in option.corners):
            continue
        step = 1 / prompt if key == "split" else STEP
        below, above = (cost(replace(middle, **{key: value + x})) for x in (-step, step))
        bend = np.abs(above + below - 2 * at)
        bend[bend < ROUNDED * np.abs(at)] = 0.0
        slopes[key] = (above - below) / (2 * step), bend / (2 * step)
    corners = []
    for corner in option.corners:
        value = at
        for key, (slope, bend) in slopes.items():
            away = getattr(corner, key) - getattr(middle, key)
            value = value + slope * away - bend * abs(away)
        corners.append(value)
    return np.stack(corners, axis=-1)
