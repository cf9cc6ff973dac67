"""Fitting a few numbers of a model to measurements, and saying how well they are known.

NumPy and SciPy only: the same fit serves published tables, microbenchmarks and serving runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.errors import InputError
from kvsim.graph import Array

FAR_OFF = 0.05  # log of predicted over measured beyond which a row counts less, if not smooth
BLIND = 0.5  # relative uncertainty above which rows do not tell a number


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number to fit, with the range it may take."""

    name: str
    start: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """Fitted numbers, their standard errors, and the relative residuals of the rows."""

    values: dict[str, float]
    errors: dict[
        str, float
    ]  # infinite where the rows do not tell; NaN where there are no spare rows
    residuals: Array  # predicted over measured, less one
    confused: tuple[tuple[str, str], ...]  # pairs that the rows cannot tell apart

    @property
    def unknown(self) -> tuple[str, ...]:
        """Numbers that the rows do not determine."""
        return tuple(
            name
            for name, value in self.values.items()
            if self.errors[name] > BLIND * max(abs(value), 1e-300)
        )


def fit_ratio(
    predict: Callable[[dict[str, float]], Array],
    measured: Array,
    parameters: Sequence[Parameter],
    smooth: bool = True,
) -> Fit:
    """Numbers that bring predictions closest to measurements in relative terms.

    Minimises the sum of squared logarithms of predicted over measured within the bounds.
    Uncertainties come from the curvature at the optimum and the residuals' spread, so that as many
    numbers as rows leave them unknown; a pair of numbers is confused if their estimates correlate
    by more than 0.95.

    Parameters
    ----------
    predict : predictions of all rows for given numbers, in the unit of ``measured``.
    measured : one value per row.
    smooth : whether predictions vary smoothly with the numbers. If not, as those of a scheduler,
        the bounds are searched first, rows far off count less, and derivatives are wide.

    Raises
    ------
    InputError
        If there are fewer rows than numbers, or values without a logarithm.
    """
    from scipy.optimize import least_squares  # 0.2 s that only a fit should cost

    if measured.size < len(parameters):
        names = ", ".join(p.name for p in parameters)
        raise InputError(
            f"{measured.size} rows cannot determine {len(parameters)} numbers ({names}); "
            f"add fit rows or free fewer numbers"
        )
    if not (np.isfinite(measured) & (measured > 0)).all():
        raise InputError("measured values must be positive numbers; correct the fit rows")
    low = np.array([p.low for p in parameters])
    span = np.array([p.high for p in parameters]) - low
    start = np.clip((np.array([p.start for p in parameters]) - low) / span, 1e-3, 1 - 1e-3)

    def named(scaled: Array) -> dict[str, float]:
        values = low + scaled * span
        return {p.name: float(v) for p, v in zip(parameters, values, strict=True)}

    def residuals(scaled: Array) -> Array:
        return np.log(np.maximum(predict(named(scaled)), 1e-300) / measured)

    if smooth:
        best = least_squares(residuals, start, bounds=(0.0, 1.0), diff_step=1e-4)
    else:
        start = _searched(residuals, len(parameters))
        best = least_squares(
            residuals, start, bounds=(0.0, 1.0), diff_step=0.02, loss="soft_l1",
            f_scale=FAR_OFF, max_nfev=1,
        )  # fmt: skip
    values = named(best.x)
    errors, confused = _uncertainty(best.jac, best.fun, span, parameters)
    return Fit(values, errors, np.expm1(best.fun), confused)


def _searched(residuals: Callable[[Array], Array], count: int) -> Array:
    """Where in the unit cube the residuals are least, those far off counting less."""
    from scipy.optimize import differential_evolution

    def loss(scaled: Array) -> float:
        return float(np.sum(np.sqrt(1 + (residuals(scaled) / FAR_OFF) ** 2) - 1))

    bounds = [(1e-3, 1 - 1e-3)] * count
    found = differential_evolution(loss, bounds, seed=0, popsize=8, maxiter=25, polish=False)
    return np.asarray(found.x)


def _uncertainty(
    jacobian: Array, residuals: Array, span: Array, parameters: Sequence[Parameter]
) -> tuple[dict[str, float], tuple[tuple[str, str], ...]]:
    """Standard errors, and pairs of numbers that move together."""
    names = [p.name for p in parameters]
    spare = residuals.size - len(names)
    variance = float(residuals @ residuals) / spare if spare else np.nan
    sensitive = np.linalg.norm(jacobian, axis=0) > 1e-9
    errors = dict.fromkeys(names, np.inf)
    seen = [n for n, s in zip(names, sensitive, strict=True) if s]
    if not seen:
        return errors, ()
    covariance = np.linalg.pinv(jacobian[:, sensitive].T @ jacobian[:, sensitive])
    deviation = np.sqrt(np.diag(covariance))
    for name, error, width in zip(seen, deviation, span[sensitive], strict=True):
        errors[name] = float(error * np.sqrt(variance) * width)
    correlation = covariance / np.outer(deviation, deviation)
    pairs = tuple(
        (seen[i], seen[j])
        for i in range(len(seen))
        for j in range(i)
        if abs(correlation[i, j]) > 0.95
    )
    return errors, pairs
