"""One replica's scheduler: what goes into each pass."""

import numpy as np

from kvsim.serving.batch import hits_of, join, preempt, swap_in, use_hits
from kvsim.serving.compiled import compiled, inlined
from kvsim.serving.growth import (
    all_surely_grow,
    blocks_of,
    grow,
    hold_rounds,
    length_of,
)
from kvsim.serving.memory import available, find, remains, reuse, take
from kvsim.serving.play import play_pass, play_rounds
from kvsim.serving.queues import unqueue, unqueue_swapped
from kvsim.serving.records import (
    GPU,
    NONE,
    POOLS,
    Replica,
    World,
)
from kvsim.serving.tables import TO_GPU, Tables

PASSES = 100_000  # between two looks at what else happens, such as Ctrl-C


@compiled
def has_work(replica: Replica) -> bool:
    """Whether anything waits or runs."""
    return replica.running + replica.waiting + replica.swapped > 0


@inlined
def decode_in_turn(world: World, replica: Replica) -> None:
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
        while not fits and replica.force:
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
def decode(world: World, replica: Replica) -> None:
    """Let sequences decode, first come first served, as long as budget and memory last.

    Where memory ends and the pass has to decode, the sequence admitted last is taken out.
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
        decode_in_turn(world, replica)
        replica.grown = True
    while replica.ousted == 0 and replica.swapped > 0 and replica.running < limits.max_seqs:
        if replica.budget < limits.width or not swap_in(world, replica, replica.swap_head):
            break
        unqueue_swapped(world, replica)
        replica.budget -= limits.width
        replica.decoding += 1


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


@inlined
def step(tables: Tables, world: World, replica: Replica, until: float) -> None:
    """One pass; if it only decodes, as many as nothing interrupts."""
    limits = world.limits
    replica.budget = limits.max_tokens
    replica.decoding = replica.prompt_tokens = replica.ousted = 0
    replica.left_out = replica.running - replica.reading
    replica.copying = 0.0
    replica.grown = False
    if limits.chunked and limits.decode_first:
        replica.force = True
        decode(world, replica)
        read_prompts(world, replica)
    elif limits.chunked:
        read_prompts(world, replica)
        replica.force = replica.prompt_tokens == 0
        decode(world, replica)
    else:
        if not (limits.decode_first and replica.running > 0):
            read_prompts(world, replica)
        if replica.prompt_tokens == 0:
            replica.force = True
            decode(world, replica)
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
def advance(tables: Tables, world: World, replica: Replica, until: float) -> bool:
    """Play passes until one ends at or after ``until``, or nothing is left to do.

    After many passes it stops before, and says so by False.
    """
    last = replica.passes + PASSES
    while replica.clock < until and has_work(replica):
        if replica.passes == last:
            return False
        step(tables, world, replica, until)
    return True
