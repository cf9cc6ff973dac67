"""One replica's scheduler: what goes into each pass."""

from typing import TYPE_CHECKING

import numpy as np

from kvsim.serving.batch import (
    blocks_of,
    grow,
    hits_of,
    join,
    length_of,
    preempt,
    swap_in,
    use_hits,
)
from kvsim.serving.compiled import compiled
from kvsim.serving.memory import available, remains, take_up
from kvsim.serving.play import play_pass, play_rounds
from kvsim.serving.queues import pop
from kvsim.serving.state import (
    HOST_PRIVATE,
    JUST_DONE,
    ON_GPU,
    ON_HOST,
    PASSES,
    RUNNING,
    RUNNING_NOW,
    SWAP_HEAD,
    SWAPPERS,
    WAIT_HEAD,
    WAITERS,
    Engine,
    Fleet,
    Integers,
    Progress,
    Trace,
)
from kvsim.serving.tables import TO_GPU

if TYPE_CHECKING:
    from kvsim.serving.tables import Tables

# What a pass is made of, as it is being put together.
DECODING, PROMPT_TOKENS, BUDGET, PREEMPTED = range(4)


@compiled
def advance(t: "Tables", x: Trace, f: Fleet, e: Engine, p: Progress, r: int, until: float) -> None:
    """Play passes until one ends at or after ``until``, or nothing is left to do."""
    while f.clock[r] < until:
        if f.tally[r, RUNNING] + f.tally[r, WAITERS] + f.tally[r, SWAPPERS] == 0:
            return
        step(t, x, f, e, p, r, until)


@compiled
def step(t: "Tables", x: Trace, f: Fleet, e: Engine, p: Progress, r: int, until: float) -> None:
    """One pass; if it only decodes, as many as nothing interrupts."""
    made = f.made[r]
    made[:] = 0
    made[BUDGET] = e.max_tokens
    for i in range(f.tally[r, RUNNING]):
        f.paused[r, i] = f.todo[r, i] == 0
        f.chunks[r, i] = 0
    copying = 0.0
    if e.chunked and e.decode_first:
        copying += _decode(t, x, f, e, p, r, made, True)
        copying += _read_prompts(t, x, f, e, p, r, made)
    elif e.chunked:
        copying += _read_prompts(t, x, f, e, p, r, made)
        copying += _decode(t, x, f, e, p, r, made, made[PROMPT_TOKENS] == 0)
    else:
        if not (e.decode_first and f.tally[r, RUNNING] > 0):
            copying += _read_prompts(t, x, f, e, p, r, made)
        if made[PROMPT_TOKENS] == 0:
            copying += _decode(t, x, f, e, p, r, made, True)
    f.tally[r, JUST_DONE] = 0
    if made[DECODING] + made[PROMPT_TOKENS] == 0:
        if f.tally[r, RUNNING] > 0:  # nothing but parts of prompts that find no memory
            copying += preempt(t, x, f, e, p, r)
        f.clock[r] += copying
    elif made[PROMPT_TOKENS] + made[PREEMPTED] > 0 or copying > 0 or _someone_waits(f, r):
        play_pass(t, x, f, e, p, r, made[DECODING], copying)
    else:
        play_rounds(t, x, f, e, p, r, until)
    f.tally[r, PASSES] += 1


@compiled
def _someone_waits(f: Fleet, r: int) -> bool:
    """Whether a decoding sequence is left out of this pass."""
    for i in range(f.tally[r, RUNNING]):  # noqa: SIM110 - the compiler knows no generators
        if f.paused[r, i]:
            return True
    return False


@compiled
def _decode(
    t: "Tables", x: Trace, f: Fleet, e: Engine, p: Progress, r: int, made: Integers, force: bool
) -> float:
    """Let sequences decode, first come first served, as long as budget and memory last.

    Where memory ends, ``force`` takes the sequence out that was admitted last. Seconds of copying.
    """
    copying = 0.0
    i = 0
    while i < f.tally[r, RUNNING] and made[BUDGET] >= t.width:
        if f.todo[r, i] > 0:
            i += 1
            continue
        fits = grow(t, f, e, r, i, length_of(f, r, i) + f.growth[r, i])
        while not fits and force:
            copying += preempt(t, x, f, e, p, r)
            made[PREEMPTED] += 1
            if i == f.tally[r, RUNNING]:
                return copying
            fits = grow(t, f, e, r, i, length_of(f, r, i) + f.growth[r, i])
        if fits:
            f.paused[r, i] = False
            made[BUDGET] -= t.width
            made[DECODING] += 1
        i += 1
    while made[PREEMPTED] == 0 and f.tally[r, SWAPPERS] > 0:  # others come back
        if f.tally[r, RUNNING] == e.max_seqs or made[BUDGET] < t.width:
            break
        took = swap_in(t, x, f, e, p, r, int(f.tally[r, SWAP_HEAD]))
        if took < 0:
            break
        pop(f, p, r, SWAP_HEAD)
        copying += took
        made[BUDGET] -= t.width
        made[DECODING] += 1
    return copying


@compiled
def _read_prompts(
    t: "Tables",
    x: Trace,
    f: Fleet,
    e: Engine,
    p: Progress,
    r: int,
    made: Integers,
) -> float:
    """Go on with the prompts that have begun, then begin others; seconds of copying."""
    for i in range(f.tally[r, RUNNING]):
        part = min(f.todo[r, i], made[BUDGET])
        if part > 0 and grow(t, f, e, r, i, f.done[r, i] + part):
            f.chunks[r, i] = part
            made[BUDGET] -= part
            made[PROMPT_TOKENS] += part
    copying = 0.0
    while made[PREEMPTED] + f.tally[r, SWAPPERS] == 0 and f.tally[r, WAITERS] > 0:
        if f.tally[r, RUNNING] == e.max_seqs or made[BUDGET] <= 0:
            break
        took = _begin(t, x, f, e, p, r, made)
        if took < 0:
            break
        copying += took
    return copying


@compiled
def _begin(
    t: "Tables",
    x: Trace,
    f: Fleet,
    e: Engine,
    p: Progress,
    r: int,
    made: Integers,
) -> float:
    """Begin the prompt that has waited longest; seconds of copying, below 0 if it has to wait.

    Its shared blocks that some memory still holds need not be computed.
    """
    request = int(f.tally[r, WAIT_HEAD])
    hits, kept, away = 0, 0, 0  # shared blocks found, of them unused on the GPU, on the host
    if e.shared_bytes > 0 and x.block_tokens > 0:
        hits = hits_of(x, f, r, request)
        for block in x.ids[x.start[request] : x.start[request] + hits]:
            kept += f.users[r, block] == 0 and f.where[r, block] == ON_GPU
            away += f.where[r, block] == ON_HOST
    length = x.prompt[request] + p.made[request]
    found, again = min(hits * x.block_tokens, length - 1), 0
    if hits == 0:  # only full blocks can be found again
        again = min(remains(f, p, r, request), (length - 1) // e.block_tokens)
        found = again * e.block_tokens
    part = min(length - found, made[BUDGET])
    if not e.chunked and part < length - found:
        if made[PROMPT_TOKENS] > 0:
            return -1.0
        part = length - found  # longer than the budget: in a pass of its own
    blocks = blocks_of(e, length if e.whole_prompt else found + part)
    own = max(t.prompt_bytes[blocks] - hits * e.shared_bytes, 0)
    if own + (kept + away) * e.shared_bytes > available(f, e, r):
        return -1.0
    if f.tally[r, HOST_PRIVATE] + t.host_bytes[blocks] > e.host:
        return -1.0
    pop(f, p, r, WAIT_HEAD)
    i = join(f, r, request, length - found, found, hits)
    use_hits(x, f, e, r, request, hits)
    f.held[r, i] = take_up(f, p, r, request, again)
    grow(t, f, e, r, i, found + part)
    if np.isnan(p.started[request]):
        p.started[request] = f.clock[r]
        p.hits[request] = found
    p.status[request] = RUNNING_NOW
    f.chunks[r, i] = part
    made[BUDGET] -= part
    made[PROMPT_TOKENS] += part
    f.spent[r, TO_GPU] += away * e.shared_bytes / t.h2d
    return float(away * e.shared_bytes / t.h2d)
