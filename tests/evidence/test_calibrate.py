"""Fits find known numbers, say how well, and admit what rows cannot tell."""

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.evidence.leastsquares import Fit, Parameter, fit_ratio
from kvsim.graph import Array

SIZES = np.geomspace(1e3, 1e9, 40)
LATENCY, BANDWIDTH = 8e-6, 24e9  # a copy: latency + size / bandwidth
FREE = [Parameter("latency", 1e-6, 0.0, 1e-4), Parameter("bandwidth", 10e9, 1e9, 100e9)]


def copy_seconds(numbers: dict[str, float]) -> Array:
    return numbers["latency"] + SIZES / numbers["bandwidth"]


def fitted(noise: float, seed: int = 0) -> Fit:
    measured = LATENCY + SIZES / BANDWIDTH
    measured = measured * np.exp(noise * np.random.default_rng(seed).standard_normal(40))
    return fit_ratio(copy_seconds, measured, FREE)


def test_exact_measurements_give_exact_numbers() -> None:
    fit = fitted(0.0)
    assert fit.values["latency"] == pytest.approx(LATENCY, rel=1e-4)
    assert fit.values["bandwidth"] == pytest.approx(BANDWIDTH, rel=1e-4)
    assert np.abs(fit.residuals).max() < 1e-4
    assert not fit.unknown and not fit.confused


@pytest.mark.parametrize("seed", range(20))
def test_five_percent_noise_moves_numbers_by_less(seed: int) -> None:
    fit = fitted(0.05, seed)
    for name, true in (("latency", LATENCY), ("bandwidth", BANDWIDTH)):
        assert fit.values[name] == pytest.approx(true, rel=0.05)
        assert abs(fit.values[name] - true) < 5 * fit.errors[name]


def test_errors_grow_with_the_noise() -> None:
    assert fitted(0.1).errors["bandwidth"] > 3 * fitted(0.01).errors["bandwidth"]


def test_a_number_that_nothing_depends_on_is_unknown() -> None:
    extra = [*FREE, Parameter("colour", 1.0, 0.0, 2.0)]
    fit = fit_ratio(copy_seconds, LATENCY + SIZES / BANDWIDTH, extra)
    assert fit.unknown == ("colour",)
    assert fit.errors["colour"] == np.inf


def test_numbers_that_only_act_together_are_confused() -> None:
    free = [Parameter("a", 1.0, 0.1, 10.0), Parameter("b", 1.0, 0.1, 10.0)]
    fit = fit_ratio(lambda n: n["a"] * n["b"] * SIZES, 2 * SIZES * (1 + 1e-3 * np.sin(SIZES)), free)
    assert fit.confused == (("b", "a"),)
    assert fit.values["a"] * fit.values["b"] == pytest.approx(2.0, rel=1e-2)


def test_as_many_numbers_as_rows_leave_the_errors_unknown() -> None:
    sizes = np.array([1e4, 1e9])
    fit = fit_ratio(
        lambda n: n["latency"] + sizes / n["bandwidth"], LATENCY + sizes / BANDWIDTH, FREE
    )
    assert fit.values["bandwidth"] == pytest.approx(BANDWIDTH, rel=1e-3)
    assert all(np.isnan(error) for error in fit.errors.values())


def test_bounds_hold() -> None:
    free = [Parameter("latency", 1e-6, 0.0, 4e-6), Parameter("bandwidth", 10e9, 1e9, 20e9)]
    fit = fit_ratio(copy_seconds, LATENCY + SIZES / BANDWIDTH, free)
    assert fit.values["latency"] <= 4e-6 and fit.values["bandwidth"] <= 20e9


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (np.array([1.0]), "1 rows cannot determine 2 numbers (latency, bandwidth)"),
        (np.array([1.0, -1.0, 2.0]), "measured values must be positive"),
        (np.array([1.0, np.nan, 2.0]), "measured values must be positive"),
        (np.array([1.0, 0.0, 2.0]), "measured values must be positive"),
    ],
)
def test_rows_that_cannot_be_fitted(measured: Array, said: str) -> None:
    with pytest.raises(InputError) as caught:
        fit_ratio(lambda n: np.full(measured.size, n["latency"]), measured, FREE)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
