"""What the simulator keeps of requests and replicas, as plain arrays for compiled code."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.graph import Array
from kvsim.serving.rules import Rules
from kvsim.serving.tables import COSTS, RESOURCES
from kvsim.traces.requests import Requests

Integers = NDArray[np.int64]

NOBODY = -1  # no request, no block
NEVER = 2**62
WAITING, RUNNING_NOW, SWAPPED, FINISHED, REFUSED = range(5)
ABSENT, ON_GPU, ON_HOST = range(3)

# Columns of ``Fleet.tally``: whole numbers of each replica.
(
    RUNNING,  # sequences in the batch
    ROUNDS,  # decoding rounds so far
    NEXT,  # round after which the next sequence is complete
    WAIT_HEAD, WAIT_TAIL, WAITERS,  # queue of requests that have not started, or start again
    SWAP_HEAD, SWAP_TAIL, SWAPPERS,  # queue of sequences in host memory
    PRIVATE,  # cache of running sequences, shared blocks apart [B]
    PINNED, CACHED,  # shared blocks in use, and those kept in case [B]
    HOST_PRIVATE,  # host memory of running sequences, as their technique states it [B]
    HOST_SWAPPED, HOST_CACHED,  # of swapped sequences, and of evicted blocks [B]
    LRU_HEAD, LRU_TAIL, HOST_LRU_HEAD, HOST_LRU_TAIL,  # least recently used blocks first
    EMITTED,  # tokens generated [tokens]
    FREED, TAKEN,  # memory ever given back, that of an idle GPU included, and ever taken [B]
    PREEMPTIONS,
    PASSES,  # rounds and prompt passes
    PEAK,  # most cache in use [B]
    LOWEST,  # least free memory ever found: below 0 would be a fault [B]
    JUST_DONE,  # sequences that the last step completed
    COUNTS,
) = range(28)  # fmt: skip

SERIES = ("seconds", "running", "waiting", "cache", "context", "decoded", "prompt", "rounds")
"""Columns of the timeline: busy time, then sums over it or counts; RESOURCES follow. [s]"""
BINS = 512
GAPS = 2048  # bins of the time between tokens
FINEST_GAP, GAP_RATIO = 1e-5, 1.01  # first bin [s], and each bin's width over the last one's


class Trace(NamedTuple):
    """Requests as compiled code reads them."""

    arrival: Array  # (n,) [s]
    prompt: Integers  # (n,) [tokens]
    generate: Integers  # (n,) [tokens]
    rate: Array  # tokens per decoding round, (n,)
    ids: Integers  # shared blocks of all prompts
    start: Integers  # request i has ids[start[i]:start[i + 1]]
    block_tokens: int  # tokens of a shared block; 0: none


class Engine(NamedTuple):
    """Rules and memory of a replica as compiled code reads them."""

    max_seqs: int
    max_tokens: int
    block_tokens: int
    chunked: bool
    decode_first: bool
    swap: bool
    whole_prompt: bool  # begins only if memory suffices for all of it
    gpu: int  # memory for caches of each GPU [B]
    host: int  # host memory for the running sequences of each GPU [B]
    host_cache: int  # and for evicted blocks and swapped sequences [B]
    keeps: bool  # preempted sequences find again what nobody has overwritten
    shared_bytes: int  # of one shared block; 0: no prefix caching [B]
    steepest: int  # most that one more KV block of a sequence takes of the GPU [B]
    host_steepest: int  # and of the host [B]


class Progress(NamedTuple):
    """What becomes of each request."""

    status: NDArray[np.int8]
    started: Array  # first scheduled [s]
    first: Array  # first token [s]
    last: Array  # last token [s]
    made: Integers  # tokens generated when it was last taken out of the batch [tokens]
    left: Integers  # decoding rounds left of a swapped sequence
    kept: Integers  # cache it left behind when it was preempted [B]
    kept_blocks: Integers  # and the KV blocks that was
    spot: Integers  # what had been freed before that, so what is overwritten before it [B]
    hits: Integers  # prompt tokens found in the prefix cache, at the first start [tokens]
    preempted: Integers
    replica: Integers
    link: Integers  # next request in its queue


class Fleet(NamedTuple):
    """Replicas; the first axis of every array."""

    clock: Array  # (r,) [s]
    tally: Integers  # (r, COUNTS)
    request: Integers  # running sequences in order of admission (r, s)
    base: Array  # tokens cached after round x: base + growth x [tokens]
    growth: Array  # tokens per round
    finish: Integers  # round that completes it; NEVER while its prompt is read
    todo: Integers  # prompt tokens to read; 0 while it decodes [tokens]
    done: Integers  # prompt tokens read or found [tokens]
    held: Integers  # GPU cache of its own [B]
    host_held: Integers  # [B]
    shared: Integers  # shared blocks it uses
    paused: NDArray[np.bool]  # decodes, but not in this step
    chunks: Integers  # prompt tokens it reads in this step [tokens]
    made: Integers  # what the step is made of, see ``schedule`` (r, 4)
    spent: Array  # what the step costs, as COSTS (r, k) [s]
    where: NDArray[np.int8]  # shared blocks: absent, on the GPU, on the host (r, blocks)
    users: NDArray[np.int32]  # running sequences that use a shared block
    newer: NDArray[np.int32]
    older: NDArray[np.int32]
    series: Array  # (r, BINS, SERIES and RESOURCES)
    width: Array  # of a bin (r,) [s]
    gaps: Array  # tokens by the time since the one before (r, GAPS)


def trace_of(requests: Requests, rate: Array, shared: bool) -> Trace:
    """Columns of a trace; shared blocks only where a prefix cache uses them."""
    ids, start, tokens = np.zeros(0, np.int64), np.zeros(len(requests) + 1, np.int64), 0
    if shared and requests.block_ids is not None and requests.block_start is not None:
        ids, start, tokens = requests.block_ids, requests.block_start, requests.block_tokens
    return Trace(requests.arrival, requests.prompt, requests.generate, rate, ids, start, tokens)


def progress_of(count: int) -> Progress:
    """All requests waiting to arrive."""
    nothing = np.full(count, np.nan)
    return Progress(
        status=np.full(count, WAITING, np.int8),
        started=nothing.copy(),
        first=nothing.copy(),
        last=nothing,
        made=np.zeros(count, np.int64),
        left=np.zeros(count, np.int64),
        kept=np.zeros(count, np.int64),
        kept_blocks=np.zeros(count, np.int64),
        spot=np.zeros(count, np.int64),
        hits=np.zeros(count, np.int64),
        preempted=np.zeros(count, np.int64),
        replica=np.full(count, NOBODY, np.int64),
        link=np.full(count, NOBODY, np.int64),
    )


def fleet_of(replicas: int, rules: Rules, gpu: int, shared_blocks: int) -> Fleet:
    """Idle replicas with empty caches."""
    seats = (replicas, rules.max_seqs)
    blocks = (replicas, shared_blocks)
    tally = np.zeros((replicas, COUNTS), np.int64)
    ends = [WAIT_HEAD, WAIT_TAIL, SWAP_HEAD, SWAP_TAIL]
    tally[:, [*ends, LRU_HEAD, LRU_TAIL, HOST_LRU_HEAD, HOST_LRU_TAIL]] = NOBODY
    tally[:, [NEXT, LOWEST]] = NEVER
    tally[:, FREED] = gpu
    return Fleet(
        clock=np.zeros(replicas),
        tally=tally,
        request=np.zeros(seats, np.int64),
        base=np.zeros(seats),
        growth=np.zeros(seats),
        finish=np.zeros(seats, np.int64),
        todo=np.zeros(seats, np.int64),
        done=np.zeros(seats, np.int64),
        held=np.zeros(seats, np.int64),
        host_held=np.zeros(seats, np.int64),
        shared=np.zeros(seats, np.int64),
        paused=np.zeros(seats, np.bool),
        chunks=np.zeros(seats, np.int64),
        made=np.zeros((replicas, 4), np.int64),
        spent=np.zeros((replicas, len(COSTS))),
        where=np.zeros(blocks, np.int8),
        users=np.zeros(blocks, np.int32),
        newer=np.full(blocks, NOBODY, np.int32),
        older=np.full(blocks, NOBODY, np.int32),
        series=np.zeros((replicas, BINS, len(SERIES) + len(RESOURCES))),
        width=np.full(replicas, 0.01),
        gaps=np.zeros((replicas, GAPS)),
    )
