"""What every kind of replica on the shortlist carries, measured once and used by all searches."""

from collections.abc import Callable

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.fleet.arrays import Offers
from kvsim.planner.fleet.configurations import Configuration, offers_of
from kvsim.planner.fleet.measure import Busy, replicas_kept_busy
from kvsim.planner.fleet.shortlist import Rated
from kvsim.planner.fleet.targets import FleetTargets
from kvsim.planner.fleet.traffic import Traffic

DEAR = 2.0  # cost of the whole trace, of the cheapest, beyond which single classes are not measured


@frozen
class Market:
    """Configurations and what they carry.

    Attributes
    ----------
    offers
        With capacities by class, in the mix of the trace where a configuration can serve all of it.
    alone
        Replicas that the whole trace keeps busy; infinite where it cannot be served. (j,)
    """

    configurations: list[Configuration]
    offers: Offers
    alone: Array

    def only(self, columns: list[int]) -> "Market":
        """Some of the configurations."""
        some = [self.configurations[j] for j in columns]
        return Market(some, self.offers.only(columns), self.alone[columns])

    def where(self, holds: Callable[[Configuration], bool]) -> "Market":
        """The configurations for which something holds."""
        return self.only([j for j, x in enumerate(self.configurations) if holds(x)])

    @property
    def cost_alone(self) -> Array:
        """Price of the whole trace on one kind of replica, in parts of replicas. (j,) [USD/h]"""
        return np.asarray(self.alone * self.offers.rent)


def measured(
    rated: list[Rated],
    traffic: Traffic,
    targets: FleetTargets,
    slowdowns: Array | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Market:
    """Play the trace, and each class alone, on every configuration that may be worth it.

    Parameters
    ----------
    slowdowns : everything that a replica of each takes so many times as long; once if None. (j,)
    """
    slow = [1.0] * len(rated) if slowdowns is None else slowdowns.tolist()
    busy = [_all(x, traffic, targets, s, tell) for x, s in zip(rated, slow, strict=True)]
    alone = np.array([x.needed for x in busy])
    rent = np.array([x.configuration.rent for x in rated])
    dear = alone * rent > DEAR * (alone * rent).min(initial=np.inf)
    peak = traffic.demand.rate.max(axis=0)
    capacity = np.zeros((traffic.classes, len(rated)))
    late = np.zeros(capacity.shape)
    for j, x in enumerate(rated):
        carries_all = bool(np.isfinite(alone[j]))
        late[:, j] = _late(busy[j].missed, traffic, targets) if carries_all else x.late
        if dear[j] and carries_all:
            needed = x.needed  # as the estimate divides it; below all of it is what was measured
        else:
            needed = np.array([
                _class(x, c, traffic, targets, late[c, j], slow[j]) for c in range(traffic.classes)
            ])  # fmt: skip
        if carries_all:  # so it carries a class among others that it cannot carry alone
            needed = np.where(np.isfinite(needed), needed, x.needed)
        some = np.isfinite(needed) & (needed > 0)
        capacity[some, j] = peak[some] / needed[some]
        if carries_all and some.all():
            together = (traffic.demand.rate / capacity[:, j]).sum(axis=1).max()
            capacity[:, j] *= together / alone[j]
    configurations = [x.configuration for x in rated]
    return Market(configurations, offers_of(configurations, capacity, late), alone)


def _all(
    rated: Rated,
    traffic: Traffic,
    targets: FleetTargets,
    slowdown: float,
    tell: Callable[[str], None],
) -> Busy:
    """Replicas that the whole trace keeps busy."""
    tell(f"what {rated.configuration.name} carries")
    if not np.isfinite(rated.needed).all():
        return Busy(np.inf, np.ones(len(traffic.requests)))
    guess = max(float(rated.needed.sum()), 1.0)
    return replicas_kept_busy(
        traffic.requests, rated.configuration, targets, guess=guess * slowdown, slowdown=slowdown
    )


def _late(missed: Array, traffic: Traffic, targets: FleetTargets) -> Array:
    """Share of each class that misses a target while all of it just meets them. (c,)

    Where some miss one target and others the other, the shares are reduced so that together they
    are what may be missed.
    """
    of_class = np.bincount(traffic.of, minlength=traffic.classes)
    late = np.bincount(traffic.of, missed, minlength=traffic.classes) / of_class
    total = float(missed.mean())
    return np.asarray(late * min(1.0, (1 - targets.share) / total) if total else late)


def _class(
    rated: Rated, c: int, traffic: Traffic, targets: FleetTargets, late: float, slowdown: float
) -> float:
    """Replicas that a class alone keeps busy."""
    guess = float(rated.needed[c])
    if not np.isfinite(guess) or late >= 1:
        return float("inf")
    part = traffic.part(c)
    guess = max(guess * slowdown, 1.0)
    return replicas_kept_busy(part, rated.configuration, targets, late, guess, slowdown).needed
