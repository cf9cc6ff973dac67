"""What mixes of replicas do with the requests of one window, played alone.

A schedule's late requests are about those of its windows, each played by itself from idle replicas,
so a few plays of single windows say much about very many schedules.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvsim.graph import Array
from kvsim.planner.fleet.arrays import Counts, Demand, Offers
from kvsim.planner.fleet.configurations import Configuration
from kvsim.planner.fleet.dispatch import utilisation
from kvsim.planner.fleet.play import Played, play
from kvsim.planner.fleet.targets import FleetTargets
from kvsim.planner.fleet.traffic import Traffic

Mix = tuple[int, ...]
"""Replicas of each kind that run at once. (j,)"""
Late = NDArray[np.int64]
"""Requests that miss TTFT, then those that miss TPOT, of each class of targets. (t,)"""


HALF = 0.5  # how busy a kind that serves some classes worse may be, of how busy the others are


class WindowPlays:
    """The windows of a trace, and what was seen of mixes there.

    Attributes
    ----------
    plays
        How many were simulated.
    """

    def __init__(
        self,
        traffic: Traffic,
        configurations: list[Configuration],
        offers: Offers,
        targets: FleetTargets,
        late: float,
        load: float = 1.0,
        slowdown: Callable[[Counts], float] = lambda _: 1.0,
    ) -> None:
        """Remember the windows; none is played.

        Parameters
        ----------
        late : share of all requests that may miss a target.
        load : the trace so many times as fast, where classes are divided for it.
        slowdown : what some replicas do takes so many times as long.
        """
        windows = range(len(traffic.demand.rate))
        self.parts = [traffic.of_window(w) for w in windows]
        self.configurations, self.offers, self.targets = configurations, offers, targets
        self.most_late, self.load, self.slowdown, self.plays = late, load, slowdown, 0
        self.busiest: dict[tuple[int, Mix], float] = {}
        self.shares: dict[tuple[int, Mix], Array] = {}
        self.seen: dict[tuple[int, Mix, float], Late] = {}

    def busy(self, window: int, mix: Mix) -> float:
        """How busy the busiest kind of a mix would be by what its replicas carry."""
        known = self.busiest.get((window, mix))
        if known is None:
            demand = self.parts[window].demand
            known = self.busiest[window, mix] = _least_busy(self.offers, demand, mix, 1.0)[0]
        return known

    def share(self, window: int, mix: Mix) -> Array:
        """Shares of the classes with which the fewest requests were late. (c, j)"""
        if (window, mix) not in self.shares:
            self.late(window, mix, self.load)
        return self.shares[window, mix]

    def late(self, window: int, mix: Mix, load: float) -> Late:
        """Requests of a window that miss a target of theirs on a mix."""
        known = self.seen.get((window, mix, load))
        if known is not None:
            return known
        if load == self.load:
            each = list(self._divisions(window, mix))
            found = []
            for share in each:
                found.append(self._played(window, mix, share, load))
                if not found[-1].any():
                    break
            best = min(range(len(found)), key=lambda i: (found[i].max(), found[i].sum()))
            self.shares[window, mix], few = each[best], found[best]
        else:
            few = self._played(window, mix, self.share(window, mix), load)
        self.seen[window, mix, load] = few
        return few

    def _played(self, window: int, mix: Mix, share: Array, load: float) -> Late:
        part = self.parts[window]
        if not len(part.requests):
            return np.zeros(2 * len(self.targets.each), np.int64)
        self.plays += 1
        running = np.array([mix])
        played = play(part, self.configurations, running, share[None], load, self.slowdown(running))
        return np.asarray(late_by_window(played, self.targets, part.window, 1)[0])

    def _divisions(self, window: int, mix: Mix) -> Iterator[Array]:
        """Shares that keep the busiest kind least busy.

        First with few late requests where replicas carry that, then where each class goes only to
        kinds that serve it about as well as the best one there does, and again with those that
        serve some classes worse half as busy as the others, as they are slow for all classes. Last
        every class by what the kinds carry of it.
        """
        offers, demand, used = self.offers, self.parts[window].demand, np.array(mix) > 0
        evenly = even_shares(offers, np.array(mix))
        busy, share = _least_busy(offers, demand, mix, self._late_at_least(demand))
        if busy > 1:
            busy, share = _least_busy(offers, demand, mix, 1.0)
        yield np.where(share.sum(axis=1, keepdims=True) > 0, share, evenly)
        serves = (offers.capacity > 0) & used
        least = np.where(serves, offers.late, np.inf).min(axis=1, keepdims=True)
        well = serves & (offers.late <= least + self.most_late)
        worse = (serves & ~well).any(axis=0)
        each = np.where(well, offers.capacity, 0.0)
        for part in (1.0, HALF) if worse.any() else ():
            some = replace(offers, capacity=each * np.where(worse, part, 1.0))
            busy, share = _least_busy(some, demand, mix, 1.0)
            if np.isfinite(busy):
                yield np.where(share.sum(axis=1, keepdims=True) > 0, share, evenly)
        if used.sum() > 1:
            carried = offers.capacity * np.array(mix)
            total = carried.sum(axis=1, keepdims=True)
            yield np.where(total > 0, carried / np.where(total > 0, total, 1.0), evenly)

    def _late_at_least(self, demand: Demand) -> float:
        """Share of a window's requests that may be late, or what no replica does without."""
        offers, rate = self.offers, demand.rate[0]
        served = np.where(offers.capacity > 0, offers.late, np.inf).min(axis=1)
        asked = (rate > 0) & np.isfinite(served)
        least = float(rate[asked] @ served[asked] / rate.sum()) if asked.any() else 0.0
        return max(self.most_late, least)


def _least_busy(offers: Offers, demand: Demand, mix: Mix, late: float) -> tuple[float, Array]:
    """The lowest utilisation of the busiest kind, and the shares that reach it. (c, j)

    Classes that none of them serves within the targets are left out: a few requests may be late.
    """
    used = np.flatnonzero(mix)
    rate = np.where((offers.capacity[:, used] > 0).any(axis=1), demand.rate, 0.0)
    if used.size != 1:
        return utilisation(offers, Demand(rate, demand.hours), np.array(mix), late)
    come, share = rate[0] > 0, np.zeros((offers.classes, len(offers)))
    share[:, used] = 1.0
    return float((rate[0, come] / offers.capacity[come, used[0]]).sum() / mix[used[0]]), share


def even_shares(offers: Offers, mix: Counts) -> Array:
    """Every class divided by the number of replicas. (c, j)"""
    weight = mix.astype(float) if mix.any() else np.ones(len(mix))
    return np.tile(weight / weight.sum(), (offers.classes, 1))


def late_by_window(
    played: Played, targets: FleetTargets, window: NDArray[np.int64], windows: int
) -> Late:
    """Requests that miss TTFT, then those that miss TPOT, of each class of targets. (w, t)"""
    classes = len(targets.each)
    place = window * classes + targets.of(played.prompt)
    ttft, tpot = targets.of_each(played.prompt)
    found = [
        np.bincount(place[late], minlength=windows * classes).reshape(windows, classes)
        for late in (played.ttft > ttft, played.tpot > tpot)
    ]
    return np.concatenate(found, axis=1)


def may_be_late(traffic: Traffic, targets: FleetTargets) -> Late:
    """The most requests of the whole trace that may miss each target. (t,)"""
    of, classes = targets.of(traffic.requests.prompt), len(targets.each)
    every = np.bincount(of, minlength=classes)
    several = np.bincount(of[traffic.requests.generate > 1], minlength=classes)
    count = np.maximum(np.concatenate([every, several]) - 1, 0)
    return np.asarray(count - np.floor(targets.share * count + 1e-9).astype(np.int64))
