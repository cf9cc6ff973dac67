"""A trace on a fleet of equal replicas, request by request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.errors import InputError
from kvsim.graph import Array
from kvsim.serving.batch import blocks_of, hits_of
from kvsim.serving.compiled import announced, compiled
from kvsim.serving.costs import StepCosts
from kvsim.serving.queues import queue
from kvsim.serving.records import (
    BINS,
    FINISHED,
    GAPS,
    NONE,
    REFUSED,
    Bin,
    Limits,
    Records,
    Replica,
    Request,
    Sequence,
    Sizes,
    World,
    make,
    pool_records,
    replica_records,
    request_records,
)
from kvsim.serving.schedule import advance, step
from kvsim.traces.requests import Requests

if TYPE_CHECKING:
    from kvsim.serving.tables import Tables

PIECE = 16384  # requests between two looks at what else happens, such as Ctrl-C
STEPS = 100_000  # and passes, once all have arrived
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
        return np.asarray(self.world.requests).view(np.recarray)

    @property
    def replicas(self) -> Any:
        """State and sums of each replica, one array for each field of ``records.Replica``. (r,)"""
        return np.asarray(self.world.replicas).view(np.recarray)

    @property
    def bins(self) -> Any:
        """Timeline of each replica, one array for each field of ``records.Bin``. (r, BINS)"""
        return np.asarray(self.world.bins).view(np.recarray).reshape(-1, BINS)

    @property
    def gaps(self) -> Array:
        """Tokens by the time since the one before. (r, GAPS)"""
        return self.world.gaps.reshape(-1, GAPS)


class Course:
    """How far a run has come."""

    route: int
    turn: int  # replica whose turn it is
    until: float  # [s]


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
    with announced():
        for first in range(0, len(requests), PIECE):
            arrive(costs.tables, world, course, (first, min(first + PIECE, len(requests))))
            told(int(np.count_nonzero(world.requests["status"] >= FINISHED)))
        replica = 0
        while replica < replicas:
            replica = finish(costs.tables, world, course, replica)
            told(int(np.count_nonzero(world.requests["status"] >= FINISHED)))
    return Run(requests, costs, world)


def world_of(requests: Requests, costs: StepCosts, replicas: int, rate: Array) -> World:
    """Idle replicas, and requests that are still to arrive.

    Raises
    ------
    InputError
        If a round's tokens exceed the budget, or prefix caching cannot work.
    """
    limits = limits_of(costs, requests)
    records, ids = request_records(requests, rate, int(limits["prefix_tokens"]))
    pools, entries, buckets = pool_records(_pool_sizes(limits, ids) * replicas)
    return World(
        limits=limits,
        requests=records,
        replicas=replica_records(replicas, costs.rules, int(limits["gpu"])),
        sequences=make(Sequence, replicas * costs.rules.max_seqs),
        pools=pools,
        entries=entries,
        buckets=buckets,
        ids=ids,
        sizes=sizes_of(costs),
        bins=make(Bin, replicas * BINS),
        gaps=np.zeros(replicas * GAPS),
    )


def sizes_of(costs: StepCosts) -> Any:
    """What sequences hold, by their KV blocks."""
    tables = costs.tables
    return make(
        Sizes, tables.gpu_bytes.size, prompt=tables.prompt_bytes, gpu=tables.gpu_bytes,
        host=tables.host_bytes,
    )  # fmt: skip


def _pool_sizes(limits: Any, ids: np.ndarray) -> list[int]:
    """Shared blocks that the GPU and the host of a replica can hold at most."""
    each, different = int(limits["prefix_bytes"]), int(ids.max()) + 1 if ids.size else 0
    if not each:
        return [0, 0]
    return [min(int(limits[memory]) // each + 1, different) for memory in ("gpu", "host_cache")]


def limits_of(costs: StepCosts, requests: Requests) -> Any:
    """Rules and memory of each replica, as a record ``Limits``.

    Raises
    ------
    InputError
        If a round's tokens exceed the budget, or prefix caching cannot work.
    """
    rules, tables = costs.rules, costs.tables
    if tables.width > rules.max_tokens:
        raise InputError(
            f"--max-tokens: got {rules.max_tokens}; expected at least {tables.width}, what one "
            f"sequence of {costs.technique} needs in a round"
        )
    host_cache = int(rules.host_cache / costs.deployment.tp)
    prefix_bytes = _prefix_bytes(costs, requests) if rules.prefix_caching else 0
    limits = make(
        Limits,
        1,
        max_seqs=rules.max_seqs,
        max_tokens=rules.max_tokens,
        block_tokens=rules.block_tokens,
        width=tables.width,
        chunked=rules.prefill == "chunked",
        decode_first=rules.priority == "decode",
        swap=rules.preemption == "swap",
        whole_prompt=rules.admission == "prompt",
        keeps=rules.prefix_caching and rules.preemption == "recompute",
        gpu=costs.capacity,
        host=max(costs.room.host_capacity - host_cache, 0),
        host_cache=host_cache,
        prefix_tokens=requests.block_tokens if prefix_bytes else 0,
        prefix_bytes=prefix_bytes,
        steepest=int(np.diff(tables.gpu_bytes).max()),
        host_steepest=int(np.diff(tables.host_bytes).max()),
        h2d=tables.h2d,
        d2h=tables.d2h,
    )
    return limits[0]


def _prefix_bytes(costs: StepCosts, requests: Requests) -> int:
    """Memory of one shared block: what its tokens add to a sequence's cache at least. [B]"""
    tokens, block = requests.block_tokens, costs.rules.block_tokens
    if not tokens:
        return 0
    if tokens % block:
        raise InputError(
            f"--block-tokens: got {block}; expected a divisor of {tokens}, the trace's tokens per "
            f"prefix block"
        )
    count = tokens // block
    tables = (costs.tables.gpu_bytes, costs.tables.prompt_bytes)
    least = min(int((t[count:] - t[:-count]).min(initial=t[-1])) for t in tables)
    if least <= 0:
        raise InputError(
            f"--prefix-caching: {costs.technique} does not keep every prompt token, so prefixes "
            f"cannot be shared; leave it out or choose a technique that keeps them"
        )
    return least


@compiled
def arrive(tables: "Tables", world: World, course: Course, some: tuple[int, int]) -> None:
    """Requests from the first to before the last in order of arrival, and passes between them."""
    replicas: Records[Replica] = world.replicas
    for index in range(some[0], some[1]):
        request = world.requests[index]
        if request.arrival >= course.until:
            break
        if not fits(world, request):
            request.status = REFUSED
            continue
        if course.route == ROUND_ROBIN:
            chosen = course.turn
            course.turn = (course.turn + 1) % replicas.size
        else:
            for other in range(replicas.size):
                advance(tables, world, replicas[other], request.arrival)
            chosen = best(world, request, course.route == PREFIX_AWARE)
        replica = replicas[chosen]
        advance(tables, world, replica, request.arrival)
        replica.clock = max(replica.clock, request.arrival)
        request.replica = chosen
        queue(world, replica, index)


@compiled
def finish(tables: "Tables", world: World, course: Course, first: int) -> int:
    """What is left to do from a replica on, STEPS passes at most; the replica to go on with."""
    left = STEPS
    while first < world.replicas.size and left > 0:
        replica = world.replicas[first]
        busy = replica.running + replica.waiting + replica.swapped > 0
        if busy and replica.clock < course.until:
            step(tables, world, replica, course.until)
            left -= 1
        else:
            first += 1
    return first


@compiled
def fits(world: World, request: Request) -> bool:
    """Whether an empty cache has room for all of a request."""
    size = world.sizes[blocks_of(world.limits, request.prompt + request.generate - 1)]
    return size.prompt <= world.limits.gpu and size.host <= world.limits.host


@compiled
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
