"""Execute a pass with prompts in it, or many decoding rounds at once, and note what happened.

The notes are a timeline of each replica and a histogram of the times between tokens.
"""

from typing import NamedTuple

import numpy as np

from kvsim.serving.batch import complete, finish_prompt
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
    bound_growth,
    check_growth,
    get_length,
    recount,
    reserve_rounds,
    take,
)
from kvsim.serving.records import FINEST_GAP, GAP_BINS, GAP_RATIO, GAPS, NEVER, Bin, Replica, World
from kvsim.serving.tables import COST_RESOURCES, COSTS, Tables

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
    """A stretch of time that begins at a replica's clock."""

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
    """Count tokens by the time since the one before, which moved evenly from first to last.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that made the tokens.
    gaps : the first and the last time between tokens. [s]
    tokens : number of tokens. [tokens]
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
    """Double the width of a replica's bins, joining two into one.

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
    """Count the parts of prompts that this pass has read.

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
    """Play one pass over the sequences that are not paused and the parts of prompts.

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
    """Return how many of some rounds find memory for all sequences.

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
    """Play decoding rounds until a sequence is complete, memory ends or a time has passed.

    What could not start beside the first one cannot start beside the others either, because they
    only take more memory.

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
