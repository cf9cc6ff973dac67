"""Two pools and requests that depend on the run: turns follow what the other pool has decoded.

Both pools are played together, because the one that reads prompts waits for turns, which wait for
the one that decodes. A client that hangs up frees what its request holds in either; a cache that is
on its way then arrives in vain.
"""

from typing import Any, NamedTuple

import numpy as np

from kvsim.serving.core import jit_entry, jit_function
from kvsim.serving.costs import StepCosts
from kvsim.serving.growth import blocks_of
from kvsim.serving.records import ABORTED, FINISHED, NONE, Event, Replica, World, make
from kvsim.serving.routes import LEAST_LOADED, receive
from kvsim.serving.schedule import PASSES, has_work, step
from kvsim.serving.sessions import (
    answered,
    arrive,
    free_all,
    never_answered,
    next_turn,
    pop,
    push,
    turns_to_come,
)
from kvsim.serving.tables import Tables
from kvsim.serving.world import Course


class Apart(NamedTuple):
    """Both pools, and how far each has come."""

    reading: World
    decoding: World
    course: Course
    second: Course


def play_both(
    reading: World, decoding: World, costs: StepCosts, how: tuple[int, str, float], told: Any
) -> World:
    """Play two pools until all requests are done; the decoding pool's world at the end.

    Parameters
    ----------
    how : the route of prompts, the way of transfer, and the rate of each GPU's network. [B/s]
    """
    route, transfer, rate = how
    course, second = make(Course, 2, until=np.inf)
    course.route, second.route = route, LEAST_LOADED
    course.by_layer, course.sends = transfer == "layers", rate
    course.layers = max(costs.deployment.model.cached_layers, 1)
    turns_to_come(reading, course, costs)
    count = len(reading.requests)  # type: ignore[arg-type]
    decoding = decoding._replace(events=make(Event, count), links=reading.links)
    both = Apart(reading, decoding, course, second)
    tables, given = costs.tables, both
    progress: Any = decoding.requests
    while not play_apart(tables, given):
        told(int(np.count_nonzero(progress.status >= FINISHED)))
    return decoding


@jit_function
def send(both: Apart, index: int) -> None:
    """A prompt has been read: its cache leaves, or all of its answer is there."""
    course = both.course
    request, later = both.reading.requests[index], both.decoding.requests[index]
    if later.generate == 1:
        later.status = FINISHED
        answered(both.reading, course, index, request.last)
        return
    sender = both.reading.replicas[request.replica]
    size = both.decoding.sizes[blocks_of(both.decoding.limits, float(request.prompt))].gpu
    read, begin = request.first, request.first
    if course.by_layer:
        begin = request.started
        read += size / course.layers / course.sends
    sender.sent = max(max(begin, sender.sent) + size / course.sends, read)
    later.first, later.arrival = request.first, sender.sent
    push(both.decoding, both.second, sender.sent, 2 * index)


@jit_function
def send_all(both: Apart, replica: Replica) -> None:
    """What a replica has read leaves in the order of the trace."""
    requests = both.reading.requests
    while replica.done != NONE:
        first, at = replica.done, replica.done
        while at != NONE:
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
def follow_all(both: Apart, replica: Replica) -> None:
    """The turns that follow those which a replica has decoded are to come."""
    while replica.done != NONE:
        finished = both.decoding.requests[replica.done]
        answered(both.reading, both.course, replica.done, finished.last)
        replica.done = finished.link


@jit_function
def hang_up(both: Apart, index: int, time: float) -> None:
    """A client hangs up, wherever its request is."""
    later = both.decoding.requests[index]
    if later.status >= FINISHED:
        return
    if both.reading.requests[index].status < FINISHED:
        free_all(both.reading, index)
        later.status = ABORTED
    else:
        free_all(both.decoding, index)
    never_answered(both.reading, both.course, index, time)


@jit_function
def happen_to_either(both: Apart) -> None:
    """The first event: a request or a cache arrives, or a client hangs up."""
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
def earliest(world: World, behind: int) -> float:
    """The lowest clock of the replicas that have work, but for one. [s]"""
    found = np.inf
    for index in range(world.replicas.size):
        if index != behind and has_work(world.replicas[index]):
            found = min(found, world.replicas[index].clock)
    return found


@jit_function
def furthest_behind(world: World) -> int:
    """The replica with work whose clock is lowest, or NONE."""
    behind = NONE
    for index in range(world.replicas.size):
        if has_work(world.replicas[index]) and (
            behind == NONE or world.replicas[index].clock < world.replicas[behind].clock
        ):
            behind = index
    return behind


@jit_function
def play_on(tables: Tables, world: World, replica: Replica, until: float) -> bool:
    """Passes until a time, or until something is finished; False after very many."""
    until = max(until, np.nextafter(replica.clock, np.inf))
    last = replica.passes + PASSES
    while replica.clock < until and has_work(replica) and replica.done == NONE:
        if replica.passes == last:
            return False
        step(tables, world, replica, until)
    return True


@jit_entry
def play_apart(tables: Tables, both: Apart) -> bool:
    """Play all passes and events in order of time; whether nothing is left.

    A replica plays on as long as nothing could come to it from another one: caches come from those
    that read, turns from any.
    """
    reading, decoding, course, second = both.reading, both.decoding, both.course, both.second
    for _ in range(PASSES):
        due = np.inf
        if course.coming > 0:
            due = reading.events[0].time
        if second.coming > 0:
            due = min(due, decoding.events[0].time)
        reader, decoder = furthest_behind(reading), furthest_behind(decoding)
        read = np.inf if reader == NONE else reading.replicas[reader].clock
        decoded = np.inf if decoder == NONE else decoding.replicas[decoder].clock
        if min(read, decoded) >= due or (reader == NONE and decoder == NONE):
            if course.coming + second.coming == 0:
                return True
            happen_to_either(both)
        elif read <= decoded:
            others = earliest(reading, reader)
            turns = next_turn(reading, course, min(others, decoded))
            if not course.alone:
                turns = min(turns, others)
            if not play_on(tables, reading, reading.replicas[reader], min(due, turns)):
                return False
            send_all(both, reading.replicas[reader])
        else:
            turns = next_turn(reading, course, earliest(decoding, decoder))
            until = min(due, min(read, turns))
            if not play_on(tables, decoding, decoding.replicas[decoder], until):
                return False
            follow_all(both, decoding.replicas[decoder])
    return False
