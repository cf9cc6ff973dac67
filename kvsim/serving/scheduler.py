"""One replica's scheduler, which says what goes into each pass, and the choice of a replica."""

import numpy as np

from kvsim.serving.batch import (
    add_sequence,
    leave_queue,
    leave_swap_queue,
    preempt,
    queue,
    queue_handed_over,
    swap_in,
)
from kvsim.serving.core import jit_function
from kvsim.serving.costs import get_round_seconds
from kvsim.serving.execute import play_pass, play_rounds
from kvsim.serving.memory import (
    available,
    bound_growth,
    count_blocks,
    count_found,
    count_own,
    get_length,
    grow,
    pin_found,
    reserve_rounds,
    share,
    take,
    take_back,
)
from kvsim.serving.records import GPU, NO_INDEX, Replica, Request, Sequence, World
from kvsim.serving.tables import Tables
from kvsim.serving.tiers import count_stored_blocks, load

MAX_PASSES_PER_CALL = 100_000  # between two looks at what else happens, such as Ctrl-C


@jit_function
def has_work(replica: Replica) -> bool:
    """Return whether anything waits or runs.

    Parameters
    ----------
    replica : the replica.

    Returns
    -------
    bool
        True if it has any request that is not done.
    """
    return replica.running + replica.waiting + replica.swapped > 0


@jit_function
def decode_with_preemption(world: World, replica: Replica) -> None:
    """Choose the sequences that decode one by one, preempting when memory runs out.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that is about to play a pass.
    """
    width, i = world.limits.width, 0
    for k in range(replica.running):
        world.sequences[replica.first_sequence + k].paused = True
    while i < replica.running and replica.budget >= width:
        sequence = world.sequences[replica.first_sequence + i]
        i += 1
        if sequence.todo > 0:
            continue
        fits = grow(world, replica, sequence, get_length(replica, sequence) + sequence.growth)
        while not fits and replica.force:
            preempt(world, replica)
            if i > replica.running:
                break
            fits = grow(world, replica, sequence, get_length(replica, sequence) + sequence.growth)
        if fits:
            sequence.paused = False
            replica.budget -= width
            replica.decoding += 1
    replica.left_out = replica.running - replica.reading - replica.decoding


@jit_function
def decode(world: World, replica: Replica) -> None:
    """Choose the sequences that decode in the next pass, as long as budget and memory last.

    Where memory ends and the pass has to decode, the sequence admitted last is preempted.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that is about to play a pass.
    """
    limits, batch = world.limits, replica.running - replica.reading
    full = replica.running == limits.max_seqs
    if batch * limits.width <= replica.budget and bound_growth(world, replica, 1):
        replica.decoding, replica.left_out = batch, 0
        replica.budget -= batch * limits.width
        others = replica.reading + replica.swapped + replica.late
        if others > 0 or (replica.waiting > 0 and not full):
            take(world, replica, reserve_rounds(world, replica, 1)[0])
            replica.grown = True  # else nothing asks for memory before the pass is played
    else:
        decode_with_preemption(world, replica)
        replica.grown = True
    while replica.ousted == 0 and replica.swapped > 0 and replica.running < limits.max_seqs:
        if replica.budget < limits.width or not swap_in(world, replica, replica.swap_ends[0]):
            break
        leave_swap_queue(world, replica, replica.swap_ends[0])
        replica.budget -= limits.width
        replica.decoding += 1


@jit_function
def start_prompt(tables: Tables, world: World, replica: Replica) -> bool:
    """Begin to read the prompt that has waited longest, if memory allows.

    Its leading blocks that the GPU still holds are not computed, nor are those that follow and are
    loaded from another memory.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    replica : the replica that is about to play a pass.

    Returns
    -------
    bool
        Whether it begins.
    """
    limits, index = world.limits, replica.wait_ends[0]
    request = world.requests[index]
    length = request.prompt + request.made
    most = (length - 1) // limits.block_tokens  # the last token is read in any case
    hits, unused, again = 0, 0, 0
    if limits.part_bytes > 0:
        hits, unused = count_found(world, replica, request, most)
        if hits == request.blocks:
            again = min(count_own(world, request, index), most - hits)
    known = (hits + again) * limits.block_tokens
    part = min(length - known, replica.budget)
    if limits.chunked:
        part = min(part, limits.part)
    if not limits.chunked and part < length - known:
        if replica.prompt_tokens > 0:
            return False
        part = length - known  # longer than the budget: in a pass of its own
    size = world.sizes[count_blocks(limits, length if limits.whole_prompt else known + part)]
    own = max(size.prompt - hits * limits.part_bytes, 0)
    if own + unused * limits.part_bytes > available(world, replica):
        return False
    if replica.host_private + size.host > limits.host:
        return False
    leave_queue(world, replica, index)
    replica.reading += 1
    sequence = add_sequence(world, replica, index, hits)
    pin_found(world, replica, request, hits)
    sequence.held = take_back(world, replica, request, again)
    request.kept = NO_INDEX
    sequence.done, sequence.todo = known, length - known
    if limits.tiers and again == 0 and hits < request.blocks:
        part = load(tables, world, replica, sequence)
    replica.unread += sequence.todo
    grow(world, replica, sequence, float(known + part + sequence.skip))
    if limits.part_bytes > 0:
        share(world, replica, sequence, known + part)
    if np.isnan(request.started):
        request.started = replica.clock
        request.hits = known + sequence.skip
        replica.found[GPU] += known
    sequence.chunk = part
    replica.budget -= part
    replica.prompt_tokens += part
    return True


@jit_function
def grow_prompt(world: World, replica: Replica, sequence: Sequence, length: float) -> bool:
    """Allocate memory for the next part of a prompt; without any, those that began last give way.

    Where passes are mixed and decoding goes first, as in vLLM; else the prompt waits for memory.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that is about to play a pass.
    sequence : the sequence whose prompt is read.
    length : what is to be cached of it. [tokens]

    Returns
    -------
    bool
        Whether it has the memory.
    """
    limits, index, fits = world.limits, sequence.request, grow(world, replica, sequence, length)
    while not fits and limits.chunked and limits.decode_first and not limits.tiers:
        last = world.sequences[replica.first_sequence + replica.running - 1]
        victim, reads = last.request, last.todo > 0
        if replica.running == 1 or not reads:
            return False
        preempt(world, replica)
        if victim == index:
            return False
        fits = grow(world, replica, sequence, length)
    return fits


@jit_function
def continue_prompt(world: World, replica: Replica, sequence: Sequence) -> None:
    """Add the next part of a prompt to the pass, unless what comes next is still being loaded.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that is about to play a pass.
    sequence : the sequence whose prompt is read.
    """
    if sequence.skip > 0 and sequence.done == sequence.skip_at:
        if sequence.ready > replica.clock:
            replica.next_ready = min(replica.next_ready, sequence.ready)
            return
        sequence.done += sequence.skip
        sequence.skip = 0
    part = min(sequence.todo, replica.budget)
    if world.limits.chunked:
        part = min(part, world.limits.part)
    if sequence.skip > 0:
        part = min(part, sequence.skip_at - sequence.done)
    elif not world.limits.chunked and part < sequence.todo:
        if replica.prompt_tokens > 0:
            return
        part = sequence.todo
    length = float(sequence.done + part + sequence.skip)
    if part > 0 and grow_prompt(world, replica, sequence, length):
        if world.limits.part_bytes > 0:
            share(world, replica, sequence, sequence.done + part)
        sequence.chunk = part
        replica.budget -= part
        replica.prompt_tokens += part


@jit_function
def read_prompts(tables: Tables, world: World, replica: Replica) -> None:
    """Add parts of prompts to the pass: of those that have begun, then of others.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    replica : the replica that is about to play a pass.
    """
    if replica.reading > 0:
        i = replica.first_reader
        while i < replica.running:  # which a prompt without memory may lower
            sequence = world.sequences[replica.first_sequence + i]
            if sequence.todo > 0:
                continue_prompt(world, replica, sequence)
            i += 1
    while replica.ousted + replica.swapped == 0 and replica.waiting > 0:
        seats = replica.running + (replica.just_done if replica.seen < np.inf else 0)
        if seats >= world.limits.max_seqs or replica.budget <= 0:
            break
        if world.requests[replica.wait_ends[0]].arrival > replica.seen:
            replica.held = True
            break
        if not start_prompt(tables, world, replica):
            break


@jit_function
def step(tables: Tables, world: World, replica: Replica, until: float) -> None:
    """Play one pass, or many decoding rounds at once if nothing interrupts them.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    replica : the replica that plays.
    until : time of the next event, which ends a row of rounds. [s]
    """
    limits, swapped = world.limits, replica.swapped
    replica.budget = limits.max_tokens
    replica.decoding = replica.prompt_tokens = replica.ousted = 0
    replica.left_out = replica.running - replica.reading
    replica.copying = 0.0
    replica.grown = replica.held = False
    replica.next_ready = np.inf
    # put together when the pass before began, unless that left nothing to do
    follows = limits.ahead and replica.running > 0 and replica.clock == replica.ended
    replica.seen = replica.began if follows else np.inf
    if not follows:
        replica.late = replica.late_kept = 0
        replica.late_entry = NO_INDEX
    begins = replica.clock
    for turn in range(2):
        if (turn == 0) == (limits.chunked and limits.decode_first):
            replica.force = replica.prompt_tokens == 0
            if limits.chunked or replica.force:
                decode(world, replica)
        elif limits.chunked or not limits.decode_first or replica.running == replica.reading:
            read_prompts(tables, world, replica)
    others = replica.waiting + replica.swapped + replica.reading
    if follows and replica.just_done > 0 and others > 0:
        replica.held = True  # for the seats or the memory of those that are done
    replica.just_done = replica.late = replica.late_kept = 0
    replica.late_entry = NO_INDEX
    if replica.decoding + replica.prompt_tokens == 0:
        if replica.next_ready < np.inf:  # nothing but blocks on their way here
            replica.clock = max(min(replica.next_ready, until), replica.clock)
        elif replica.running > 0:  # nothing but parts of prompts that find no memory
            preempt(world, replica)
        replica.clock += replica.copying
    elif (
        replica.prompt_tokens + replica.ousted + replica.left_out > 0
        or replica.copying > 0
        or replica.held
        or replica.swapped < swapped  # others may begin once nothing is swapped out
    ):
        play_pass(tables, world, replica)
        replica.began, replica.ended = begins, replica.clock
    else:
        play_rounds(tables, world, replica, until)
        replica.ended = replica.clock
    replica.passes += 1


@jit_function
def check_only_decodes(world: World, replica: Replica) -> bool:
    """Return whether a replica does nothing but decode before its next request, whatever others do.

    Nothing waits or is read, and memory suffices, by a quick bound, until all have finished.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.

    Returns
    -------
    bool
        True if it surely does.
    """
    if replica.reading + replica.waiting + replica.swapped > 0:
        return False
    longest = 0
    for i in range(replica.running):
        sequence = world.sequences[replica.first_sequence + i]
        longest = max(longest, sequence.finish - replica.rounds)
    return bound_growth(world, replica, longest)


@jit_function
def next_completion(tables: Tables, world: World, replica: Replica) -> float:
    """Return a time before which a replica completes no request.

    Where it only decodes and memory suffices, rounds take no less than the first: contexts grow.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation.
    replica : the replica.

    Returns
    -------
    float
        Its clock, where it does anything else. [s]
    """
    if replica.reading + replica.waiting + replica.swapped > 0 or replica.running == 0:
        return replica.clock
    rounds = replica.end - replica.rounds
    if rounds < 2 or not bound_growth(world, replica, rounds):
        return replica.clock
    context = replica.context / replica.running
    return replica.clock + (rounds - 1) * get_round_seconds(tables, replica.running, context)


ROUTES = ("round-robin", "least-loaded", "prefix-aware", "cache-and-load")
ROUND_ROBIN, LEAST_LOADED, PREFIX_AWARE, CACHE_AND_LOAD = range(len(ROUTES))


@jit_function
def choose_replica(world: World, request: Request, route: int) -> int:
    """Return the replica that a request goes to.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    request : the request that arrives.
    route : index into ``ROUTES``.

    Returns
    -------
    int
        Index of the replica; of equals, the one with the fewest unfinished requests.
    """
    chosen, least, least_load = 0, 0, 0
    for index in range(world.replicas.size):
        replica = world.replicas[index]
        if not has_work(replica):
            replica.clock = max(replica.clock, request.arrival)
        load = replica.running + replica.waiting + replica.swapped
        if replica.clock > request.arrival:  # what its pass will complete is not complete yet
            load += replica.just_done
        score = 0
        if route != LEAST_LOADED and request.blocks > 0:
            score = -count_stored_blocks(world, replica, request)
        if route == CACHE_AND_LOAD:
            score = replica.unread + score * world.limits.block_tokens
        if index == 0 or score < least or (score == least and load < least_load):
            chosen, least, least_load = index, score, load
    return chosen


@jit_function
def receive(world: World, route: int, index: int) -> None:
    """Queue a request at its replica, or at the one that suits it best.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    route : index into ``ROUTES``.
    index : row of the request.
    """
    request = world.requests[index]
    if request.replica == NO_INDEX:
        request.replica = choose_replica(world, request, route)
    replica = world.replicas[request.replica]
    replica.clock = max(replica.clock, request.arrival)
    if request.handed:
        queue_handed_over(world, replica, index)
    else:
        queue(world, replica, index)
