"""Time goes by: one pass with prompts in it, or many rounds of decoding at once."""

from kvsim.serving import spend
from kvsim.serving.batch import complete, finish_prompt
from kvsim.serving.core import jit_function
from kvsim.serving.growth import all_grow, all_surely_grow, hold_rounds, length_of, recount
from kvsim.serving.memory import take
from kvsim.serving.record import Span, note_gaps, note_span
from kvsim.serving.records import (
    NEVER,
    Replica,
    World,
)
from kvsim.serving.tables import COSTS, Tables


@jit_function
def let_the_paused_wait(world: World, replica: Replica) -> float:
    """The coming round does not count for the paused; context of the others. [tokens]"""
    context = 0.0
    for i in range(replica.first_sequence, replica.first_sequence + replica.running):
        sequence = world.sequences[i]
        if sequence.todo == 0:
            if sequence.paused:
                sequence.finish += 1
                sequence.intercept -= sequence.growth
            else:
                context += length_of(replica, sequence)
    return context


@jit_function
def read_on(world: World, replica: Replica) -> None:
    """The parts of prompts of this pass are read."""
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
def read_in_lanes(tables: Tables, world: World, replica: Replica) -> int:
    """What parts of prompts need besides, evenly over lanes but for the longest part.

    Returns the tokens of the lane with most of them.
    """
    most, longest, total = spend.of_lane(tables, replica.prompt_tokens), 0.0, 0.0
    for i in range(replica.first_reader, replica.running):
        sequence = world.sequences[replica.first_sequence + i]
        if sequence.chunk > 0:
            most = max(most, sequence.chunk)
            for k in range(len(COSTS)):
                replica.estimate[k] = 0.0
            chunk, done = float(sequence.chunk), float(sequence.done)
            spend.add_chunk(tables, replica.estimate, chunk, done)
            longest = max(longest, replica.estimate[0])
            total += replica.estimate[0]
            for k in range(len(COSTS)):
                replica.cost[k] += replica.estimate[k] / tables.lanes
    replica.cost[0] += max(longest - total / tables.lanes, 0.0)
    return most


@jit_function
def play_pass(tables: Tables, world: World, replica: Replica) -> None:
    """One pass over the sequences that are not paused and the parts of prompts."""
    if not replica.grown and replica.decoding > 0:
        take(world, replica, hold_rounds(world, replica, 1)[0])
    first, batch, finished, context = replica.first_sequence, replica.decoding, 0, 0.0
    tokens = replica.prompt_tokens
    if tables.lanes > 1 and tokens > 0:
        tokens = read_in_lanes(tables, world, replica)
    if replica.reading > 0:
        for i in range(first + replica.first_reader, first + replica.running):
            sequence = world.sequences[i]
            if sequence.chunk > 0:
                if tables.lanes == 1:
                    chunk, done = float(sequence.chunk), float(sequence.done)
                    spend.add_chunk(tables, replica.cost, chunk, done)
                if sequence.chunk == sequence.todo:
                    finished += 1
                    prompt = float(sequence.done + sequence.chunk)
                    spend.add_after_prompt(tables, replica.cost, prompt)
    if batch > 0:
        context = replica.context
        if replica.left_out > 0:
            context = let_the_paused_wait(world, replica)
    decoding = spend.Decoding(batch, context / max(batch, 1), 0.0)
    prompts = spend.Prompts(tokens, replica.prompt_tokens, finished)
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


@jit_function
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


@jit_function
def play_rounds(tables: Tables, world: World, replica: Replica, until: float) -> None:
    """Decoding rounds until a sequence is complete, memory ends or ``until`` has passed.

    What could not start beside the first one cannot start beside the others either, because they
    only take more memory.
    """
    batch = replica.decoding
    context, growth = replica.context, replica.growth
    decoding = spend.Decoding(batch, context / batch, growth / batch)
    rounds = replica.end - replica.rounds
    if rounds > 1:
        seconds = min(until, replica.next_ready) - replica.clock
        rounds = spend.rounds_within(tables, decoding, rounds, seconds)
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
