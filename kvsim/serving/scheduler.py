"""The scheduler of a replica: composition of passes, their execution, and the choice of a replica.

A pass with prompt tokens is executed singly, decoding rounds without any many at once. Each replica
records a timeline and a histogram of times between tokens.
"""

from typing import NamedTuple

import numpy as np

from kvsim.serving.batch import (
    add_sequence,
    complete,
    finish_prompt,
    leave_queue,
    leave_swap_queue,
    preempt,
    queue,
    queue_handed_over,
    swap_in,
)
from kvsim.serving.core import jit_function
from kvsim.serving.costs import (
    Decoding,
    Prompts,
    add_after_prompt,
    add_part,
    add_pass,
    add_rounds,
    count_fullest_lane,
    count_rounds_within,
    get_round_seconds,
)
from kvsim.serving.memory import (
    available,
    bound_growth,
    check_growth,
    count_blocks,
    count_found,
    count_own,
    get_length,
    grow,
    pin_found,
    promised,
    recount,
    reserve_rounds,
    share,
    take,
    take_back,
)
from kvsim.serving.records import (
    FINEST_GAP,
    GAP_BINS,
    GAP_RATIO,
    GAPS,
    GPU,
    NEVER,
    NO_INDEX,
    Bin,
    Replica,
    Request,
    Sequence,
    World,
)
from kvsim.serving.tables import COST_RESOURCES, COSTS, Tables
from kvsim.serving.tiers import count_stored_blocks, load

GAP_EDGES = FINEST_GAP * GAP_RATIO ** np.arange(1.0, GAPS + 1)  # where each bin ends [s]
CELL_BITS = 43  # of a number's bits, those below its exponent and the next nine: a cell is 0.1 to
# 0.2 %, so that its smallest number is mostly in the same bin as any other
FIRST_CELL = int(np.float64(FINEST_GAP).view(np.int64)) >> CELL_BITS
LAST_CELL = int(GAP_EDGES[-1].view(np.int64)) >> CELL_BITS
LOWEST_BIN = np.searchsorted(
    GAP_EDGES, (np.arange(FIRST_CELL, LAST_CELL + 1) << CELL_BITS).view(np.float64), side="right"
).astype(np.int16)
"""Bin of the smallest number in each cell."""


class Span(NamedTuple):
    """An interval that begins at a replica's clock."""

    seconds: float
    batch: int  # decoding sequences
    context: float  # of all of them, on average over its rounds [tokens]
    rounds: int  # or one pass that only reads prompts


@jit_function
def gap_bin(gap: float) -> int:
    """Return the bin of a time between tokens, without a logarithm.

    Parameters
    ----------
    gap : the time. [s]

    Returns
    -------
    int
        Index of the bin, from 0 to GAPS - 1.
    """
    cell = int(np.float64(gap).view(np.int64) >> CELL_BITS) - FIRST_CELL
    at = int(LOWEST_BIN[min(max(cell, 0), LOWEST_BIN.size - 1)])
    while at < GAPS - 1 and gap >= GAP_EDGES[at]:
        at += 1
    return at


@jit_function
def note_gaps(world: World, replica: Replica, gaps: tuple[float, float], tokens: int) -> None:
    """Add times between tokens to the histogram, spread evenly between two values.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that generated the tokens.
    gaps : first and last time between two tokens of a sequence. [s]
    tokens : number of tokens to count. [tokens]
    """
    if tokens == 0:
        return
    first, last = gaps
    low = high = gap_bin(min(first, last))
    while high < GAPS - 1 and max(first, last) >= GAP_EDGES[high]:
        high += 1
    for i in range(replica.index * GAPS + low, replica.index * GAPS + high + 1):
        world.gaps[i] += tokens / (high - low + 1)


@jit_function
def clear(note: Bin) -> None:
    """Empty a bin of the timeline.

    Parameters
    ----------
    note : the bin.
    """
    note.seconds = note.running = note.waiting = note.cache = 0.0
    note.context = note.decoded = note.prompt = note.rounds = 0.0
    for k in range(len(COST_RESOURCES)):
        note.use[k] = 0.0


@jit_function
def widen(world: World, replica: Replica) -> None:
    """Double the width of a replica's timeline bins, merging pairs of bins.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the timeline.
    """
    first, half = replica.index * GAP_BINS, GAP_BINS // 2
    for i in range(half):
        into = world.bins[first + i]
        one, other = world.bins[first + 2 * i], world.bins[first + 2 * i + 1]
        into.seconds = one.seconds + other.seconds
        into.running = one.running + other.running
        into.waiting = one.waiting + other.waiting
        into.cache = one.cache + other.cache
        into.context = one.context + other.context
        into.decoded = one.decoded + other.decoded
        into.prompt = one.prompt + other.prompt
        into.rounds = one.rounds + other.rounds
        for k in range(len(COST_RESOURCES)):
            into.use[k] = one.use[k] + other.use[k]
    for i in range(half, GAP_BINS):
        clear(world.bins[first + i])
    replica.bin_width *= 2


@jit_function
def note_span(world: World, replica: Replica, span: Span) -> None:
    """Add a span to the bins of the timeline that it covers, and reset the costs of the pass.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica, whose clock is at the begin of the span.
    span : the stretch of time.
    """
    begin, end = replica.clock, replica.clock + span.seconds
    while end > GAP_BINS * replica.bin_width:
        widen(world, replica)
    width = replica.bin_width
    cache = replica.private + replica.pinned + replica.cached
    first, last = int(begin / width), min(int(end / width), GAP_BINS - 1)
    for i in range(first, last + 1):
        here = span.seconds
        if first < last:
            here = min(end, (i + 1) * width) - max(begin, i * width)
        share = here / span.seconds if span.seconds > 0 else 1.0
        note = world.bins[replica.index * GAP_BINS + i]
        note.seconds += here
        note.running += here * span.batch
        note.waiting += here * replica.waiting
        note.cache += here * cache
        note.context += here * span.context
        note.decoded += share * span.batch * span.rounds
        note.prompt += share * replica.prompt_tokens
        note.rounds += share * span.rounds
        for k in range(len(COST_RESOURCES)):
            note.use[k] += share * replica.cost[k + 1]
    for k in range(len(COSTS)):
        replica.cost[k] = 0.0


@jit_function
def skip_paused(world: World, replica: Replica) -> float:
    """Delay the paused sequences by a round.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the batch.

    Returns
    -------
    float
        Context of the sequences that are not paused. [tokens]
    """
    context = 0.0
    for i in range(replica.first_sequence, replica.first_sequence + replica.running):
        sequence = world.sequences[i]
        if sequence.todo == 0:
            if sequence.paused:
                sequence.finish += 1
                sequence.intercept -= sequence.growth
            else:
                context += get_length(replica, sequence)
    return context


@jit_function
def advance_prompts(world: World, replica: Replica) -> None:
    """Count the tokens of the prompt chunks that this pass has prefilled.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the batch.
    """
    first = NEVER
    for i in range(replica.first_reader, replica.running):
        sequence = world.sequences[replica.first_sequence + i]
        sequence.done += sequence.chunk
        replica.unread -= sequence.chunk
        if sequence.todo > 0 and sequence.chunk == sequence.todo:
            finish_prompt(world, replica, sequence)
        elif sequence.todo > 0:
            sequence.todo -= sequence.chunk
            first = min(first, i)
        sequence.chunk = 0
    replica.first_reader = first


@jit_function
def play_pass(tables: Tables, world: World, replica: Replica) -> None:
    """Simulate one pass over the sequences that are not paused and the scheduled prompt chunks.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    replica : the replica that plays.
    """
    if not replica.grown and replica.decoding > 0:
        take(world, replica, reserve_rounds(world, replica, 1)[0])
    first, batch, finished, context = replica.first_sequence, replica.decoding, 0, 0.0
    most = count_fullest_lane(tables, replica.prompt_tokens)  # tokens of the lane with most of them
    if replica.prompt_tokens > 0:
        longest, total = 0.0, 0.0
        for i in range(first + replica.first_reader, first + replica.running):
            sequence = world.sequences[i]
            if sequence.chunk > 0:
                most = max(most, sequence.chunk)
                own = add_part(
                    tables,
                    (replica.cost, replica.estimate),
                    float(sequence.chunk),
                    float(sequence.done),
                )
                longest = max(longest, own)
                total += own
                if sequence.chunk == sequence.todo:
                    finished += 1
                    prompt = float(sequence.done + sequence.chunk)
                    add_after_prompt(tables, replica.cost, prompt)
        # parts are divided evenly over lanes, but for the longest
        replica.cost[0] += max(longest - total / tables.lanes, 0.0)
    if batch > 0:
        context = replica.context
        if replica.left_out > 0:
            context = skip_paused(world, replica)
    decoding = Decoding(batch, context / max(batch, 1), 0.0)
    prompts = Prompts(most, replica.prompt_tokens, finished)
    add_pass(tables, replica.cost, decoding, prompts)
    took = replica.cost[0] + replica.copying
    note_gaps(world, replica, (took, took), batch)
    note_span(world, replica, Span(took, batch, context, 1))
    replica.clock += took
    if batch > 0:
        replica.rounds += 1
        replica.context += replica.growth
        if replica.left_out > 0:
            recount(world, replica)
    if replica.reading > 0:
        advance_prompts(world, replica)
    if replica.end <= replica.rounds:
        complete(world, replica)


@jit_function
def find_rounds_in_memory(world: World, replica: Replica, rounds: int) -> int:
    """Return for how many rounds memory suffices for all sequences.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the batch.
    rounds : rounds at most.

    Returns
    -------
    int
        Number of rounds, at least 1.
    """
    low, high = 1, rounds
    while low < high:
        middle = (low + high + 1) // 2
        if check_growth(world, replica, middle):
            low = middle
        else:
            high = middle - 1
    return low


@jit_function
def play_rounds(tables: Tables, world: World, replica: Replica, until: float) -> None:
    """Simulate decoding rounds until a sequence is complete, memory is full or a time is reached.

    A request that could not start with the first round cannot start with later ones either, because
    these only need more memory.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    replica : the replica that plays.
    until : time of the next event. [s]
    """
    batch = replica.decoding
    context, growth = replica.context, replica.growth
    decoding = Decoding(batch, context / batch, growth / batch)
    rounds = replica.end - replica.rounds
    if rounds > 1:
        seconds = min(until, replica.next_ready) - replica.clock
        rounds = count_rounds_within(tables, decoding, rounds, seconds)
    if rounds > 1 and not bound_growth(world, replica, rounds):
        rounds = find_rounds_in_memory(world, replica, rounds)
    add_rounds(tables, replica.cost, decoding, rounds)
    took = replica.cost[0]
    first_more, more = 0, 0
    if rounds > 1 or not replica.grown:
        first_more, more = reserve_rounds(world, replica, rounds)
        take(world, replica, first_more)
    last = get_round_seconds(tables, batch, decoding.context + decoding.growth * (rounds - 1))
    gaps = (get_round_seconds(tables, batch, decoding.context), last)
    note_gaps(world, replica, gaps, batch * rounds)
    middle = context + growth * (rounds - 1) / 2
    note_span(world, replica, Span(took, batch, middle, rounds))
    take(world, replica, more - first_more)
    replica.began = replica.clock if rounds == 1 else replica.clock + took - last
    replica.clock += took
    replica.rounds += rounds
    replica.context += growth * rounds
    if replica.rounds == replica.end:
        complete(world, replica)


MAX_PASSES_PER_CALL = 100_000  # between two looks at what else happens, such as Ctrl-C


@jit_function
def has_work(replica: Replica) -> bool:
    """Return whether a replica has waiting or running requests.

    Parameters
    ----------
    replica : the replica.

    Returns
    -------
    bool
        Whether any request is unfinished.
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
    """Start the prefill of the request that has waited longest, if memory allows.

    Leading blocks in the GPU's prefix cache are reused, and following ones are loaded from other
    memories where that is configured.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    replica : the replica that composes a pass.

    Returns
    -------
    bool
        Whether the prefill starts.
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
    if limits.whole_request and replica.running > 0:
        whole = world.sizes[count_blocks(limits, request.prompt + request.generate)]
        own = max(whole.gpu - hits * limits.part_bytes, own)
        if own + unused * limits.part_bytes + promised(world, replica) > available(world, replica):
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
    """Allocate memory for the next chunk of a prompt, preempting other sequences if necessary.

    Sequences are preempted where passes are mixed and decoding has priority, as in vLLM; otherwise
    the prompt waits for memory.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that composes a pass.
    sequence : the sequence in prefill.
    length : number of tokens to be cached. [tokens]

    Returns
    -------
    bool
        Whether memory was allocated.
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
    """Add the next chunk of a prompt to the pass, unless it must wait for blocks being loaded.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that composes a pass.
    sequence : the sequence in prefill.
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
    """Add prompt chunks to the pass: of started prompts first, then of waiting ones.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    replica : the replica that composes a pass.
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
    """Execute one pass, or many decoding rounds at once if nothing interrupts them.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    replica : the replica.
    until : time of the next event, at which rounds stop. [s]
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
    """Return whether a replica certainly only decodes until its next request arrives.

    That is so if no request waits or is in prefill, and a quick bound shows that memory suffices
    until all have finished.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.

    Returns
    -------
    bool
        True if it certainly does.
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

    If it only decodes and memory suffices, no round is shorter than the first, as contexts grow.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation.
    replica : the replica.

    Returns
    -------
    float
        The time; the replica's clock if it does anything else. [s]
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
    """Route a request to a replica.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    request : the arriving request.
    route : index into ``ROUTES``.

    Returns
    -------
    int
        Index of the replica; ties go to the one with the fewest unfinished requests.
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
    """Route an arriving request and add it to the queue of its replica.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    route : index into ``ROUTES``.
    index : index of the request.
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
