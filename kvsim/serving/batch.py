"""The batch and the queues of a replica: how requests wait, join, finish and leave.

Queues are doubly linked lists through the requests, ordered by priority class and then by arrival.
"""

import numpy as np

from kvsim.serving.core import jit_function
from kvsim.serving.memory import (
    count_blocks,
    get_length,
    get_own_bytes,
    grow,
    keep,
    make_host_room,
    recount,
)
from kvsim.serving.records import (
    FINISHED,
    GPU,
    LENGTH_ROUNDING,
    NEVER,
    NO_INDEX,
    POOLS,
    RUNNING,
    SWAPPED,
    WAITING,
    Ends,
    Replica,
    Request,
    Sequence,
    World,
)
from kvsim.serving.tables import TO_GPU, TO_HOST
from kvsim.serving.tiers import store

QUEUE_HEAD = 0  # of a queue's ends; behind it, the last request of each class


@jit_function
def enqueue(world: World, ends: Ends, index: int, front: bool) -> None:
    """Add a request to a queue, at the end or the front of its priority class.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    ends : first request of the queue, and the last of each class.
    index : index of the request.
    front : whether to add it at the front of its class.
    """
    request = world.requests[index]
    before = NO_INDEX
    for rank in range(request.priority + (not front)):
        if ends[1 + rank] != NO_INDEX:
            before = ends[1 + rank]
    request.back = before
    if before == NO_INDEX:
        request.link = ends[QUEUE_HEAD]
        ends[QUEUE_HEAD] = index
    else:
        request.link = world.requests[before].link
        world.requests[before].link = index
    if request.link != NO_INDEX:
        world.requests[request.link].back = index
    if not front or ends[1 + request.priority] == NO_INDEX:
        ends[1 + request.priority] = index


@jit_function
def dequeue(world: World, ends: Ends, index: int) -> None:
    """Remove a request from a queue.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    ends : first request of the queue, and the last of each class.
    index : index of the request.
    """
    request = world.requests[index]
    if request.back == NO_INDEX:
        ends[QUEUE_HEAD] = request.link
    else:
        world.requests[request.back].link = request.link
    if request.link != NO_INDEX:
        world.requests[request.link].back = request.back
    if ends[1 + request.priority] == index:
        ends[1 + request.priority] = NO_INDEX
        if request.back != NO_INDEX and world.requests[request.back].priority == request.priority:
            ends[1 + request.priority] = request.back


@jit_function
def unread(request: Request) -> int:
    """Return the number of tokens to prefill for a waiting request if no prefix is cached.

    Parameters
    ----------
    request : the request.

    Returns
    -------
    int
        Its prompt and the tokens that it has generated before a preemption. [tokens]
    """
    return request.prompt + request.made


@jit_function
def queue(world: World, replica: Replica, index: int) -> None:
    """Add a request to the waiting queue of a replica, at the end of its priority class.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the request.
    index : index of the request.
    """
    replica.unread += unread(world.requests[index])
    enqueue(world, replica.wait_ends, index, False)
    replica.waiting += 1


@jit_function
def queue_front(world: World, replica: Replica, index: int) -> None:
    """Add a request to the waiting queue of a replica, at the front of its priority class.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the request.
    index : index of the request.
    """
    replica.unread += unread(world.requests[index])
    enqueue(world, replica.wait_ends, index, True)
    replica.waiting += 1


@jit_function
def leave_queue(world: World, replica: Replica, index: int) -> None:
    """Remove a request from the waiting queue.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    index : row of the request.
    """
    replica.unread -= unread(world.requests[index])
    dequeue(world, replica.wait_ends, index)
    replica.waiting -= 1


@jit_function
def queue_swapped(world: World, replica: Replica, index: int) -> None:
    """Add a request, whose cache was swapped to host memory, to the queue of swapped requests.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the request.
    index : index of the request.
    """
    enqueue(world, replica.swap_ends, index, False)
    replica.swapped += 1


@jit_function
def queue_handed_over(world: World, replica: Replica, index: int) -> None:
    """Queue a request for decoding, with the cache that a prefill replica has sent.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that decodes it.
    index : index of the request.
    """
    request = world.requests[index]
    request.status = SWAPPED
    request.left = int(np.ceil((request.generate - request.made) / request.rate - LENGTH_ROUNDING))
    queue_swapped(world, replica, index)


@jit_function
def leave_swap_queue(world: World, replica: Replica, index: int) -> None:
    """Remove a request from the queue of swapped ones.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    index : row of the request.
    """
    dequeue(world, replica.swap_ends, index)
    replica.swapped -= 1


@jit_function
def get_class(world: World, replica: Replica, place: int) -> int:
    """Return the priority class of a sequence in the batch.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the batch.
    place : position in the batch, from 0.

    Returns
    -------
    int
        The class; lower ones are scheduled first.
    """
    return int(world.requests[world.sequences[replica.first_sequence + place].request].priority)


@jit_function
def find_place(world: World, replica: Replica, index: int) -> int:
    """Return the position of a running request in the batch.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the request.
    index : index of the request.

    Returns
    -------
    int
        The position, from 0.
    """
    place = 0
    while world.sequences[replica.first_sequence + place].request != index:
        place += 1
    return place


@jit_function
def remove_sequence(world: World, replica: Replica, place: int) -> None:
    """Remove a sequence from the batch; later ones move up.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the batch.
    place : place in the batch, from 0.
    """
    for at in range(replica.first_sequence + place, replica.first_sequence + replica.running - 1):
        world.sequences[at] = world.sequences[at + 1]
    replica.running -= 1
    recount(world, replica)


@jit_function
def add_sequence(world: World, replica: Replica, index: int, shared: int) -> Sequence:
    """Add a request to the batch as the last of its class, with nothing read or decoded yet.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    index : row of the request.
    shared : leading KV blocks that it shares with others. [blocks]

    Returns
    -------
    Sequence
        Its row of the batch.
    """
    place, priority = replica.running, world.requests[index].priority
    while place > 0 and priority < get_class(world, replica, place - 1):
        at = replica.first_sequence + place
        world.sequences[at] = world.sequences[at - 1]
        place -= 1
    sequence = world.sequences[replica.first_sequence + place]
    replica.first_reader = min(replica.first_reader, place)
    replica.running += 1
    sequence.request = index
    sequence.shared = sequence.found = sequence.named = shared
    sequence.load_from = sequence.load_to = 0
    sequence.skip = sequence.skip_at = 0
    sequence.ready = 0.0
    sequence.todo = sequence.done = sequence.chunk = 0
    sequence.finish = NEVER
    sequence.held = sequence.host_held = 0
    sequence.intercept = sequence.growth = sequence.brim = 0.0
    sequence.paused = False
    world.requests[index].status = RUNNING
    return sequence


@jit_function
def start_decoding(replica: Replica, sequence: Sequence, request: Request, rounds: int) -> None:
    """Let a sequence decode from the next round.

    Parameters
    ----------
    replica : the replica of the request.
    sequence : its entry in the batch.
    request : the request.
    rounds : number of rounds until its answer is complete. [rounds]
    """
    sequence.todo = 0
    sequence.growth = (request.generate - request.made) / rounds
    sequence.finish = replica.rounds + rounds
    length = request.prompt + request.generate - 1.0
    sequence.intercept = length - sequence.growth * sequence.finish
    replica.context += get_length(replica, sequence)
    replica.growth += sequence.growth
    replica.end = min(replica.end, sequence.finish)


@jit_function
def finish_prompt(world: World, replica: Replica, sequence: Sequence) -> None:
    """Record the first token of a prefilled request, and store its full blocks.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the request.
    sequence : its entry in the batch.
    """
    request = world.requests[sequence.request]
    request.made += 1
    replica.emitted += 1
    replica.reading -= 1
    if np.isnan(request.first):
        request.first = replica.clock
    sequence.todo = 0
    if world.limits.tiers and request.blocks > 0:
        store(world, replica, request)
    held = get_own_bytes(world, sequence, request.prompt + request.made - 1.0)
    replica.private -= sequence.held - held
    sequence.held = held
    more = request.generate - request.made
    if more > 0:
        rounds = int(np.ceil(more / request.rate - LENGTH_ROUNDING))
        start_decoding(replica, sequence, request, rounds)
    else:
        sequence.finish = replica.end = replica.rounds


@jit_function
def release_sequence(world: World, replica: Replica, sequence: Sequence, cached: float) -> None:
    """Free the memory of a sequence and its use of shared blocks.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    sequence : the sequence, a row of the batch.
    cached : its length. [tokens]
    """
    replica.host_private -= sequence.host_held
    if world.limits.part_bytes == 0:
        replica.private -= sequence.held
        return
    request = world.requests[sequence.request]
    known = int(cached + LENGTH_ROUNDING)
    finished = known >= request.prompt + request.generate - 1
    if world.limits.ahead and known > request.prompt and not finished:
        known -= 1  # its last token is still under way
    request.kept = keep(world, replica, sequence, known)


@jit_function
def complete(world: World, replica: Replica) -> None:
    """Remove the sequences whose answers are complete from the batch.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the batch.
    """
    stay, held = replica.first_sequence, replica.private + replica.pinned
    kept, newest = replica.cached, world.pools[POOLS * replica.index + GPU].newest
    for i in range(replica.first_sequence, replica.first_sequence + replica.running):
        sequence = world.sequences[i]
        if sequence.finish > replica.rounds:
            if stay < i:
                world.sequences[stay] = sequence
            stay += 1
            continue
        request = world.requests[sequence.request]
        replica.emitted += request.generate - request.made
        request.made = request.generate
        request.last = replica.clock
        request.status = FINISHED
        request.link = replica.done
        replica.done = sequence.request
        replica.just_done += 1
        release_sequence(world, replica, sequence, request.prompt + request.generate - 1.0)
    replica.running = stay - replica.first_sequence
    replica.late = held - replica.private - replica.pinned
    replica.late_kept = replica.cached - kept
    if world.limits.ahead and replica.late_kept > 0:
        replica.late_entry = world.pools[POOLS * replica.index + GPU].oldest
        if newest != NO_INDEX:
            replica.late_entry = world.entries[newest].newer
    recount(world, replica)


@jit_function
def count_decoded(replica: Replica, sequence: Sequence, request: Request) -> None:
    """Record the tokens that a sequence has generated, before it leaves the batch early.

    Parameters
    ----------
    replica : the replica of the request.
    sequence : its entry in the batch.
    request : the request.
    """
    request.left = sequence.finish - replica.rounds
    more = int(np.ceil(request.left * sequence.growth - LENGTH_ROUNDING))
    replica.emitted += request.generate - more - request.made
    request.made = request.generate - more


@jit_function
def preempt(world: World, replica: Replica) -> None:
    """Preempt a sequence: of the lowest priority class, the one admitted last.

    If the rules allow and there is room, the cache of a decoding sequence is swapped to host
    memory; otherwise it is dropped and recomputed later.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the batch.
    """
    limits = world.limits
    sequence = world.sequences[replica.first_sequence + replica.running - 1]
    request = world.requests[sequence.request]
    replica.preemptions += 1
    request.preempted += 1
    replica.ousted += 1
    decoding = sequence.todo == 0
    swapped = 0
    if decoding:
        count_decoded(replica, sequence, request)
        swapped = world.sizes[count_blocks(limits, request.prompt + request.made - 1.0)].gpu
    cached = get_length(replica, sequence) if decoding else float(sequence.done)
    release_sequence(world, replica, sequence, cached)
    replica.running -= 1
    replica.reading -= not decoding
    replica.unread -= sequence.todo
    recount(world, replica)
    if decoding and limits.swap and make_host_room(world, replica, swapped):
        replica.host_swapped += swapped
        request.status = SWAPPED
        queue_swapped(world, replica, sequence.request)
        replica.cost[TO_HOST] += swapped / limits.d2h
        replica.copying += swapped / limits.d2h
    else:
        request.status = WAITING
        queue_front(world, replica, sequence.request)


@jit_function
def swap_in(world: World, replica: Replica, index: int) -> bool:
    """Return a swapped sequence to the batch if its cache fits in GPU memory.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the request.
    index : index of the request.

    Returns
    -------
    bool
        Whether it fits.
    """
    limits, request = world.limits, world.requests[index]
    length = request.prompt + request.made - 1.0
    swapped = world.sizes[count_blocks(limits, length)].gpu
    sequence = add_sequence(world, replica, index, 0)
    start_decoding(replica, sequence, request, request.left)
    if not grow(world, replica, sequence, length + sequence.growth):
        remove_sequence(world, replica, find_place(world, replica, index))
        request.status = SWAPPED
        return False
    if request.handed:
        request.handed, request.first = False, replica.clock
        return True
    replica.host_swapped -= swapped
    replica.cost[TO_GPU] += swapped / limits.h2d
    replica.copying += swapped / limits.h2d
    return True
