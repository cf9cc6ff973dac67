"""Whole-number searches against looking at every number."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.graph import Array
from kvsim.search import last_within, least_of_convex, smallest_count

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


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(-4000, 4000), st.integers(0, 60)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 300),
)
def test_the_last_number_within_is_found(functions: list[list[tuple[int, int]]], most: int) -> None:
    """Each element is the highest of lines of its own, settings before the batches as in kvsim."""

    def excess(at: Array) -> Array:
        each = np.broadcast_to(at, (*at.shape[:-3], len(functions), 1, 1))
        found = [
            np.max([a + slope * each[..., i : i + 1, :, :] for a, slope in lines], axis=0)
            for i, lines in enumerate(functions)
        ]
        return np.concatenate(found, axis=-3)

    none = np.zeros((1, 1))
    found = last_within(excess, none, none + most)
    within = [
        max((k for k in range(most) if all(a + s * k <= 0 for a, s in lines)), default=0)
        for lines in functions
    ]
    assert found.ravel().tolist() == within
    assert found.shape == ((len(functions), 1, 1) if len(functions) > 1 else (1, 1))


@settings(deadline=None, derandomize=True)
@given(answer=st.integers(1, 200), guess=st.integers(1, 100), more=st.floats(1.1, 3.0))
def test_the_fewest_that_meet_is_found_without_asking_far_beyond(
    answer: int, guess: int, more: float
) -> None:
    asked = []

    def meets(count: int) -> bool:
        asked.append(count)
        return count >= answer

    found = smallest_count(meets, guess, most=128, more=more)
    assert found == (0 if answer > 128 else answer)
    assert max(asked) <= max(guess, min(128, answer * more + 1))
