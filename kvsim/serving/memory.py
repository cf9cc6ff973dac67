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
    """Return the bucket in which a block's chain begins.

    Parameters
    ----------
    pool : blocks in one memory of a replica.
    block : id of the block.

    Returns
    -------
    int
        Index into the world's buckets.
    """
    return pool.first_bucket + (((block * SCATTER) >> 16) & pool.mask)


@jit_function
def find(world: World, pool: Pool, block: int) -> int:
    """Return the entry of a block.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    pool : blocks in one memory of a replica.
    block : id of the block.

    Returns
    -------
    int
        Index of the entry; NO_INDEX if the pool does not hold the block.
    """
    if pool.room == 0:
        return NO_INDEX
    at = int(world.buckets[bucket(pool, block)])
    while at != NO_INDEX and world.entries[at].block != block:
        at = world.entries[at].chain
    return at


@jit_function
def unlink(world: World, pool: Pool, at: int) -> None:
    """Remove an entry from the list of blocks without users.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    pool : blocks in one memory of a replica.
    at : index of the entry.
    """
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
    """Make an entry the most recently used of those without users.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    pool : blocks in one memory of a replica.
    at : index of the entry.
    """
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
    """Add an entry without users, in no list yet.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    pool : blocks in one memory of a replica.
    block : id of the block.

    Returns
    -------
    int
        Index of the entry.
    """
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
    """Forget a block that is in the list of those without users.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    pool : blocks in one memory of a replica.
    at : index of the entry.
    """
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
    """Forget the least recently used block.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    pool : blocks in one memory of a replica.
    """
    remove(world, pool, pool.oldest)


@jit_function
def available(world: World, replica: Replica) -> int:
    """Return the GPU memory that is free, or would be without kept blocks. [B]

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that owns the memory.

    Returns
    -------
    int
        Memory of each GPU. [B]
    """
    return world.limits.gpu - replica.private - replica.pinned - replica.late


@jit_function
def note_fill(world: World, replica: Replica) -> None:
    """Record the fill of the memory if it is the highest so far.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that owns the memory.
    """
    used = replica.private + replica.pinned + replica.cached
    replica.peak = max(replica.peak, used)
    replica.lowest = min(replica.lowest, world.limits.gpu - used)


@jit_function
def give_back(replica: Replica, size: int) -> None:
    """Free memory of a sequence's own cache.

    Parameters
    ----------
    replica : the replica that owns the memory.
    size : memory of each GPU. [B]
    """
    replica.private -= size
    replica.freed += size


@jit_function
def make_host_room(world: World, replica: Replica, size: int) -> bool:
    """Drop blocks from host memory until some of it is free.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that owns the memory.
    size : memory that is needed. [B]

    Returns
    -------
    bool
        Whether that much can be freed; nothing is dropped otherwise.
    """
    free = world.limits.host_cache - replica.host_swapped
    if free < size:
        return False
    host = world.pools[POOLS * replica.index + HOST]
    while free - host.count * world.limits.unit_bytes < size:
        drop_oldest(world, host)
    return True


@jit_function
def make_room(world: World, replica: Replica, size: int) -> None:
    """Drop kept blocks, the least recently used first, until some memory is free.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that owns the memory.
    size : memory that is needed. [B]
    """
    each = world.limits.prefix_bytes
    pool = world.pools[POOLS * replica.index + GPU]
    while replica.cached > 0 and available(world, replica) - replica.cached < size:
        drop_oldest(world, pool)
        replica.cached -= each
        replica.freed += each


@jit_function
def take(world: World, replica: Replica, size: int) -> None:
    """Allocate memory for a sequence's own cache, dropping kept blocks where needed.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that owns the memory.
    size : memory of each GPU, which has to be available. [B]
    """
    make_room(world, replica, size)
    replica.private += size
    replica.taken += size
    note_fill(world, replica)


@jit_function
def pin(world: World, replica: Replica, block: int) -> None:
    """Add a user to a shared block, which is on the GPU from now on.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that owns the memory.
    block : id of the block.
    """
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
    """Remove a user from a shared block; without any it is kept, if it has arrived.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that owns the memory.
    block : id of the block.
    """
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
    """Return the leading KV blocks of a preempted sequence that nothing has overwritten.

    Free memory is used in the order it became free, and of a sequence its last blocks first.

    Parameters
    ----------
    replica : the replica that the request is on.
    request : the request.

    Returns
    -------
    int
        Number of blocks.
    """
    if request.kept == 0:
        return 0
    gone = min(max(replica.taken - request.spot, 0), request.kept)
    return (request.kept - gone) * request.kept_blocks // request.kept


@jit_function
def reuse(world: World, replica: Replica, request: Request, blocks: int) -> int:
    """Allocate again what remains of a preempted sequence.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    request : the request.
    blocks : leading blocks that are taken back.

    Returns
    -------
    int
        Their memory, which is no longer free. [B]
    """
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
    """Count the leading prompt blocks that the replica's GPU holds now.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica whose GPU is searched.
    request : the request.

    Returns
    -------
    int
        Number of blocks of the trace.
    """
    for k in range(request.blocks):
        found = find(world, world.pools[POOLS * replica.index], world.ids[request.first_block + k])
        if found == NO_INDEX or world.entries[found].ready > replica.clock:
            return k
    return int(request.blocks)


@jit_function
def count_blocks(limits: Limits, tokens: float) -> int:
    """Return the number of KV blocks that some tokens fill.

    Parameters
    ----------
    limits : the replica's limits.
    tokens : length of a sequence. [tokens]

    Returns
    -------
    int
        Number of blocks, the last of which may be partly filled.
    """
    return int(np.ceil(tokens / limits.block_tokens - LENGTH_ROUNDING))


@jit_function
def get_length(replica: Replica, sequence: Sequence) -> float:
    """Return the cached tokens of a decoding sequence.

    Parameters
    ----------
    replica : the replica that the request is on.
    sequence : the sequence, a row of the batch.

    Returns
    -------
    float
        Its length at the replica's current round. [tokens]
    """
    return sequence.intercept + sequence.growth * replica.rounds


@jit_function
def get_own_bytes(world: World, sequence: Sequence, tokens: float) -> int:
    """Return the GPU memory of a sequence without the blocks that it shares.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    sequence : the sequence, a row of the batch.
    tokens : its length. [tokens]

    Returns
    -------
    int
        Memory of each GPU. [B]
    """
    row = world.sizes[count_blocks(world.limits, tokens)]
    size = row.prompt if sequence.todo > 0 else row.gpu
    return max(size - sequence.shared * world.limits.prefix_bytes, 0)


@jit_function
def grow(world: World, replica: Replica, sequence: Sequence, tokens: float) -> bool:
    """Allocate the memory of a sequence at a greater length if there is enough.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    sequence : the sequence, a row of the batch.
    tokens : its new length. [tokens]

    Returns
    -------
    bool
        Whether there is enough; nothing is allocated otherwise.
    """
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
    """Return whether memory surely suffices for some rounds, by a bound that takes no loop.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the batch.
    rounds : rounds of all decoding sequences. [rounds]

    Returns
    -------
    bool
        True if it surely does; False leaves it open.
    """
    limits, batch = world.limits, replica.running - replica.reading
    blocks = rounds * replica.growth / limits.block_tokens + batch
    free, host_free = available(world, replica), limits.host - replica.host_private
    return blocks * limits.steepest <= free and blocks * limits.host_steepest <= host_free


@jit_function
def check_growth(world: World, replica: Replica, rounds: int) -> bool:
    """Return whether memory suffices for some rounds, sequence by sequence.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the batch.
    rounds : rounds of all decoding sequences. [rounds]

    Returns
    -------
    bool
        Whether GPU and host memory suffice.
    """
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
    """Assign decoding sequences the memory that they need after some rounds.

    The memory itself is still to be allocated with ``take``.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the batch.
    rounds : rounds of all decoding sequences. [rounds]

    Returns
    -------
    tuple of int
        Memory that the first round needs, and that all rounds need. [B]
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
    """Recompute the sums over the batch, its next completion and its first unread prompt.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the batch.
    """
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
