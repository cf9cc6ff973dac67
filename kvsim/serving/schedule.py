"""One replica's scheduler: what goes into each pass, and how long the pass takes."""

from typing import TYPE_CHECKING

import numpy as np

from kvsim.serving import spend
from kvsim.serving.batch import (
    all_grow,
    all_surely_grow,
    blocks_of,
    complete,
    finish_prompt,
    grow,
    hits_of,
    hold_rounds,
    join,
    length_of,
    preempt,
    recount,
    swap_in,
    use_hits,
)
from kvsim.serving.compiled import compiled
from kvsim.serving.memory import available, find, remains, reuse, take
from kvsim.serving.queues import unqueue, unqueue_swapped
from kvsim.serving.record import Span, note_gaps, note_span
from kvsim.serving.records import (
    GPU,
    HOST,
    NEVER,
    NONE,
    POOLS,
    Replica,
    World,
)
from kvsim.serving.tables import TO_GPU

if TYPE_CHECKING:
    from kvsim.serving.tables import Tables


@compiled
def advance(tables: "Tables", world: World, replica: Replica, until: float) -> None:
    """Play passes until one ends at or after ``until``, or nothing is left to do."""
    while replica.clock < until and replica.running + replica.waiting + replica.swapped > 0:
        step(tables, world, replica, until)


@compiled
def step(tables: "Tables", world: World, replica: Replica, until: float) -> None:
    """One pass; if it only decodes, as many as nothing interrupts."""
    limits = world.limits
    replica.budget = limits.max_tokens
    replica.decoding = replica.prompt_tokens = replica.ousted = 0
    replica.left_out = replica.running - replica.reading
    replica.copying = 0.0
    replica.grown = False
    if limits.chunked and limits.decode_first:
        decode(world, replica, True)
        read_prompts(world, replica)
    elif limits.chunked:
        read_prompts(world, replica)
        decode(world, replica, replica.prompt_tokens == 0)
    else:
        if not (limits.decode_first and replica.running > 0):
            read_prompts(world, replica)
        if replica.prompt_tokens == 0:
            decode(world, replica, True)
    replica.just_done = 0
    if replica.decoding + replica.prompt_tokens == 0:
        if replica.running > 0:  # nothing but parts of prompts that find no memory
            preempt(world, replica)
        replica.clock += replica.copying
    elif replica.prompt_tokens + replica.ousted + replica.left_out > 0 or replica.copying > 0:
        play_pass(tables, world, replica)
    else:
        play_rounds(tables, world, replica, until)
    replica.passes += 1


@compiled
def decode(world: World, replica: Replica, force: bool) -> None:
    """Let sequences decode, first come first served, as long as budget and memory last.

    Where memory ends, ``force`` takes the sequence out that was admitted last.
    """
    limits, batch = world.limits, replica.running - replica.reading
    full = replica.running == limits.max_seqs
    if batch * limits.width <= replica.budget and all_surely_grow(world, replica, 1):
        replica.decoding, replica.left_out = batch, 0
        replica.budget -= batch * limits.width
        if replica.reading + replica.swapped > 0 or (replica.waiting > 0 and not full):
            take(world, replica, hold_rounds(world, replica, 1)[0])
            replica.grown = True  # else nothing asks for memory before the pass is played
    else:
        decode_in_turn(world, replica, force)
        replica.grown = True
    while replica.ousted == 0 and replica.swapped > 0 and replica.running < limits.max_seqs:
        if replica.budget < limits.width or not swap_in(world, replica, replica.swap_head):
            break
        unqueue_swapped(world, replica)
        replica.budget -= limits.width
        replica.decoding += 1


@compiled
def decode_in_turn(world: World, replica: Replica, force: bool) -> None:
    """The same where budget or memory may not suffice for all."""
    width, i = world.limits.width, 0
    for k in range(replica.running):
        world.sequences[replica.first_sequence + k].paused = True
    while i < replica.running and replica.budget >= width:
        sequence = world.sequences[replica.first_sequence + i]
        i += 1
        if sequence.todo > 0:
            continue
        fits = grow(world, replica, sequence, length_of(replica, sequence) + sequence.growth)
        while not fits and force:
            preempt(world, replica)
            if i > replica.running:
                break
            fits = grow(world, replica, sequence, length_of(replica, sequence) + sequence.growth)
        if fits:
            sequence.paused = False
            replica.budget -= width
            replica.decoding += 1
    replica.left_out = replica.running - replica.reading - replica.decoding


@compiled
def read_prompts(world: World, replica: Replica) -> None:
    """Go on with the prompts that have begun, then begin others."""
    if replica.reading > 0:
        for i in range(replica.first_reader, replica.running):
            sequence = world.sequences[replica.first_sequence + i]
            part = min(sequence.todo, replica.budget)
            if part > 0 and grow(world, replica, sequence, sequence.done + part):
                sequence.chunk = part
                replica.budget -= part
                replica.prompt_tokens += part
    while replica.ousted + replica.swapped == 0 and replica.waiting > 0:
        if replica.running == world.limits.max_seqs or replica.budget <= 0:
            break
        if not begin(world, replica):
            break


@compiled
def begin(world: World, replica: Replica) -> bool:
    """Begin the prompt that has waited longest, unless it has to wait.

    Its shared blocks that some memory still holds need not be computed.
    """
    limits, index = world.limits, replica.wait_head
    request = world.requests[index]
    hits, kept, away = 0, 0, 0  # shared blocks found, of them unused on the GPU, on the host
    if request.blocks > 0:
        hits = hits_of(world, replica, request)
        for k in range(hits):
            block = world.ids[request.first_block + k]
            found = find(world, world.pools[POOLS * replica.index + GPU], block)
            away += found == NONE
            kept += found != NONE and world.entries[found].users == 0
    length = request.prompt + request.made
    known, again = min(hits * limits.prefix_tokens, length - 1), 0
    if hits == 0:  # only full blocks can be found again
        again = min(remains(replica, request), (length - 1) // limits.block_tokens)
        known = again * limits.block_tokens
    part = min(length - known, replica.budget)
    if not limits.chunked and part < length - known:
        if replica.prompt_tokens > 0:
            return False
        part = length - known  # longer than the budget: in a pass of its own
    size = world.sizes[blocks_of(limits, length if limits.whole_prompt else known + part)]
    own = max(size.prompt - hits * limits.prefix_bytes, 0)
    if own + (kept + away) * limits.prefix_bytes > available(world, replica):
        return False
    if replica.host_private + size.host > limits.host:
        return False
    unqueue(world, replica)
    replica.first_reader = min(replica.first_reader, replica.running)
    replica.reading += 1
    sequence = join(world, replica, index, hits)
    sequence.todo, sequence.done = length - known, known
    use_hits(world, replica, request, hits)
    sequence.held = reuse(world, replica, request, again)
    grow(world, replica, sequence, known + part)
    if np.isnan(request.started):
        request.started = replica.clock
        request.hits = known
    sequence.chunk = part
    replica.budget -= part
    replica.prompt_tokens += part
    replica.cost[TO_GPU] += away * limits.prefix_bytes / limits.h2d
    replica.copying += away * limits.prefix_bytes / limits.h2d
    return True


@compiled
def play_pass(tables: "Tables", world: World, replica: Replica) -> None:
    """One pass over the sequences that are not paused and the parts of prompts."""
    if not replica.grown and replica.decoding > 0:
        take(world, replica, hold_rounds(world, replica, 1)[0])
    first, batch, finished, context = replica.first_sequence, replica.decoding, 0, 0.0
    if replica.reading > 0:
        for i in range(first + replica.first_reader, first + replica.running):
            sequence = world.sequences[i]
            if sequence.chunk > 0:
                spend.add_chunk(tables, replica.cost, float(sequence.chunk), float(sequence.done))
                if sequence.chunk == sequence.todo:
                    finished += 1
                    prompt = float(sequence.done + sequence.chunk)
                    spend.add_after_prompt(tables, replica.cost, prompt)
    if batch > 0:
        context = replica.context
        if replica.left_out > 0:
            context = let_the_paused_wait(world, replica)
    decoding = spend.Decoding(batch, context / max(batch, 1), 0.0)
    prompts = spend.Prompts(replica.prompt_tokens, finished)
    spend.add_pass(tables, replica.cost, decoding, prompts)
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
        read_on(world, replica)
    if replica.end <= replica.rounds:
        complete(world, replica)


@compiled
def let_the_paused_wait(world: World, replica: Replica) -> float:
    """The coming round does not count for the paused; context of the others. [tokens]"""
    context = 0.0
    for i in range(replica.first_sequence, replica.first_sequence + replica.running):
        sequence = world.sequences[i]
        if sequence.todo == 0:
            if sequence.paused:
                sequence.finish += 1
                sequence.base -= sequence.growth
            else:
                context += length_of(replica, sequence)
    return context


@compiled
def read_on(world: World, replica: Replica) -> None:
    """The parts of prompts of this pass are read."""
    first = NEVER
    for i in range(replica.first_reader, replica.running):
        sequence = world.sequences[replica.first_sequence + i]
        sequence.done += sequence.chunk
        if sequence.todo > 0 and sequence.chunk == sequence.todo:
            finish_prompt(world, replica, sequence)
        elif sequence.todo > 0:
            sequence.todo -= sequence.chunk
            first = min(first, i)
        sequence.chunk = 0
    replica.first_reader = first


@compiled
def play_rounds(tables: "Tables", world: World, replica: Replica, until: float) -> None:
    """Decoding rounds until a sequence is complete, memory ends or ``until`` has passed.

    What could not start beside the first one cannot start beside the others either, because they
    only take more memory.
    """
    batch = replica.decoding
    context, growth = replica.context, replica.growth
    decoding = spend.Decoding(batch, context / batch, growth / batch)
    rounds = replica.end - replica.rounds
    if rounds > 1:
        rounds = spend.rounds_within(tables, decoding, rounds, until - replica.clock)
    if rounds > 1 and not all_surely_grow(world, replica, rounds):
        rounds = rounds_in_memory(world, replica, rounds)
    spend.add_rounds(tables, replica.cost, decoding, rounds)
    took = replica.cost[0]
    first_more, more = 0, 0
    if rounds > 1 or not replica.grown:
        first_more, more = hold_rounds(world, replica, rounds)
        take(world, replica, first_more)
    last = spend.round_s(tables, batch, decoding.context + decoding.growth * (rounds - 1))
    gaps = (spend.round_s(tables, batch, decoding.context), last)
    note_gaps(world, replica, gaps, batch * rounds)
    middle = context + growth * (rounds - 1) / 2
    note_span(world, replica, Span(took, batch, middle, rounds))
    take(world, replica, more - first_more)
    replica.clock += took
    replica.rounds += rounds
    replica.context += growth * rounds
    if replica.rounds == replica.end:
        complete(world, replica)


@compiled
def rounds_in_memory(world: World, replica: Replica, rounds: int) -> int:
    """How many of some rounds find memory for all sequences; at least 1."""
    low, high = 1, rounds
    while low < high:
        middle = (low + high + 1) // 2
        if all_grow(world, replica, middle):
            low = middle
        else:
            high = middle - 1
    return low
