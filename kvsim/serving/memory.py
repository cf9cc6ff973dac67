"""Memory of a replica: sequences' own caches, and prompt blocks that several share.

A shared block is in use (pinned), kept on the GPU in case its prefix comes again, kept on the host,
or absent. Kept blocks give way, least recently used first, when their memory is needed: to the
host if there is room, else for good.
"""

from kvsim.serving.compiled import compiled
from kvsim.serving.state import (
    ABSENT,
    CACHED,
    FREED,
    HOST_CACHED,
    HOST_LRU_HEAD,
    HOST_SWAPPED,
    LOWEST,
    LRU_HEAD,
    NOBODY,
    ON_GPU,
    ON_HOST,
    PEAK,
    PINNED,
    PRIVATE,
    TAKEN,
    WAIT_HEAD,
    WAITERS,
    Engine,
    Fleet,
    Progress,
)


@compiled
def available(f: Fleet, e: Engine, r: int) -> int:
    """Memory of the GPU that is free, or would be without kept blocks. [B]"""
    return int(e.gpu - f.tally[r, PRIVATE] - f.tally[r, PINNED])


@compiled
def take(f: Fleet, e: Engine, r: int, size: int) -> None:
    """Occupy memory that is available, for a sequence of its own; kept blocks give way. [B]"""
    make_room(f, e, r, size)
    f.tally[r, PRIVATE] += size
    f.tally[r, TAKEN] += size
    _note(f, e, r)


@compiled
def give_back(f: Fleet, r: int, size: int) -> None:
    """Free memory of a sequence's own. [B]"""
    f.tally[r, PRIVATE] -= size
    f.tally[r, FREED] += size


@compiled
def make_room(f: Fleet, e: Engine, r: int, size: int) -> None:
    """Drop kept blocks, the least recently used first, until that much is free. [B]"""
    while f.tally[r, CACHED] > 0 and available(f, e, r) - f.tally[r, CACHED] < size:
        block = int(f.tally[r, LRU_HEAD])
        _unlink(f, r, LRU_HEAD, block)
        f.tally[r, CACHED] -= e.shared_bytes
        f.tally[r, FREED] += e.shared_bytes
        f.where[r, block] = ABSENT
        if make_host_room(f, e, r, e.shared_bytes):
            f.where[r, block] = ON_HOST
            f.tally[r, HOST_CACHED] += e.shared_bytes
            _append(f, r, HOST_LRU_HEAD, block)


@compiled
def make_host_room(f: Fleet, e: Engine, r: int, size: int) -> bool:
    """Drop blocks from host memory until that much is free; whether there can be. [B]"""
    if e.host_cache - f.tally[r, HOST_SWAPPED] < size:
        return False
    while e.host_cache - f.tally[r, HOST_SWAPPED] - f.tally[r, HOST_CACHED] < size:
        remove_from_host(f, e, r, int(f.tally[r, HOST_LRU_HEAD]))
    return True


@compiled
def pin(f: Fleet, e: Engine, r: int, block: int) -> None:
    """One more running sequence uses a shared block, which is on the GPU from now on."""
    if f.users[r, block] == 0:
        if f.where[r, block] == ON_GPU:
            _unlink(f, r, LRU_HEAD, block)
            f.tally[r, CACHED] -= e.shared_bytes
        else:
            if f.where[r, block] == ON_HOST:
                remove_from_host(f, e, r, block)
            make_room(f, e, r, e.shared_bytes)
            f.tally[r, TAKEN] += e.shared_bytes
        f.where[r, block] = ON_GPU
        f.tally[r, PINNED] += e.shared_bytes
        _note(f, e, r)
    f.users[r, block] += 1


@compiled
def unpin(f: Fleet, e: Engine, r: int, block: int) -> None:
    """One sequence less uses a block; without any it is kept as the most recently used."""
    f.users[r, block] -= 1
    if f.users[r, block] == 0:
        f.tally[r, PINNED] -= e.shared_bytes
        f.tally[r, CACHED] += e.shared_bytes
        _append(f, r, LRU_HEAD, block)


@compiled
def remains(f: Fleet, p: Progress, r: int, request: int) -> int:
    """KV blocks of a preempted sequence, from its first on, that nobody has overwritten.

    Free memory is used in the order it became free, and of a sequence its last blocks first.
    """
    if p.kept[request] == 0:
        return 0
    gone = min(max(f.tally[r, TAKEN] - p.spot[request], 0), p.kept[request])
    return int((p.kept[request] - gone) * p.kept_blocks[request] // p.kept[request])


@compiled
def take_up(f: Fleet, p: Progress, r: int, request: int, blocks: int) -> int:
    """Use what remains of a preempted sequence again: its memory is no longer free. [B]"""
    if p.kept[request] == 0:
        return 0
    size = int(blocks * p.kept[request] // p.kept_blocks[request])
    f.tally[r, FREED] -= size
    f.tally[r, PRIVATE] += size
    other = f.tally[r, WAIT_HEAD]
    for _ in range(f.tally[r, WAITERS]):  # preempted ones wait in front of all others
        if p.preempted[other] == 0:
            break
        if p.kept[other] > 0 and p.spot[other] > p.spot[request]:
            p.spot[other] -= size
        other = p.link[other]
    p.kept[request] = 0
    return size


@compiled
def remove_from_host(f: Fleet, e: Engine, r: int, block: int) -> None:
    """Take a kept block off the host."""
    _unlink(f, r, HOST_LRU_HEAD, block)
    f.tally[r, HOST_CACHED] -= e.shared_bytes
    f.where[r, block] = ABSENT


@compiled
def _note(f: Fleet, e: Engine, r: int) -> None:
    """Record how full the memory has ever been."""
    used = f.tally[r, PRIVATE] + f.tally[r, PINNED] + f.tally[r, CACHED]
    f.tally[r, PEAK] = max(f.tally[r, PEAK], used)
    f.tally[r, LOWEST] = min(f.tally[r, LOWEST], e.gpu - used)


@compiled
def _append(f: Fleet, r: int, head: int, block: int) -> None:
    """Most recently used of the list whose head and tail are two neighbouring counts."""
    tail = f.tally[r, head + 1]
    f.older[r, block] = tail
    f.newer[r, block] = NOBODY
    if tail == NOBODY:
        f.tally[r, head] = block
    else:
        f.newer[r, tail] = block
    f.tally[r, head + 1] = block


@compiled
def _unlink(f: Fleet, r: int, head: int, block: int) -> None:
    older, newer = f.older[r, block], f.newer[r, block]
    if older == NOBODY:
        f.tally[r, head] = newer
    else:
        f.newer[r, older] = newer
    if newer == NOBODY:
        f.tally[r, head + 1] = older
    else:
        f.older[r, newer] = older
