"""A trace on a fleet of equal replicas, request by request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.graph import Array
from kvsim.serving.batch import hits_of
from kvsim.serving.compiled import compiled, inlined, prepare
from kvsim.serving.costs import StepCosts
from kvsim.serving.growth import blocks_of
from kvsim.serving.queues import queue
from kvsim.serving.records import (
    BINS,
    FINISHED,
    GAPS,
    NONE,
    REFUSED,
    Request,
    World,
    make,
)
from kvsim.serving.schedule import advance
from kvsim.serving.tables import Tables
from kvsim.serving.world import Course, kinds_of, world_of
from kvsim.traces.requests import Requests

PIECE = 16384  # requests between two looks at what else happens, such as Ctrl-C
ROUTES = ("round-robin", "least-loaded", "prefix-aware")
ROUND_ROBIN, LEAST_LOADED, PREFIX_AWARE = range(len(ROUTES))


@dataclass(frozen=True)
class Run:
    """What became of every request, and of every replica."""

    requests: Requests
    costs: StepCosts
    world: World

    @property
    def progress(self) -> Any:
        """What became of each request, one array for each field of ``records.Request``. (n,)"""
        return self.world.requests

    @property
    def replicas(self) -> Any:
        """State and sums of each replica, one array for each field of ``records.Replica``. (r,)"""
        return self.world.replicas

    @property
    def bins(self) -> Any:
        """Timeline of each replica, one array for each field of ``records.Bin``. (r, BINS)"""
        bins: Any = self.world.bins
        return bins.reshape(-1, BINS)

    @property
    def gaps(self) -> Array:
        """Tokens by the time since the one before. (r, GAPS)"""
        return self.world.gaps.reshape(-1, GAPS)


def simulate(
    requests: Requests,
    costs: StepCosts,
    replicas: int = 1,
    route: str = ROUTES[0],
    rate: Array | None = None,
    until: float = np.inf,
    told: Callable[[int], None] = lambda done: None,
) -> Run:
    """Play a trace.

    The goodput of N replicas under targets is
    ``Outcome(simulate(requests, costs, N), Targets(ttft, tpot)).summary()["goodput_per_s"]``,
    and the share of requests within both targets is ``["good_share"]``.

    Parameters
    ----------
    route : which replica a request goes to: in turn, where the fewest are unfinished, or where
        most of its prefix is (the least loaded of those).
    rate : tokens per decoding round of each request; None for the technique's mean. (n,)
    until : passes that would begin later are not played. [s]
    told : called now and then with the number of requests that are done.

    Raises
    ------
    InputError
        For an unknown route, no replicas, or rules that the technique cannot keep.
    """
    if route not in ROUTES:
        raise InputError(f"--route: got {route[:40]!r}; expected one of {', '.join(ROUTES)}")
    if not 1 <= replicas <= 10**5:
        raise InputError(f"--replicas: got {replicas}; expected 1 to 100,000")
    each = np.full(len(requests), costs.rate) if rate is None else rate
    world = world_of(requests, costs, replicas, each)
    course = make(Course, 1, route=ROUTES.index(route), until=until)[0]
    progress: Any = world.requests
    prepare(kinds_of(world, costs.tables))
    while True:
        left = play(costs.tables, world, course, int(course.next) + PIECE)
        told(int(np.count_nonzero(progress.status >= FINISHED)))
        if not left:
            break
    return Run(requests, costs, world)


@compiled
def play(tables: Tables, world: World, course: Course, pause: int) -> bool:
    """Requests in order of arrival, and passes between them; whether something is left to do.

    It stops for a while before the request ``pause`` arrives, and after many passes on end.
    """
    requests, replicas = world.requests, world.replicas
    while True:
        if course.next >= pause:
            return True
        now = course.until
        if course.next < requests.size:
            now = min(requests[course.next].arrival, now)
        chosen = NONE
        if now < course.until:
            request = requests[course.next]
            if not fits(world, request):
                request.status = REFUSED
                course.next += 1
                continue
            if course.route == ROUND_ROBIN:
                chosen = course.turn
        first, last = (chosen, chosen + 1) if chosen != NONE else (0, replicas.size)
        for index in range(first, last):
            if not advance(tables, world, replicas[index], now):
                return True
        if now >= course.until:
            return False
        if chosen == NONE:
            chosen = best(world, request, course.route == PREFIX_AWARE)
        course.turn = (chosen + 1) % replicas.size
        replica = replicas[chosen]
        replica.clock = max(replica.clock, now)
        request.replica = chosen
        queue(world, replica, course.next)
        course.next += 1


@compiled
def fits(world: World, request: Request) -> bool:
    """Whether an empty cache has room for all of a request."""
    size = world.sizes[blocks_of(world.limits, request.prompt + request.generate - 1)]
    return size.prompt <= world.limits.gpu and size.host <= world.limits.host


@inlined
def best(world: World, request: Request, prefix: bool) -> int:
    """The replica with the most of the prefix, if that counts, then with the fewest unfinished."""
    chosen, most_hits, least = 0, NONE, 0
    for index in range(world.replicas.size):
        replica = world.replicas[index]
        hits = hits_of(world, replica, request) if prefix else 0
        load = replica.running + replica.waiting + replica.swapped
        if replica.clock > request.arrival:  # what its pass will complete is not complete yet
            load += replica.just_done
        if hits > most_hits or (hits == most_hits and load < least):
            chosen, most_hits, least = index, hits, load
    return chosen
