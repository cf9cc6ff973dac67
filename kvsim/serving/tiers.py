"""Shared blocks in other memories: the host's, an NVMe drive, and a store that all replicas share.

Blocks that a prompt was read into are stored, and blocks that a prompt needs are loaded, in units
of the connector and while passes go on. Each link carries what it is given in order. Of the stored
blocks of a prompt, the first may be recomputed while the rest are loaded.
"""

from typing import NamedTuple

import numpy as np

from kvsim.serving.core import fetch, jit_function, jit_unless_tiered
from kvsim.serving.costs import Decoding, Prompts, add_chunk, add_pass
from kvsim.serving.memory import (
    append,
    available,
    bucket,
    count_blocks,
    count_gpu_hits,
    drop_oldest,
    find,
    insert,
    locate,
    make_room,
    pin,
    remove,
    unlink,
)
from kvsim.serving.records import (
    D2H,
    GPU,
    H2D,
    HOST,
    NIC_IN,
    NIC_OUT,
    NO_INDEX,
    NVME,
    NVME_READ,
    NVME_WRITE,
    POOLS,
    REMOTE,
    Pool,
    Replica,
    Request,
    Sequence,
    TieredWorld,
    World,
)
from kvsim.serving.rules import FASTER, LOAD, RECOMPUTE
from kvsim.serving.tables import Tables


@jit_function
def get_pool(world: TieredWorld, replica: Replica, memory: int) -> Pool:
    """Return the pool of a replica in a memory; all replicas share the remote store.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.
    memory : index of the memory.

    Returns
    -------
    Pool
        The pool.
    """
    if memory == REMOTE:
        return world.pools[world.pools.size - 1]
    return world.pools[POOLS * replica.index + memory]


@jit_function
def find_unit(world: TieredWorld, replica: Replica, memory: int, unit: int) -> int:
    """Find a storage unit in a memory, evicting it if its time to live has passed.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.
    memory : index of the memory.
    unit : id of the unit's last block.

    Returns
    -------
    int
        Index of the entry, or NO_INDEX.
    """
    pool = get_pool(world, replica, memory)
    at = find(world, pool, unit)
    if at != NO_INDEX and world.used.size > 0 and replica.clock - world.used[at] > world.limits.ttl:
        remove(world, pool, at)
        return NO_INDEX
    return at


@jit_function
def find_source(world: TieredWorld, replica: Replica, unit: int) -> int:
    """Return the fastest memory from which a storage unit can be loaded now.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.
    unit : id of the unit's last block.

    Returns
    -------
    int
        Index of the memory, or NO_INDEX.
    """
    for memory in range(HOST, REMOTE + 1):
        at = find_unit(world, replica, memory, unit)
        if at != NO_INDEX and world.entries[at].ready <= replica.clock:
            return memory
    return NO_INDEX


@jit_function
def count_units(world: TieredWorld, request: Request) -> int:
    """Count the storage units that a prompt fills.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    request : the request.

    Returns
    -------
    int
        Number of units.
    """
    blocks = min(int(request.blocks), request.prompt // world.limits.block_tokens)
    return blocks // world.limits.unit


@jit_function
def get_unit(world: TieredWorld, request: Request, number: int) -> int:
    """Return the id of a unit of a prompt: that of its last block.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    request : the request.
    number : which unit, from 0.

    Returns
    -------
    int
        The id.
    """
    blocks = world.limits.unit // world.limits.parts
    return int(world.places[request.first_block + (number + 1) * blocks - 1].block)


@jit_function
def fetch_blocks(world: World, request: Request, stage: int) -> None:
    """Prefetch the processor's cache lines that look up a request's blocks, before it arrives.

    Parameters
    ----------
    world : state of the simulation.
    request : the request.
    stage : what is prefetched: 0, the places of its blocks; 1, their hash buckets; 2, their
        entries.
    """
    if request.replica == NO_INDEX or request.blocks == 0:
        return
    limits = world.limits
    if stage == 0:
        fetch(world.places, request.first_block)
        return
    replica = world.replicas[request.replica]
    j = 0
    while j < request.blocks:
        place = world.places[request.first_block + j // limits.parts]
        block, j = int(place.block), j + place.left
        for memory in range(GPU, REMOTE + 1):
            pool = get_pool(world, replica, memory)
            if pool.room > 0:
                where = bucket(pool, block)
                if stage == 1:
                    fetch(world.buckets, where)
                elif world.buckets[where] != NO_INDEX:
                    fetch(world.entries, world.buckets[where])


@jit_unless_tiered(count_gpu_hits)
def count_stored_blocks(world: TieredWorld, replica: Replica, request: Request) -> int:
    """Count the leading KV blocks that the replica's own memories hold now.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica whose memories are searched.
    request : the request.

    Returns
    -------
    int
        Number of KV blocks.
    """
    blocks, units = count_gpu_hits(world, replica, request), count_units(world, request)
    for j in range(blocks // world.limits.unit, units):
        source = find_source(world, replica, get_unit(world, request, j))
        if source in (NO_INDEX, REMOTE):
            break
        blocks = (j + 1) * world.limits.unit
    return blocks


@jit_function
def get_transfer_end(world: TieredWorld, replica: Replica, link: int, size: float) -> float:
    """Return when a transfer that starts now on a link would be complete.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.
    link : index into TIER_LINKS.
    size : bytes of each GPU. [B]

    Returns
    -------
    float
        The time. [s]
    """
    if size == 0:
        return replica.clock
    begin = max(replica.clock, replica.link_free[link])
    return float(begin + size / world.links[link])


@jit_function
def transfer(world: TieredWorld, replica: Replica, link: int, size: float) -> float:
    """Start a transfer on a link, after those in progress.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.
    link : index into TIER_LINKS.
    size : bytes of each GPU. [B]

    Returns
    -------
    float
        Time at which it is complete. [s]
    """
    if size == 0:
        return replica.clock
    replica.link_free[link] = get_transfer_end(world, replica, link, size)
    replica.link_bytes[link] += size
    if link in (NVME_READ, NVME_WRITE):
        replica.link_free[NVME_READ] = replica.link_free[NVME_WRITE] = replica.link_free[link]
    return float(replica.link_free[link])


@jit_function
def store_unit(world: TieredWorld, replica: Replica, what: tuple[int, int], ready: float) -> None:
    """Store a unit in a memory as its most recently used one, evicting others if it is full.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica.
    what : index of the memory, and id of the unit's last block.
    ready : time at which it is available there. [s]
    """
    memory, unit = what
    pool = get_pool(world, replica, memory)
    limit = pool.limit
    if memory == HOST and world.limits.unit_bytes > 0:
        free = world.limits.host_cache - replica.host_swapped
        limit = min(limit, free // world.limits.unit_bytes)
    if limit == 0:
        return
    at = find(world, pool, unit)
    if at == NO_INDEX:
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
    """Do nothing, as only GPUs store blocks.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    request : the request.
    """


@jit_unless_tiered(store_nowhere)
def store(world: TieredWorld, replica: Replica, request: Request) -> None:
    """Copy the full units of a prompt on the GPU to the memories that do not hold them.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    request : the request.
    """
    units, each = count_units(world, request), float(world.limits.unit_bytes)
    down = drive = net = 0.0
    for j in range(units):
        unit = get_unit(world, request, j)
        host = find_unit(world, replica, HOST, unit) != NO_INDEX
        nvme = get_pool(world, replica, NVME).limit == 0
        nvme = nvme or find_unit(world, replica, NVME, unit) != NO_INDEX
        remote = get_pool(world, replica, REMOTE).limit == 0
        remote = remote or find_unit(world, replica, REMOTE, unit) != NO_INDEX
        if not host and (get_pool(world, replica, HOST).limit > 0 or not nvme or not remote):
            down += each
        drive += each * (not nvme)
        net += each * (not remote)
    arrived = transfer(world, replica, D2H, down)
    on_drive = max(arrived, transfer(world, replica, NVME_WRITE, drive))
    on_remote = max(arrived, transfer(world, replica, NIC_OUT, net))
    for j in range(units - 1, -1, -1):  # the end of a prefix is dropped first
        unit = get_unit(world, request, j)
        store_unit(world, replica, (HOST, unit), arrived)
        store_unit(world, replica, (NVME, unit), on_drive)
        store_unit(world, replica, (REMOTE, unit), on_remote)


EXPECTED_WAITERS = 2  # who waits for work put before theirs: those there, and as many to come
DECODING, QUEUED = 0.1, 0.2  # share of those decoding that counts, and what each one waiting adds:
# longer passes delay last tokens, and first ones only where requests wait for seats or memory


class Plan(NamedTuple):
    """The stored units of a prompt that could be loaded, and the prompt's length.

    Attributes
    ----------
    request : index of the request.
    begins : prompt tokens that are already on the GPU. [tokens]
    length : length of the prompt. [tokens]
    first, last : first unit that could be loaded, and the one after the last.
    """

    request: int
    begins: int
    length: int
    first: int
    last: int


@jit_function
def estimate_recompute(
    tables: Tables, world: TieredWorld, replica: Replica, span: tuple[int, int]
) -> float:
    """Estimate the time to recompute a part of a prompt in separate passes. [s]

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    span : its first token, and the one after its last. [tokens]

    Returns
    -------
    float
        The time. [s]
    """
    first, last = span
    size = world.limits.part if world.limits.chunked else last
    replica.recompute[0] = 0.0
    while first < last:
        part = min(size, last - first)
        alone, prompts = Decoding(0, 0.0, 0.0), Prompts(part, part, 0)
        add_pass(tables, replica.recompute, alone, prompts)
        add_chunk(tables, replica.recompute, float(part), float(first))
        first += part
    return float(replica.recompute[0])


@jit_function
def estimate_load(
    world: TieredWorld, replica: Replica, request: Request, span: tuple[int, int]
) -> float:
    """Estimate how long loading some units of a prompt to the GPU would take from now. [s]

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    request : the request.
    span : its first unit, and the one after its last.

    Returns
    -------
    float
        The time. [s]
    """
    up = drive = net = 0.0
    for j in range(span[0], span[1]):
        unit = get_unit(world, request, j)
        source = find_source(world, replica, unit)
        up += world.limits.unit_bytes
        drive += world.limits.unit_bytes * (source == NVME)
        net += world.limits.unit_bytes * (source == REMOTE)
    there = get_transfer_end(world, replica, H2D, up)
    there = max(there, get_transfer_end(world, replica, NVME_READ, drive))
    return max(there, get_transfer_end(world, replica, NIC_IN, net)) - replica.clock


@jit_function
def first_loaded(tables: Tables, world: TieredWorld, replica: Replica, plan: Plan) -> int:
    """Return the first stored unit to load; those before it are recomputed.

    Recomputation and loading overlap, so the one that ends later decides. Recomputation delays the
    other requests of the replica, and loading those that use the same links.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    plan : the stored units of the prompt.

    Returns
    -------
    int
        Index of the unit.
    """
    if world.limits.load == LOAD:
        return plan.first
    if world.limits.load == RECOMPUTE:
        return plan.last
    request = world.requests[plan.request]
    tokens = world.limits.unit * world.limits.block_tokens
    low, high = plan.first, plan.last
    if world.limits.load == FASTER or not world.limits.chunked:
        high = low
    while low < high:  # the fewest units that take at least as long to recompute as the rest
        middle = (low + high) // 2
        before = (plan.begins, max(middle * tokens, plan.begins))
        took = estimate_recompute(tables, world, replica, before)
        if took < estimate_load(world, replica, request, (middle, plan.last)):
            low = middle + 1
        else:
            high = middle
    chosen, least = plan.last, np.inf
    loading = 0
    for i in range(replica.running):
        loading += world.sequences[replica.first_sequence + i].skip > 0
    queued = replica.waiting + replica.swapped
    decoding = (replica.running - replica.reading) * min(DECODING + QUEUED * queued, 1.0)
    others = queued + replica.reading - 1 + decoding
    behind = estimate_recompute(
        tables, world, replica, (min(plan.last * tokens, plan.length - 1), plan.length)
    )
    tried = -1
    for first in (plan.first, max(low - 1, plan.first), low, plan.last):
        if first == tried:
            continue
        tried, loaded, upto = first, 0.0, plan.length
        if first < plan.last:
            loaded = estimate_load(world, replica, request, (first, plan.last))
            upto = max(first * tokens, plan.begins)
        recomputed = estimate_recompute(tables, world, replica, (plan.begins, upto))
        took = max(loaded, recomputed) + behind * (first < plan.last)
        took += EXPECTED_WAITERS * (loading * loaded + others * recomputed)
        if took < least:
            chosen, least = first, took
    return chosen


@jit_function
def find_arriving(
    world: TieredWorld, replica: Replica, request: Request, span: tuple[int, int]
) -> tuple[int, int]:
    """Find KV blocks of a request that are on the GPU or being loaded to it.

    Parameters
    ----------
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    request : the request.
    span : the first KV block, and the one after the last.

    Returns
    -------
    tuple of int
        Entry that holds the first block, or NO_INDEX, and the number of blocks to which this
        applies.
    """
    first, last = span
    each, gpu = world.limits.parts, world.pools[POOLS * replica.index + GPU]
    block, part = locate(world, request, first)
    last = min(last, (first // each + 1) * each)
    at = find(world, gpu, block, part)
    if at != NO_INDEX:
        entry = world.entries[at]
        return at, min(entry.first + entry.parts - part, last - first)
    count = 1
    while first + count < last and find(world, gpu, block, part + count) == NO_INDEX:
        count += 1
    return at, count


@jit_function
def load_nothing(tables: Tables, world: World, replica: Replica, sequence: Sequence) -> int:
    """Load nothing, as only GPUs store blocks.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    replica : the replica that the request is on.
    sequence : the sequence, a row of the batch.

    Returns
    -------
    int
        Tokens to read in this pass. [tokens]
    """
    limits = world.limits
    return min(sequence.todo, replica.budget) if limits.chunked else sequence.todo


@jit_unless_tiered(load_nothing)
def load(tables: Tables, world: TieredWorld, replica: Replica, sequence: Sequence) -> int:
    """Start to load stored units of a prompt that follow the blocks on the GPU.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    replica : the replica.
    sequence : the sequence, an entry in the batch.

    Returns
    -------
    int
        Tokens to prefill in this pass. [tokens]
    """
    limits, request = world.limits, world.requests[sequence.request]
    first = last = sequence.found // limits.unit
    while last < count_units(world, request):
        if find_source(world, replica, get_unit(world, request, last)) == NO_INDEX:
            break
        last += 1
    length = sequence.done + sequence.todo
    whole = min(sequence.todo, replica.budget) if limits.chunked else sequence.todo
    if first == last:
        return whole
    plan = Plan(sequence.request, sequence.done, length, first, last)
    first = first_loaded(tables, world, replica, plan)
    begin, end = max(first * limits.unit, sequence.found), last * limits.unit
    skip_at = max(begin * limits.block_tokens, sequence.done)
    skip = min(end * limits.block_tokens, length - 1) - skip_at
    if first == last or skip <= 0:
        return whole
    part = min(skip_at - sequence.done, replica.budget)
    new, k = 0, begin
    while k < end:
        at, parts = find_arriving(world, replica, request, (k, end))
        new += parts * (at == NO_INDEX or world.entries[at].users == 0)
        k += parts
    size = world.sizes[count_blocks(limits, float(sequence.done + part + skip))].prompt
    own = max(size - (sequence.found + end - begin) * limits.part_bytes, 0)
    if own + new * limits.part_bytes > available(world, replica) + sequence.held:
        return whole
    up = drive = net = 0.0
    for j in range(last - 1, first - 1, -1):
        unit = get_unit(world, request, j)
        source = find_source(world, replica, unit)
        up += limits.unit_bytes
        drive += limits.unit_bytes * (source == NVME)
        net += limits.unit_bytes * (source == REMOTE)
        store_unit(world, replica, (source, unit), 0.0)
        if request.started != request.started:  # NaN: this is its first start
            replica.found[source] += max(
                min((j + 1) * limits.unit * limits.block_tokens, length - 1)
                - max(j * limits.unit * limits.block_tokens, skip_at),
                0,
            )
    ready = max(transfer(world, replica, H2D, up), transfer(world, replica, NVME_READ, drive))
    sequence.ready = max(ready, transfer(world, replica, NIC_IN, net))
    gpu, k = world.pools[POOLS * replica.index + GPU], begin
    while k < end:
        at, parts = find_arriving(world, replica, request, (k, end))
        if at == NO_INDEX:
            make_room(world, replica, parts * limits.part_bytes)
            block, number = locate(world, request, k)
            at = insert(world, gpu, block)
            entry = world.entries[at]
            entry.first, entry.parts, entry.ready = number, parts, sequence.ready
            append(world, gpu, at)
            replica.cached += parts * limits.part_bytes
        pin(world, replica, at, (k % limits.parts, parts))
        k += parts
    sequence.load_from, sequence.load_to = begin, end
    sequence.shared = sequence.found + end - begin
    sequence.skip_at, sequence.skip = skip_at, skip
    sequence.todo -= skip
    if part == 0:
        replica.next_ready = min(replica.next_ready, sequence.ready)
    return part
