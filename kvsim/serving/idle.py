"""Records at the beginning of a run: requests to come, idle replicas, empty memories."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.graph import Array
from kvsim.serving.records import (
    NEVER,
    NONE,
    Entry,
    Event,
    Integers,
    Pool,
    Replica,
    Request,
    Turn,
    World,
    layout,
    make,
)
from kvsim.serving.rules import Rules
from kvsim.traces.requests import Requests

LINE = 64  # of the CPU's cache [B]


def request_records(requests: Requests, rate: Array, prefix_tokens: int) -> tuple[Any, Integers]:
    """All requests waiting to arrive, and the hash blocks of their prompts.

    Parameters
    ----------
    prefix_tokens : tokens of a shared block; 0 leaves the blocks out. [tokens]
    """
    ids = np.zeros(0, np.int64)
    first, full = np.zeros((2, len(requests)), np.int64)
    if prefix_tokens and requests.block_ids is not None and requests.block_start is not None:
        ids, first = requests.block_ids, requests.block_start[:-1]
        full = np.minimum(np.diff(requests.block_start), requests.prompt // prefix_tokens)
    records = make(
        Request, len(requests), arrival=requests.arrival, rate=rate, started=np.nan, first=np.nan,
        last=np.nan, first_block=first, blocks=full, prompt=requests.prompt,
        generate=requests.generate, replica=NONE, link=NONE, back=NONE,
        priority=0 if requests.priority is None else requests.priority,
    )  # fmt: skip
    return records, np.array(ids)  # a copy that is not read-only, as compiled code expects


def turn_records(requests: Requests) -> tuple[Any, Any]:
    """What depends on the run, and a heap for it; both empty if all requests just arrive."""
    count = len(requests) if requests.depends else 0
    turns = make(Turn, count, next=NONE, sibling=NONE, abort_after=np.inf)
    if count and requests.abort_after is not None:
        turns.abort_after = requests.abort_after
    if count and requests.parent is not None:
        turns.think = 0.0 if requests.think is None else requests.think
        turns.awaited = requests.parent >= 0
        for index in np.flatnonzero(turns.awaited)[::-1].tolist():
            before = int(requests.parent[index])
            turns.sibling[index], turns.next[before] = turns.next[before], index
    return turns, make(Event, 2 * count)


def replica_records(replicas: int, rules: Rules, gpu: int) -> Any:
    """Idle replicas with empty caches."""
    number = np.arange(replicas)
    ends = dict.fromkeys(("wait_ends", "swap_ends", "done"), NONE)
    return make(
        Replica, replicas, index=number, first_sequence=number * rules.max_seqs, end=NEVER,
        freed=gpu, lowest=NEVER, bin_width=0.01, next_ready=np.inf, **ends,
    )  # fmt: skip


def pool_records(sizes: list[int]) -> tuple[Any, Any, NDArray[np.int32]]:
    """Empty pools of so many entries each: the pools, their entries and their buckets."""
    size = np.array(sizes, np.int64)
    buckets = 2 ** np.ceil(np.log2(np.maximum(2 * size, 1))).astype(np.int64)
    first = np.cumsum(size) - size
    pools = make(
        Pool, size.size, first=first, room=size, first_bucket=np.cumsum(buckets) - buckets,
        mask=buckets - 1, limit=size, free=np.where(size > 0, first, NONE), oldest=NONE,
        newest=NONE,
    )  # fmt: skip
    entries = _aligned(Entry, int(size.sum()))
    entries["newer"] = entries["older"] = NONE
    entries["chain"] = np.arange(1, len(entries) + 1)
    entries["chain"][(first + size - 1)[size > 0]] = NONE
    return pools, entries, np.full(int(buckets.sum()), NONE, np.int32)


def _aligned(record: type, count: int) -> Any:
    """Records of zeros, none of which lies in more lines of the CPU's cache than it must."""
    dtype = layout(record)
    memory = np.zeros(count * dtype.itemsize + LINE, np.uint8)
    first = -memory.ctypes.data % LINE
    return memory[first : first + count * dtype.itemsize].view(dtype).view(np.recarray)


def fits(world: World) -> NDArray[np.bool_]:
    """Which requests an empty cache has space for. (n,)"""
    requests: Any = world.requests
    sizes: Any = world.sizes
    blocks = (sizes.prompt <= world.limits.gpu) & (sizes.host <= world.limits.host)
    most = (np.count_nonzero(blocks) - 1) * world.limits.block_tokens  # more blocks never need less
    longest = requests.prompt.astype(np.int64) + requests.generate - 1
    return np.asarray(longest <= most)
