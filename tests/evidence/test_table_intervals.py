"""Intervals of paper tables with few rows: how many rows of the same kind they hold."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import published_errors
from kvsim.evidence import published
from kvsim.machines.profiles import load_stack, number_of

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


def test_what_rows_without_a_mechanism_do_not_tell_is_as_in_the_stack_below() -> None:
    """Full KV's rows tell KCache's engine its attention, and nothing of what KCache fetches."""
    stack = load_stack("kcache-engine")
    rows = [row for row in published.read("kcache") if row.ran_on(stack)]
    full = [replace(r, use="fit") for r in rows if r.technique == "full" and r.metric != "fits"]
    told, base = published_errors.fit_told_numbers(full, stack), load_stack(stack.extends)
    for key in ("kernel.relay.memory", "offload.layer_s"):
        assert told[key] == number_of(base, key) != number_of(stack, key)
    assert told["kernel.attention.memory"] == pytest.approx(0.87, abs=0.05)
