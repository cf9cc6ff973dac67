"""A fleet plays traffic: which kind of replica serves which requests, and what they waited."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.fleet.demand import GOLDEN_RATIO, ClassTarget, Counts, FleetTargets, Traffic
from kvsim.planner.fleet.offers import Configuration, count_replicas
from kvsim.serving.outcome import Outcome
from kvsim.serving.pools import simulate_pools
from kvsim.serving.records import NO_INDEX, REFUSED, Told, World
from kvsim.serving.simulate import Run, simulate
from kvsim.traces.requests import Requests

HUGE = 1e300  # stands for an infinite time [s]
HOPELESS = 2.0  # times its target of TTFT: how much later a request is does not matter


@frozen
class Fleet:
    """Replicas that are rented, and which requests go to them.

    Attributes
    ----------
    kinds
        Its kinds of replica.
    running
        Replicas of each kind that serve in each window. (w, j)
    share
        Of each class of requests in each window, by kind. (w, c, j)
    reserved
        Replicas that are rented with a commitment. (j,)
    cost
        Mean price. [USD/h]
    """

    kinds: tuple[Configuration, ...]
    running: Counts
    share: Array
    reserved: Counts
    cost: float

    @property
    def replicas(self) -> Counts:
        """The most that run at once. (j,)"""
        return np.asarray(self.running.max(axis=0))

    @property
    def changes(self) -> bool:
        """Whether replicas start and stop between windows."""
        return bool((self.running != self.running[0]).any())

    @property
    def rented(self) -> list[tuple[Configuration, int]]:
        """Its kinds of replica of which there are some, and how many."""
        each = zip(self.kinds, self.replicas.tolist(), strict=True)
        return [(x, n) for x, n in each if n]

    @property
    def key(self) -> tuple[object, ...]:
        """What tells fleets apart that play differently."""
        used = self.replicas > 0
        share = self.share[..., used].round(6)
        return *(id(x) for x, _ in self.rented), self.running[:, used].tobytes(), share.tobytes()

    @property
    def complexity(self) -> tuple[int, int, int]:
        """How much there is to run: kinds of replica, what they have, and GPUs of the largest."""
        used = [x for x, _ in self.rented]
        return len(used), max(x.complexity for x in used), max(x.gpus for x in used)

    @property
    def name(self) -> str:
        """Name of the fleet: the number and the kind of its replicas, joined by ``+``."""
        return " + ".join(count_replicas(n, x.name) for x, n in self.rented)

    def total(self, name: str) -> float:
        """A quantity of all replicas that are rented at most: gpus, host or power."""
        return float(sum(n * getattr(x, name) for x, n in self.rented))


@frozen
class Replicas:
    """Equal replicas that serve from one time to another, and what became of their requests.

    Attributes
    ----------
    kind
        Index of their configuration.
    count
        How many.
    requests
        How many they served or refused.
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


class Excess(NamedTuple):
    """What the asked share of requests are within, in parts of the targets.

    Attributes
    ----------
    ttft, tpot
        Of each target by itself.
    both
        Of both at once, which is what is judged: the targets are kept up to 1.
    """

    ttft: float
    tpot: float
    both: float


@frozen
class Played:
    """What a fleet did with a trace.

    Attributes
    ----------
    ttft, tpot, latency
        Of each request. Latency is infinite where not all tokens came, TTFT where none did; TPOT
        of a single token is NaN. (n,) [s]
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

    def measure_excess(
        self, targets: FleetTargets, rows: NDArray[np.bool_] | None = None
    ) -> Excess:
        """How far requests are beyond their targets, in the class of prompts that is worst off."""
        most = targets.list_limits(self.prompt)
        with np.errstate(invalid="ignore"):
            ttft, tpot = (x / t for x, t in zip((self.ttft, self.tpot), most, strict=True))
        ttft = np.where(np.isnan(ttft), np.inf, ttft)  # never came, though there is no target
        tpot = np.where(np.isnan(tpot), 0.0, tpot)  # one token has none
        both = np.where(np.isfinite(self.latency), np.maximum(ttft, tpot), np.inf)
        found = [Excess(0.0, 0.0, 0.0)] + [
            Excess(*(rank(x[some], targets.share) for x in (ttft, tpot, both)))
            for some, _ in self.by_class(targets, rows)
        ]
        return Excess(*(max(each) for each in zip(*found, strict=True)))

    def by_class(
        self, targets: FleetTargets, rows: NDArray[np.bool_] | None = None
    ) -> Iterator[tuple[NDArray[np.bool_], ClassTarget]]:
        """The requests of each class of prompts that there are, and its targets."""
        of = targets.classify(self.prompt)
        for place, target in enumerate(targets.classes):
            some = of == place if rows is None else rows & (of == place)
            if some.any():
                yield some, target

    def meets(self, targets: FleetTargets, rows: NDArray[np.bool_] | None = None) -> bool:
        """Whether the asked share of the requests of each class are within both targets."""
        return self.measure_excess(targets, rows).both <= 1

    def good_share(
        self, targets: FleetTargets, rows: NDArray[np.bool_] | None = None
    ) -> float | None:
        """Compute the share of requests that end and meet both latency targets, 0 to 1.

        Parameters
        ----------
        targets
            Limits on TTFT and TPOT.
        rows
            Mask of the requests that count; None for all.

        Returns
        -------
        float or None
            The share; None if there are no requests.
        """
        ttft, tpot = targets.list_limits(self.prompt)
        good = np.isfinite(self.latency) & ~((self.ttft > ttft) | (self.tpot > tpot))
        good = good if rows is None else good[rows]
        return float(good.mean()) if good.size else None


def rank(values: Array, share: float) -> float:
    """The smallest value that a share of all values do not exceed."""
    place = max(ceil(share * values.size - 1e-9), 1) - 1
    return float(np.partition(values, place)[place])


def quantile(values: Array, share: float) -> float:
    """What a share of the values are within, as often as not between two of them; 0 for none."""
    if not values.size:
        return 0.0
    found = float(np.quantile(np.minimum(values, HUGE), share))  # infinities have no differences
    return np.inf if found > HUGE / 1e9 else found


class TargetsLostError(Exception):
    """More requests are far beyond their TTFT targets than may be."""


def stop_if_lost(traffic: Traffic, targets: Iterable[FleetTargets], slowdown: float) -> Told:
    """Make a callback of a simulation that ends it when no targets can be met any more.

    Parameters
    ----------
    traffic
        What is played.
    targets
        All targets that the outcome is held against.
    slowdown
        Everything that a replica does takes so many times as long.
    """
    longest = HOPELESS * max(x.uniform.ttft for x in targets) / slowdown
    may_miss = (1 - min(x.share for x in targets)) * len(traffic.requests)

    def check(world: World) -> None:
        """Count requests that have waited, up to the clock of their replica, for too long."""
        r = world.requests
        waited = np.fmin(r.first, world.replicas.clock[r.replica]) - r.arrival
        if np.count_nonzero((waited > longest) & (r.replica != NO_INDEX)) > may_miss:
            raise TargetsLostError

    return check


def play(
    traffic: Traffic, fleet: Fleet, slowdown: float = 1.0, told: Told = lambda world: None
) -> Played:
    """Play traffic on a fleet.

    Requests go to a kind of replica by their class, in the fleet's shares, and among replicas of a
    kind by its router. Replicas that start or stop between windows are sets of their own, which
    share their kind's requests evenly.

    Parameters
    ----------
    traffic
        Requests with their classes and windows.
    fleet
        What serves them.
    slowdown
        Everything that a replica does takes so many times as long.
    told
        Called now and then with the state of the simulation.
    """
    requests = traffic.requests
    kind = traffic.dispatched(fleet.share)
    faster = requests.time_scaled(slowdown)
    times = [np.full(len(requests), np.nan) for _ in range(3)]
    groups, end = [], requests.duration
    for j in np.unique(kind):
        mine = np.flatnonzero(kind == j)
        sets, of = replica_sets(fleet.running[:, j], traffic.window[mine])
        for i, count in enumerate(sets):
            rows = mine if len(sets) == 1 else mine[of == i]
            if not rows.size:
                continue
            some = faster if rows.size == len(requests) else faster.take(rows)
            outcome = serve(some, fleet.kinds[j], count, told)
            for into, found in zip(times, waits(outcome), strict=True):
                into[rows] = found * slowdown
            last = outcome.run.progress.last[~outcome.refused]
            end = max(end, float(last.max(initial=0.0) - faster.arrival[0]) * slowdown)
            groups.append(_summarize(int(j), count, outcome))
    ttft, tpot, latency = times
    return Played(ttft, tpot, latency, kind, tuple(groups), end, requests.prompt)


def serve(
    requests: Requests,
    configuration: Configuration,
    count: int,
    told: Told = lambda world: None,
) -> Outcome:
    """Simulate a trace on a number of equal replicas.

    Parameters
    ----------
    requests
        The trace.
    configuration
        Cost model of a replica, how requests are routed, and the numbers of prefill and decode
        engines of a replica if these are apart.
    count
        Number of replicas.
    told
        Called now and then with the state of the simulation.
    """
    one, route = configuration.apart, configuration.route
    if one is None:
        return Outcome(simulate(requests, configuration.costs, count, route, told=told))
    pools = replace(one, prefill=count * one.prefill, decode=count * one.decode)
    return Outcome(simulate_pools(requests, configuration.costs, pools, route, told=told))


def _summarize(kind: int, count: int, outcome: Outcome) -> Replicas:
    """What is reported of a set of replicas; the simulation itself is too large to keep."""
    return Replicas(
        kind=kind,
        count=count,
        requests=len(outcome.run.requests),
        busy=outcome.busy_share,
        most_running=_most_running(outcome.run),
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


def waits(outcome: Outcome) -> tuple[Array, Array, Array]:
    """TTFT, TPOT and latency of each request. [s]

    Latency is infinite where not all tokens came, and TTFT where none did.
    """
    lost = outcome.refused | (outcome.aborted & np.isnan(outcome.ttft_s))
    latency = np.where(outcome.finished, outcome.latency_s, np.inf)
    return np.where(lost, np.inf, outcome.ttft_s), outcome.tpot_s, latency


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
