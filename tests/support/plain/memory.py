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
    kept: int = 0  # cache it left behind [B]
    kept_blocks: int = 0
    handed: bool = False  # it comes with its cache


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
    found: list[int] = field(default_factory=list)  # blocks of its prompt that it uses
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
    free: list[tuple[int, PlainRequest | None]] = field(default_factory=list)  # used from the front
    users: dict[int, int] = field(default_factory=dict)  # shared blocks in use
    kept: list[int] = field(default_factory=list)  # unused ones on the GPU, oldest first
    arrives: dict[int, float] = field(default_factory=dict)  # when blocks are on the GPU [s]
    clock: float = 0.0
    host_swapped: int = 0
    late: int = 0  # memory that a pass put together ahead does not know to be free [B]

    def __post_init__(self) -> None:
        self.free = [(int(self.limits.gpu), None)]

    def freed(self, size: int, owner: PlainRequest | None = None) -> None:
        """Free memory is used in the order in which it became free."""
        self.free.append((size, owner))

    def taken(self, size: int) -> None:
        """Overwrite what has been free for longest."""
        while size > 0:
            first, owner = self.free.pop(0)
            rest = max(first - size, 0)
            if rest:
                self.free.insert(0, (rest, owner))
            size -= first - rest

    def remains(self, request: PlainRequest) -> int:
        """KV blocks of a preempted sequence that nothing has overwritten."""
        left = sum(size for size, owner in self.free if owner is request)
        return left * request.kept_blocks // request.kept if request.kept else 0

    def reuse(self, request: PlainRequest, blocks: int) -> int:
        """Take back what remains of a preempted sequence. [B]"""
        size = blocks * request.kept // request.kept_blocks if request.kept else 0
        left = sum(size for size, owner in self.free if owner is request)
        self.free = [
            ((left - size) if owner is request else part, None if owner is request else owner)
            for part, owner in self.free
        ]
        request.kept = 0
        return size

    def private(self) -> int:
        """Cache of running sequences, without shared blocks. [B]"""
        return sum(s.held for s in self.batch)

    def available(self) -> int:
        """Free memory, and that of kept blocks. [B]"""
        used = self.private() + len(self.users) * self.limits.prefix_bytes
        return int(self.limits.gpu - used - self.late)

    def host_room(self) -> int:
        """Host memory that running sequences may still take. [B]"""
        return int(self.limits.host - sum(s.host_held for s in self.batch))

    def make_room(self, size: int) -> None:
        """Kept blocks give way, least recently used first."""
        while self.kept and self.available() - len(self.kept) * self.limits.prefix_bytes < size:
            self.arrives.pop(self.kept.pop(0))
            self.freed(self.limits.prefix_bytes)

    def pin(self, block: int, arrives: float = 0.0) -> None:
        """One more sequence uses a block."""
        if block not in self.users:
            if block in self.kept:
                self.kept.remove(block)
            else:
                self.make_room(self.limits.prefix_bytes)
                self.taken(self.limits.prefix_bytes)
                self.arrives[block] = arrives
            self.users[block] = 0
        self.users[block] += 1

    def unpin(self, block: int) -> None:
        """One sequence less uses a block, which is kept if it has arrived."""
        self.users[block] -= 1
        if self.users[block]:
            return
        del self.users[block]
        if self.arrives[block] <= self.clock:
            self.kept.append(block)
        else:
            del self.arrives[block]
            self.freed(self.limits.prefix_bytes)

    def blocks(self, tokens: float) -> int:
        """KV blocks of so many tokens."""
        size: int = self.limits.block_tokens
        return ceil(tokens / size - EPS)

    def own(self, sequence: PlainSequence, tokens: float) -> int:
        """Cache of a sequence of that length, without shared blocks. [B]"""
        table = self.t.prompt_bytes if sequence.todo > 0 else self.t.gpu_bytes
        size = int(table[self.blocks(tokens)]) - sequence.shared * int(self.limits.prefix_bytes)
        return max(size, 0)

    def grow(self, sequence: PlainSequence, tokens: float) -> bool:
        """Occupy the memory of a sequence of that length, if there is enough."""
        size, host = self.own(sequence, tokens), int(self.t.host_bytes[self.blocks(tokens)])
        if size - sequence.held > self.available() or host - sequence.host_held > self.host_room():
            return False
        self.make_room(size - sequence.held)
        self.taken(size - sequence.held)
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
