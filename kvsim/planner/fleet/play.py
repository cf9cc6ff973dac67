"""A fleet plays a trace, and what each kind of replica carries by such plays.

What a kind carries is measured once and used by all searches: the requests themselves are played,
so their bursts count, on the fewest replicas that meet the targets, then faster and faster until
these do not. Where one replica carries them several times over, copies that begin at other times
are played together: the same requests in less time would be over before a queue can grow.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.fleet.demand import GOLDEN_RATIO, ClassTarget, Counts, FleetTargets, Traffic
from kvsim.planner.fleet.offers import Configuration, Offers, Rated, offers_of
from kvsim.search import smallest_count
from kvsim.serving.outcome import Outcome
from kvsim.serving.pools import simulate_pools
from kvsim.serving.records import REFUSED
from kvsim.serving.simulate import Run, simulate
from kvsim.traces.requests import Requests

ROUTE_WITHIN_KIND = "least-loaded"  # how a request finds its replica among those of its kind
ROUTE_WITH_PREFIXES = "prefix-aware"


@frozen
class Replicas:
    """Equal replicas that serve from one time to another, and what became of their requests.

    Attributes
    ----------
    kind
        Index of their configuration.
    count
        How many.
    busy
        Share of the time in which one computes, mean of all.
    most_running
        Sequences that one of them held at most.
    hits
        Share of the prompt tokens that were found in each memory.
    tokens
        Generated tokens.
    """

    kind: int
    count: int
    requests: int
    busy: float
    most_running: int
    hits: Mapping[str, float]
    tokens: int


@frozen
class Played:
    """What a fleet did with a trace.

    Attributes
    ----------
    ttft, tpot, latency
        Of each request. TTFT and latency of a request that fits in no cache are infinite; TPOT of
        a single token is NaN. (n,) [s]
    groups
        Its replicas.
    duration
        From the first arrival to the last token. [s]
    prompt
        Lengths of the prompts. (n,) [tokens]
    """

    ttft: Array
    tpot: Array
    latency: Array
    kind: NDArray[np.int64]
    groups: tuple[Replicas, ...]
    duration: float
    prompt: NDArray[np.int64]

    @property
    def refused(self) -> int:
        """Requests larger than the cache of the replica that they were sent to."""
        return int(np.isinf(self.ttft).sum())

    def reached(self, share: float, rows: NDArray[np.bool_] | None = None) -> FleetTargets:
        """TTFT and TPOT that a share of the requests are within. [s]"""
        some = slice(None) if rows is None else rows
        ttft, tpot = self.ttft[some], self.tpot[some]
        return FleetTargets(quantile(ttft, share), quantile(tpot[~np.isnan(tpot)], share), share)

    def over(
        self, targets: FleetTargets, rows: NDArray[np.bool_] | None = None
    ) -> tuple[float, float]:
        """TTFT and TPOT in parts of their targets, of the class of prompts that is worst off."""
        found = [(0.0, 0.0)]
        for some, target in self.by_class(targets, rows):
            reached = self.reached(targets.share, some)
            ttft = reached.ttft / target.ttft if np.isfinite(target.ttft) else 0.0
            found.append((ttft, reached.tpot / target.tpot if np.isfinite(target.tpot) else 0.0))
        return max(x[0] for x in found), max(x[1] for x in found)

    def by_class(
        self, targets: FleetTargets, rows: NDArray[np.bool_] | None = None
    ) -> Iterator[tuple[NDArray[np.bool_], ClassTarget]]:
        """The requests of each class of prompts that there are, and its targets."""
        of = targets.of(self.prompt)
        for place, target in enumerate(targets.each):
            some = of == place if rows is None else rows & (of == place)
            if some.any():
                yield some, target

    def meets(self, targets: FleetTargets, rows: NDArray[np.bool_] | None = None) -> bool:
        """Whether a share of the requests of each class are within each target."""
        return max(self.over(targets, rows)) <= 1

    def good_share(self, targets: FleetTargets) -> float:
        """Share of the requests that are within both targets."""
        ttft, tpot = targets.of_each(self.prompt)
        slow = (self.ttft > ttft) | (self.tpot > tpot)
        return float(1 - slow.mean()) if slow.size else 1.0


def quantile(values: Array, share: float) -> float:
    """What a share of the values are within, as often as not between two of them; 0 for none."""
    if not values.size:
        return 0.0
    rank = share * (values.size - 1)
    low = int(np.floor(rank))
    ordered = np.partition(values, [low, min(low + 1, values.size - 1)])
    first, second = float(ordered[low]), float(ordered[min(low + 1, values.size - 1)])
    return first if rank == low else first + (second - first) * (rank - low)


def play(
    traffic: Traffic,
    configurations: list[Configuration],
    running: Counts,
    share: Array,
    load: float = 1.0,
    slowdown: float = 1.0,
) -> Played:
    """Play a trace on a fleet.

    Requests go to a kind of replica by their class, in the shares of the programme, and among
    replicas of a kind to the least loaded, or where most of their prefix is. Replicas that start or
    stop between windows are sets of their own, which share their kind's requests evenly.

    Parameters
    ----------
    running : replicas of each kind that serve in each window. (w, j)
    share : of each class in each window, by kind. (w, c, j)
    load : the trace so many times as fast.
    slowdown : everything that a replica does takes so many times as long.
    """
    requests = traffic.requests
    kind = traffic.dispatched(share)
    faster = requests.scaled(load).time_scaled(slowdown)
    times = [np.full(len(requests), np.nan) for _ in range(3)]
    groups = []
    end = float(requests.arrival[-1] - requests.arrival[0]) / load if len(requests) else 0.0
    for j in np.unique(kind):
        mine = np.flatnonzero(kind == j)
        sets, of = replica_sets(running[:, j], traffic.window[mine])
        for i, count in enumerate(sets):
            rows = mine[of == i]
            if not rows.size:
                continue
            outcome = serve(faster.take(rows), configurations[j], count)
            for into, found in zip(times, waits(outcome), strict=True):
                into[rows] = found * slowdown
            last = outcome.run.progress.last[~outcome.refused]
            end = max(end, float(last.max(initial=0.0) - faster.arrival[0]) * slowdown)
            groups.append(_replicas(int(j), count, outcome))
    ttft, tpot, latency = times
    return Played(ttft, tpot, latency, kind, tuple(groups), end, requests.prompt)


def serve(requests: Requests, configuration: Configuration, count: int) -> Outcome:
    """Play a trace on equal replicas."""
    keeps = configuration.costs.rules.prefix_caching and requests.block_ids is not None
    route = ROUTE_WITH_PREFIXES if keeps else ROUTE_WITHIN_KIND
    one = configuration.apart
    if one is None:
        return Outcome(simulate(requests, configuration.costs, count, route))
    pools = replace(one, prefill=count * one.prefill, decode=count * one.decode)
    return Outcome(simulate_pools(requests, configuration.costs, pools, route))


def waits(outcome: Outcome) -> tuple[Array, Array, Array]:
    """TTFT, TPOT and latency of each request. [s]

    They are infinite for those that fit in no cache, and TTFT for those whose client hung up
    without a token.
    """
    lost = outcome.refused | (outcome.aborted & np.isnan(outcome.ttft_s))
    ttft, latency = (np.where(lost, np.inf, x) for x in (outcome.ttft_s, outcome.latency_s))
    return ttft, outcome.tpot_s, latency


def _replicas(kind: int, count: int, outcome: Outcome) -> Replicas:
    run = outcome.run
    return Replicas(
        kind=kind,
        count=count,
        requests=len(run.requests),
        busy=outcome.busy_share,
        most_running=_most_running(run),
        hits=outcome.prefix_hits,
        tokens=outcome.output_tokens,
    )


def _most_running(run: Run) -> int:
    """Sequences that one replica held at once, at most."""
    p, most = run.progress, 0
    for r in range(run.replicas.size):
        mine = (p.replica == r) & (p.status != REFUSED)
        start, end = np.sort(p.started[mine]), np.sort(p.last[mine])
        held = np.arange(1, start.size + 1) - np.searchsorted(end, start, side="right")
        most = max(most, int(held.max(initial=0)))
    return most


def replica_sets(running: Counts, window: NDArray[np.int64]) -> tuple[list[int], NDArray[np.int64]]:
    """Replicas of one kind as sets that start and stop together, and the set of each request.

    Parameters
    ----------
    running : replicas in each window. (w,)
    window : of each request. (n,)

    Returns
    -------
    How many replicas each set has, and the set that each request goes to. (n,)
    """
    spans: dict[tuple[int, int], int] = {}
    for i in range(int(running.max(initial=0))):
        on = np.concatenate([[False], running > i, [False]])
        for first, last in zip(
            np.flatnonzero(~on[:-1] & on[1:]), np.flatnonzero(on[:-1] & ~on[1:]), strict=True
        ):
            spans[int(first), int(last)] = spans.get((int(first), int(last)), 0) + 1
    of = np.zeros(window.size, np.int64)
    if len(spans) <= 1:
        return list(spans.values()) or [1], of
    for w in np.unique(window):
        rows = np.flatnonzero(window == w)
        here = [i for i, (first, last) in enumerate(spans) if first <= w < last]
        count = np.array([list(spans.values())[i] for i in here], float)
        if not here:
            continue
        upto = np.cumsum(count) / count.sum()
        upto[-1] = 1.0
        evenly = np.mod((np.arange(rows.size) + 0.5) * GOLDEN_RATIO, 1.0)
        of[rows] = np.array(here)[(evenly[:, None] >= upto).sum(axis=1)]
    return list(spans.values()), of


# what replicas carry

LOAD_RESOLUTION = 1.04  # ratio of two loads between which the search for the largest stops
Missed = NDArray[np.bool_]
REPLICA_STEP = 1.5  # replicas are tried in such steps
MAX_REPLICAS = 1024  # replicas
MAX_COPIES = 16  # of requests that are too few for one replica, at most


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
        ttft, tpot, _ = waits(
            serve(some.scaled(load).time_scaled(slowdown), configuration, replicas)
        )
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

    first = max(round(min(guess, MAX_REPLICAS)), 1)
    most = min(8 * first + 8, MAX_REPLICAS)
    count = smallest_count(lambda n: meet(requests, n, 1.0), first, most, REPLICA_STEP)
    if count == 0:
        return Busy(np.inf, np.ones(len(requests)))
    copies, some = 1, requests
    while count == 1 and copies < MAX_COPIES and meet(overlay_copies(requests, 2 * copies), 1, 1.0):
        copies *= 2
        some = overlay_copies(requests, copies)
    low, high = 1.0, count / (count - 1) * REPLICA_STEP if count > 1 else 2.0
    while high / low > LOAD_RESOLUTION:
        middle = (low * high) ** 0.5
        if meet(some, count, middle):
            low = middle
        else:
            high = middle
    slow, halting = misses(some, count, low)
    missed = np.bincount(copy_origins(requests, copies), slow | halting) / copies
    return Busy(count / (low * copies), missed)


def overlay_copies(requests: Requests, copies: int) -> Requests:
    """Copies of a trace that begin evenly over its duration and go round; none shares a prefix."""
    if copies == 1:
        return requests
    arrival, order = _arrivals_of_copies(requests, copies)
    some = requests.take(order % len(requests), np.asarray(arrival[order], np.float64))
    ids, parent = some.block_ids, some.parent
    if ids is not None and ids.size and some.block_start is not None:
        copy = np.repeat(order // len(requests), np.diff(some.block_start))
        ids = ids + copy * (int(ids.max()) + 1)
    if requests.parent is not None:
        parent = _parents_of_copies(requests.parent, order)
    return replace(some, block_ids=ids, parent=parent)


def _parents_of_copies(parent: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which of the copies' requests each one follows, -1 where that comes later or never. (n,)"""
    count = len(parent)
    place = np.argsort(order)  # where each copy's requests are
    before = parent[order % count]
    found = np.where(before >= 0, place[order - order % count + before], -1)
    return np.where(found < np.arange(order.size), found, -1)


def copy_origins(requests: Requests, copies: int) -> NDArray[np.int64]:
    """Which request each of the copies' requests is a copy of."""
    if copies == 1:
        return np.arange(len(requests))
    return np.asarray(_arrivals_of_copies(requests, copies)[1] % len(requests))


def _arrivals_of_copies(requests: Requests, copies: int) -> tuple[Array, NDArray[np.int64]]:
    """When each copy's requests arrive, one copy after the other [s], and their order."""
    duration = requests.duration
    since = np.tile(requests.arrival - requests.arrival[0], copies)
    begin = np.repeat(np.arange(copies) * duration / copies, len(requests))
    arrival = since + begin
    arrival = np.where(arrival > duration, arrival - duration, arrival)
    return arrival, np.argsort(arrival, kind="stable")


# Cost of the whole trace, of the cheapest, beyond which single classes are not measured.
MAX_COST_OF_ALL = 2.0


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


def measure_market(
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
    busy = [_measure_all(x, traffic, targets, s, tell) for x, s in zip(rated, slow, strict=True)]
    alone = np.array([x.needed for x in busy])
    rent = np.array([x.configuration.rent for x in rated])
    dear = alone * rent > MAX_COST_OF_ALL * (alone * rent).min(initial=np.inf)
    peak = traffic.demand.rate.max(axis=0)
    capacity = np.zeros((traffic.classes, len(rated)))
    late = np.zeros(capacity.shape)
    for j, x in enumerate(rated):
        carries_all = bool(np.isfinite(alone[j]))
        late[:, j] = _late_by_class(busy[j].missed, traffic, targets) if carries_all else x.late
        if dear[j] and carries_all:
            needed = x.needed  # as the estimate divides it; below all of it is what was measured
        else:
            classes = range(traffic.classes)
            each = [_measure_class(x, c, traffic, targets, late[c, j], slow[j]) for c in classes]
            needed = np.array(each)
        if carries_all:  # so it carries a class among others that it cannot carry alone
            needed = np.where(np.isfinite(needed), needed, x.needed)
        some = np.isfinite(needed) & (needed > 0)
        capacity[some, j] = peak[some] / needed[some]
        if carries_all and some.all():
            together = (traffic.demand.rate / capacity[:, j]).sum(axis=1).max()
            capacity[:, j] *= together / alone[j]
    configurations = [x.configuration for x in rated]
    return Market(configurations, offers_of(configurations, capacity, late), alone)


def _measure_all(
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


def _late_by_class(missed: Array, traffic: Traffic, targets: FleetTargets) -> Array:
    """Share of each class that misses a target while all of it just meets them. (c,)

    Where some miss one target and others the other, the shares are reduced so that together they
    are what may be missed.
    """
    of_class = np.bincount(traffic.of, minlength=traffic.classes)
    late = np.bincount(traffic.of, missed, minlength=traffic.classes) / of_class
    total = float(missed.mean())
    return np.asarray(late * min(1.0, (1 - targets.share) / total) if total else late)


def _measure_class(
    rated: Rated, c: int, traffic: Traffic, targets: FleetTargets, late: float, slowdown: float
) -> float:
    """Replicas that a class alone keeps busy."""
    guess = float(rated.needed[c])
    if not np.isfinite(guess) or late >= 1:
        return float("inf")
    part = traffic.part(c)
    guess = max(guess * slowdown, 1.0)
    return replicas_kept_busy(part, rated.configuration, targets, late, guess, slowdown).needed
