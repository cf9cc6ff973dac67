"""What a fleet must have left after a failure, as rows of the programme.

Whether some replicas carry the demand is a linear programme: the lowest utilisation of the busiest
kind is at most 1. Its dual solution prices a replica of each kind so that no replicas which carry
the demand are worth less than 1 in all (Benders, Numerische Mathematik 4, 1962). One such row for a
failure that a fleet would not survive excludes that fleet and all others that fail for its reason.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from kvsim.graph import Array
from kvsim.planner.fleet.arrays import Offers

Losses = tuple[int, ...]
"""Replicas of each kind that are lost. (j,)"""


@dataclass(frozen=True, order=True)
class FatalLoss:
    """Replicas that are lost in a window, and those that are left and do not carry it.

    Attributes
    ----------
    lost, left
        Replicas of each kind. (j,)
    """

    window: int
    lost: Losses
    left: tuple[int, ...]


def worth(
    offers: Offers, peaks: Array, mean: Array, left: Array, late: float
) -> tuple[float, Array]:
    """The utilisation of the busiest kind, and the worth of one replica of each kind.

    Replicas that carry the demand are worth 1 at least.

    Parameters
    ----------
    peaks, mean : rates of the classes. (p, c), (c,) [1/s]
    left : replicas of each kind. (j,)
    late : share of all requests that may miss a target.

    Returns
    -------
    Infinite utilisation if a class cannot be served at all. Worth: (j,)
    """
    serves = (offers.capacity > 0) & (mean > 0)[:, None]
    none = np.flatnonzero((mean > 0) & ~(serves & (left > 0)).any(axis=1))
    if none.size:
        return np.inf, serves[none[0]].astype(float)
    c, j = np.nonzero(serves)
    each = np.where(serves, 1 / np.where(serves, offers.capacity, 1.0), 0.0)
    kinds, shares = len(offers), len(c)
    load = np.zeros((len(peaks), kinds, shares + 1))
    load[:, j, np.arange(shares)] = peaks[:, c] * each[c, j]
    load[:, :, -1] = -left
    of_all = mean[c] * offers.late[c, j] / mean.sum()
    rows = np.vstack([load.reshape(-1, shares + 1), [*of_all, 0.0]])
    served = np.zeros((len(mean), shares + 1))
    served[c, np.arange(shares)] = 1.0
    served = served[mean > 0]
    found = linprog(
        c=[*np.zeros(shares), 1.0], A_ub=rows, b_ub=[*np.zeros(len(rows) - 1), late], A_eq=served,
        b_eq=np.ones(len(served)), method="highs",
    )  # fmt: skip
    if found.status != 0:  # too many requests would be late, however many replicas there are
        return np.inf, np.where(left > 0, 0.0, 1.0)
    price = -np.asarray(found.ineqlin.marginals)
    of_class = np.zeros(len(mean))
    of_class[mean > 0] = found.eqlin.marginals
    value = price[:-1].reshape(len(peaks), kinds).sum(axis=0)
    gain = np.where(serves, of_class[:, None], 0.0)
    gain[c, j] -= price[-1] * of_all
    value = np.where(left > 0, value, np.minimum(value, _enough(offers, peaks, gain)))
    return float(found.fun), value / found.fun if found.fun > 0 else value


def _enough(offers: Offers, peaks: Array, gain: Array) -> Array:
    """The least worth of a kind that is not there, by the one peak that asks for least. (j,)

    Parameters
    ----------
    gain : what it saves to serve a class; its worth must cover that. (c, j)
    """
    wanted = np.where(gain > 0, gain * offers.capacity, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_peak = np.where(wanted > 0, wanted / peaks[:, :, None], 0.0)
    return np.asarray(by_peak.max(axis=1).min(axis=0))
