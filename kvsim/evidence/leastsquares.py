"""Least-squares fits of a few parameters, with standard errors.

NumPy and SciPy only: the same fit serves published tables, microbenchmarks and serving runs.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array

FAR_OFF = 0.05  # log of predicted over measured beyond which a row counts less, if not smooth
SINGULAR_SHARE = 1e-7  # of the largest singular value, below which rows do not see a direction
BLIND = 0.5  # relative uncertainty above which rows do not tell a number


@frozen
class Parameter:
    """A number to fit, with the range it may take.

    Attributes
    ----------
    name
        Name of the number.
    start
        Value that the fit starts from.
    low, high
        Bounds.
    decades
        Whether the logarithm is fitted, for a range over several orders of magnitude.
    """

    name: str
    start: float
    low: float
    high: float
    decades: bool = False

    def value_at(self, place: float) -> float:
        """Return the value at a relative position in the range.

        Parameters
        ----------
        place
            Position, from 0 at the lower bound to 1 at the upper one.

        Returns
        -------
        float
            The value, interpolated by its logarithm if ``decades`` is set.
        """
        if self.decades:
            return float(self.low * (self.high / self.low) ** place)
        return self.low + place * (self.high - self.low)

    def place(self, value: float) -> float:
        """Return the relative position of a value in the range.

        Parameters
        ----------
        value
            A value within the bounds.

        Returns
        -------
        float
            Position, from 0 at the lower bound to 1 at the upper one.
        """
        if self.decades:
            return float(np.log(value / self.low) / np.log(self.high / self.low))
        return (value - self.low) / (self.high - self.low)

    def slope(self, place: float) -> float:
        """Return the derivative of the value with respect to its position.

        Parameters
        ----------
        place
            Position in the range, from 0 to 1.

        Returns
        -------
        float
            Change of the value per unit of position.
        """
        if self.decades:
            return self.value_at(place) * float(np.log(self.high / self.low))
        return self.high - self.low


@frozen
class Fit:
    """Result of a least-squares fit.

    Attributes
    ----------
    values
        Fitted numbers by name.
    errors
        Standard errors by name; infinite where the rows do not determine the number, NaN if there
        are no more rows than numbers.
    residuals
        Predicted over measured value of each row, minus 1. (n,)
    confused
        Pairs of numbers that the rows cannot tell apart.
    """

    values: dict[str, float]
    errors: dict[str, float]
    residuals: Array
    confused: tuple[tuple[str, str], ...]

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
    robust: bool = False,
) -> Fit:
    """Fit numbers that bring predictions closest to measurements in relative terms.

    Minimises the sum of squared logarithms of predicted over measured within the bounds.
    Uncertainties come from the curvature at the optimum and the residuals' spread, so that as many
    numbers as rows leave them unknown; a pair of numbers is confused if their estimates correlate
    by more than 0.95.

    Parameters
    ----------
    predict
        Predictions of all rows for given numbers, in the unit of ``measured``.
    measured
        One value per row.
    parameters
        The numbers to fit, with their bounds and first guesses.
    smooth
        Whether predictions vary smoothly with the numbers. If not, as those of a scheduler, the
        bounds are searched first, rows far off count less, and derivatives are wide.
    robust
        Whether rows far off count less although predictions are smooth: measured medians have
        outliers.

    Returns
    -------
    Fit
        The numbers, their standard errors and the residuals of the rows.

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
    start = np.clip([p.place(p.start) for p in parameters], 1e-3, 1 - 1e-3)

    def named(scaled: Array) -> dict[str, float]:
        return {p.name: float(p.value_at(x)) for p, x in zip(parameters, scaled, strict=True)}

    def residuals(scaled: Array) -> Array:
        return np.log(np.maximum(predict(named(scaled)), 1e-300) / measured)

    if smooth:
        # most rows may fit before the few that tell a number do; at 1e-6 no fit of 54,000 measured
        # operators was worse by more than 0.1 % than at 1e-10, in a third of the time
        close = dict.fromkeys(("ftol", "xtol", "gtol"), 1e-6)
        how = {"loss": "soft_l1", "f_scale": FAR_OFF, **close} if robust else {}
        best = least_squares(residuals, start, bounds=(0.0, 1.0), diff_step=1e-4, **how)
    else:
        start = _searched(residuals, len(parameters))
        best = least_squares(
            residuals,
            start,
            bounds=(0.0, 1.0),
            diff_step=0.02,
            loss="soft_l1",
            f_scale=FAR_OFF,
            max_nfev=1,
        )
    values = named(best.x)
    slopes = np.array([p.slope(x) for p, x in zip(parameters, best.x, strict=True)])
    errors, confused = _uncertainty(best.jac, best.fun, slopes, parameters, robust)
    return Fit(values, errors, np.expm1(best.fun), confused)


def robust_loss(fit: Fit) -> float:
    """Compute the loss that a robust fit minimises, in which outliers count less.

    Parameters
    ----------
    fit
        A fit, robust or not.

    Returns
    -------
    float
        Sum of the rows' losses; smaller is better.
    """
    return float(np.sum(np.sqrt(1 + (np.log1p(fit.residuals) / FAR_OFF) ** 2)))


def _searched(residuals: Callable[[Array], Array], count: int) -> Array:
    """Where in the unit cube the residuals are least, those far off counting less."""
    from scipy.optimize import differential_evolution

    def loss(scaled: Array) -> float:
        return float(np.sum(np.sqrt(1 + (residuals(scaled) / FAR_OFF) ** 2) - 1))

    bounds = [(1e-3, 1 - 1e-3)] * count
    found = differential_evolution(loss, bounds, seed=0, popsize=8, maxiter=25, polish=False)
    return np.asarray(found.x)


def _uncertainty(
    jacobian: Array, residuals: Array, slopes: Array, parameters: Sequence[Parameter], robust: bool
) -> tuple[dict[str, float], tuple[tuple[str, str], ...]]:
    """Standard errors, and pairs of numbers that move together."""
    names = [p.name for p in parameters]
    spare = residuals.size - len(names)
    squares = float(residuals @ residuals)
    if robust:  # the spread of most rows, whatever the outliers do
        squares = residuals.size * float(1.4826 * np.median(np.abs(residuals))) ** 2
    variance = squares / spare if spare else np.nan
    sensitive = np.linalg.norm(jacobian, axis=0) > 1e-9
    errors = dict.fromkeys(names, np.inf)
    seen = [n for n, s in zip(names, sensitive, strict=True) if s]
    if not seen:
        return errors, ()
    _, singular, directions = np.linalg.svd(jacobian[:, sensitive], full_matrices=False)
    # a direction that no row sees is not known at all: a pseudo-inverse would call it certain
    weights = directions / np.maximum(singular, SINGULAR_SHARE * singular.max())[:, None]
    covariance = weights.T @ weights
    deviation = np.sqrt(np.diag(covariance))
    for name, error, width in zip(seen, deviation, slopes[sensitive], strict=True):
        errors[name] = float(error * np.sqrt(variance) * width)
    return errors, list_confused(seen, covariance)


def list_confused(names: Sequence[str], covariance: Array) -> tuple[tuple[str, str], ...]:
    """List the pairs of fitted numbers whose estimates correlate by more than 0.95.

    Parameters
    ----------
    names
        Names of the numbers. (n,)
    covariance
        Covariance of their estimates. (n, n)

    Returns
    -------
    tuple of (str, str)
        The pairs.
    """
    deviation = np.sqrt(np.diag(covariance))
    correlated = np.abs(covariance / np.outer(deviation, deviation)) > 0.95
    return tuple(
        (names[i], names[j]) for i in range(len(names)) for j in range(i) if correlated[i, j]
    )
