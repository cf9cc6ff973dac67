"""Whole-number searches against looking at every number."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.graph import Array
from kvsim.search import least_of_convex

LINES = st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 4000)), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(LINES, min_size=1, max_size=4), st.integers(0, 400), st.sampled_from((0.0, 0.01)))
def test_the_least_of_lines_maximum(
    costs: list[list[tuple[int, int]]], most: int, near: float
) -> None:
    """Each element has lines of its own; 5000 keeps every cost positive."""

    def cost(at: Array) -> Array:
        found = [
            np.max([5000.0 + a + slope * at[..., i] for slope, a in lines], axis=0)
            for i, lines in enumerate(costs)
        ]
        return np.stack(found, axis=-1)

    most = min(most, 99)
    high = np.full(len(costs), float(most))
    found, least = least_of_convex(cost, 0 * high, high, near)
    every = cost(np.repeat(np.arange(most + 1.0)[:, None], len(costs), axis=1))
    best = every.min(axis=0)
    assert ((found >= 0) & (found <= high) & (found == np.floor(found))).all()
    assert (cost(found) == least).all()
    assert (cost(found) <= (1 + near) * best * (1 + 1e-12)).all()
