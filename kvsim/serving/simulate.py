"""A trace on a fleet of equal replicas, request by request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvsim.errors import InputError
from kvsim.graph import Array
from kvsim.serving.batch import blocks_of, hits_of
from kvsim.serving.compiled import compiled
from kvsim.serving.costs import StepCosts
from kvsim.serving.queues import push
from kvsim.serving.schedule import advance, step
from kvsim.serving.state import (
    FINISHED,
    JUST_DONE,
    REFUSED,
    RUNNING,
    SWAPPERS,
    WAIT_HEAD,
    WAITERS,
    Engine,
    Fleet,
    Progress,
    Trace,
    fleet_of,
    progress_of,
    trace_of,
)
from kvsim.traces.requests import Requests

if TYPE_CHECKING:
    from kvsim.serving.tables import Tables

PIECE = 16384  # requests between two looks at what else happens, such as Ctrl-C
STEPS = 100_000  # and passes, once all have arrived
ROUTES = ("round-robin", "least-loaded", "prefix-aware")


@dataclass(frozen=True)
class Run:
    """What became of every request, and of every replica."""

    requests: Requests
    costs: StepCosts
    engine: Engine
    progress: Progress
    fleet: Fleet


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

    Parameters
    ----------
    route : which replica a request goes to: in turn, where the fewest are unfinished, or where
        most of its prefix is (the least loaded of those).
    rate : tokens per decoding round of each request; None for the technique's mean. (n,)
    until : passes that would begin later are not played. [s]
    told : called now and then with the requests that are done.

    Raises
    ------
    InputError
        For an unknown route, no replicas, or rules that the technique cannot keep.
    """
    if route not in ROUTES:
        raise InputError(f"--route: got {route[:40]!r}; expected one of {', '.join(ROUTES)}")
    if not 1 <= replicas <= 10**5:
        raise InputError(f"--replicas: got {replicas}; expected 1 to 100,000")
    engine = engine_of(costs, requests)
    shared = engine.shared_bytes > 0
    each = np.full(len(requests), costs.rate) if rate is None else rate
    trace = trace_of(requests, each, shared)
    progress = progress_of(len(requests))
    blocks = int(trace.ids.max()) + 1 if trace.ids.size else 0
    fleet = fleet_of(replicas, costs.rules, engine.gpu, blocks)
    parts = (costs.tables, trace, fleet, engine, progress)
    turn = 0
    for first in range(0, len(requests), PIECE):
        last = min(first + PIECE, len(requests))
        turn = _arrive(*parts, ROUTES.index(route), until, first, last, turn)
        told(int(np.count_nonzero(progress.status >= FINISHED)))
    replica = 0
    while replica < replicas:
        replica = _finish(*parts, until, replica)
        told(int(np.count_nonzero(progress.status >= FINISHED)))
    return Run(requests, costs, engine, progress, fleet)


def engine_of(costs: StepCosts, requests: Requests) -> Engine:
    """Rules and memory of each replica.

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
    return Engine(
        max_seqs=rules.max_seqs,
        max_tokens=rules.max_tokens,
        block_tokens=rules.block_tokens,
        chunked=rules.prefill == "chunked",
        decode_first=rules.priority == "decode",
        swap=rules.preemption == "swap",
        whole_prompt=rules.admission == "prompt",
        gpu=costs.capacity,
        host=max(costs.room.host_capacity - host_cache, 0),
        host_cache=host_cache,
        keeps=rules.prefix_caching and rules.preemption == "recompute",
        shared_bytes=_shared_bytes(costs, requests) if rules.prefix_caching else 0,
        steepest=int(np.diff(tables.gpu_bytes).max()),
        host_steepest=int(np.diff(tables.host_bytes).max()),
    )


def _shared_bytes(costs: StepCosts, requests: Requests) -> int:
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
def _arrive(
    t: "Tables",
    x: Trace,
    f: Fleet,
    e: Engine,
    p: Progress,
    route: int,
    until: float,
    first: int,
    last: int,
    turn: int,
) -> int:
    """Requests from the first to before the last in order of arrival, and passes between them.

    ``turn`` is the replica whose turn it is; returns the next one's.
    """
    replicas = f.clock.size
    for request in range(first, last):
        now = x.arrival[request]
        if now >= until:
            break
        if not fits(t, e, x, request):
            p.status[request] = REFUSED
            continue
        if route == 0:
            r = turn
            turn = (turn + 1) % replicas
        else:
            for other in range(replicas):
                advance(t, x, f, e, p, other, now)
            r = _best(x, f, request, now, route == 2)
        advance(t, x, f, e, p, r, now)
        f.clock[r] = max(f.clock[r], now)
        p.replica[request] = r
        push(f, p, r, WAIT_HEAD, request)
    return turn


@compiled
def _finish(t: "Tables", x: Trace, f: Fleet, e: Engine, p: Progress, until: float, r: int) -> int:
    """What is left to do from replica ``r`` on, STEPS at most; the replica to go on with."""
    left = STEPS
    while r < f.clock.size and left > 0:
        busy = f.tally[r, RUNNING] + f.tally[r, WAITERS] + f.tally[r, SWAPPERS] > 0
        if busy and f.clock[r] < until:
            step(t, x, f, e, p, r, until)
            left -= 1
        else:
            r += 1
    return r


@compiled
def fits(t: "Tables", e: Engine, x: Trace, request: int) -> bool:
    """Whether an empty cache has room for all of a request."""
    blocks = blocks_of(e, x.prompt[request] + x.generate[request] - 1)
    return bool(t.prompt_bytes[blocks] <= e.gpu and t.host_bytes[blocks] <= e.host)


@compiled
def _best(x: Trace, f: Fleet, request: int, now: float, prefix: bool) -> int:
    """The replica with the most of the prefix, if that counts, then with the fewest unfinished."""
    best, best_hits, best_load = 0, -1, 0
    for r in range(f.clock.size):
        hits = hits_of(x, f, r, request) if prefix and x.block_tokens > 0 else 0
        load = f.tally[r, RUNNING] + f.tally[r, WAITERS] + f.tally[r, SWAPPERS]
        if f.clock[r] > now:  # what the pass in progress will complete is not complete yet
            load += f.tally[r, JUST_DONE]
        if hits > best_hits or (hits == best_hits and load < best_load):
            best, best_hits, best_load = r, hits, load
    return best
