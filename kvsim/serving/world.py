"""Creation of a simulation's state from a trace and a cost model."""

import weakref
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError
from kvsim.graph import Array
from kvsim.machines.hardware import ServerWork
from kvsim.serving.core import jit_entry
from kvsim.serving.costs import StepCosts
from kvsim.serving.records import (
    GAP_BINS,
    GAPS,
    NEVER,
    NO_INDEX,
    POOLS,
    Bin,
    BlockPlace,
    Entry,
    Event,
    Integers,
    Limits,
    Pool,
    Records,
    Replica,
    Request,
    Sequence,
    Sizes,
    Turn,
    World,
    make,
)
from kvsim.serving.rules import PREFIX_LOADS, Rules
from kvsim.traces.requests import Requests


def request_records(
    requests: Requests, rate: Array, limits: Limits
) -> tuple[Records[Request], Records[BlockPlace]]:
    """Make records of all requests, which wait to arrive.

    Parameters
    ----------
    requests : the trace, n requests.
    rate : tokens per decoding round of each request. (n,) [tokens]
    limits : rules and memory of every replica.

    Returns
    -------
    tuple of array
        The records (n,), and the places of all prompts' blocks; none without prefix caching.
    """
    places = make(BlockPlace, 0)
    first, full = np.zeros((2, len(requests)), np.int64)
    if limits.part_bytes and requests.block_ids is not None and requests.block_start is not None:
        places, first = find_places(requests, limits), requests.block_start[:-1]
        named = np.diff(requests.block_start) * limits.parts
        full = np.minimum(named, requests.prompt // limits.block_tokens)
        turn, follows = find_repeated(requests)
        first = np.array(first)
        first[turn] = requests.block_start[follows]
        length = (requests.prompt + requests.generate - 1)[turn]  # the last token is never cached
        full[turn] = np.minimum(named[follows], length // limits.block_tokens)
    later = dict.fromkeys(("started", "first", "last"), np.nan)
    later |= dict.fromkeys(("kept", "replica", "link", "back"), NO_INDEX)
    records = make(
        Request,
        len(requests),
        arrival=requests.arrival,
        rate=rate,
        first_block=first,
        blocks=full,
        prompt=requests.prompt,
        generate=requests.generate,
        priority=0 if requests.priority is None else requests.priority,
        **later,
    )
    return records, places


def find_places(requests: Requests, limits: Limits) -> Records[BlockPlace]:
    """Find the position of each prompt block in its run.

    Parameters
    ----------
    requests : the trace, which has hash blocks.
    limits : rules and memory of every replica.

    Returns
    -------
    records
        One for each of the trace's block ids, in their order.
    """
    ids, parts = requests.block_ids, int(limits.parts)
    assert ids is not None
    owner = ids if ids.base is None else ids.base
    start = np.array(requests.block_start)
    tiers = bool(limits.tiers)
    key = id(owner), ids.ctypes.data, hash(start.tobytes()), parts, tiers
    if key not in _PLACES:
        places = make(BlockPlace, ids.size, block=ids, left=parts)
        if not tiers:
            different = int(ids.max(initial=-1)) + 1
            around = np.full((2, different), UNSEEN, np.int32)
            joined = JoinedBlocks(places, around, np.zeros(different, np.bool_))
            join_runs(np.array(ids), start, parts, joined)
        if not isinstance(owner, np.ndarray):
            return places
        _PLACES[key] = places
        weakref.finalize(owner, _PLACES.pop, key, None)
    return _PLACES[key]


_PLACES: dict[tuple[int, ...], Records[BlockPlace]] = {}
"""Places of traces whose blocks are still in memory: the same trace is played at many rates."""
UNSEEN = -2  # no block yet: before or after another one
LONGEST_RUN = 16
"""Blocks of a run. Its pieces are looked through one by one, and prompts that end anywhere in a
common start leave one for each end: a play of 2,000 that shared 12,000 tokens took 2.7 s without
this bound, and 0.09 s with it."""


class JoinedBlocks(NamedTuple):
    """Positions of blocks in runs, and work space to find them."""

    places: Records[BlockPlace]
    around: NDArray[np.int32]  # the block before and after each one (2, ids)
    heads: NDArray[np.bool_]  # whether a run begins with it (ids,)


@jit_entry
def join_runs(ids: Integers, start: Integers, parts: int, joined: JoinedBlocks) -> None:
    """Join blocks that always occur in the same order into runs.

    Parameters
    ----------
    ids : hash blocks of all prompts. (m,)
    start : index in ``ids`` at which each request's blocks begin. (n + 1,)
    parts : KV blocks per block of the trace.
    joined : places, so far of single blocks, and work space; changed in place.
    """
    places, around, heads = joined.places, joined.around, joined.heads
    for r in range(start.size - 1):
        before = NO_INDEX
        for i in range(start[r], start[r + 1]):
            block = ids[i]
            if around[0, block] == UNSEEN:
                around[0, block] = before
            if before == NO_INDEX or around[0, block] != before:
                heads[block] = True
            if before != NO_INDEX:
                if around[1, before] == UNSEEN:
                    around[1, before] = block
                elif around[1, before] != block:  # neither continues its run
                    heads[block] = heads[around[1, before]] = True
            before = block
    for r in range(start.size - 1):
        for i in range(start[r] + 1, start[r + 1]):
            before = places[i - 1].before + parts
            if not heads[ids[i]] and before < LONGEST_RUN * parts:
                places[i].block, places[i].before = places[i - 1].block, before
        for i in range(start[r + 1] - 2, start[r] - 1, -1):
            if places[i + 1].before > 0:
                places[i].left = places[i + 1].left + parts


def find_repeated(requests: Requests) -> tuple[Integers, Integers]:
    """Find turns whose prompt and answer are a prefix of the next turn's prompt.

    The next turn's blocks thus identify those of the answer, which it can reuse.

    Parameters
    ----------
    requests : the trace. Without hash blocks, or where no turn follows another, nothing is found.

    Returns
    -------
    tuple of array
        Indices of the turns, and of the next turn of each.
    """
    nothing = np.zeros(0, np.int64)
    start, ids, parent = requests.block_start, requests.block_ids, requests.parent
    if parent is None or start is None or ids is None:
        return nothing, nothing
    follows = np.flatnonzero(parent >= 0)
    turn, which = np.unique(parent[follows], return_index=True)
    follows = follows[which]
    length = (requests.prompt + requests.generate)[turn]
    whole = requests.prompt[turn] // requests.block_tokens
    fits = (requests.prompt[follows] >= length) & (np.diff(start)[turn] >= whole)
    fits &= np.diff(start)[follows] >= whole
    turn, follows, whole = turn[fits], follows[fits], whole[fits]
    inside = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    differs = (
        ids[np.repeat(start[turn], whole) + inside]
        != (ids[np.repeat(start[follows], whole) + inside])
    )
    same = np.bincount(np.repeat(np.arange(turn.size), whole), differs, turn.size) == 0
    return turn[same], follows[same]


def turn_records(requests: Requests, server: ServerWork) -> tuple[Records[Turn], Records[Event]]:
    """Create the records of turns, and an empty heap of events.

    Parameters
    ----------
    requests : the trace.
    server : the server's work around the engine, which counts towards a client's wait.

    Returns
    -------
    tuple of records
        Turns and events; both have no entries if no request depends on the simulation.
    """
    count = len(requests) if requests.depends else 0
    turns = make(Turn, count, next=NO_INDEX, sibling=NO_INDEX, abort_after=np.inf)
    if count and requests.abort_after is not None:
        around = server.request_overhead(requests.prompt.astype(float))
        turns.abort_after = np.maximum(requests.abort_after - around, 0.0)
    if count and requests.parent is not None:
        turns.think = 0.0 if requests.think is None else requests.think
        turns.awaited = requests.parent >= 0
        following, sibling = turns.next, turns.sibling
        for index in np.flatnonzero(turns.awaited)[::-1].tolist():
            before = int(requests.parent[index])
            sibling[index], following[before] = following[before], index
    return turns, make(Event, 2 * count)


def replica_records(replicas: int, rules: Rules) -> Records[Replica]:
    """Make idle replicas with empty caches.

    Parameters
    ----------
    replicas : number of replicas.
    rules : their scheduling rules.

    Returns
    -------
    records
        One for each replica.
    """
    number = np.arange(replicas)
    ends = dict.fromkeys(("wait_ends", "swap_ends", "done", "late_entry"), NO_INDEX)
    idle = {"end": NEVER, "lowest": NEVER, "bin_width": 0.01, "next_ready": np.inf}
    first = number * rules.max_seqs
    return make(Replica, replicas, index=number, first_sequence=first, **idle, **ends)


def pool_records(
    sizes: list[int], different: int, parts: int = 1
) -> tuple[Records[Pool], Records[Entry], NDArray[np.int32]]:
    """Make empty pools of KV blocks, in the numbers that replicas have.

    Parameters
    ----------
    sizes : most entries of each pool.
    different : number of different block ids that are looked up.
    parts : KV blocks per block of the trace, which a GPU pool mostly keeps as one entry.

    Returns
    -------
    tuple of records
        The pools, their entries and their hash buckets.
    """
    size = np.array(sizes, np.int64)
    blocks = np.array(size)
    blocks[:-1:POOLS] //= parts
    sought = np.minimum(blocks, different)
    buckets = 2 ** np.ceil(np.log2(np.maximum(2 * sought, 1))).astype(np.int64)
    first = np.cumsum(size) - size
    empty = dict.fromkeys(("free", "oldest", "newest"), NO_INDEX)
    bounds = {"first": first, "room": size, "limit": size}
    hashes = {"first_bucket": np.cumsum(buckets) - buckets, "mask": buckets - 1}
    pools = make(Pool, size.size, **bounds, **hashes, **empty)
    entries = make(Entry, int(size.sum()))  # memory that nothing has touched takes no room
    return pools, entries, np.full(int(buckets.sum()), NO_INDEX, np.int32)


class ArrivalOrder(NamedTuple):
    """The requests in order of arrival, and when each replica is next simulated.

    Attributes
    ----------
    order : requests in order of arrival. (n,)
    due : time before which a replica needs no attention. (r,) [s]
    """

    order: Integers
    due: Array


class Course:
    """Progress of a simulation: the router's state, events and the time limit.

    Attributes
    ----------
    route : index into ``simulate.ROUTES``.
    together : whether all replicas are simulated up to every arrival.
    next : position in the order of arrivals.
    ending : whether all requests have arrived, so that only the remaining passes are simulated.
    until : time from which on no pass begins. [s]
    turn : replica that gets the next request in turn.
    coming : number of events in the heap.
    alone : whether replicas share no memory, so that only arrivals connect them.
    think : shortest think time after any turn. [s]
    first_awaited : first request that waits for the turn it follows.
    by_layer : whether prefill replicas send each layer's cache as soon as it is computed.
    layers : number of layers with a cache.
    sends : rate at which each GPU sends caches to the decode pool. [B/s]
    """

    route: int
    together: bool
    next: int
    ending: bool
    until: float
    turn: int
    coming: int
    alone: bool
    think: float
    first_awaited: int
    by_layer: bool
    layers: int
    sends: float


def make_world(requests: Requests, costs: StepCosts, replicas: int, rate: Array) -> World:
    """Make the initial state of a simulation: idle replicas, and requests that have not arrived.

    Parameters
    ----------
    requests : the trace.
    costs : cost model of the replicas.
    replicas : number of replicas.
    rate : tokens per decoding round of each request. (n,) [tokens]

    Returns
    -------
    World
        The state.

    Raises
    ------
    InputError
        If a round's tokens exceed the token budget, or prefix caching is impossible.
    """
    limits = limits_of(costs, requests)
    records, places = request_records(requests, rate, limits)
    turns, events = turn_records(requests, costs.deployment.stack.server)
    different = int(places.block.max()) + 1 if places.size else 0
    sizes = _pool_sizes(costs, limits, different, replicas)
    pools, entries, buckets = pool_records(sizes, different, int(limits.parts))
    return World(
        limits=limits,
        requests=records,
        replicas=replica_records(replicas, costs.rules),
        sequences=make(Sequence, replicas * costs.rules.max_seqs),
        pools=pools,
        entries=entries,
        used=np.zeros(entries.size if np.isfinite(limits.ttl) else 0),
        buckets=buckets,
        places=places,
        sizes=make_sizes(costs),
        bins=make(Bin, replicas * GAP_BINS),
        gaps=np.zeros(replicas * GAPS),
        turns=turns,
        events=events,
        links=get_link_rates(costs) if limits.tiers else None,
    )


def get_link_rates(costs: StepCosts) -> Array:
    """Return the rates of the links between each GPU and the other memories.

    Parameters
    ----------
    costs : step costs of the technique in the deployment.

    Returns
    -------
    array
        Rate by link, in the order of TIER_LINKS. [B/s]
    """
    rules, tables = costs.rules, costs.tables
    shared = (rules.nvme_read, rules.nvme_write, rules.nic, rules.nic)  # by the replica's GPUs
    return np.array([tables.h2d, tables.d2h, *(rate / costs.deployment.gpus for rate in shared)])


def make_sizes(costs: StepCosts) -> Records[Sizes]:
    """Tabulate the memory of a sequence by its number of KV blocks.

    Parameters
    ----------
    costs : step costs of the technique in the deployment.

    Returns
    -------
    records
        Memory of each GPU and of the host. [B]
    """
    t = costs.tables
    return make(Sizes, t.gpu_bytes.size, prompt=t.prompt_bytes, gpu=t.gpu_bytes, host=t.host_bytes)


def _pool_sizes(costs: StepCosts, limits: Limits, different: int, replicas: int) -> list[int]:
    """Return the largest number of entries of each replica's memories and of the remote one."""
    if not limits.part_bytes:
        return [0] * (POOLS * replicas + 1)
    rules, gpus = costs.rules, costs.deployment.gpus
    gpu = int(limits.gpu) // int(limits.part_bytes) + 1
    host, nvme, remote = (
        min(int(size / gpus) // max(int(limits.unit_bytes), 1), different)
        for size in (rules.host_cache, rules.nvme_cache, rules.remote_cache)
    )
    return [gpu, host, nvme] * replicas + [remote]


def limits_of(costs: StepCosts, requests: Requests) -> Limits:
    """Collect the rules and memory limits of each replica in a record ``Limits``.

    Parameters
    ----------
    costs : step costs of the technique in the deployment.
    requests : the trace.

    Raises
    ------
    InputError
        If a round's tokens exceed the budget, or prefix caching cannot work.
    """
    rules, width = costs.rules, costs.passes.width
    if width > rules.max_tokens:  # told before the tables are made, which takes seconds
        raise InputError(
            f"--max-tokens: got {rules.max_tokens}; expected at least {width}, what one "
            f"sequence of {costs.technique} needs in a round"
        )
    tables = costs.tables
    host_cache = int(rules.host_cache / costs.deployment.gpus)
    parts = max(requests.block_tokens // rules.block_tokens, 1)
    unit = _unit(rules, requests) * parts
    part_bytes = _part_bytes(costs, requests) if rules.prefix_caching else 0
    limits = make(
        Limits,
        1,
        max_seqs=rules.max_seqs,
        max_tokens=rules.max_tokens,
        part=rules.max_tokens // tables.lanes,
        block_tokens=rules.block_tokens,
        width=width,
        chunked=rules.prefill == "chunked",
        decode_first=rules.priority == "decode",
        swap=rules.preemption == "swap",
        whole_prompt=rules.admission != "chunk",
        whole_request=rules.admission == "request",
        ahead=rules.ahead,
        gpu=costs.capacity,
        host=costs.host_capacity,
        host_cache=host_cache,
        parts=parts,
        part_bytes=part_bytes,
        steepest=int(np.diff(tables.gpu_bytes).max()),
        host_steepest=int(np.diff(tables.host_bytes).max()),
        h2d=tables.h2d,
        d2h=tables.d2h,
        tiers=rules.tiers and part_bytes > 0,
        unit=unit,
        unit_bytes=unit * part_bytes,
        ttl=rules.cache_ttl,
        load=PREFIX_LOADS.index(rules.prefix_load),
    )
    return limits[0]


def _unit(rules: Rules, requests: Requests) -> int:
    """Return the number of shared blocks that are stored and loaded together.

    Raises
    ------
    InputError
        If the connector's blocks are not made of whole blocks of the trace.
    """
    if rules.tiers and not requests.block_tokens:
        raise InputError(
            "--host-cache: the trace has no prefix blocks, so nothing would be stored; use a "
            "trace with hash blocks, or replace --trace with, for example, --prompt 4k "
            "--generate 300 --rate 2 --turns 5"
        )
    if not rules.cache_block:
        return 1
    if rules.cache_block % max(requests.block_tokens, 1):
        raise InputError(
            f"--cache-block: got {rules.cache_block}; expected a multiple of "
            f"{requests.block_tokens}, the trace's tokens per prefix block"
        )
    return rules.cache_block // requests.block_tokens


def _part_bytes(costs: StepCosts, requests: Requests) -> int:
    """Return the memory of a shared KV block: the least that a block of the trace adds, per part.

    Without blocks in the trace sequences still find their own again after they were preempted. [B]
    """
    block = costs.rules.block_tokens
    tokens = requests.block_tokens or block
    if tokens % block:
        raise InputError(
            f"--block-tokens: got {block}; expected a divisor of {tokens}, the trace's tokens per "
            f"prefix block"
        )
    if requests.block_tokens and not costs.shares_prefixes(tokens):
        raise InputError(
            f"--prefix-caching: {costs.technique} does not keep every prompt token, so prefixes "
            f"cannot be shared; omit it or choose a technique that keeps them"
        )
    return max(costs.least_growth(tokens) // (tokens // block), 0)
