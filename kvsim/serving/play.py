"""Time goes by: one pass with prompts in it, or many rounds of decoding at once."""

from typing import TYPE_CHECKING

from kvsim.serving import lookup, spend
from kvsim.serving.batch import blocks_of, complete, finish_prompt, grow, length_of, own_bytes
from kvsim.serving.compiled import compiled
from kvsim.serving.memory import available
from kvsim.serving.record import note_gaps, note_span
from kvsim.serving.state import (
    HOST_PRIVATE,
    NEVER,
    ROUNDS,
    RUNNING,
    Engine,
    Fleet,
    Progress,
    Trace,
)

if TYPE_CHECKING:
    from kvsim.serving.tables import Tables


@compiled
def play_pass(
    t: "Tables",
    x: Trace,
    f: Fleet,
    e: Engine,
    p: Progress,
    r: int,
    decoding: int,
    copying: float,
) -> None:
    """One pass over the sequences that are not paused and the parts of prompts."""
    tokens, finished, context, spent = 0, 0, 0.0, f.spent[r]
    for i in range(f.tally[r, RUNNING]):
        if f.chunks[r, i] > 0:
            tokens += f.chunks[r, i]
            spend.add_chunk(t, spent, f.chunks[r, i], f.done[r, i])
            if f.chunks[r, i] == f.todo[r, i]:
                finished += 1
                spend.add_between(t, spent, f.done[r, i] + f.chunks[r, i])
        elif f.todo[r, i] == 0 and not f.paused[r, i]:
            context += length_of(f, r, i)
    mean = context / max(decoding, 1)
    spend.add_pass(t, spent, decoding, mean, tokens, finished)
    took = spent[0] + copying
    note_gaps(f, r, took, took, decoding)
    note_span(f, r, took, decoding, context, 1, decoding, tokens)
    f.clock[r] += took
    if decoding > 0:
        f.tally[r, ROUNDS] += 1
        for i in range(f.tally[r, RUNNING]):
            if f.paused[r, i]:  # the round did not count for those
                f.finish[r, i] += 1
                f.base[r, i] -= f.growth[r, i]
    for i in range(f.tally[r, RUNNING]):
        if f.chunks[r, i] > 0:
            f.done[r, i] += f.chunks[r, i]
            if f.chunks[r, i] == f.todo[r, i]:
                finish_prompt(t, x, f, e, p, r, i, f.clock[r])
            else:
                f.todo[r, i] -= f.chunks[r, i]
    complete(x, f, e, p, r, f.clock[r])


@compiled
def play_rounds(
    t: "Tables", x: Trace, f: Fleet, e: Engine, p: Progress, r: int, until: float
) -> None:
    """Decoding rounds until a sequence is complete, memory ends or ``until`` has passed.

    Memory for the first one is taken already. What could not start beside the first one cannot
    start beside the others either, because they only take more memory.
    """
    batch, context, growth, end = 0, 0.0, 0.0, NEVER
    for i in range(f.tally[r, RUNNING]):
        if f.todo[r, i] == 0:
            batch += 1
            context += length_of(f, r, i)
            growth += f.growth[r, i]
            end = min(end, f.finish[r, i])
    rounds = int(end - f.tally[r, ROUNDS])
    mean, each = context / batch, growth / batch
    if rounds > 1:
        rounds = lookup.rounds_within(t, batch, mean, each, rounds, until - f.clock[r])
    if rounds > 1:
        rounds = _rounds_in_memory(t, f, e, r, batch, growth, rounds)
    spend.add_rounds(t, f.spent[r], batch, mean, each, rounds)
    took = f.spent[r, 0]
    last = lookup.round_s(t, batch, mean + each * (rounds - 1))
    note_gaps(f, r, lookup.round_s(t, batch, mean), last, batch * rounds)
    middle = context + growth * (rounds - 1) / 2
    note_span(f, r, took, batch, middle, rounds, batch * rounds, 0)
    f.clock[r] += took
    f.tally[r, ROUNDS] += rounds
    for i in range(f.tally[r, RUNNING]):
        if f.todo[r, i] == 0 and rounds > 1:
            grow(t, f, e, r, i, length_of(f, r, i))
    if f.tally[r, ROUNDS] == end:
        complete(x, f, e, p, r, f.clock[r])


@compiled
def _rounds_in_memory(
    t: "Tables", f: Fleet, e: Engine, r: int, batch: int, growth: float, rounds: int
) -> int:
    """How many of some rounds find memory for all sequences; at least 1."""
    blocks = rounds * growth / e.block_tokens + batch  # no more than these
    room, host_room = available(f, e, r), e.host - f.tally[r, HOST_PRIVATE]
    if blocks * e.steepest <= room and blocks * e.host_steepest <= host_room:
        return rounds
    low, high = 1, rounds
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(t, f, e, r, middle, room, host_room):
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def _fits(t: "Tables", f: Fleet, e: Engine, r: int, rounds: int, room: int, host_room: int) -> bool:
    """Whether that many rounds find memory."""
    more, host_more = 0, 0
    for i in range(f.tally[r, RUNNING]):
        if f.todo[r, i] == 0:
            length = length_of(f, r, i) + rounds * f.growth[r, i]
            more += own_bytes(t, f, e, r, i, length) - f.held[r, i]
            host_more += t.host_bytes[blocks_of(e, length)] - f.host_held[r, i]
    return more <= room and host_more <= host_room
