"""How the sequences of a batch grow, and the memory that takes."""

import numpy as np

from kvsim.serving.core import jit_function
from kvsim.serving.memory import (
    available,
    take,
)
from kvsim.serving.records import NEVER, ROUNDING, Limits, Replica, Sequence, World


@jit_function
def blocks_of(limits: Limits, tokens: float) -> int:
    """KV blocks of that many tokens."""
    return int(np.ceil(tokens / limits.block_tokens - ROUNDING))


@jit_function
def length_of(replica: Replica, sequence: Sequence) -> float:
    """Tokens cached of a decoding sequence. [tokens]"""
    return sequence.intercept + sequence.growth * replica.rounds


@jit_function
def own_bytes(world: World, sequence: Sequence, tokens: float) -> int:
    """GPU cache of a sequence of some length, without the blocks it shares. [B]"""
    row = world.sizes[blocks_of(world.limits, tokens)]
    size = row.prompt if sequence.todo > 0 else row.gpu
    return max(size - sequence.shared * world.limits.prefix_bytes, 0)


@jit_function
def grow(world: World, replica: Replica, sequence: Sequence, tokens: float) -> bool:
    """Occupy the memory of a sequence of that length if there is enough."""
    more = own_bytes(world, sequence, tokens) - sequence.held
    host_more = world.sizes[blocks_of(world.limits, tokens)].host - sequence.host_held
    if more > available(world, replica) or replica.host_private + host_more > world.limits.host:
        return False
    take(world, replica, more)
    sequence.held += more
    sequence.brim = 0.0
    replica.host_private += host_more
    sequence.host_held += host_more
    return True


@jit_function
def all_surely_grow(world: World, replica: Replica, rounds: int) -> bool:
    """Whether memory suffices for so many rounds of all decoding sequences, by a quick bound."""
    limits, batch = world.limits, replica.running - replica.reading
    blocks = rounds * replica.growth / limits.block_tokens + batch
    free, host_free = available(world, replica), limits.host - replica.host_private
    return blocks * limits.steepest <= free and blocks * limits.host_steepest <= host_free


@jit_function
def all_grow(world: World, replica: Replica, rounds: int) -> bool:
    """The same, sequence by sequence."""
    more, host_more = 0, 0
    for i in range(replica.first_sequence, replica.first_sequence + replica.running):
        sequence = world.sequences[i]
        if sequence.todo == 0:
            length = length_of(replica, sequence) + rounds * sequence.growth
            more += own_bytes(world, sequence, length) - sequence.held
            host_more += world.sizes[blocks_of(world.limits, length)].host - sequence.host_held
    host_free = world.limits.host - replica.host_private
    return more <= available(world, replica) and host_more <= host_free


@jit_function
def hold_rounds(world: World, replica: Replica, rounds: int) -> tuple[int, int]:
    """Let all decoding sequences hold what they need after so many rounds.

    The memory itself is still to be taken: returns what the first round needs, and what all do. [B]
    """
    limits, first_more, more, context = world.limits, 0, 0, 0.0
    for i in range(replica.first_sequence, replica.first_sequence + replica.running):
        sequence = world.sequences[i]
        if sequence.todo > 0:
            continue
        now = length_of(replica, sequence)
        context += now
        length = now + rounds * sequence.growth
        if length <= sequence.brim:  # within the last block that it holds
            continue
        blocks = blocks_of(limits, length)
        last = max(world.sizes[blocks].gpu - sequence.shared * limits.prefix_bytes, 0)
        if not replica.grown:
            if rounds == 1:
                first_more += last - sequence.held
            elif now + sequence.growth > sequence.brim:
                first_more += own_bytes(world, sequence, now + sequence.growth) - sequence.held
        more += last - sequence.held
        sequence.held = last
        sequence.brim = float(blocks * limits.block_tokens)
        if limits.host_steepest > 0:
            replica.host_private += world.sizes[blocks].host - sequence.host_held
            sequence.host_held = world.sizes[blocks].host
    replica.context = context
    return first_more, more


@jit_function
def recount(world: World, replica: Replica) -> None:
    """Sums over the batch, and what comes first in it."""
    replica.context = replica.growth = 0.0
    replica.end = replica.first_reader = NEVER
    for i in range(replica.running):
        sequence = world.sequences[replica.first_sequence + i]
        if sequence.todo == 0:
            replica.context += length_of(replica, sequence)
            replica.growth += sequence.growth
            replica.end = min(replica.end, sequence.finish)
        elif replica.first_reader == NEVER:
            replica.first_reader = i
