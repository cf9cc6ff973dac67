"""Integer searches over arrays of monotone or convex functions."""

from collections.abc import Callable

import numpy as np

from kvsim.graph import Array, Number

GRID_AXES = 3  # of what is searched for: settings, batches, contexts
NEIGHBOURS = np.arange(-4.0, 2.0)  # of a guess that are looked at with it
MOST_PROBES = 3 * 24  # every third one halves a bracket of at most 10^7


def smallest_count(meets: Callable[[int], bool], guess: int, most: int, more: float) -> int:
    """Find the smallest count that satisfies a monotone condition; 0 if none up to ``most`` does.

    Parameters
    ----------
    meets
        The condition; once a count meets it, all larger counts do.
    guess
        First count that is tried.
    most
        Largest count that is tried.
    more
        Factor to the next count while none meets.
    """
    low, high = 0, guess  # the answer is above `low`, and at most `high` once that meets
    while not meets(high):
        if high >= most:
            return 0
        low, high = high, min(int(np.ceil(high * more)), most)
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle
    return high


def last_within(excess: Callable[[Array], Number], low: Array, high: Array) -> Array:
    """Find the largest whole number with ``excess`` at most 0, element by element.

    ``excess`` must not decrease, and should be nearly affine, above all for large numbers. The line
    through the upper half of the bracket usually crosses 0 at the answer or next to it, so its
    neighbours are evaluated together. Otherwise secant steps narrow the bracket, with a bisection
    every third time to bound the worst case.

    Parameters
    ----------
    excess
        Function of an array of whole numbers, whose first axis holds several candidates.
    low, high
        Brackets. ``low`` is returned where no larger number qualifies; ``high`` is assumed not to.

    Returns
    -------
    Array
        With the brackets' shape, or with the leading axes that ``excess`` adds to it.
    """
    plain = np.broadcast_shapes(low.shape, high.shape)
    alone = (1,) * (GRID_AXES - len(plain))
    low, high = (np.broadcast_to(end, plain).reshape(alone + plain) for end in (low, high))
    middle = np.floor((low + high) / 2)
    first = excess(np.stack([low, middle, high]))
    shape = np.broadcast_shapes(low.shape, np.shape(first)[1:])
    low, middle, high = (np.broadcast_to(end, shape) for end in (low, middle, high))
    below, halfway, above = np.broadcast_to(first, (3, *shape))
    slope = np.where(above > halfway, above - halfway, 1.0)
    trial = high - (high - middle) * np.clip(above / slope, 0.0, 2.0)
    steps = NEIGHBOURS.reshape(-1, *(1 for _ in shape))
    for probe in range(MOST_PROBES):
        around = np.clip(np.floor(trial) + steps, low, np.maximum(high - 1, low))
        values = np.broadcast_to(excess(around), around.shape)
        within = np.count_nonzero(values <= 0, axis=0)
        ends = np.stack([within, within + 1])
        low, high = np.take_along_axis(np.concatenate([low[None], around, high[None]]), ends, 0)
        if not (high - low > 1).any():
            break
        values = np.concatenate([below[None], values, above[None]])
        below, above = np.take_along_axis(values, ends, 0)
        slope = np.where(above > below, above - below, 1.0)
        secant = low + (high - low) * np.clip(-below / slope, 0.0, 1.0)
        trial = (low + high) / 2 if probe % 3 == 1 else secant
    return low.reshape(plain) if low.size == np.prod(plain) else low


def least_of_convex(
    cost: Callable[[Array], Number], low: Array, high: Array, within: float = 0.0
) -> tuple[Array, Array]:
    """Find the whole number of least cost from ``low`` to ``high``, element by element.

    ``cost`` is convex and piecewise affine. The lines at both ends of a bracket cross at the
    minimum or on another line, so few points are evaluated; a bisection every third time bounds
    the worst case. The crossing is a lower bound of the least cost.

    Parameters
    ----------
    cost
        Positive function of an array of whole numbers, whose first axis holds several candidates.
    low, high
        Brackets that include the answer.
    within
        Relative excess over the least cost that is accepted.

    Returns
    -------
    tuple[Array, Array]
        The numbers and their costs, with the brackets' shape.
    """
    shape = np.broadcast_shapes(low.shape, high.shape)
    low, high = (np.array(np.broadcast_to(end, shape), dtype=float) for end in (low, high))

    first, last = low, high
    before, above = np.asarray(cost(np.stack([np.maximum(last - 1, low), last])))
    rise = np.where(last > first, above - before, 0.0)
    if ((rise < 0) | (last <= first)).all():
        return last, above
    value, beyond = np.asarray(cost(np.stack([first, np.minimum(first + 1, high)])))
    slope = np.where(first < high, beyond - value, 0.0)
    for probe in range(MOST_PROBES):
        apart = (slope < 0) & (rise > 0) & (last - first > 1)
        meets = first + (value - above + rise * (last - first)) / np.where(apart, rise - slope, 1.0)
        least = value + slope * (meets - first)
        enough = (1 + within) * least
        apart &= np.minimum(value, above) > enough
        if not apart.any():
            break
        trial = np.floor(meets) if probe % 3 < 2 else np.floor((first + last) / 2)
        trial = np.where(apart, np.clip(trial, first + 1, np.maximum(last - 1, first)), first)
        (at,) = np.asarray(cost(trial[None]))
        if (at <= enough)[apart].all():  # where the lines meet, as a rule: no slope is needed then
            first, value = np.where(apart, trial, first), np.where(apart, at, value)
            break
        (beyond,) = np.asarray(cost(np.minimum(trial + 1, high)[None]))
        grows = np.where(trial < high, beyond - at, 0.0)
        falls, other = apart & (grows < 0), apart & (grows >= 0)
        first, value, slope = (
            np.where(falls, new, old) for new, old in ((trial, first), (at, value), (grows, slope))
        )
        last, above, rise = (
            np.where(other, new, old) for new, old in ((trial, last), (at, above), (grows, rise))
        )
    return np.where(value <= above, first, last), np.minimum(value, above)
