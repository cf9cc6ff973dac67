"""Numbers that are never above a cost: planes over shares in a box, means over a growing context.

Durations are maxima of affine functions of the shares, and what a layer adds is made of sums and
maxima of durations, so every cost is convex in the shares: a plane with the slope of one point is
nowhere above it. Over the context a cost is convex where a memory limits it, and concave where a
window or a saturating floor does.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from kvsim.graph import Array
from kvsim.planner.choose import distinct
from kvsim.planner.shares import Option, Shares

STEP = 1e-5  # of a share, by which a slope is taken
ROUNDED = 1e-13  # of a cost: differences below this are rounding
CONTEXTS = 3  # stretches of the growing context


@dataclass(frozen=True)
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
    cost: Callable[[Shares, int], Array],
    prompt: int,
    full_windows: list[int],
    streams: int,
) -> Array:
    """Planes below costs of all options. (q, r, k, b, corners)

    A window that the prompt fills holds fewer tokens than a share of the prompt that is to be
    recomputed, beyond which nothing changes: a cost that no plane with the slope of one point is
    below. What a stream works there is at least what it does at the least share on the host, with
    nothing or everything recomputed; a chain at least what the first stream, the GPU, works.

    Where the CPU attends beside a recomputation, a chain bends where the GPU takes over. Its first
    plane is below the one part; the last resource, a chain too, has that of nothing recomputed,
    which is below the other.

    Parameters
    ----------
    cost : of shares and parts of the batch, by phase, resource, shape and batch. (q, r, k, b)
    full_windows : shapes of layers whose window the prompt fills.
    streams : of the resources, how many are streams; after them come chains.
    """
    found = []
    for option in options:

        def mine(shares: Shares, parts: int = option.parts) -> Array:
            return cost(shares, parts)

        values = plane(option, mine, prompt)
        if full_windows and any(corner.split for corner in option.corners):
            low = min(corner.host for corner in option.corners)
            ends = mine(Shares(low)), mine(Shares(low, low))
            least = np.minimum(*ends)
            least[:, streams:] = least[:, :1]
            values[:, :, full_windows] = least[:, :, full_windows, :, None]
        if any(corner.split and corner.cpu for corner in option.corners):
            alone = tuple(Shares(cpu=corner.cpu) for corner in option.corners)
            values[:, -1] = plane(replace(option, corners=alone), mine, prompt)[:, -1]
        found.append(values)
    return np.concatenate(found, axis=-1)


def plane(option: Option, cost: Callable[[Shares], Array], prompt: int) -> Array:
    """A plane below a cost in the option's box, at its corners. (..., corners)

    Where the cost bends beside the middle, the plane is lowered by what its slope may be off.

    Parameters
    ----------
    prompt : tokens, as a split is a whole number of them.
    """
    middle = option.middle
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
