"""How many replicas some requests keep busy within the targets, by simulation.

The requests themselves are played, so their bursts count, on the fewest replicas that meet the
targets; then more and more of them until these do not. Where one replica carries them several times
over, copies that begin at other times are played together: the same requests in less time would be
over before a queue can grow.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.fleet.configurations import Configuration
from kvsim.planner.fleet.play import serve, waits
from kvsim.planner.fleet.targets import FleetTargets
from kvsim.search import fewest
from kvsim.traces.requests import Requests

FINE = 1.04  # ratio of two loads between which the search for the largest stops
Missed = NDArray[np.bool_]
MORE = 1.5  # replicas are tried in such steps
MOST = 1024  # replicas
COPIES = 16  # of requests that are too few for one replica, at most


@frozen
class Busy:
    """The most that some replicas carry.

    Attributes
    ----------
    needed
        Replicas that the requests keep busy, in parts of one; infinite if none meet the targets.
    missed
        How often each of the requests then misses a target, from 0 to 1. (n,)
    """

    needed: float
    missed: Array


def replicas_kept_busy(
    requests: Requests,
    configuration: Configuration,
    targets: FleetTargets,
    late: float = 0.0,
    guess: float = 1.0,
    slowdown: float = 1.0,
) -> Busy:
    """The replicas that some requests need.

    Parameters
    ----------
    late : share of the requests that may miss a target; at least that which the targets allow.
    guess : how many replicas it may take.
    """
    share = min(targets.share, 1 - late)

    def misses(some: Requests, replicas: int, load: float) -> tuple[Missed, Missed]:
        ttft, tpot, _ = waits(serve(some.scaled(load).hurried(slowdown), configuration, replicas))
        longest, slowest = targets.of_each(some.prompt)
        return ttft * slowdown > longest, tpot * slowdown > slowest

    def meet(some: Requests, replicas: int, load: float) -> bool:
        slow, halting = misses(some, replicas, load)
        of, classes = targets.of(some.prompt), len(targets.each)
        each = np.maximum(np.bincount(of, minlength=classes), 1)
        several = np.maximum(np.bincount(of, some.generate > 1, minlength=classes), 1)
        late = np.bincount(of, slow, minlength=classes) / each
        late = np.maximum(late, np.bincount(of, halting, minlength=classes) / several)
        return bool(late.max() <= 1 - share)

    first = max(round(min(guess, MOST)), 1)
    most = min(8 * first + 8, MOST)
    count = fewest(lambda n: meet(requests, n, 1.0), first, most, MORE)
    if count == 0:
        return Busy(np.inf, np.ones(len(requests)))
    copies, some = 1, requests
    while count == 1 and copies < COPIES and meet(together(requests, 2 * copies), 1, 1.0):
        copies *= 2
        some = together(requests, copies)
    low, high = 1.0, count / (count - 1) * MORE if count > 1 else 2.0
    while high / low > FINE:
        middle = (low * high) ** 0.5
        if meet(some, count, middle):
            low = middle
        else:
            high = middle
    slow, halting = misses(some, count, low)
    missed = np.bincount(origin(requests, copies), slow | halting) / copies
    return Busy(count / (low * copies), missed)


def together(requests: Requests, copies: int) -> Requests:
    """Copies of a trace that begin evenly over its duration and go round; none shares a prefix."""
    if copies == 1:
        return requests
    arrival, order = _rounds(requests, copies)
    some = requests.take(order % len(requests), np.asarray(arrival[order], np.float64))
    ids, parent = some.block_ids, some.parent
    if ids is not None and ids.size and some.block_start is not None:
        copy = np.repeat(order // len(requests), np.diff(some.block_start))
        ids = ids + copy * (int(ids.max()) + 1)
    if requests.parent is not None:
        parent = _parents(requests.parent, order)
    return replace(some, block_ids=ids, parent=parent)


def _parents(parent: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which of the copies' requests each one follows, -1 where that comes later or never. (n,)"""
    count = len(parent)
    place = np.argsort(order)  # where each copy's requests are
    before = parent[order % count]
    found = np.where(before >= 0, place[order - order % count + before], -1)
    return np.where(found < np.arange(order.size), found, -1)


def origin(requests: Requests, copies: int) -> NDArray[np.int64]:
    """Which request each of the copies' requests is a copy of."""
    if copies == 1:
        return np.arange(len(requests))
    return np.asarray(_rounds(requests, copies)[1] % len(requests))


def _rounds(requests: Requests, copies: int) -> tuple[Array, NDArray[np.int64]]:
    """When each copy's requests arrive, one copy after the other [s], and their order."""
    duration = requests.duration
    since = np.tile(requests.arrival - requests.arrival[0], copies)
    begin = np.repeat(np.arange(copies) * duration / copies, len(requests))
    arrival = since + begin
    arrival = np.where(arrival > duration, arrival - duration, arrival)
    return arrival, np.argsort(arrival, kind="stable")
