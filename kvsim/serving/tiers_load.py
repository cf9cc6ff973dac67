"""Which stored blocks of a prompt are loaded from other memories, and which are read anew."""

from typing import NamedTuple

import numpy as np

from kvsim.serving import spend
from kvsim.serving.core import jit_function, jit_unless_tiered
from kvsim.serving.growth import blocks_of
from kvsim.serving.memory import available, find, pin
from kvsim.serving.records import (
    GPU,
    H2D,
    NIC_IN,
    NONE,
    NVME,
    NVME_READ,
    POOLS,
    REMOTE,
    Replica,
    Request,
    Sequence,
    TieredWorld,
    World,
)
from kvsim.serving.rules import FASTER, LOAD, RECOMPUTE
from kvsim.serving.tables import Tables
from kvsim.serving.tiers import passed, put, source_of, transfer

BEHIND = 2  # who waits for work that is put before theirs: those there, and as many still to come
DECODING, QUEUED = 0.1, 0.2  # share of those decoding that counts, and what each one waiting adds:
# longer passes delay last tokens, and first ones only where requests wait for seats or memory


class Plan(NamedTuple):
    """Stored units of a prompt that are to be loaded, and what is around them."""

    request: int
    begins: int  # prompt tokens that are on the GPU [tokens]
    length: int  # all of its tokens [tokens]
    first: int
    last: int


@jit_function
def recompute_s(
    tables: Tables, world: TieredWorld, replica: Replica, span: tuple[int, int]
) -> float:
    """A part of a prompt in passes of its own. [s]"""
    first, last = span
    size = world.limits.part if world.limits.chunked else last
    replica.recompute[0] = 0.0
    while first < last:
        part = min(size, last - first)
        alone, prompts = spend.Decoding(0, 0.0, 0.0), spend.Prompts(part, part, 0)
        spend.add_pass(tables, replica.recompute, alone, prompts)
        spend.add_chunk(tables, replica.recompute, float(part), float(first))
        first += part
    return float(replica.recompute[0])


@jit_function
def load_s(world: TieredWorld, replica: Replica, request: Request, span: tuple[int, int]) -> float:
    """From now until units of a prompt would be here. [s]"""
    up = drive = net = 0.0
    for j in range(span[0], span[1]):
        unit = world.ids[request.first_block + (j + 1) * world.limits.unit - 1]
        source = source_of(world, replica, unit)
        up += world.limits.unit_bytes
        drive += world.limits.unit_bytes * (source == NVME)
        net += world.limits.unit_bytes * (source == REMOTE)
    there = passed(world, replica, H2D, up)
    there = max(there, passed(world, replica, NVME_READ, drive))
    return max(there, passed(world, replica, NIC_IN, net)) - replica.clock


@jit_function
def first_loaded(tables: Tables, world: TieredWorld, replica: Replica, plan: Plan) -> int:
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
    queued = replica.waiting + replica.swapped
    decoding = (replica.running - replica.reading) * min(DECODING + QUEUED * queued, 1.0)
    others = queued + replica.reading - 1 + decoding
    behind = recompute_s(
        tables, world, replica, (min(plan.last * tokens, plan.length - 1), plan.length)
    )
    tried = -1
    for first in (plan.first, max(low - 1, plan.first), low, plan.last):
        if first == tried:
            continue
        tried, loaded, upto = first, 0.0, plan.length
        if first < plan.last:
            loaded = load_s(world, replica, request, (first, plan.last))
            upto = max(first * tokens, plan.begins)
        recomputed = recompute_s(tables, world, replica, (plan.begins, upto))
        took = max(loaded, recomputed) + behind * (first < plan.last)
        took += BEHIND * (loading * loaded + others * recomputed)
        if took < least:
            chosen, least = first, took
    return chosen


@jit_function
def load_nothing(tables: Tables, world: World, replica: Replica, sequence: Sequence) -> int:
    """Only the GPU keeps blocks: tokens to read in this pass."""
    limits = world.limits
    return min(sequence.todo, replica.budget) if limits.chunked else sequence.todo


@jit_unless_tiered(load_nothing)
def load(tables: Tables, world: TieredWorld, replica: Replica, sequence: Sequence) -> int:
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
