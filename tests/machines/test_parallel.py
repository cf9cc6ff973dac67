"""Which experts tokens touch where some are more popular than others."""

import numpy as np
import pytest

from kvsim.machines.parallel import left_idle


@pytest.mark.parametrize("share", [1 / 32, 1 / 16, 1 / 4])
def test_popular_experts_leave_more_of_the_others_idle(share: float) -> None:
    tokens = np.array([1.0, 8.0, 64.0, 512.0])
    uniform, uneven = (np.asarray(left_idle(share, tokens, x)) for x in (1.0, 30.0))
    assert uneven[0] == pytest.approx(uniform[0])  # a token calls for the model's number of experts
    assert (uneven[1:] > uniform[1:]).all() and (np.diff(uneven) < 0).all()


def test_shares_of_several_shapes_are_solved_at_once() -> None:
    shares, tokens = np.array([1 / 32, 1 / 4]), np.array([16.0, 4.0])
    both = left_idle(shares, tokens, 30.0)
    assert both == pytest.approx(
        [left_idle(s, t, 30.0) for s, t in zip(shares, tokens, strict=True)]
    )


def test_the_rate_is_that_of_experts_between_the_least_and_the_most_popular() -> None:
    sizes = 30.0 ** np.linspace(0, 1, 10_001)
    rate = 0.05
    share = 1 - np.exp(-rate * sizes / 30).mean()
    expected = np.exp(-rate * sizes / 30 * 20).mean()
    assert left_idle(share, 20.0, 30.0) == pytest.approx(expected, rel=0.01)
