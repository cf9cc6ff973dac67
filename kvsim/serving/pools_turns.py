"""Two pools and requests that depend on the run: turns follow what the other pool has decoded.

Both pools are played together, because the one that reads prompts waits for turns, which wait for
the one that decodes. A client that hangs up frees what its request holds in either; a cache that is
on its way then arrives in vain.
"""

from typing import Any

import numpy as np

from kvsim.serving.compiled import compiled, entry, prepare
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
from kvsim.serving.views import shared
from kvsim.serving.world import Course, kinds_of


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
    prepare(play_apart, lambda: kinds_of(reading, costs.tables), reading.links is not None)
    tables, first, other = shared(costs.tables), shared(reading), shared(decoding)
    progress: Any = decoding.requests
    while not play_apart(tables, first, other, shared(course), shared(second)):
        told(int(np.count_nonzero(progress.status >= FINISHED)))
    return decoding


@compiled
def send(reading: World, decoding: World, course: Course, second: Course, index: int) -> None:
    """A prompt has been read: its cache leaves, or all of its answer is there."""
    request, later = reading.requests[index], decoding.requests[index]
    if later.generate == 1:
        later.status = FINISHED
        answered(reading, course, index, request.last)
        return
    sender = reading.replicas[request.replica]
    size = decoding.sizes[blocks_of(decoding.limits, float(request.prompt))].gpu
    read, begin = request.first, request.first
    if course.by_layer:
        begin = request.started
        read += size / course.layers / course.sends
    sender.sent = max(max(begin, sender.sent) + size / course.sends, read)
    later.first, later.arrival = request.first, sender.sent
    push(decoding, second, sender.sent, 2 * index)


@compiled
def send_all(
    reading: World, decoding: World, course: Course, second: Course, replica: Replica
) -> None:
    """What a replica has read leaves in the order of the trace."""
    while replica.done != NONE:
        first, at = replica.done, replica.done
        while at != NONE:
            first = min(first, at)
            at = reading.requests[at].link
        if first == replica.done:
            replica.done = reading.requests[first].link
        else:
            at = replica.done
            while reading.requests[at].link != first:
                at = reading.requests[at].link
            reading.requests[at].link = reading.requests[first].link
        send(reading, decoding, course, second, first)


@compiled
def follow_all(reading: World, decoding: World, course: Course, replica: Replica) -> None:
    """The turns that follow those which a replica has decoded are to come."""
    while replica.done != NONE:
        finished = decoding.requests[replica.done]
        answered(reading, course, replica.done, finished.last)
        replica.done = finished.link


@compiled
def hang_up(reading: World, decoding: World, course: Course, index: int, time: float) -> None:
    """A client hangs up, wherever its request is."""
    if decoding.requests[index].status >= FINISHED:
        return
    if reading.requests[index].status < FINISHED:
        free_all(reading, index)
        decoding.requests[index].status = ABORTED
    else:
        free_all(decoding, index)
    never_answered(reading, course, index, time)


@compiled
def happen_to_either(reading: World, decoding: World, course: Course, second: Course) -> None:
    """The first event: a request or a cache arrives, or a client hangs up."""
    first = reading.events[0]
    if course.coming > 0 and (second.coming == 0 or first.time <= decoding.events[0].time):
        time, key = first.time, first.key
        pop(reading, course)
        if key % 2 == 1:
            hang_up(reading, decoding, course, key // 2, time)
        else:
            arrive(reading, course, key // 2, key, time)
        return
    index = decoding.events[0].key // 2
    pop(decoding, second)
    if decoding.requests[index].status < FINISHED:
        receive(decoding, second.route, index)


@compiled
def earliest(world: World, behind: int) -> float:
    """The lowest clock of the replicas that have work, but for one. [s]"""
    found = np.inf
    for index in range(world.replicas.size):
        if index != behind and has_work(world.replicas[index]):
            found = min(found, world.replicas[index].clock)
    return found


@compiled
def furthest_behind(world: World) -> int:
    """The replica with work whose clock is lowest, or NONE."""
    behind = NONE
    for index in range(world.replicas.size):
        if has_work(world.replicas[index]) and (
            behind == NONE or world.replicas[index].clock < world.replicas[behind].clock
        ):
            behind = index
    return behind


@compiled
def play_on(tables: Tables, world: World, replica: Replica, until: float) -> bool:
    """Passes until a time, or until something is finished; False after very many."""
    until = max(until, np.nextafter(replica.clock, np.inf))
    last = replica.passes + PASSES
    while replica.clock < until and has_work(replica) and replica.done == NONE:
        if replica.passes == last:
            return False
        step(tables, world, replica, until)
    return True


@entry
def play_apart(
    tables: Tables, reading: World, decoding: World, course: Course, second: Course
) -> bool:
    """Play all passes and events in order of time; whether nothing is left.

    A replica plays on as long as nothing could come to it from another one: caches come from those
    that read, turns from any.
    """
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
            happen_to_either(reading, decoding, course, second)
        elif read <= decoded:
            others = earliest(reading, reader)
            turns = next_turn(reading, course, min(others, decoded))
            if not course.alone:
                turns = min(turns, others)
            if not play_on(tables, reading, reading.replicas[reader], min(due, turns)):
                return False
            send_all(reading, decoding, course, second, reading.replicas[reader])
        else:
            turns = next_turn(reading, course, earliest(decoding, decoder))
            until = min(due, min(read, turns))
            if not play_on(tables, decoding, decoding.replicas[decoder], until):
                return False
            follow_all(reading, decoding, course, decoding.replicas[decoder])
    return False
