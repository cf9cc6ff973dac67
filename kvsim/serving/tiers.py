"""Shared blocks in other memories: the host's, an NVMe drive, and a store that all replicas share.

Blocks that a prompt was read into are stored, and blocks that a prompt needs are loaded, in units
of the connector and while passes go on. Each link carries what it is given in order.
"""

from kvsim.serving.core import jit_function, jit_unless_tiered
from kvsim.serving.memory import append, drop_oldest, find, hits_of, insert, remove, unlink
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


@jit_function
def pool_of(world: TieredWorld, replica: Replica, memory: int) -> Pool:
    """A replica's pool in one memory; all replicas share the remote one."""
    if memory == REMOTE:
        return world.pools[world.pools.size - 1]
    return world.pools[POOLS * replica.index + memory]


@jit_function
def holds(world: TieredWorld, replica: Replica, memory: int, unit: int) -> int:
    """Entry of a unit that is in a memory and not forgotten, or NONE."""
    pool = pool_of(world, replica, memory)
    at = find(world, pool, unit)
    if at != NONE and world.used.size > 0 and replica.clock - world.used[at] > world.limits.ttl:
        remove(world, pool, at)
        return NONE
    return at


@jit_function
def source_of(world: TieredWorld, replica: Replica, unit: int) -> int:
    """The nearest memory that a unit can be loaded from now, or NONE."""
    for memory in range(HOST, REMOTE + 1):
        at = holds(world, replica, memory, unit)
        if at != NONE and world.entries[at].ready <= replica.clock:
            return memory
    return NONE


@jit_unless_tiered(hits_of)
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


@jit_function
def passed(world: TieredWorld, replica: Replica, link: int, size: float) -> float:
    """When bytes that are put on a link now would have passed it. [s]"""
    if size == 0:
        return replica.clock
    begin = max(replica.clock, replica.link_free[link])
    return float(begin + size / world.links[link])


@jit_function
def transfer(world: TieredWorld, replica: Replica, link: int, size: float) -> float:
    """Put bytes on a link behind those before; when they have passed. [s]"""
    if size == 0:
        return replica.clock
    replica.link_free[link] = passed(world, replica, link, size)
    replica.link_bytes[link] += size
    if link in (NVME_READ, NVME_WRITE):
        replica.link_free[NVME_READ] = replica.link_free[NVME_WRITE] = replica.link_free[link]
    return float(replica.link_free[link])


@jit_function
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
            drop_oldest(world, pool)
        at = insert(world, pool, unit)
        world.entries[at].ready = ready
    else:
        unlink(world, pool, at)
    if world.used.size > 0:
        world.used[at] = replica.clock
    append(world, pool, at)


@jit_function
def store_nowhere(world: World, replica: Replica, request: Request) -> None:
    """Only the GPU keeps blocks."""


@jit_unless_tiered(store_nowhere)
def store(world: TieredWorld, replica: Replica, request: Request) -> None:
    """Copy the full units of a prompt on the GPU to the memories that do not hold them."""
    units, each = request.blocks // world.limits.unit, float(world.limits.unit_bytes)
    down = drive = net = 0.0
    for j in range(units):
        unit = world.ids[request.first_block + (j + 1) * world.limits.unit - 1]
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
