"""Whole-number searches over arrays of increasing functions."""

from collections.abc import Callable

import numpy as np

from kvsim.graph import Array, Number

MOST_PROBES = 3 * 24  # every third one halves a bracket of at most 10^7


def last_within(excess: Callable[[Array], Number], low: Array, high: Array) -> Array:
    """The largest whole number whose ``excess`` is not above 0, element by element.

    ``excess`` must not decrease, and should be nearly affine: the secant usually lands on the
    answer, its neighbour closes the bracket, and a bisection at times keeps the worst case short.

    Parameters
    ----------
    excess : function of an array of whole numbers.
    low, high : brackets. ``low`` is returned where nothing above it is within; ``high`` is
        taken to be beyond.
    """
    below, above = np.asarray(excess(low)), np.asarray(excess(high))
    shape = np.broadcast_shapes(low.shape, high.shape, below.shape, above.shape)
    low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
    for probe in range(MOST_PROBES):
        if not (high - low > 1).any():
            break
        slope = np.where(above > below, above - below, 1.0)
        secant = low + (high - low) * np.clip(-below / slope, 0.0, 1.0)
        trial = (np.floor(secant), low + 1, np.floor((low + high) / 2))[probe % 3]
        trial = np.clip(trial, np.minimum(low + 1, high), np.maximum(high - 1, low))
        over = np.asarray(excess(trial))
        fits = over <= 0
        low, below = np.where(fits, trial, low), np.where(fits, over, below)
        high, above = np.where(fits, high, trial), np.where(fits, above, over)
    return low
