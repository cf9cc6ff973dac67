"""Losses of layers as rows over counts: against an assignment by another method."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from kvsim import solver
from kvsim.planner.assigning import assigned
from kvsim.planner.programme import Programme, build
from kvsim.planner.solving import solve
from tests.planner.test_programme import instance


def least(p: Programme, counts: np.ndarray) -> float:
    """The least loss of whole counts, each option as often as it has layers."""
    assert p.loss is not None and p.shape_of is not None
    total = 0.0
    for k in range(p.layers.size):
        options = np.repeat(np.arange(counts.shape[0]), counts[:, k].astype(int))
        cost = p.loss[p.shape_of == k][:, options]
        total += float(cost[linear_sum_assignment(cost)].sum())
    return total


def some_counts(p: Programme, random: np.random.Generator) -> np.ndarray:
    share = random.dirichlet(np.ones(len(p.names)))
    return np.stack([random.multinomial(n, share) for n in p.layers], axis=1).astype(float)


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_below_the_loss_of_all_counts_and_touch_it_at_theirs(seed: int) -> None:
    p, random = instance(seed, losses=True), np.random.default_rng(seed)
    counts = some_counts(p, random)
    found = assigned(p, counts)
    assert found.loss == pytest.approx(least(p, counts), rel=1e-9, abs=1e-12)
    assert found.row.at_none + (found.row.each * counts).sum() == pytest.approx(found.loss)
    for _ in range(20):
        other = some_counts(p, random)
        assert found.row.at_none + (found.row.each * other).sum() <= least(p, other) + 1e-9


def test_the_optimum_is_that_of_layers_assigned_in_the_programme() -> None:
    solved = 0
    for seed in range(20):
        p = instance(seed, losses=True)
        built = build(p)
        solution = solver.solve(built.problem, 1e-9, 20.0)
        if not solution.found:
            continue
        solved += 1
        mix = solve(p, gap=1e-9)
        assert mix.objective == pytest.approx(solution.bound, rel=1e-6), seed
    assert solved > 8


def test_a_bound_is_what_the_solver_proved_not_its_solution_less_the_gap() -> None:
    for seed in range(5):
        p = replace(instance(seed), times={}, memory=(100.0, 100.0))
        best = solve(p, gap=1e-9).objective
        found = solve(p, gap=0.5)
        assert 0.5 * best <= found.bound <= best * (1 + 1e-9)
        assert found.bound <= found.objective
