"""Memory of a replica in plain Python, with lists and dictionaries: what ``memory`` must equal."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from math import ceil, nan
from typing import Any

import numpy as np

EPS = 1e-9


@dataclass(eq=False)
class PlainRequest:
    """A request, and its state during the run."""

    index: int
    arrival: float
    prompt: int
    generate: int
    rate: float
    ids: list[int]
    named: int = 0  # full KV blocks of its tokens that these name
    priority: int = 0
    made: int = 0
    started: float = nan
    first: float = nan
    last: float = nan
    status: str = "waiting"
    preempted: int = 0
    hits: int = 0
    replica: int = -1
    left: int = 0  # rounds, while it is swapped out or decodes
    handed: bool = False  # it comes with its cache


Key = tuple[Any, ...]


@dataclass(eq=False)
class PlainBlock:
    """A KV block that can be found again by the tokens in it."""

    key: Key | None
    users: int = 0
    arrives: float = 0.0  # [s]


@dataclass(eq=False)
class PlainSequence:
    """A running request: what of its prompt is read and what memory it holds."""

    request: PlainRequest
    todo: int
    done: int
    shared: int
    held: int = 0
    host_held: int = 0
    length: float = 0.0
    growth: float = 0.0
    left: int = 0
    shares: dict[int, "PlainBlock"] = field(default_factory=dict)  # KV blocks by their place
    skip: int = 0  # prompt tokens that come from another memory
    skip_at: int = 0
    ready: float = 0.0
    chunk: int = 0
    runs: bool = False


@dataclass(eq=False)
class PlainMemory:
    """Sequences' own caches, and prompt blocks that several share."""

    t: Any  # tables
    limits: Any
    batch: list[PlainSequence] = field(default_factory=list)
    copies: dict[Key, list[PlainBlock]] = field(default_factory=dict)  # on the GPU, oldest first
    unused: list[PlainBlock] = field(default_factory=list)  # those without users, in order of use
    clock: float = 0.0
    host_swapped: int = 0
    late: int = 0  # memory that a pass put together ahead does not know to be free [B]
    late_kept: int = 0  # of it, what is kept [B]
    late_blocks: list[PlainBlock] = field(default_factory=list)

    @property
    def each(self) -> int:
        """Memory of a KV block that is shared. [B]"""
        return int(self.limits.part_bytes)

    def private(self) -> int:
        """Cache of running sequences, without shared blocks. [B]"""
        return sum(s.held for s in self.batch)

    def pinned(self) -> int:
        """Shared blocks in use. [B]"""
        return self.each * sum(b.users > 0 for copies in self.copies.values() for b in copies)

    def available(self) -> int:
        """Free memory, and that of kept blocks. [B]"""
        return int(self.limits.gpu - self.private() - self.pinned() - self.late)

    def host_room(self) -> int:
        """Host memory that running sequences may still take. [B]"""
        return int(self.limits.host - sum(s.host_held for s in self.batch))

    def make_room(self, size: int) -> None:
        """Kept blocks give way, least recently used first."""
        while self.unused and self.available() - self.evictable() < size:
            self.forget(self.unused.pop(0))

    def evictable(self) -> int:
        """Memory of kept blocks, but for those that a pass put together ahead takes to be used."""
        return len(self.unused) * self.each - self.late_kept

    def forget(self, block: PlainBlock) -> None:
        """Nothing finds a block any more."""
        if block.key is not None:
            self.copies[block.key].remove(block)
            block.key = None

    def key(self, request: PlainRequest, place: int) -> Key:
        """Name the tokens of a full KV block: by the trace, or as those of one request."""
        each = int(self.limits.parts)
        if place < request.named:
            return request.ids[place // each], place % each
        return "own", request.index, place

    def find(self, request: PlainRequest, place: int) -> PlainBlock | None:
        """Return the oldest block on the GPU with the same tokens, if it is here or to come."""
        copies = self.copies.get(self.key(request, place))
        return copies[0] if copies else None

    def pin(self, block: PlainBlock) -> PlainBlock:
        """One more sequence uses a block."""
        if not block.users:
            self.unused.remove(block)
        block.users += 1
        return block

    def unpin(self, block: PlainBlock) -> None:
        """One sequence less uses a block, which is kept if it has arrived."""
        block.users -= 1
        if block.users:
            return
        if block.arrives <= self.clock:
            later = (i for i, other in enumerate(self.unused) if other in self.late_blocks)
            self.unused.insert(next(later, len(self.unused)), block)
        else:
            self.forget(block)

    def add(self, request: PlainRequest, place: int, arrives: float = 0.0) -> PlainBlock:
        """Add a block of a sequence to those that can be found."""
        block = PlainBlock(self.key(request, place), 1, arrives)
        self.copies.setdefault(self.key(request, place), []).append(block)
        return block

    def share(self, sequence: PlainSequence, tokens: int, own: bool = False) -> None:
        """Full blocks of a sequence can be found; with ``own``, those of its own tokens too."""
        request, full = sequence.request, tokens // int(self.limits.block_tokens)
        for place in range(full if own else min(full, request.named)):
            if place not in sequence.shares:
                if sequence.held < self.each or not self.each:
                    return
                sequence.held -= self.each
                sequence.shares[place] = self.add(request, place)
                sequence.shared += 1

    def known(self, sequence: PlainSequence) -> int:
        """Tokens whose blocks are kept after a sequence: one put together ahead is not known."""
        r, s = sequence.request, sequence
        cached = s.done if s.todo else int(s.length + EPS)
        under_way = self.limits.ahead and r.prompt < cached < r.prompt + r.generate - 1
        return cached - under_way

    def blocks(self, tokens: float) -> int:
        """KV blocks of so many tokens."""
        size: int = self.limits.block_tokens
        return ceil(tokens / size - EPS)

    def own(self, sequence: PlainSequence, tokens: float) -> int:
        """Cache of a sequence of that length, without shared blocks. [B]"""
        table = self.t.prompt_bytes if sequence.todo > 0 else self.t.gpu_bytes
        size = int(table[self.blocks(tokens)]) - sequence.shared * self.each
        return max(size, 0)

    def whole(self, request: PlainRequest, shared: int) -> int:
        """Cache of a request with its whole answer, without shared blocks. [B]"""
        return (
            int(self.t.gpu_bytes[self.blocks(request.prompt + request.generate)])
            - shared * self.each
        )

    def grow(self, sequence: PlainSequence, tokens: float) -> bool:
        """Occupy the memory of a sequence of that length, if there is enough."""
        size, host = self.own(sequence, tokens), int(self.t.host_bytes[self.blocks(tokens)])
        if size - sequence.held > self.available() or host - sequence.host_held > self.host_room():
            return False
        self.make_room(size - sequence.held)
        sequence.held, sequence.host_held = size, host
        return True

    def could_hold(self, request: PlainRequest) -> bool:
        """Whether an empty cache has space for all of a request."""
        blocks = self.blocks(request.prompt + request.generate - 1)
        on_gpu, on_host = self.t.prompt_bytes[blocks], self.t.host_bytes[blocks]
        return bool(on_gpu <= self.limits.gpu and on_host <= self.limits.host)


def by_class(queue: list[Any], newcomer: Any, request: PlainRequest, front: bool = False) -> None:
    """Stand behind all others of the same class, or in front of them."""
    classes = [getattr(other, "request", other).priority for other in queue]
    queue.insert((bisect_left if front else bisect_right)(classes, request.priority), newcomer)


def line(nodes: Any, values: Any, value: float) -> float:
    """Linear interpolation, and beyond the last node as before it."""
    if value > nodes[-1]:
        slope = (values[-1] - values[-2]) / (nodes[-1] - nodes[-2])
        return float(values[-1] + slope * (value - nodes[-1]))
    return float(np.interp(value, nodes, values))


def plane(rows: Any, columns: Any, values: Any, value: float, tokens: float) -> float:
    """Linear interpolation in both directions."""
    at_tokens = np.array([line(columns, row, tokens) for row in values])
    return line(rows, at_tokens, value)
