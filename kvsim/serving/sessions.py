"""Requests that depend on the run: turns that follow others, and clients that hang up.

A turn arrives at its own arrival, or the time to think after the last token of the turn before it,
whichever is later. A client that hangs up frees its request's memory between two passes.
"""

import numpy as np

from kvsim.serving.batch import (
    count_decoded,
    find_place,
    leave_queue,
    leave_swap_queue,
    release_sequence,
    remove_sequence,
)
from kvsim.serving.core import jit_entry, jit_function
from kvsim.serving.costs import StepCosts
from kvsim.serving.memory import count_blocks, get_length
from kvsim.serving.records import (
    ABORTED,
    FINISHED,
    NO_INDEX,
    REFUSED,
    SWAPPED,
    WAITING,
    Event,
    Replica,
    World,
)
from kvsim.serving.scheduler import MAX_PASSES_PER_CALL, ROUND_ROBIN, has_work, receive, step
from kvsim.serving.servable import find_refusals, longest_request
from kvsim.serving.tables import Tables
from kvsim.serving.world import Course


def queue_first_turns(world: World, course: Course, costs: StepCosts) -> None:
    """Push the arrivals of all requests that follow no other request onto the event heap.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    course : progress of the simulation, changed in place.
    costs : cost model of the replicas.
    """
    requests, turns, events = world.requests, world.turns, world.events
    refused = find_refusals(longest_request(costs), requests) > 0
    requests.status[refused & (requests.arrival < course.until)] = REFUSED
    status, following, sibling = requests.status, turns.next, turns.sibling
    for index in np.flatnonzero(following != NO_INDEX).tolist():  # turns follow earlier rows
        if status[index] >= FINISHED:
            follows = following[index]
            while follows != NO_INDEX:
                if status[follows] < FINISHED:
                    status[follows] = ABORTED
                turns.awaited[follows] = False
                follows = sibling[follows]
    first = np.flatnonzero((requests.status < FINISHED) & ~turns.awaited)
    events.time[: first.size] = requests.arrival[first]
    events.key[: first.size] = 2 * first
    course.coming = first.size
    course.alone = costs.rules.remote_cache == 0
    course.think = float(turns.think[turns.awaited].min(initial=np.inf))


@jit_function
def comes_before(one: Event, other: Event) -> bool:
    """Return whether an event precedes another; for equal times, the one with the lower key.

    Parameters
    ----------
    one, other : the events.

    Returns
    -------
    bool
        Whether ``one`` is first.
    """
    return one.time < other.time or (one.time == other.time and one.key < other.key)


@jit_function
def swap(one: Event, other: Event) -> None:
    """Exchange two events of the heap.

    Parameters
    ----------
    one, other : the events.
    """
    time, key = one.time, one.key
    one.time, one.key = other.time, other.key
    other.time, other.key = time, key


@jit_function
def push(world: World, course: Course, time: float, key: int) -> None:
    """Push an event onto the heap.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    course : how far the run has come.
    time : time of the event. [s]
    key : twice the row of the request, plus 1 if its client hangs up.
    """
    at = course.coming
    course.coming += 1
    world.events[at].time, world.events[at].key = time, key
    while at > 0 and comes_before(world.events[at], world.events[(at - 1) // 2]):
        swap(world.events[at], world.events[(at - 1) // 2])
        at = (at - 1) // 2


@jit_function
def pop(world: World, course: Course) -> None:
    """Remove the first event from the heap.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    course : how far the run has come.
    """
    course.coming -= 1
    last, at = course.coming, 0
    world.events[0].time, world.events[0].key = world.events[last].time, world.events[last].key
    while 2 * at + 1 < last:
        least = 2 * at + 1
        if least + 1 < last and comes_before(world.events[least + 1], world.events[least]):
            least += 1
        if not comes_before(world.events[least], world.events[at]):
            break
        swap(world.events[at], world.events[least])
        at = least


@jit_function
def queue_next_turns(world: World, course: Course, index: int, last: float) -> None:
    """Push the turns that follow a finished request onto the event heap.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    course : progress of the simulation, changed in place.
    index : index of the request.
    last : time of its last token. [s]
    """
    index = world.turns[index].next
    while index != NO_INDEX:
        request, turn = world.requests[index], world.turns[index]
        if request.status < FINISHED:
            request.arrival = max(request.arrival, last + turn.think)
            turn.awaited = False
            push(world, course, request.arrival, 2 * index)
        index = turn.sibling


@jit_function
def follow_turns(world: World, course: Course, replica: Replica) -> None:
    """Push the turns that follow the requests a replica has finished onto the event heap.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    course : how far the run has come.
    replica : the replica.
    """
    while replica.done != NO_INDEX:
        finished = world.requests[replica.done]
        queue_next_turns(world, course, replica.done, finished.last)
        replica.done = finished.link


@jit_function
def free_all(world: World, index: int) -> None:
    """Free all memory of an unfinished request, and mark it as aborted.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    index : index of the request.
    """
    request = world.requests[index]
    if request.replica != NO_INDEX:
        replica = world.replicas[request.replica]
        if request.status == WAITING:
            leave_queue(world, replica, index)
        elif request.status == SWAPPED:
            leave_swap_queue(world, replica, index)
            if not request.handed:
                blocks = count_blocks(world.limits, request.prompt + request.made - 1.0)
                replica.host_swapped -= world.sizes[blocks].gpu
        else:
            place = find_place(world, replica, index)
            sequence = world.sequences[replica.first_sequence + place]
            cached = float(sequence.done)
            if sequence.todo == 0:
                count_decoded(replica, sequence, request)
                cached = get_length(replica, sequence)
            else:
                replica.reading -= 1
                replica.unread -= sequence.todo
            release_sequence(world, replica, sequence, cached)
            remove_sequence(world, replica, place)
    request.status = ABORTED


@jit_function
def cancel_next_turns(world: World, course: Course, index: int, time: float) -> None:
    """Cancel the turns that would follow a request.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    course : how far the run has come.
    index : row of the request.
    time : time of the event. [s]
    """
    follows = world.turns[index].next
    while follows != NO_INDEX:
        world.turns[follows].awaited = False
        push(world, course, time, 2 * follows + 1)
        follows = world.turns[follows].sibling


@jit_function
def abort(world: World, course: Course, index: int, time: float) -> None:
    """Abort a request whose client disconnects, and the later turns of its conversation.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    course : progress of the simulation, changed in place.
    index : index of the request.
    time : time of the disconnection. [s]
    """
    if world.requests[index].status < FINISHED:
        free_all(world, index)
        cancel_next_turns(world, course, index, time)


@jit_function
def arrive(world: World, course: Course, key: int, time: float) -> None:
    """Let a request arrive, and schedule the disconnection of its client if it has one.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    course : progress of the simulation, changed in place.
    key : key of the event, which is twice the index of the request.
    time : time of the arrival. [s]
    """
    index = key // 2
    request = world.requests[index]
    if course.route == ROUND_ROBIN and request.replica == NO_INDEX:
        request.replica = course.turn
        course.turn = (course.turn + 1) % world.replicas.size
    receive(world, course.route, index)
    abort_after = world.turns[index].abort_after
    if abort_after < np.inf:
        push(world, course, time + abort_after, key + 1)


@jit_function
def handle_event(world: World, course: Course) -> None:
    """Process the first event of the heap: an arrival or a disconnection.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    course : progress of the simulation, changed in place.
    """
    time, key = world.events[0].time, world.events[0].key
    pop(world, course)
    if key % 2 == 1:
        abort(world, course, key // 2, time)
    else:
        arrive(world, course, key, time)


@jit_function
def next_turn(world: World, course: Course, clock: float) -> float:
    """Return the earliest time at which an awaited turn could arrive, if no clock is below a given
    one.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    course : how far the run has come.
    clock : the clock. [s]

    Returns
    -------
    float
        The time; infinite if no turn is awaited. [s]
    """
    if course.think == np.inf:
        return np.inf
    while course.first_awaited < world.turns.size:
        if world.turns[course.first_awaited].awaited:
            break
        course.first_awaited += 1
    if course.first_awaited == world.turns.size:
        return np.inf
    return max(clock + course.think, world.requests[course.first_awaited].arrival)


@jit_entry
def play_turns(tables: Tables, world: World, course: Course) -> bool:
    """Simulate passes and events in order of time.

    The replica with the lowest clock continues as long as no turn could come from another one. The
    function also returns after many passes and is then called again.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    course : how far the run has come.

    Returns
    -------
    bool
        Whether the simulation is complete.
    """
    for _ in range(MAX_PASSES_PER_CALL):
        until = course.until
        if course.coming > 0:
            until = min(until, world.events[0].time)
        behind, clock, others = 0, np.inf, np.inf
        for index in range(world.replicas.size):
            if has_work(world.replicas[index]):
                own = world.replicas[index].clock
                if own < clock:
                    behind, others, clock = index, clock, own
                else:
                    others = min(others, own)
        if clock >= until:
            if course.coming == 0 or until >= course.until:
                return True
            handle_event(world, course)
            continue
        replica = world.replicas[behind]
        if course.alone:
            others = next_turn(world, course, others)
        until = max(min(until, others), np.nextafter(clock, np.inf))
        last = replica.passes + MAX_PASSES_PER_CALL
        while replica.clock < until and has_work(replica) and replica.done == NO_INDEX:
            if replica.passes == last:
                return False
            step(tables, world, replica, until)
        follow_turns(world, course, replica)
    return False
