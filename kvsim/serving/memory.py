"""Memory of a replica: KV caches of running sequences, and prefix blocks that requests share.

As in vLLM, a full block with known tokens becomes shareable as soon as the pass that computes it is
scheduled. A block on the GPU is either pinned by running sequences or kept for reuse; kept blocks
are evicted in LRU order when memory is needed. Two sequences that compute the same tokens at the
same time have a copy each. Consecutive blocks that are used and evicted together share an entry.
Copies in host memory or on drives are handled in ``tiers``.
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
    """Return the hash bucket of a block.

    Parameters
    ----------
    pool : blocks in one memory of a replica.
    block : id of the block.

    Returns
    -------
    int
        Index into the buckets of the simulation.
    """
    return pool.first_bucket + (((block * SCATTER) >> 16) & pool.mask)


@jit_function
def locate(world: World, request: Request, index: int) -> tuple[int, int]:
    """Return the run that contains a KV block of a request, and the block's position in it.

    Parameters
    ----------
    world : state of the simulation.
    request : the request.
    index : index of the KV block, among those that its blocks in the trace cover.

    Returns
    -------
    tuple of int
        Id of the run, and the position of the KV block in it.
    """
    each = world.limits.parts
    place = world.places[request.first_block + index // each]
    return int(place.block), int(place.before + index % each)


@jit_function
def find(world: World, pool: Pool, block: int, part: int = 0) -> int:
    """Return the entry that holds a part of a run, the oldest of several copies.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    pool : blocks in one memory of a replica.
    block : id of the run.
    part : which of its KV blocks; 0 in memories that keep whole units.

    Returns
    -------
    int
        Index of the entry; NO_INDEX if the pool does not hold the part.
    """
    found = NO_INDEX
    if pool.room == 0:
        return found
    at = int(world.buckets[bucket(pool, block)])
    while at != NO_INDEX:
        entry = world.entries[at]
        if entry.block == block and entry.first <= part < entry.first + entry.parts:
            found = at
        at = entry.chain
    return found


@jit_function
def find_own(world: World, pool: Pool, place: tuple[int, int], owner: int) -> int:
    """Return the entry of a KV block whose content a given request computed last.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    pool : blocks in one memory of a replica.
    place : id of the run, and which of its KV blocks.
    owner : the request.

    Returns
    -------
    int
        Index of the entry, or NO_INDEX.
    """
    block, part = place
    at = int(world.buckets[bucket(pool, block)])
    while at != NO_INDEX:
        entry = world.entries[at]
        own = entry.owner == owner and entry.block == block
        if own and entry.first <= part < entry.first + entry.parts:
            return at
        at = entry.chain
    return at


@jit_function
def unlink(world: World, pool: Pool, at: int) -> None:
    """Remove an entry from the LRU list of unused blocks.

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
    """Make an entry the most recently used of the unused ones.

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
def link_before(world: World, pool: Pool, at: int, next_one: int) -> None:
    """Put an unused entry directly before another one in the LRU list.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    pool : blocks in one memory of a replica.
    at : index of the entry.
    next_one : index of the other.
    """
    entry, other = world.entries[at], world.entries[next_one]
    entry.older, entry.newer = other.older, next_one
    if other.older == NO_INDEX:
        pool.oldest = at
    else:
        world.entries[other.older].newer = at
    other.older = at
    pool.count += 1


@jit_function
def make_entry(world: World, pool: Pool, block: int) -> int:
    """Take a free or new entry, which is not in the LRU list or the hash table yet.

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
    if at == NO_INDEX:
        at = pool.first + pool.made
        pool.made += 1
    else:
        pool.free = world.entries[at].chain
    entry = world.entries[at]
    entry.block, entry.users, entry.ready = block, 0, 0.0
    entry.first, entry.parts, entry.owner = 0, 1, NO_INDEX
    entry.chain = NO_INDEX
    pool.stored += 1
    return at


@jit_function
def insert(world: World, pool: Pool, block: int) -> int:
    """Add an entry to the hash table; it has no users and is not in the LRU list yet.

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
    at, where = make_entry(world, pool, block), bucket(pool, block)
    world.entries[at].chain = world.buckets[where]
    world.buckets[where] = at
    return at


@jit_function
def remove(world: World, pool: Pool, at: int) -> None:
    """Evict an unused entry.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    pool : blocks in one memory of a replica.
    at : index of the entry.
    """
    unlink(world, pool, at)
    entry = world.entries[at]
    if entry.block >= 0:  # else nothing finds it by its name
        where = bucket(pool, entry.block)
        if world.buckets[where] == at:
            world.buckets[where] = entry.chain
        else:
            before = world.buckets[where]
            while world.entries[before].chain != at:
                before = world.entries[before].chain
            world.entries[before].chain = entry.chain
    entry.block = NO_INDEX
    entry.chain = pool.free
    pool.free = at
    pool.dropped += 1


@jit_function
def drop_oldest(world: World, pool: Pool) -> None:
    """Evict the least recently used entry.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    pool : blocks in one memory of a replica.
    """
    remove(world, pool, pool.oldest)


@jit_function
def available(world: World, replica: Replica) -> int:
    """Return the GPU memory that is free or could be freed by evicting unused blocks. [B]

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.

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
def make_host_room(world: World, replica: Replica, size: int) -> bool:
    """Evict blocks from host memory until enough is free.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.
    size : memory that is needed. [B]

    Returns
    -------
    bool
        Whether that much can be freed; if not, nothing is evicted.
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
    """Evict unused blocks from the GPU, in LRU order, until enough memory is free.

    The last blocks of an entry are evicted first, as a prefix remains usable without them.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.
    size : memory that is needed. [B]
    """
    each = world.limits.part_bytes
    pool = world.pools[POOLS * replica.index + GPU]
    missing = size - available(world, replica) + replica.cached - replica.late_kept
    while replica.cached > 0 and missing > 0:
        entry = world.entries[pool.oldest]
        parts = min((missing + each - 1) // each, entry.parts)
        entry.parts -= parts
        replica.cached -= parts * each
        missing -= parts * each
        if entry.parts == 0:
            remove(world, pool, pool.oldest)


@jit_function
def take(world: World, replica: Replica, size: int) -> None:
    """Allocate memory for the private cache of a sequence, evicting unused blocks if necessary.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.
    size : memory of each GPU, which must be available. [B]
    """
    if replica.cached > 0:
        make_room(world, replica, size)
    replica.private += size
    note_fill(world, replica)


@jit_function
def split(world: World, pool: Pool, at: int, parts: int) -> None:
    """Split an entry in two that have the same users and are evicted one after the other.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    pool : blocks in one memory of a replica.
    at : index of the entry, which keeps its first parts.
    parts : how many it keeps.
    """
    other = make_entry(world, pool, world.entries[at].block)
    entry, rest = world.entries[at], world.entries[other]
    rest.first, rest.parts = entry.first + parts, entry.parts - parts
    rest.users, rest.ready, rest.owner = entry.users, entry.ready, entry.owner
    entry.parts = parts
    if entry.block >= 0:  # copies are found by their age
        rest.chain, entry.chain = entry.chain, other
    if entry.users == 0:
        link_before(world, pool, other, at)


@jit_function
def put_by(world: World, replica: Replica, at: int) -> None:
    """Append an unused entry to the LRU list, before those not yet known to be free.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that owns the memory.
    at : index of the entry.
    """
    pool = world.pools[POOLS * replica.index + GPU]
    if replica.late_entry == NO_INDEX:
        append(world, pool, at)
    else:
        link_before(world, pool, at, replica.late_entry)
    replica.cached += world.entries[at].parts * world.limits.part_bytes


@jit_function
def pin(world: World, replica: Replica, at: int, span: tuple[int, int]) -> None:
    """Mark KV blocks of an entry as used by one more running request, so that they are not evicted.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.
    at : index of the entry.
    span : first of the entry's blocks that is used, and their number; earlier blocks may be taken
        from an older copy.
    """
    part, parts = span
    pool, before = world.pools[POOLS * replica.index + GPU], part - world.entries[at].first
    if before > 0:
        split(world, pool, at, before)
        if at == replica.late_entry:
            replica.late_entry = world.entries[at].chain
        at = world.entries[at].chain
    entry = world.entries[at]
    if parts < entry.parts:
        split(world, pool, at, parts)
        if at == replica.late_entry:
            replica.late_entry = entry.older
    if entry.users == 0:
        if at == replica.late_entry:
            replica.late_entry = entry.newer
        unlink(world, pool, at)
        replica.cached -= parts * world.limits.part_bytes
        replica.pinned += parts * world.limits.part_bytes
        note_fill(world, replica)
    entry.users += 1


@jit_function
def unpin(world: World, replica: Replica, at: int) -> None:
    """Mark an entry as used by one request fewer; when no request uses it, it can be evicted.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.
    at : index of the entry.
    """
    entry = world.entries[at]
    entry.users -= 1
    if entry.users == 0:
        size = entry.parts * world.limits.part_bytes
        replica.pinned -= size
        put_by(world, replica, at)
        if entry.ready > replica.clock:  # it was still on its way here
            replica.cached -= size
            remove(world, world.pools[POOLS * replica.index + GPU], at)


@jit_function
def pin_found(world: World, replica: Replica, request: Request, count: int) -> None:
    """Use the leading KV blocks of a request that the GPU holds.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that owns the memory.
    request : the request.
    count : number of KV blocks, all of which are found.
    """
    pool, j = world.pools[POOLS * replica.index + GPU], 0
    while j < count:
        run, part = locate(world, request, j)
        at = find(world, pool, run, part)
        parts = min(world.entries[at].first + world.entries[at].parts - part, count - j)
        pin(world, replica, at, (part, parts))
        j += parts


@jit_function
def share(world: World, replica: Replica, sequence: Sequence, tokens: int) -> None:
    """Convert full private blocks of a sequence to shared ones.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the request.
    sequence : its entry in the batch.
    tokens : its length. [tokens]
    """
    limits, request = world.limits, world.requests[sequence.request]
    each, pool = limits.parts, world.pools[POOLS * replica.index + GPU]
    last = min(tokens // limits.block_tokens, request.blocks)
    while True:
        j = sequence.named
        if j == sequence.load_from and sequence.load_to > j:
            j = sequence.named = sequence.load_to
        if j >= last:
            return
        until = min(last, j - j % each + world.places[request.first_block + j // each].left)
        if j < sequence.load_from:
            until = min(until, sequence.load_from)
        parts = min(until - j, sequence.held // limits.part_bytes)
        if parts <= 0:
            return
        run, part = locate(world, request, j)
        at = NO_INDEX
        if part > 0:
            at = find_own(world, pool, (run, part - 1), sequence.request)
        # a copy of the same tokens is older, unless this one is an entry of its own
        if (
            at != NO_INDEX
            and world.entries[at].users == 1
            and world.entries[at].first + world.entries[at].parts == part
            and find(world, pool, run, part) == NO_INDEX
        ):
            world.entries[at].parts += parts
        else:
            entry = world.entries[insert(world, pool, run)]
            entry.first, entry.parts, entry.owner, entry.users = part, parts, sequence.request, 1
        size = parts * limits.part_bytes
        sequence.held -= size
        replica.private -= size
        replica.pinned += size
        sequence.shared += parts
        sequence.named += parts


@jit_function
def keep(world: World, replica: Replica, sequence: Sequence, tokens: int) -> int:
    """Keep the KV blocks of a finished or preempted sequence in the cache, shared and private ones.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    sequence : the sequence, a row of the batch.
    tokens : of it that the engine knows. [tokens]

    Returns
    -------
    int
        Entry of the tokens that only this request has, or NO_INDEX.
    """
    limits, request, own = world.limits, world.requests[sequence.request], NO_INDEX
    pool = world.pools[POOLS * replica.index + GPU]
    share(world, replica, sequence, tokens)
    if sequence.named >= request.blocks:
        parts = tokens // limits.block_tokens - sequence.named
        parts = min(parts, sequence.held // limits.part_bytes)
        if parts > 0:
            own = make_entry(world, pool, NO_INDEX - 1 - sequence.request)
            world.entries[own].parts = parts
            put_by(world, replica, own)
    replica.private -= sequence.held
    j = sequence.named
    if sequence.load_to > j:
        j = sequence.load_to
    while j > 0:  # the end of a prefix is dropped first
        if sequence.load_from >= sequence.named and j == sequence.load_from:
            j = sequence.named
            if j == 0:
                break
        run, part = locate(world, request, j - 1)
        found = j <= sequence.found or (sequence.load_from < j <= sequence.load_to)
        if found:
            at = find(world, pool, run, part)
        else:
            at = find_own(world, pool, (run, part), sequence.request)
        j -= part + 1 - world.entries[at].first
        unpin(world, replica, at)
    return own


@jit_function
def take_back(world: World, replica: Replica, request: Request, parts: int) -> int:
    """Reuse the remaining KV blocks that only a preempted request has.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    request : the request.
    parts : leading KV blocks of them that are used.

    Returns
    -------
    int
        Their memory, which is the sequence's own from now on. [B]
    """
    if parts == 0:
        return 0
    pool, size = world.pools[POOLS * replica.index + GPU], parts * world.limits.part_bytes
    entry = world.entries[request.kept]
    entry.parts -= parts
    replica.cached -= size
    replica.private += size
    if entry.parts == 0:
        remove(world, pool, request.kept)
    return size


@jit_function
def count_own(world: World, request: Request, index: int) -> int:
    """Count the remaining KV blocks that only a preempted request has.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    request : the request.
    index : its row.

    Returns
    -------
    int
        Number of KV blocks.
    """
    if request.kept == NO_INDEX or world.entries[request.kept].block != NO_INDEX - 1 - index:
        return 0
    return int(world.entries[request.kept].parts)


@jit_function
def count_found(world: World, replica: Replica, request: Request, most: int) -> tuple[int, int]:
    """Count the leading KV blocks of a request on the replica's GPU.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica whose GPU is searched.
    request : the request.
    most : KV blocks that are looked for.

    Returns
    -------
    tuple of int
        Number of KV blocks, and of them those without users.
    """
    pool = world.pools[POOLS * replica.index + GPU]
    j, unused, last = 0, 0, min(int(request.blocks), most)
    while j < last:
        run, part = locate(world, request, j)
        at = find(world, pool, run, part)
        if at == NO_INDEX or world.entries[at].ready > replica.clock:
            break
        parts = min(world.entries[at].first + world.entries[at].parts - part, last - j)
        unused += parts * (world.entries[at].users == 0)
        j += parts
    return j, unused


@jit_function
def count_gpu_hits(world: World, replica: Replica, request: Request) -> int:
    """Count the leading KV blocks of a request that the replica's GPU holds now.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica whose GPU is searched.
    request : the request.

    Returns
    -------
    int
        Number of KV blocks.
    """
    return count_found(world, replica, request, int(request.blocks))[0]


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
    return max(size - sequence.shared * world.limits.part_bytes, 0)


@jit_function
def grow(world: World, replica: Replica, sequence: Sequence, tokens: float) -> bool:
    """Allocate memory for a sequence to grow to a length, if there is enough.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the request.
    sequence : its entry in the batch.
    tokens : the new length. [tokens]

    Returns
    -------
    bool
        Whether there is enough; if not, nothing is allocated.
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
def promised(world: World, replica: Replica) -> int:
    """Return the memory that running sequences will need until their answers are complete. [B]

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the batch.
    """
    total = 0
    for i in range(replica.running):
        sequence = world.sequences[replica.first_sequence + i]
        request = world.requests[sequence.request]
        whole = world.sizes[count_blocks(world.limits, request.prompt + request.generate)].gpu
        own = whole - sequence.shared * world.limits.part_bytes
        total += max(own - sequence.held, 0)
    return total


@jit_function
def bound_growth(world: World, replica: Replica, rounds: int) -> bool:
    """Return whether memory suffices for some rounds by a quick upper bound, without a loop.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica of the batch.
    rounds : rounds of all decoding sequences. [rounds]

    Returns
    -------
    bool
        True if it does; False if the bound does not tell.
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
        length = max(now + rounds * sequence.growth, sequence.brim)
        blocks = count_blocks(limits, length)
        last = max(world.sizes[blocks].gpu - sequence.shared * limits.part_bytes, 0)
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
