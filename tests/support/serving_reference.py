"""Continuous batching one pass at a time, in plain Python: what the compiled simulator must equal.

Written from the rules as docs/serving.md states them, with lists and dictionaries, and with
NumPy's own interpolation. No pass is ever skipped or summed up.
"""

from dataclasses import dataclass, field
from math import ceil, inf, isnan, nan
from typing import Any

import numpy as np

EPS = 1e-9


@dataclass(eq=False)
class Request:
    index: int
    arrival: float
    prompt: int
    generate: int
    rate: float
    ids: list[int]
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


@dataclass(eq=False)
class Sequence:
    request: Request
    todo: int
    done: int
    shared: int
    held: int = 0
    host_held: int = 0
    length: float = 0.0
    growth: float = 0.0
    left: int = 0
    chunk: int = 0
    runs: bool = False


@dataclass(eq=False)
class Replica:
    t: Any  # tables
    e: Any  # engine
    block_tokens: int
    clock: float = 0.0
    batch: list[Sequence] = field(default_factory=list)
    free: list[tuple[int, Request | None]] = field(default_factory=list)  # used from the front
    waiting: list[Request] = field(default_factory=list)
    swapped: list[Request] = field(default_factory=list)
    users: dict[int, int] = field(default_factory=dict)  # shared blocks in use
    kept: list[int] = field(default_factory=list)  # unused ones on the GPU, oldest first
    away: list[int] = field(default_factory=list)  # on the host, oldest first
    host_swapped: int = 0
    just_done: int = 0
    passes: int = 0
    budget: int = 0
    preempted: int = 0
    copying: float = 0.0

    # memory

    def __post_init__(self) -> None:
        self.free = [(int(self.e.gpu), None)]

    def freed(self, size: int, owner: Request | None = None) -> None:
        self.free.append((size, owner))

    def taken(self, size: int) -> None:
        while size > 0:
            first, owner = self.free.pop(0)
            rest = max(first - size, 0)
            if rest:
                self.free.insert(0, (rest, owner))
            size -= first - rest

    def remains(self, r: Request) -> int:
        left = sum(size for size, owner in self.free if owner is r)
        return left * r.kept_blocks // r.kept if r.kept else 0

    def take_up(self, r: Request, blocks: int) -> int:
        size = blocks * r.kept // r.kept_blocks if r.kept else 0
        left = sum(size for size, owner in self.free if owner is r)
        self.free = [
            ((left - size) if owner is r else s, None if owner is r else owner)
            for s, owner in self.free
        ]
        r.kept = 0
        return size

    def private(self) -> int:
        return sum(s.held for s in self.batch)

    def available(self) -> int:
        return int(self.e.gpu - self.private() - len(self.users) * self.e.shared_bytes)

    def host_room(self) -> int:
        return int(self.e.host - sum(s.host_held for s in self.batch))

    def make_room(self, size: int) -> None:
        while self.kept and self.available() - len(self.kept) * self.e.shared_bytes < size:
            block = self.kept.pop(0)
            self.freed(self.e.shared_bytes)
            if self.make_host_room(self.e.shared_bytes):
                self.away.append(block)

    def make_host_room(self, size: int) -> bool:
        room = int(self.e.host_cache) - self.host_swapped
        if room < size:
            return False
        while room - len(self.away) * self.e.shared_bytes < size:
            self.away.pop(0)
        return True

    def pin(self, block: int) -> None:
        if block not in self.users:
            if block in self.kept:
                self.kept.remove(block)
            else:
                if block in self.away:
                    self.away.remove(block)
                self.make_room(self.e.shared_bytes)
                self.taken(self.e.shared_bytes)
            self.users[block] = 0
        self.users[block] += 1

    def unpin(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            del self.users[block]
            self.kept.append(block)

    def blocks(self, tokens: float) -> int:
        size: int = self.e.block_tokens
        return ceil(tokens / size - EPS)

    def own(self, s: Sequence, tokens: float) -> int:
        table = self.t.prompt_bytes if s.todo > 0 else self.t.gpu_bytes
        size = int(table[self.blocks(tokens)]) - s.shared * int(self.e.shared_bytes)
        return max(size, 0)

    def grow(self, s: Sequence, tokens: float) -> bool:
        size, host = self.own(s, tokens), int(self.t.host_bytes[self.blocks(tokens)])
        if size - s.held > self.available() or host - s.host_held > self.host_room():
            return False
        self.make_room(size - s.held)
        self.taken(size - s.held)
        s.held, s.host_held = size, host
        return True

    # one pass

    def step(self) -> None:
        e = self.e
        self.budget, self.preempted, self.copying = e.max_tokens, 0, 0.0
        self.just_done = 0
        for s in self.batch:
            s.chunk, s.runs = 0, False
        if e.chunked and e.decode_first:
            self.decode(True)
            self.read_prompts()
        elif e.chunked:
            self.read_prompts()
            self.decode(not any(s.chunk for s in self.batch))
        else:
            if not (e.decode_first and self.batch):
                self.read_prompts()
            if not any(s.chunk for s in self.batch):
                self.decode(True)
        if any(s.chunk or s.runs for s in self.batch):
            self.play()
        else:
            if self.batch:
                self.preempt()
            self.clock += self.copying

    def decode(self, force: bool) -> None:
        for s in list(self.batch):
            if s.todo or s not in self.batch or self.budget < self.t.width:
                continue
            fits = self.grow(s, s.length + s.growth)
            while not fits and force:
                if self.preempt() is s:
                    return
                fits = self.grow(s, s.length + s.growth)
            if fits:
                s.runs = True
                self.budget -= self.t.width
        while self.swapped and not self.preempted and len(self.batch) < self.e.max_seqs:
            if self.budget < self.t.width or not self.swap_in(self.swapped[0]):
                return
            self.swapped.pop(0)
            self.budget -= self.t.width

    def preempt(self) -> Sequence:
        s = self.batch[-1]
        r = s.request
        r.preempted += 1
        self.preempted += 1
        if not s.todo:
            r.made = r.generate - ceil(s.left * s.growth - EPS)
            r.left = s.left
        size = int(self.t.gpu_bytes[self.blocks(r.prompt + r.made - 1)])
        r.kept = 0
        if self.e.keeps and not s.shared:
            blocks = self.blocks(s.done if s.todo else s.length)
            r.kept, r.kept_blocks = (s.held, blocks) if blocks else (0, 0)
        self.drop(s)
        if not s.todo and self.e.swap and self.make_host_room(size):
            self.host_swapped += size
            self.copying += size / self.t.d2h
            self.swapped.append(r)
        else:
            self.waiting.insert(0, r)
        return s

    def drop(self, s: Sequence) -> None:
        self.batch.remove(s)
        self.freed(s.held, s.request if s.request.kept else None)
        for block in reversed(s.request.ids[: s.shared]):
            self.unpin(block)

    def swap_in(self, r: Request) -> bool:
        length = r.prompt + r.made - 1
        s = Sequence(r, 0, 0, 0, length=length, left=r.left, runs=True)
        s.growth = (r.generate - r.made) / r.left
        self.batch.append(s)
        if not self.grow(s, s.length + s.growth):
            self.batch.pop()
            return False
        size = int(self.t.gpu_bytes[self.blocks(length)])
        self.host_swapped -= size
        self.copying += size / self.t.h2d
        return True

    def read_prompts(self) -> None:
        for s in self.batch:
            part = min(s.todo, self.budget)
            if part > 0 and self.grow(s, s.done + part):
                s.chunk = part
                self.budget -= part
        while self.waiting and not self.swapped and not self.preempted:
            if len(self.batch) == self.e.max_seqs or self.budget <= 0 or not self.begin():
                return

    def hits(self, r: Request) -> list[int]:
        if not self.e.shared_bytes or not self.block_tokens:
            return []
        found = []
        for block in r.ids[: r.prompt // self.block_tokens]:
            if block not in self.users and block not in self.kept and block not in self.away:
                break
            found.append(block)
        return found

    def begin(self) -> bool:
        r = self.waiting[0]
        hits = self.hits(r)
        away = [b for b in hits if b in self.away]
        length = r.prompt + r.made
        found, again = min(len(hits) * self.block_tokens, length - 1), 0
        if not hits:
            again = min(self.remains(r), (length - 1) // self.e.block_tokens)
            found = again * self.e.block_tokens
        part = min(length - found, self.budget)
        if not self.e.chunked and part < length - found:
            if any(s.chunk for s in self.batch):
                return False
            part = length - found
        blocks = self.blocks(length if self.e.whole_prompt else found + part)
        own = max(int(self.t.prompt_bytes[blocks]) - len(hits) * self.e.shared_bytes, 0)
        new = [b for b in hits if b not in self.users]
        if own + len(new) * self.e.shared_bytes > self.available():
            return False
        if int(self.t.host_bytes[blocks]) > self.host_room():
            return False
        self.waiting.pop(0)
        for block in hits:
            if block not in away:
                self.pin(block)
        self.away = [b for b in self.away if b not in away]
        for block in away:
            self.pin(block)
        s = Sequence(r, length - found, found, len(hits), chunk=part)
        self.batch.append(s)
        s.held = self.take_up(r, again)
        assert self.grow(s, found + part)
        if isnan(r.started):
            r.started, r.hits = self.clock, found
        self.budget -= part
        self.copying += len(away) * self.e.shared_bytes / self.t.h2d
        return True

    def play(self) -> None:
        t = self.t
        running = [s for s in self.batch if s.runs]
        reading = [s for s in self.batch if s.chunk]
        took, n, cost = self.copying, t.nodes, t.seconds
        if running:
            mean = sum(s.length for s in running) / len(running)
            took += line(n.contexts, cost.round[len(running)], mean)
        if reading:
            alone, every = len(running) * t.width, sum(s.chunk for s in reading)
            ends = [s for s in reading if s.chunk == s.todo]
            for values, more in ((cost.token, every), (cost.head, len(ends))):
                took += line(n.tokens, values, alone + more) - line(n.tokens, values, alone)
            took += sum(plane(n.chunks, n.starts, cost.chunk, s.chunk, s.done) for s in reading)
            took += sum(line(n.contexts, cost.between, s.done + s.chunk) for s in ends)
        self.clock += took
        self.passes += 1
        for s in running:
            s.length += s.growth
            s.left -= 1
        for s in reading:
            s.done += s.chunk
            if s.chunk < s.todo:
                s.todo -= s.chunk
            else:
                self.finish_prompt(s)
        for s in [s for s in self.batch if not s.todo and not s.left]:
            r = s.request
            r.made, r.last, r.status = r.generate, self.clock, "finished"
            self.just_done += 1
            self.drop(s)

    def finish_prompt(self, s: Sequence) -> None:
        r = s.request
        r.made += 1
        if isnan(r.first):
            r.first = self.clock
        s.todo = 0
        if self.e.shared_bytes and self.block_tokens:
            full = min(len(r.ids), r.prompt // self.block_tokens)
            given = min((full - s.shared) * self.e.shared_bytes, s.held)
            s.held -= given
            self.freed(given)
            for block in r.ids[s.shared : full]:
                self.pin(block)
            s.shared = full
        s.length = r.prompt + r.made - 1
        self.freed(s.held - self.own(s, s.length))
        s.held = self.own(s, s.length)
        more = r.generate - r.made
        s.left = ceil(more / r.rate - EPS)
        s.growth = more / s.left if more else 0.0

    def load(self, now: float) -> int:
        unfinished = len(self.batch) + len(self.waiting) + len(self.swapped)
        return unfinished + (self.just_done if self.clock > now else 0)

    def advance(self, until: float) -> None:
        while self.clock < until and (self.batch or self.waiting or self.swapped):
            self.step()


def line(nodes: Any, values: Any, x: float) -> float:
    """Linear interpolation, and beyond the last node as before it."""
    if x > nodes[-1]:
        slope = (values[-1] - values[-2]) / (nodes[-1] - nodes[-2])
        return float(values[-1] + slope * (x - nodes[-1]))
    return float(np.interp(x, nodes, values))


def plane(rows: Any, columns: Any, values: Any, x: float, y: float) -> float:
    """Linear interpolation in both directions."""
    at_y = np.array([line(columns, row, y) for row in values])
    return line(rows, at_y, x)


def simulate(
    requests: Any, costs: Any, engine: Any, replicas: int, route: str, rate: Any, until: float = inf
) -> tuple[list[Request], list[Replica]]:
    """What becomes of every request."""
    fleet = [Replica(costs.tables, engine, requests.block_tokens) for _ in range(replicas)]
    out = []
    turn = 0
    for i in range(len(requests)):
        ids: list[int] = []
        if requests.block_ids is not None:
            ids = list(requests.block_ids[requests.block_start[i] : requests.block_start[i + 1]])
        r = Request(
            i, requests.arrival[i], int(requests.prompt[i]), int(requests.generate[i]),
            rate[i], ids,
        )  # fmt: skip
        out.append(r)
        if r.arrival >= until:
            continue
        blocks = fleet[0].blocks(r.prompt + r.generate - 1)
        t = costs.tables
        if t.prompt_bytes[blocks] > engine.gpu or t.host_bytes[blocks] > engine.host:
            r.status = "refused"
            continue
        if route == "round-robin":
            chosen = fleet[turn]
            turn = (turn + 1) % replicas
        else:
            for replica in fleet:
                replica.advance(r.arrival)
            prefix = route == "prefix-aware"
            chosen = max(
                fleet,
                key=lambda f: (len(f.hits(r)) if prefix else 0, -f.load(r.arrival)),
            )
        chosen.advance(r.arrival)
        chosen.clock = max(chosen.clock, r.arrival)
        r.replica = fleet.index(chosen)
        chosen.waiting.append(r)
    for replica in fleet:
        replica.advance(until)
    return out, fleet
