"""Memory of a replica: sequences' own caches, how they grow, and blocks that prompts share.

A shared block on the GPU is in use (pinned) or kept in case its prefix comes again. Kept blocks
give way, least recently used first, when their memory is needed. Other memories keep copies:
``tiers``.
"""

import numpy as np

from kvsim.serving.core import jit_function
from kvsim.serving.records import (
    GPU,
    HOST,
    LENGTH_ROUNDING,
    NEVER,
    NO_INDEX,
    POOLS,
    Limits,
    Pool,
    Replica,
    Request,
    Sequence,
    World,
)

SCATTER = 0x9E3779B1  # an odd number that spreads consecutive ids over the buckets


@jit_function
def bucket(pool: Pool, block: int) -> int:
    """Return where a block's chain begins."""
    return pool.first_bucket + (((block * SCATTER) >> 16) & pool.mask)


@jit_function
def find(world: World, pool: Pool, block: int) -> int:
    """Return the entry of a block, or NONE."""
    if pool.room == 0:
        return NO_INDEX
    at = int(world.buckets[bucket(pool, block)])
    while at != NO_INDEX and world.entries[at].block != block:
        at = world.entries[at].chain
    return at


@jit_function
def unlink(world: World, pool: Pool, at: int) -> None:
    """Take an entry out of the list of blocks without users."""
    entry = world.entries[at]
    if entry.older == NO_INDEX:
        pool.oldest = entry.newer
    else:
        world.entries[entry.older].newer = entry.newer
    if entry.newer == NO_INDEX:
        pool.newest = entry.older
    else:
        world.entries[entry.newer].older = entry.older
    pool.count -= 1


@jit_function
def append(world: World, pool: Pool, at: int) -> None:
    """Make an entry the most recently used of those without users."""
    entry = world.entries[at]
    entry.older, entry.newer = pool.newest, NO_INDEX
    if pool.newest == NO_INDEX:
        pool.oldest = at
    else:
        world.entries[pool.newest].newer = at
    pool.newest = at
    pool.count += 1


@jit_function
def insert(world: World, pool: Pool, block: int) -> int:
    """Make a new entry without users, in no list yet."""
    at = pool.free
    entry = world.entries[at]
    pool.free = entry.chain
    where = bucket(pool, block)
    entry.block, entry.users, entry.ready = block, 0, 0.0
    pool.stored += 1
    entry.chain = world.buckets[where]
    world.buckets[where] = at
    return at


@jit_function
def remove(world: World, pool: Pool, at: int) -> None:
    """Forget a block that is in the list of those without users."""
    unlink(world, pool, at)
    entry = world.entries[at]
    where = bucket(pool, entry.block)
    if world.buckets[where] == at:
        world.buckets[where] = entry.chain
    else:
        before = world.buckets[where]
        while world.entries[before].chain != at:
            before = world.entries[before].chain
        world.entries[before].chain = entry.chain
    entry.chain = pool.free
    pool.free = at
    pool.dropped += 1


@jit_function
def drop_oldest(world: World, pool: Pool) -> None:
    """Forget the block whose last use is longest ago."""
    remove(world, pool, pool.oldest)


@jit_function
def available(world: World, replica: Replica) -> int:
    """Return the GPU memory that is free, or would be without kept blocks. [B]"""
    return world.limits.gpu - replica.private - replica.pinned


@jit_function
def note_fill(world: World, replica: Replica) -> None:
    """Record how full the memory has ever been."""
    used = replica.private + replica.pinned + replica.cached
    replica.peak = max(replica.peak, used)
    replica.lowest = min(replica.lowest, world.limits.gpu - used)


@jit_function
def give_back(replica: Replica, size: int) -> None:
    """Free memory of a sequence's own cache. [B]"""
    replica.private -= size
    replica.freed += size


@jit_function
def make_host_room(world: World, replica: Replica, size: int) -> bool:
    """Drop blocks from host memory until that much is free; whether there can be. [B]"""
    free = world.limits.host_cache - replica.host_swapped
    if free < size:
        return False
    host = world.pools[POOLS * replica.index + HOST]
    while free - host.count * world.limits.unit_bytes < size:
        drop_oldest(world, host)
    return True


@jit_function
def make_room(world: World, replica: Replica, size: int) -> None:
    """Drop kept blocks, the least recently used first, until that much is free. [B]"""
    each = world.limits.prefix_bytes
    pool = world.pools[POOLS * replica.index + GPU]
    while replica.cached > 0 and available(world, replica) - replica.cached < size:
        drop_oldest(world, pool)
        replica.cached -= each
        replica.freed += each


@jit_function
def take(world: World, replica: Replica, size: int) -> None:
    """Occupy available memory for a sequence's own cache; kept blocks give way. [B]"""
    make_room(world, replica, size)
    replica.private += size
    replica.taken += size
    note_fill(world, replica)


@jit_function
def pin(world: World, replica: Replica, block: int) -> None:
    """Let one more running sequence use a shared block, which is on the GPU from now on."""
    each = world.limits.prefix_bytes
    pool = world.pools[POOLS * replica.index + GPU]
    found = find(world, pool, block)
    if found == NO_INDEX:
        make_room(world, replica, each)
        replica.taken += each
        found = insert(world, pool, block)
    elif world.entries[found].users == 0:
        unlink(world, pool, found)
        replica.cached -= each
    entry = world.entries[found]
    if entry.users == 0:
        replica.pinned += each
        note_fill(world, replica)
    entry.users += 1


@jit_function
def unpin(world: World, replica: Replica, block: int) -> None:
    """Let one sequence less use a block; without any it is kept, if it has arrived."""
    pool = world.pools[POOLS * replica.index + GPU]
    found = find(world, pool, block)
    world.entries[found].users -= 1
    if world.entries[found].users == 0:
        each = world.limits.prefix_bytes
        replica.pinned -= each
        append(world, pool, found)
        if world.entries[found].ready <= replica.clock:
            replica.cached += each
        else:  # it was still on its way here
            remove(world, pool, found)
            replica.freed += each


@jit_function
def remains(replica: Replica, request: Request) -> int:
    """KV blocks of a preempted sequence, from its first on, that nothing has overwritten.

    Free memory is used in the order it became free, and of a sequence its last blocks first.
    """
    if request.kept == 0:
        return 0
    gone = min(max(replica.taken - request.spot, 0), request.kept)
    return (request.kept - gone) * request.kept_blocks // request.kept


@jit_function
def reuse(world: World, replica: Replica, request: Request, blocks: int) -> int:
    """Take back what remains of a preempted sequence: its memory is no longer free. [B]"""
    if request.kept == 0:
        return 0
    size = blocks * request.kept // request.kept_blocks
    replica.freed -= size
    replica.private += size
    other = replica.wait_ends[0]
    while other != NO_INDEX:
        behind = world.requests[other]
        if behind.preempted == 0:  # of a class, preempted ones wait in front of all others
            behind = world.requests[replica.wait_ends[1 + behind.priority]]
        elif behind.kept > 0 and behind.spot > request.spot:
            behind.spot -= size
        other = behind.link
    request.kept = 0
    return size


@jit_function
def count_gpu_hits(world: World, replica: Replica, request: Request) -> int:
    """Count the leading prompt blocks that the replica's GPU holds now."""
    for k in range(request.blocks):
        found = find(world, world.pools[POOLS * replica.index], world.ids[request.first_block + k])
        if found == NO_INDEX or world.entries[found].ready > replica.clock:
            return k
    return int(request.blocks)


@jit_function
def count_blocks(limits: Limits, tokens: float) -> int:
    """Return the KV blocks of that many tokens."""
    return int(np.ceil(tokens / limits.block_tokens - LENGTH_ROUNDING))


@jit_function
def get_length(replica: Replica, sequence: Sequence) -> float:
    """Return the tokens cached of a decoding sequence. [tokens]"""
    return sequence.intercept + sequence.growth * replica.rounds


@jit_function
def get_own_bytes(world: World, sequence: Sequence, tokens: float) -> int:
    """Return the GPU cache of a sequence of some length, without the blocks it shares. [B]"""
    row = world.sizes[count_blocks(world.limits, tokens)]
    size = row.prompt if sequence.todo > 0 else row.gpu
    return max(size - sequence.shared * world.limits.prefix_bytes, 0)


@jit_function
def grow(world: World, replica: Replica, sequence: Sequence, tokens: float) -> bool:
    """Occupy the memory of a sequence of that length if there is enough."""
    more = get_own_bytes(world, sequence, tokens) - sequence.held
    host_more = world.sizes[count_blocks(world.limits, tokens)].host - sequence.host_held
    if more > available(world, replica) or replica.host_private + host_more > world.limits.host:
        return False
    take(world, replica, more)
    sequence.held += more
    sequence.brim = 0.0
    replica.host_private += host_more
    sequence.host_held += host_more
    return True


@jit_function
def bound_growth(world: World, replica: Replica, rounds: int) -> bool:
    """Return whether memory surely suffices for so many rounds of all decoding sequences."""
    limits, batch = world.limits, replica.running - replica.reading
    blocks = rounds * replica.growth / limits.block_tokens + batch
    free, host_free = available(world, replica), limits.host - replica.host_private
    return blocks * limits.steepest <= free and blocks * limits.host_steepest <= host_free


@jit_function
def check_growth(world: World, replica: Replica, rounds: int) -> bool:
    """Return whether memory suffices for so many rounds, sequence by sequence."""
    more, host_more = 0, 0
    for i in range(replica.first_sequence, replica.first_sequence + replica.running):
        sequence = world.sequences[i]
        if sequence.todo == 0:
            length = get_length(replica, sequence) + rounds * sequence.growth
            more += get_own_bytes(world, sequence, length) - sequence.held
            host_more += world.sizes[count_blocks(world.limits, length)].host - sequence.host_held
    host_free = world.limits.host - replica.host_private
    return more <= available(world, replica) and host_more <= host_free


@jit_function
def reserve_rounds(world: World, replica: Replica, rounds: int) -> tuple[int, int]:
    """Let all decoding sequences hold what they need after so many rounds.

    The memory itself is still to be taken: returns what the first round needs, and what all do. [B]
    """
    limits, first_more, more, context = world.limits, 0, 0, 0.0
    for i in range(replica.first_sequence, replica.first_sequence + replica.running):
        sequence = world.sequences[i]
        if sequence.todo > 0:
            continue
        now = get_length(replica, sequence)
        context += now
        length = now + rounds * sequence.growth
        if length <= sequence.brim:  # within the last block that it holds
            continue
        blocks = count_blocks(limits, length)
        last = max(world.sizes[blocks].gpu - sequence.shared * limits.prefix_bytes, 0)
        if not replica.grown:
            if rounds == 1:
                first_more += last - sequence.held
            elif now + sequence.growth > sequence.brim:
                first_more += get_own_bytes(world, sequence, now + sequence.growth) - sequence.held
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
    """Sum up the batch again, and find what comes first in it."""
    replica.context = replica.growth = 0.0
    replica.end = replica.first_reader = NEVER
    for i in range(replica.running):
        sequence = world.sequences[replica.first_sequence + i]
        if sequence.todo == 0:
            replica.context += get_length(replica, sequence)
            replica.growth += sequence.growth
            replica.end = min(replica.end, sequence.finish)
        elif replica.first_reader == NEVER:
            replica.first_reader = i
