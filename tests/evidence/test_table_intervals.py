"""Intervals of paper tables with few rows: how many rows of the same kind they hold."""

import numpy as np
import pytest

from kvsim.evidence import published_errors

SPREAD = 0.05  # of the logarithms of measured over predicted


def table(rng: np.random.Generator, cells: int, own: float) -> published_errors.Cells:
    return {("model", i): rng.normal(0.0, own, 2) for i in range(cells)}


@pytest.mark.parametrize("cells", [1, 2, 4, 16])
def test_an_interval_holds_four_rows_in_five_however_few_there_are(cells: int) -> None:
    rng, held = np.random.default_rng(cells), []
    for _ in range(400):
        low, high = published_errors.interval(table(rng, cells, SPREAD), SPREAD**2)
        held.append(low <= np.exp(rng.normal(0.0, SPREAD)) <= high)
    assert 0.75 <= np.mean(held) <= 0.9


def test_rows_that_agree_by_chance_do_not_make_an_interval_narrow() -> None:
    few = {("model", i): np.array([0.001]) for i in range(3)}
    low, high = published_errors.interval(few, SPREAD**2)
    assert low < 0.96 and high > 1.04
    many = {("model", i): np.array([0.001]) for i in range(100)}
    assert np.log(published_errors.interval(many, SPREAD**2)) == pytest.approx(0.0, abs=0.03)
