"""What a run leaves behind besides its requests: a timeline and the times between tokens."""

from typing import NamedTuple

import numpy as np

from kvsim.serving.core import jit_function
from kvsim.serving.records import BINS, FINEST_GAP, GAP_RATIO, GAPS, Bin, Replica, World
from kvsim.serving.tables import COSTS, RESOURCES

GAP_EDGES = FINEST_GAP * GAP_RATIO ** np.arange(1.0, GAPS + 1)  # where each bin ends [s]
CELL_BITS = 47  # of a number's bits, those below its exponent and the next five: a cell is 2-3 %
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
    """Bin of a time between tokens: quicker than a logarithm, with the same result."""
    cell = int(np.float64(gap).view(np.int64) >> CELL_BITS) - FIRST_CELL
    at = int(LOWEST_BIN[min(max(cell, 0), LOWEST_BIN.size - 1)])
    while at < GAPS - 1 and gap >= GAP_EDGES[at]:
        at += 1
    return at


@jit_function
def note_gaps(world: World, replica: Replica, gaps: tuple[float, float], tokens: int) -> None:
    """Tokens by the time since the one before, which moved evenly from first to last. [s]"""
    if tokens == 0:
        return
    first, last = gaps
    low = gap_bin(min(first, last))
    high = low if first == last else gap_bin(max(first, last))
    for i in range(replica.index * GAPS + low, replica.index * GAPS + high + 1):
        world.gaps[i] += tokens / (high - low + 1)


@jit_function
def clear(note: Bin) -> None:
    """Nothing happened in this stretch of time."""
    note.seconds = note.running = note.waiting = note.cache = 0.0
    note.context = note.decoded = note.prompt = note.rounds = 0.0
    for k in range(len(RESOURCES)):
        note.use[k] = 0.0


@jit_function
def widen(world: World, replica: Replica) -> None:
    """Bins twice as wide, two into one."""
    first, half = replica.index * BINS, BINS // 2
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
        for k in range(len(RESOURCES)):
            into.use[k] = one.use[k] + other.use[k]
    for i in range(half, BINS):
        clear(world.bins[first + i])
    replica.bin_width *= 2


@jit_function
def note_span(world: World, replica: Replica, span: Span) -> None:
    """Spread a span over the bins of the timeline it covers; the pass's costs start anew."""
    begin, end = replica.clock, replica.clock + span.seconds
    while end > BINS * replica.bin_width:
        widen(world, replica)
    width = replica.bin_width
    cache = replica.private + replica.pinned + replica.cached
    first, last = int(begin / width), min(int(end / width), BINS - 1)
    for i in range(first, last + 1):
        here = span.seconds
        if first < last:
            here = min(end, (i + 1) * width) - max(begin, i * width)
        share = here / span.seconds if span.seconds > 0 else 1.0
        note = world.bins[replica.index * BINS + i]
        note.seconds += here
        note.running += here * span.batch
        note.waiting += here * replica.waiting
        note.cache += here * cache
        note.context += here * span.context
        note.decoded += share * span.batch * span.rounds
        note.prompt += share * replica.prompt_tokens
        note.rounds += share * span.rounds
        for k in range(len(RESOURCES)):
            note.use[k] += share * replica.cost[k + 1]
    for k in range(len(COSTS)):
        replica.cost[k] = 0.0
