"""The sequences of a replica's batch: how they join, grow, finish and are taken out."""

from typing import TYPE_CHECKING

import numpy as np

from kvsim.serving.compiled import compiled
from kvsim.serving.memory import (
    available,
    give_back,
    make_host_room,
    pin,
    remove_from_host,
    take,
    unpin,
)
from kvsim.serving.queues import push, push_front
from kvsim.serving.state import (
    ABSENT,
    EMITTED,
    FINISHED,
    FREED,
    HOST_PRIVATE,
    HOST_SWAPPED,
    JUST_DONE,
    NEVER,
    ON_HOST,
    PREEMPTIONS,
    ROUNDS,
    RUNNING,
    RUNNING_NOW,
    SWAP_HEAD,
    SWAPPED,
    WAIT_HEAD,
    WAITING,
    Engine,
    Fleet,
    Progress,
    Trace,
)
from kvsim.serving.tables import TO_GPU, TO_HOST

if TYPE_CHECKING:
    from kvsim.serving.tables import Tables

ROUNDING = 1e-9  # lengths are whole up to this: rounds may yield fractions of a token


@compiled
def blocks_of(e: Engine, tokens: float) -> int:
    """KV blocks of that many tokens."""
    return int(np.ceil(tokens / e.block_tokens - ROUNDING))


@compiled
def length_of(f: Fleet, r: int, i: int) -> float:
    """Tokens cached of a decoding sequence. [tokens]"""
    return float(f.base[r, i] + f.growth[r, i] * f.tally[r, ROUNDS])


@compiled
def own_bytes(t: "Tables", f: Fleet, e: Engine, r: int, i: int, tokens: float) -> int:
    """GPU cache of a sequence of some length, without the blocks it shares. [B]"""
    table = t.prompt_bytes if f.todo[r, i] > 0 else t.gpu_bytes
    return int(max(table[blocks_of(e, tokens)] - f.shared[r, i] * e.shared_bytes, 0))


@compiled
def grow(t: "Tables", f: Fleet, e: Engine, r: int, i: int, tokens: float) -> bool:
    """Occupy the memory of a sequence of that length if there is enough."""
    more = own_bytes(t, f, e, r, i, tokens) - f.held[r, i]
    host_more = t.host_bytes[blocks_of(e, tokens)] - f.host_held[r, i]
    if more > available(f, e, r) or f.tally[r, HOST_PRIVATE] + host_more > e.host:
        return False
    take(f, e, r, more)
    f.held[r, i] += more
    f.tally[r, HOST_PRIVATE] += host_more
    f.host_held[r, i] += host_more
    return True


@compiled
def hits_of(x: Trace, f: Fleet, r: int, request: int) -> int:
    """Leading prompt blocks that some memory of the replica still holds."""
    first, last = x.start[request], x.start[request + 1]
    full = min(last - first, x.prompt[request] // max(x.block_tokens, 1))
    count = 0
    while count < full and f.where[r, x.ids[first + count]] != ABSENT:
        count += 1
    return count


@compiled
def use_hits(x: Trace, f: Fleet, e: Engine, r: int, request: int, hits: int) -> int:
    """Pin the leading blocks of a prompt; returns how many come from the host.

    Those on the GPU first, and those on the host leave it before room is made for them, so that
    no block of the prompt gives way to another.
    """
    first = x.start[request]
    fetched = 0
    for block in x.ids[first : first + hits]:
        if f.where[r, block] != ON_HOST:
            pin(f, e, r, block)
    for block in x.ids[first : first + hits]:
        if f.where[r, block] == ON_HOST:
            remove_from_host(f, e, r, block)
            fetched += 1
    for block in x.ids[first : first + hits]:
        if f.where[r, block] == ABSENT:
            pin(f, e, r, block)
    return fetched


@compiled
def join(f: Fleet, r: int, request: int, todo: int, done: int, shared: int) -> int:
    """A sequence whose prompt is to be read enters the batch; returns its seat."""
    i = int(f.tally[r, RUNNING])
    f.tally[r, RUNNING] += 1
    f.request[r, i] = request
    f.todo[r, i] = todo
    f.done[r, i] = done
    f.shared[r, i] = shared
    f.finish[r, i] = NEVER
    f.held[r, i] = f.host_held[r, i] = 0
    f.base[r, i] = f.growth[r, i] = 0.0
    f.paused[r, i] = False
    f.chunks[r, i] = 0
    return i


@compiled
def start_decoding(x: Trace, f: Fleet, r: int, i: int, left: int, more: int) -> None:
    """From the next round on: ``more`` tokens in ``left`` rounds."""
    request = f.request[r, i]
    f.todo[r, i] = 0
    f.growth[r, i] = more / left
    f.finish[r, i] = f.tally[r, ROUNDS] + left
    length = x.prompt[request] + x.generate[request] - 1.0
    f.base[r, i] = length - f.growth[r, i] * f.finish[r, i]


@compiled
def rounds_of(tokens: int, rate: float) -> int:
    """Decoding rounds for that many tokens."""
    return int(np.ceil(tokens / rate - ROUNDING))


@compiled
def finish_prompt(
    t: "Tables", x: Trace, f: Fleet, e: Engine, p: Progress, r: int, i: int, now: float
) -> None:
    """The prompt has been read and yields a token; its full blocks are shared from now on."""
    request = f.request[r, i]
    p.made[request] += 1
    f.tally[r, EMITTED] += 1
    if np.isnan(p.first[request]):
        p.first[request] = now
    f.todo[r, i] = 0
    if e.shared_bytes > 0 and x.block_tokens > 0:
        _share(t, x, f, e, r, i)
    length = x.prompt[request] + p.made[request] - 1.0
    give_back(f, r, f.held[r, i] - own_bytes(t, f, e, r, i, length))
    f.held[r, i] = own_bytes(t, f, e, r, i, length)
    more = x.generate[request] - p.made[request]
    if more > 0:
        start_decoding(x, f, r, i, rounds_of(more, x.rate[request]), more)
    else:
        f.finish[r, i] = f.tally[r, ROUNDS]


@compiled
def _share(t: "Tables", x: Trace, f: Fleet, e: Engine, r: int, i: int) -> None:
    """Turn the full blocks of a prompt that was just read into shared ones."""
    request = f.request[r, i]
    first = x.start[request]
    full = min(x.start[request + 1] - first, x.prompt[request] // x.block_tokens)
    fresh = full - f.shared[r, i]
    given = min(fresh * e.shared_bytes, f.held[r, i])
    f.held[r, i] -= given  # its own copies become the shared blocks, or are dropped
    give_back(f, r, given)
    for block in x.ids[first + f.shared[r, i] : first + full]:
        pin(f, e, r, block)
    f.shared[r, i] = full


@compiled
def leave(x: Trace, f: Fleet, e: Engine, r: int, i: int) -> None:
    """Give back a sequence's memory and its seat; later ones move up."""
    request = f.request[r, i]
    give_back(f, r, f.held[r, i])
    f.tally[r, HOST_PRIVATE] -= f.host_held[r, i]
    first = x.start[request]
    for k in range(f.shared[r, i] - 1, -1, -1):  # the end of a prefix is dropped first
        unpin(f, e, r, int(x.ids[first + k]))
    last = f.tally[r, RUNNING] - 1
    for seat in range(i, last):
        f.request[r, seat] = f.request[r, seat + 1]
        f.todo[r, seat] = f.todo[r, seat + 1]
        f.done[r, seat] = f.done[r, seat + 1]
        f.shared[r, seat] = f.shared[r, seat + 1]
        f.finish[r, seat] = f.finish[r, seat + 1]
        f.held[r, seat] = f.held[r, seat + 1]
        f.host_held[r, seat] = f.host_held[r, seat + 1]
        f.base[r, seat] = f.base[r, seat + 1]
        f.growth[r, seat] = f.growth[r, seat + 1]
        f.paused[r, seat] = f.paused[r, seat + 1]
    f.tally[r, RUNNING] = last


@compiled
def complete(x: Trace, f: Fleet, e: Engine, p: Progress, r: int, now: float) -> None:
    """Sequences that have all their tokens leave, in order of admission."""
    i = 0
    while i < f.tally[r, RUNNING]:
        if f.finish[r, i] > f.tally[r, ROUNDS]:
            i += 1
            continue
        request = f.request[r, i]
        f.tally[r, EMITTED] += x.generate[request] - p.made[request]
        p.made[request] = x.generate[request]
        p.last[request] = now
        p.status[request] = FINISHED
        f.tally[r, JUST_DONE] += 1
        leave(x, f, e, r, i)


@compiled
def preempt(t: "Tables", x: Trace, f: Fleet, e: Engine, p: Progress, r: int) -> float:
    """Take the sequence that was admitted last out of the batch; seconds for copying it."""
    i = int(f.tally[r, RUNNING] - 1)
    request = f.request[r, i]
    f.tally[r, PREEMPTIONS] += 1
    p.preempted[request] += 1
    decoding = f.todo[r, i] == 0
    swapped = 0
    if decoding:
        left = f.finish[r, i] - f.tally[r, ROUNDS]
        more = int(np.ceil(left * f.growth[r, i] - ROUNDING))
        f.tally[r, EMITTED] += x.generate[request] - more - p.made[request]
        p.made[request] = x.generate[request] - more
        p.left[request] = left
        swapped = t.gpu_bytes[blocks_of(e, x.prompt[request] + p.made[request] - 1.0)]
    p.kept[request] = 0
    if e.keeps and f.shared[r, i] == 0:
        p.spot[request] = f.tally[r, FREED]
        p.kept[request] = f.held[r, i]
        p.kept_blocks[request] = blocks_of(e, length_of(f, r, i) if decoding else f.done[r, i])
        if p.kept_blocks[request] == 0:
            p.kept[request] = 0
    leave(x, f, e, r, i)
    if decoding and e.swap and make_host_room(f, e, r, swapped):
        f.tally[r, HOST_SWAPPED] += swapped
        p.status[request] = SWAPPED
        push(f, p, r, SWAP_HEAD, request)
        f.spent[r, TO_HOST] += swapped / t.d2h
        return float(swapped / t.d2h)
    p.status[request] = WAITING
    push_front(f, p, r, WAIT_HEAD, request)
    return 0.0


@compiled
def swap_in(t: "Tables", x: Trace, f: Fleet, e: Engine, p: Progress, r: int, request: int) -> float:
    """Bring a swapped sequence back to decode on, if it fits; seconds, or below 0 if not."""
    more = x.generate[request] - p.made[request]
    length = x.prompt[request] + p.made[request] - 1.0
    swapped = t.gpu_bytes[blocks_of(e, length)]
    i = join(f, r, request, 0, 0, 0)
    start_decoding(x, f, r, i, int(p.left[request]), int(more))
    if not grow(t, f, e, r, i, length + f.growth[r, i]):
        f.tally[r, RUNNING] -= 1
        return -1.0
    f.tally[r, HOST_SWAPPED] -= swapped
    p.status[request] = RUNNING_NOW
    f.spent[r, TO_GPU] += swapped / t.h2d
    return float(swapped / t.h2d)
