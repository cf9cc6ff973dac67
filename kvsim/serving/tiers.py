"""Shared blocks in other memories: the host's, an NVMe drive, and a store that all replicas share.

Blocks that a prompt was read into are stored, and blocks that a prompt needs are loaded, in units
of the connector and while passes go on. Each link carries what it is given in order.
"""

from kvsim.serving.compiled import compiled, compiled_unless
from kvsim.serving.memory import append, find, hits_of, insert, remove, unlink
from kvsim.serving.records import (
    D2H,
    HOST,
    NIC_OUT,
    NONE,
    NVME,
    NVME_READ,
    NVME_WRITE,
    POOLS,
    REMOTE,
    Pool,
    Replica,
    Request,
    TieredWorld,
    World,
)
<<<<<<< HEAD
=======
from kvsim.serving.rules import FASTER, LOAD, RECOMPUTE
from kvsim.serving.tables import COSTS, Tables

BEHIND = 2  # who waits for work that is put before theirs: those there, and as many still to come


class Plan(NamedTuple):
    """Stored units of a prompt that are to be loaded, and what is around them."""

    request: int
    begins: int  # prompt tokens that are on the GPU [tokens]
    length: int  # all of its tokens [tokens]
    first: int
    last: int
>>>>>>> 1f9f4b1 (Recompute or load counts what the other requests on a replica lose; benchmarks/tiers.py measures it)


@compiled
def pool_of(world: TieredWorld, replica: Replica, memory: int) -> Pool:
    """A replica's pool in one memory; the remote one is everybody's."""
    if memory == REMOTE:
        return world.pools[world.pools.size - 1]
    return world.pools[POOLS * replica.index + memory]


@compiled
def holds(world: TieredWorld, replica: Replica, memory: int, unit: int) -> int:
    """Entry of a unit that is in a memory and not forgotten, or NONE."""
    pool = pool_of(world, replica, memory)
    at = find(world, pool, unit)
    if at != NONE and replica.clock - world.entries[at].used > world.limits.ttl:
        remove(world, pool, at)
        return NONE
    return at


@compiled
def source_of(world: TieredWorld, replica: Replica, unit: int) -> int:
    """The nearest memory that a unit can be loaded from now, or NONE."""
    for memory in range(HOST, REMOTE + 1):
        at = holds(world, replica, memory, unit)
        if at != NONE and world.entries[at].ready <= replica.clock:
            return memory
    return NONE


@compiled_unless(hits_of)
def found_blocks(world: TieredWorld, replica: Replica, request: Request) -> int:
    """Leading prompt blocks that the replica's own memories hold now."""
    blocks = hits_of(world, replica, request)
    while blocks < request.blocks:
        j = blocks // world.limits.unit
        if (j + 1) * world.limits.unit > request.blocks:
            break
        unit = world.ids[request.first_block + (j + 1) * world.limits.unit - 1]
        source = source_of(world, replica, unit)
        if source in (NONE, REMOTE):
            break
        blocks = (j + 1) * world.limits.unit
    return blocks


@compiled
def passed(world: TieredWorld, replica: Replica, link: int, size: float) -> float:
    """When bytes that are put on a link now would have passed it. [s]"""
    if size == 0:
        return replica.clock
    begin = max(replica.clock, replica.link_free[link])
    return float(begin + size / world.links[link])


@compiled
def transfer(world: TieredWorld, replica: Replica, link: int, size: float) -> float:
    """Put bytes on a link behind those before; when they have passed. [s]"""
    if size == 0:
        return replica.clock
    replica.link_free[link] = passed(world, replica, link, size)
    replica.link_bytes[link] += size
    if link in (NVME_READ, NVME_WRITE):
        replica.link_free[NVME_READ] = replica.link_free[NVME_WRITE] = replica.link_free[link]
    return float(replica.link_free[link])


@compiled
def put(world: TieredWorld, replica: Replica, what: tuple[int, int], ready: float) -> None:
    """A unit becomes the most recently used of a memory; it is there once it has arrived."""
    memory, unit = what
    pool = pool_of(world, replica, memory)
    limit = pool.limit
    if memory == HOST and world.limits.unit_bytes > 0:
        free = world.limits.host_cache - replica.host_swapped
        limit = min(limit, free // world.limits.unit_bytes)
    if limit == 0:
        return
    at = find(world, pool, unit)
    if at == NONE:
        while pool.count >= limit:
            remove(world, pool, pool.oldest)
        at = insert(world, pool, unit)
        world.entries[at].ready = ready
    else:
        unlink(world, pool, at)
    world.entries[at].used = replica.clock
    append(world, pool, at)


@compiled
def store_nowhere(world: World, replica: Replica, request: Request) -> None:
    """Only the GPU keeps blocks."""


@compiled_unless(store_nowhere)
def store(world: TieredWorld, replica: Replica, request: Request) -> None:
    """Copy the full units of a prompt on the GPU to the memories that do not hold them."""
    units, each = request.blocks // world.limits.unit, float(world.limits.unit_bytes)
    down = drive = net = 0.0
    for j in range(units):
        unit = world.ids[request.first_block + (j + 1) * world.limits.unit - 1]
<<<<<<< HEAD
        host = holds(world, replica, HOST, unit) != NONE
        nvme = pool_of(world, replica, NVME).limit == 0
        nvme = nvme or holds(world, replica, NVME, unit) != NONE
        remote = pool_of(world, replica, REMOTE).limit == 0
        remote = remote or holds(world, replica, REMOTE, unit) != NONE
        if not host and (pool_of(world, replica, HOST).limit > 0 or not nvme or not remote):
            down += each
        drive += each * (not nvme)
        net += each * (not remote)
    arrived = transfer(world, replica, D2H, down)
    on_drive = max(arrived, transfer(world, replica, NVME_WRITE, drive))
    on_remote = max(arrived, transfer(world, replica, NIC_OUT, net))
    for j in range(units - 1, -1, -1):  # the end of a prefix is dropped first
        unit = world.ids[request.first_block + (j + 1) * world.limits.unit - 1]
        put(world, replica, (HOST, unit), arrived)
        put(world, replica, (NVME, unit), on_drive)
        put(world, replica, (REMOTE, unit), on_remote)
=======
        source = source_of(world, replica, unit)
        up += world.limits.unit_bytes
        drive += world.limits.unit_bytes * (source == NVME)
        net += world.limits.unit_bytes * (source == REMOTE)
    there = passed(world, replica, H2D, up)
    there = max(there, passed(world, replica, NVME_READ, drive))
    return max(there, passed(world, replica, NIC_IN, net)) - replica.clock


@compiled
def until_read_s(tables: Tables, world: World, replica: Replica, plan: Plan) -> float:
    """Until a prompt is read whose units from one on are loaded, the last one not included. [s]"""
    request = world.requests[plan.request]
    tokens = world.limits.unit * world.limits.prefix_tokens
    if plan.first == plan.last:
        return recompute_s(tables, world, replica, (plan.begins, plan.length))
    before = (plan.begins, max(plan.first * tokens, plan.begins))
    behind = (min(plan.last * tokens, plan.length - 1), plan.length)
    loaded = load_s(world, replica, request, (plan.first, plan.last))
    recomputed = recompute_s(tables, world, replica, before)
    return max(loaded, recomputed) + recompute_s(tables, world, replica, behind)


@compiled
def first_loaded(tables: Tables, world: World, replica: Replica, plan: Plan) -> int:
    """The unit from which on a prompt's stored units are loaded; those before are recomputed.

    Recomputing goes on while the rest is loaded, so the later of the two decides. What it takes of
    the GPU the others on the replica wait for, and what loading takes of the links those who load.
    """
    if world.limits.load == LOAD:
        return plan.first
    if world.limits.load == RECOMPUTE:
        return plan.last
    request = world.requests[plan.request]
    tokens = world.limits.unit * world.limits.prefix_tokens
    low, high = plan.first, plan.last
    if world.limits.load == FASTER or not world.limits.chunked:
        high = low
    while low < high:  # the fewest units that take at least as long to recompute as the rest
        middle = (low + high) // 2
        before = (plan.begins, max(middle * tokens, plan.begins))
        took = recompute_s(tables, world, replica, before)
        if took < load_s(world, replica, request, (middle, plan.last)):
            low = middle + 1
        else:
            high = middle
    chosen, least = plan.last, np.inf
    loading = 0
    for i in range(replica.running):
        loading += world.sequences[replica.first_sequence + i].skip > 0
    others = replica.waiting + replica.swapped + replica.running - 1
    for first in (plan.first, max(low - 1, plan.first), low, plan.last):
        choice = Plan(plan.request, plan.begins, plan.length, first, plan.last)
        took = until_read_s(tables, world, replica, choice)
        upto = plan.length
        if first < plan.last:
            upto = max(first * tokens, plan.begins)
            took += BEHIND * loading * load_s(world, replica, request, (first, plan.last))
        took += BEHIND * others * recompute_s(tables, world, replica, (plan.begins, upto))
        if took < least:
            chosen, least = first, took
    return chosen


@compiled
def load(tables: Tables, world: World, replica: Replica, sequence: Sequence) -> int:
    """Begin to load stored units behind the blocks on the GPU; tokens to read in this pass."""
    limits, request = world.limits, world.requests[sequence.request]
    first = last = sequence.found // limits.unit
    while (last + 1) * limits.unit <= request.blocks:
        unit = world.ids[request.first_block + (last + 1) * limits.unit - 1]
        if source_of(world, replica, unit) == NONE:
            break
        last += 1
    length = sequence.done + sequence.todo
    whole = min(sequence.todo, replica.budget) if limits.chunked else sequence.todo
    if first == last:
        return whole
    plan = Plan(sequence.request, sequence.done, length, first, last)
    first = first_loaded(tables, world, replica, plan)
    begin, end = max(first * limits.unit, sequence.found), last * limits.unit
    skip_at = max(begin * limits.prefix_tokens, sequence.done)
    skip = min(end * limits.prefix_tokens, length - 1) - skip_at
    if first == last or skip <= 0:
        return whole
    part = min(skip_at - sequence.done, replica.budget)
    gpu, new = world.pools[POOLS * replica.index + GPU], 0
    for k in range(begin, end):
        at = find(world, gpu, world.ids[request.first_block + k])
        new += at == NONE or world.entries[at].users == 0
    size = world.sizes[blocks_of(limits, float(sequence.done + part + skip))].prompt
    own = max(size - (sequence.found + end - begin) * limits.prefix_bytes, 0)
    if own + new * limits.prefix_bytes > available(world, replica) + sequence.held:
        return whole
    up = drive = net = 0.0
    for j in range(last - 1, first - 1, -1):
        unit = world.ids[request.first_block + (j + 1) * limits.unit - 1]
        source = source_of(world, replica, unit)
        up += limits.unit_bytes
        drive += limits.unit_bytes * (source == NVME)
        net += limits.unit_bytes * (source == REMOTE)
        put(world, replica, (source, unit), 0.0)
        if request.started != request.started:  # NaN: this is its first start
            replica.found[source] += max(
                min((j + 1) * limits.unit * limits.prefix_tokens, length - 1)
                - max(j * limits.unit * limits.prefix_tokens, skip_at),
                0,
            )
    ready = max(transfer(world, replica, H2D, up), transfer(world, replica, NVME_READ, drive))
    sequence.ready = max(ready, transfer(world, replica, NIC_IN, net))
    for k in range(begin, end):
        block = world.ids[request.first_block + k]
        fresh = find(world, gpu, block) == NONE
        pin(world, replica, block)
        if fresh:
            world.entries[find(world, gpu, block)].ready = sequence.ready
    sequence.load_from, sequence.load_to = begin, end
    sequence.shared = sequence.found + end - begin
    sequence.skip_at, sequence.skip = skip_at, skip
    sequence.todo -= skip
    if part == 0:
        replica.next_ready = min(replica.next_ready, sequence.ready)
    return part
>>>>>>> 1f9f4b1 (Recompute or load counts what the other requests on a replica lose; benchmarks/tiers.py measures it)
