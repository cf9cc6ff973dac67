"""Disaggregated serving: prefill and decode on different replicas, with transfer of the KV cache.

Prefill replicas never wait for decode replicas, so they are simulated first; a request arrives at a
decode replica together with its cache. In conversations, or if clients disconnect, both pools are
simulated together, as the next turn depends on decoding. A disconnected request frees its memory in
either pool; a cache in transfer is then discarded on arrival.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.serving.core import jit_entry, jit_function
from kvsim.serving.costs import StepCosts
from kvsim.serving.memory import count_blocks
from kvsim.serving.records import (
    ABORTED,
    FINISHED,
    NO_INDEX,
    REFUSED,
    Event,
    Integers,
    Replica,
    Told,
    World,
    make,
)
from kvsim.serving.rules import NIC_RATE
from kvsim.serving.scheduler import (
    LEAST_LOADED,
    MAX_PASSES_PER_CALL,
    ROUTES,
    has_work,
    receive,
    step,
)
from kvsim.serving.servable import find_refusals, longest_request
from kvsim.serving.sessions import (
    arrive,
    cancel_next_turns,
    free_all,
    next_turn,
    pop,
    push,
    queue_first_turns,
    queue_next_turns,
)
from kvsim.serving.simulate import Run, play_world, usual_route
from kvsim.serving.tables import Tables
from kvsim.serving.world import Course, make_world
from kvsim.traces.requests import Requests

TRANSFERS = ("layers", "whole")


@frozen
class TwoPools:
    """The prefill and decode pools, and how caches are sent from one to the other.

    Parameters
    ----------
    prefill, decode : number of replicas that prefill, and that decode.
    transfer : ``whole`` sends a cache after the prefill, ``layers`` each layer's cache as soon as
        it is computed, so that only the last layer's remains to be sent.
    rate : of each replica's network in one direction. [B/s]

    Raises
    ------
    InputError
        If a pool is empty, or the way of transfer is unknown.
    """

    prefill: int
    decode: int
    transfer: str = TRANSFERS[0]
    rate: float = NIC_RATE

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 1:
            raise InputError(
                f"--prefill-replicas: got {self.prefill} of {self.prefill + self.decode} replicas; "
                f"expected at least 1 and fewer than --replicas"
            )
        if self.transfer not in TRANSFERS:
            raise InputError(
                f"--transfer: got {self.transfer[:40]!r}; expected {' or '.join(TRANSFERS)}"
            )


def simulate_pools(
    requests: Requests,
    costs: StepCosts,
    pools: TwoPools,
    route: str = "",
    rate: Array | None = None,
    told: Told = lambda world: None,
) -> Run:
    """Simulate a trace on a prefill pool and a decode pool.

    Parameters
    ----------
    route : how the prefill replica is chosen, by default as ``usual_route`` returns; the decode
        replica is the one with the fewest unfinished requests.
    rate : tokens per decoding round of each request; None for the technique's mean. (n,)

    Returns
    -------
    Run
        Its replicas are the prefill replicas, followed by the decode replicas. Metrics of prefix
        blocks are those of the prefill replicas.

    Raises
    ------
    InputError
        For an unknown route, or rules that the technique cannot keep.
    """
    each = np.full(len(requests), costs.rate) if rate is None else rate
    route = route or usual_route(costs, requests)
    reading = make_world(requests, costs, pools.prefill, each)
    first = reading.requests
    refused = find_refusals(longest_request(costs), requests) > 0
    first.status[refused] = REFUSED  # the decoding pool must hold all of it
    first.generate[:] = 1
    alone = costs.with_rules(costs.rules.without_prefixes())
    if requests.depends:
        return _run_with_turns(requests, costs, alone, reading, (pools, route, each, told))
    play_world(reading, costs, (ROUTES.index(route), np.inf), told)
    ready = handed_over(reading, alone, pools)
    rows = np.flatnonzero((first.status == FINISHED) & (requests.generate > 1))
    order = rows[np.argsort(ready[rows], kind="stable")]
    arrival = ready[order]
    coming = Requests(
        arrival,
        requests.prompt[order],
        requests.generate[order],
        priority=None if requests.priority is None else requests.priority[order],
    )
    decoding = make_world(coming, alone, pools.decode, each[order])
    second = decoding.requests
    second.made, second.handed = 1, True
    play_world(decoding, alone, (LEAST_LOADED, np.inf), told)
    return Run(requests, costs, _join_worlds(requests, reading, decoding, order))


def _run_with_turns(
    requests: Requests,
    costs: StepCosts,
    alone: StepCosts,
    reading: World,
    how: tuple[TwoPools, str, Array, Told],
) -> Run:
    """Simulate both pools together, as turns follow others or clients disconnect."""
    pools, route, each, told = how
    plain = Requests(
        requests.arrival, requests.prompt, requests.generate, priority=requests.priority
    )
    decoding = make_world(plain, alone, pools.decode, each)
    first = reading.requests
    second = decoding.requests
    second.made, second.handed = 1, True
    second.status[first.status == REFUSED] = REFUSED
    rate = pools.rate / costs.deployment.gpus
    decoding = simulate_turns(
        reading, decoding, costs, (ROUTES.index(route), pools.transfer, rate), told
    )
    rows = np.flatnonzero((first.status == FINISHED) & (requests.generate > 1))
    sent = decoding._replace(requests=second[rows])
    return Run(requests, costs, _join_worlds(requests, reading, sent, rows))


def handed_over(reading: World, costs: StepCosts, pools: TwoPools) -> NDArray[np.float64]:
    """Return when each request's cache has been sent by its prefill replica.

    Each replica sends caches in the order in which their prefills end.

    Parameters
    ----------
    reading : state of the pool that reads prompts.
    costs : step costs of replicas that only decode.
    pools : the two pools.

    Returns
    -------
    array
        Time by request; NaN for one that is not finished. (n,) [s]
    """
    requests = reading.requests
    layers = max(costs.deployment.model.cached_layers, 1)
    rate = pools.rate / costs.deployment.gpus
    blocks = -(-requests.prompt.astype(np.int64) // costs.rules.block_tokens)
    # a prompt beyond the context is refused, and has no size
    size = costs.tables.gpu_bytes[np.where(requests.status == FINISHED, blocks, 0)]
    ready = np.full(requests.size, np.nan)
    order = np.argsort(requests.first, kind="stable")
    order = order[requests.status[order] == FINISHED]
    for sender in range(pools.prefill):
        mine = order[requests.replica[order] == sender]
        takes, read = size[mine] / rate, requests.first[mine]
        begin = requests.started[mine] if pools.transfer == "layers" else read
        last_layer = takes / layers if pools.transfer == "layers" else 0.0
        alone = np.maximum(begin + takes, read + last_layer)
        sent = np.cumsum(takes)  # if each had to wait for the one before it
        ready[mine] = sent + np.maximum.accumulate(alone - sent)
    return ready


def _join_worlds(requests: Requests, reading: World, decoding: World, order: Integers) -> World:
    """Join the states of both pools, with the final state of each request."""
    records = reading.requests
    second = decoding.requests
    records.generate = requests.generate
    for name in ("first", "last", "made", "status"):
        kept = records[name]
        kept[order] = second[name]
    records.preempted[order] += second.preempted
    decoded = second.replica != NO_INDEX  # else its client hung up while the cache was on its way
    records.replica[order[decoded]] = second.replica[decoded] + len(reading.replicas)
    sides = (reading, decoding)
    replicas, bins = (
        np.concatenate([np.asarray(getattr(side, name)) for side in sides]).view(np.recarray)
        for name in ("replicas", "bins")
    )
    gaps = np.concatenate([side.gaps for side in sides])
    return reading._replace(gaps=gaps, replicas=replicas, bins=bins)


class Apart(NamedTuple):
    """The states of the prefill pool and the decode pool.

    Attributes
    ----------
    reading, decoding : replicas and requests of the prefill pool and of the decode pool.
    course, second : progress of the simulation in the two pools.
    """

    reading: World
    decoding: World
    course: Course
    second: Course


def simulate_turns(
    reading: World, decoding: World, costs: StepCosts, how: tuple[int, str, float], told: Told
) -> World:
    """Simulate two pools until all requests are done, and return the decode pool's final state.

    Parameters
    ----------
    how : the route of prompts, the way of transfer, and the rate of each GPU's network. [B/s]
    """
    route, transfer, rate = how
    course, second = make(Course, 2, until=np.inf)
    course.route, second.route = route, LEAST_LOADED
    course.by_layer, course.sends = transfer == "layers", rate
    course.layers = max(costs.deployment.model.cached_layers, 1)
    queue_first_turns(reading, course, costs)
    count = len(reading.requests)
    decoding = decoding._replace(events=make(Event, count), links=reading.links)
    both = Apart(reading, decoding, course, second)
    tables, given = costs.tables, both
    while not play_pools(tables, given):
        told(decoding)
    return decoding


@jit_function
def send(both: Apart, index: int) -> None:
    """Send the cache of a prefilled prompt, or finish the request if its answer has one token.

    Parameters
    ----------
    both : state of the two pools, changed in place.
    index : row of the request.
    """
    course = both.course
    request, later = both.reading.requests[index], both.decoding.requests[index]
    if later.generate == 1:
        later.status = FINISHED
        queue_next_turns(both.reading, course, index, request.last)
        return
    sender = both.reading.replicas[request.replica]
    size = both.decoding.sizes[count_blocks(both.decoding.limits, float(request.prompt))].gpu
    read, begin = request.first, request.first
    if course.by_layer:
        begin = request.started
        read += size / course.layers / course.sends
    sender.sent = max(max(begin, sender.sent) + size / course.sends, read)
    later.arrival = sender.sent
    push(both.decoding, both.second, sender.sent, 2 * index)


@jit_function
def send_all(both: Apart, replica: Replica) -> None:
    """Send the caches of the prompts that a replica has prefilled, in the order of the trace.

    Parameters
    ----------
    both : state of the two pools, changed in place.
    replica : the replica that has read the prompts.
    """
    requests = both.reading.requests
    while replica.done != NO_INDEX:
        first, at = replica.done, replica.done
        while at != NO_INDEX:
            first = min(first, at)
            at = requests[at].link
        if first == replica.done:
            replica.done = requests[first].link
        else:
            at = replica.done
            while requests[at].link != first:
                at = requests[at].link
            requests[at].link = requests[first].link
        send(both, first)


@jit_function
def follow_decoded_turns(both: Apart, replica: Replica) -> None:
    """Push the turns that follow the requests a replica has finished onto the event heap.

    Parameters
    ----------
    both : state of the two pools, changed in place.
    replica : the replica that has decoded them.
    """
    while replica.done != NO_INDEX:
        finished = both.decoding.requests[replica.done]
        queue_next_turns(both.reading, both.course, replica.done, finished.last)
        replica.done = finished.link


@jit_function
def hang_up(both: Apart, index: int, time: float) -> None:
    """Abort a request in either pool, as its client disconnects.

    Parameters
    ----------
    both : state of the two pools, changed in place.
    index : row of the request.
    time : time at which the client hangs up. [s]
    """
    later = both.decoding.requests[index]
    if later.status >= FINISHED:
        return
    if both.reading.requests[index].status < FINISHED:
        free_all(both.reading, index)
        later.status = ABORTED
    else:
        free_all(both.decoding, index)
    cancel_next_turns(both.reading, both.course, index, time)


@jit_function
def handle_pool_event(both: Apart) -> None:
    """Handle the earliest event: the arrival of a request or a cache, or a disconnection.

    Parameters
    ----------
    both : state of the two pools, changed in place.
    """
    course, second = both.course, both.second
    first = both.reading.events[0]
    if course.coming > 0 and (second.coming == 0 or first.time <= both.decoding.events[0].time):
        time, key = first.time, first.key
        pop(both.reading, course)
        if key % 2 == 1:
            hang_up(both, key // 2, time)
        else:
            arrive(both.reading, course, key, time)
        return
    index = both.decoding.events[0].key // 2
    pop(both.decoding, second)
    if both.decoding.requests[index].status < FINISHED:
        receive(both.decoding, second.route, index)


@jit_function
def get_earliest_clock(world: World, behind: int) -> float:
    """Return the lowest clock of the replicas with work, except one of them.

    Parameters
    ----------
    world : state of one pool.
    behind : index of the replica that is left out.

    Returns
    -------
    float
        The clock, infinite if no other replica has work. [s]
    """
    found = np.inf
    for index in range(world.replicas.size):
        if index != behind and has_work(world.replicas[index]):
            found = min(found, world.replicas[index].clock)
    return found


@jit_function
def find_slowest_replica(world: World) -> int:
    """Return the replica with work whose clock is lowest.

    Parameters
    ----------
    world : state of one pool.

    Returns
    -------
    int
        Its index, or NO_INDEX if none has work.
    """
    behind = NO_INDEX
    for index in range(world.replicas.size):
        if has_work(world.replicas[index]) and (
            behind == NO_INDEX or world.replicas[index].clock < world.replicas[behind].clock
        ):
            behind = index
    return behind


@jit_function
def play_on(tables: Tables, world: World, replica: Replica, until: float) -> bool:
    """Simulate passes of a replica until a given time, or until a request is finished.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the replica's pool, changed in place.
    replica : the replica.
    until : the time. [s]

    Returns
    -------
    bool
        False if it stops earlier, after many passes; call it again.
    """
    until = max(until, np.nextafter(replica.clock, np.inf))
    last = replica.passes + MAX_PASSES_PER_CALL
    while replica.clock < until and has_work(replica) and replica.done == NO_INDEX:
        if replica.passes == last:
            return False
        step(tables, world, replica, until)
    return True


@jit_entry
def play_pools(tables: Tables, both: Apart) -> bool:
    """Simulate the passes and events of two pools in order of time.

    A replica continues as long as no other one could send it work: caches come from prefill
    replicas, turns from any.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    both : state of the two pools, changed in place.

    Returns
    -------
    bool
        Whether the simulation is complete.
    """
    reading, decoding, course, second = both.reading, both.decoding, both.course, both.second
    for _ in range(MAX_PASSES_PER_CALL):
        due = np.inf
        if course.coming > 0:
            due = reading.events[0].time
        if second.coming > 0:
            due = min(due, decoding.events[0].time)
        reader, decoder = find_slowest_replica(reading), find_slowest_replica(decoding)
        read = np.inf if reader == NO_INDEX else reading.replicas[reader].clock
        decoded = np.inf if decoder == NO_INDEX else decoding.replicas[decoder].clock
        if min(read, decoded) >= due or (reader == NO_INDEX and decoder == NO_INDEX):
            if course.coming + second.coming == 0:
                return True
            handle_pool_event(both)
        elif read <= decoded:
            others = get_earliest_clock(reading, reader)
            turns = next_turn(reading, course, min(others, decoded))
            if not course.alone:
                turns = min(turns, others)
            if not play_on(tables, reading, reading.replicas[reader], min(due, turns)):
                return False
            send_all(both, reading.replicas[reader])
        else:
            turns = next_turn(reading, course, get_earliest_clock(decoding, decoder))
            until = min(due, min(read, turns))
            if not play_on(tables, decoding, decoding.replicas[decoder], until):
                return False
            follow_decoded_turns(both, decoding.replicas[decoder])
    return False
