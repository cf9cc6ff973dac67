"""Continuous batching one pass at a time, in plain Python: what the compiled simulator must equal.

Written from the rules as docs/serving.md states them, with lists and dictionaries, and with
NumPy's own interpolation. No pass is ever skipped or summed up. This is the documented meaning of
the compiled simulator: tests compare the two request by request.
"""

from dataclasses import dataclass, field
from math import ceil, inf, isnan
from typing import Any

from kvsim.serving.costs import StepCosts
from kvsim.serving.reference_memory import (
    EPS,
    PlainMemory,
    PlainRequest,
    PlainSequence,
    line,
    plane,
)
from kvsim.traces.requests import Requests


@dataclass(eq=False)
class PlainReplica(PlainMemory):
    """One replica and its scheduler."""

    clock: float = 0.0
    waiting: list[PlainRequest] = field(default_factory=list)
    swapped: list[PlainRequest] = field(default_factory=list)
    just_done: int = 0
    passes: int = 0
    budget: int = 0
    preempted: int = 0
    copying: float = 0.0

    def step(self) -> None:
        """One pass."""
        limits = self.limits
        self.budget, self.preempted, self.copying = limits.max_tokens, 0, 0.0
        self.just_done = 0
        for s in self.batch:
            s.chunk, s.runs = 0, False
        if limits.chunked and limits.decode_first:
            self.decode(True)
            self.read_prompts()
        elif limits.chunked:
            self.read_prompts()
            self.decode(not any(s.chunk for s in self.batch))
        else:
            if not (limits.decode_first and self.batch):
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
        """Sequences decode in order of admission while budget and memory last."""
        for s in list(self.batch):
            if s.todo or s not in self.batch or self.budget < self.limits.width:
                continue
            fits = self.grow(s, s.length + s.growth)
            while not fits and force:
                if self.preempt() is s:
                    return
                fits = self.grow(s, s.length + s.growth)
            if fits:
                s.runs = True
                self.budget -= self.limits.width
        while self.swapped and not self.preempted and len(self.batch) < self.limits.max_seqs:
            if self.budget < self.limits.width or not self.swap_in(self.swapped[0]):
                return
            self.swapped.pop(0)
            self.budget -= self.limits.width

    def preempt(self) -> PlainSequence:
        """Take out the sequence that was admitted last."""
        s = self.batch[-1]
        r = s.request
        r.preempted += 1
        self.preempted += 1
        if not s.todo:
            r.made = r.generate - ceil(s.left * s.growth - EPS)
            r.left = s.left
        size = int(self.t.gpu_bytes[self.blocks(r.prompt + r.made - 1)])
        r.kept = 0
        if self.limits.keeps and not s.shared:
            blocks = self.blocks(s.done if s.todo else s.length)
            r.kept, r.kept_blocks = (s.held, blocks) if blocks else (0, 0)
        self.drop(s)
        if not s.todo and self.limits.swap and self.make_host_room(size):
            self.host_swapped += size
            self.copying += size / self.t.d2h
            self.swapped.append(r)
        else:
            self.waiting.insert(0, r)
        return s

    def drop(self, s: PlainSequence) -> None:
        """Give back the memory of a sequence."""
        self.batch.remove(s)
        self.freed(s.held, s.request if s.request.kept else None)
        for block in reversed(s.request.ids[: s.shared]):
            self.unpin(block)

    def swap_in(self, r: PlainRequest) -> bool:
        """Bring a swapped sequence back, if it fits."""
        length = r.prompt + r.made - 1
        s = PlainSequence(r, 0, 0, 0, length=length, left=r.left, runs=True)
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
        """Go on with prompts that have begun, then begin others in order."""
        for s in self.batch:
            part = min(s.todo, self.budget)
            if part > 0 and self.grow(s, s.done + part):
                s.chunk = part
                self.budget -= part
        while self.waiting and not self.swapped and not self.preempted:
            if len(self.batch) == self.limits.max_seqs or self.budget <= 0 or not self.begin():
                return

    def hits(self, r: PlainRequest) -> list[int]:
        """Leading prompt blocks that some memory still holds."""
        if not self.limits.prefix_bytes or not self.limits.prefix_tokens:
            return []
        found = []
        for block in r.ids[: r.prompt // self.limits.prefix_tokens]:
            if block not in self.users and block not in self.kept and block not in self.away:
                break
            found.append(block)
        return found

    def begin(self) -> bool:
        """Begin the prompt that has waited longest, unless it has to wait."""
        r = self.waiting[0]
        hits = self.hits(r)
        away = [b for b in hits if b in self.away]
        length = r.prompt + r.made
        found, again = min(len(hits) * self.limits.prefix_tokens, length - 1), 0
        if not hits:
            again = min(self.remains(r), (length - 1) // self.limits.block_tokens)
            found = again * self.limits.block_tokens
        part = min(length - found, self.budget)
        if not self.limits.chunked and part < length - found:
            if any(s.chunk for s in self.batch):
                return False
            part = length - found
        blocks = self.blocks(length if self.limits.whole_prompt else found + part)
        own = max(int(self.t.prompt_bytes[blocks]) - len(hits) * self.limits.prefix_bytes, 0)
        new = [b for b in hits if b not in self.users]
        if own + len(new) * self.limits.prefix_bytes > self.available():
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
        s = PlainSequence(r, length - found, found, len(hits), chunk=part)
        self.batch.append(s)
        s.held = self.take_up(r, again)
        assert self.grow(s, found + part)
        if isnan(r.started):
            r.started, r.hits = self.clock, found
        self.budget -= part
        self.copying += len(away) * self.limits.prefix_bytes / self.t.h2d
        return True

    def play(self) -> None:
        """The pass takes its time and hands out its tokens."""
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

    def finish_prompt(self, s: PlainSequence) -> None:
        """A prompt yields its first token, and its full blocks are shared."""
        r = s.request
        r.made += 1
        if isnan(r.first):
            r.first = self.clock
        s.todo = 0
        if self.limits.prefix_bytes and self.limits.prefix_tokens:
            full = min(len(r.ids), r.prompt // self.limits.prefix_tokens)
            given = min((full - s.shared) * self.limits.prefix_bytes, s.held)
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
        """Unfinished requests; what a pass in progress will complete is not complete yet."""
        unfinished = len(self.batch) + len(self.waiting) + len(self.swapped)
        return unfinished + (self.just_done if self.clock > now else 0)

    def advance(self, until: float) -> None:
        """Play passes until one ends at or after that time."""
        while self.clock < until and (self.batch or self.waiting or self.swapped):
            self.step()


def simulate_plainly(
    requests: Requests,
    costs: StepCosts,
    limits: Any,
    replicas: int,
    route: str,
    rate: Any,
    until: float = inf,
) -> tuple[list[PlainRequest], list[PlainReplica]]:
    """What becomes of every request, and the replicas at the end."""
    fleet = [PlainReplica(costs.tables, limits) for _ in range(replicas)]
    out = []
    turn = 0
    for i in range(len(requests)):
        ids: list[int] = []
        if requests.block_ids is not None and requests.block_start is not None:
            ids = list(requests.block_ids[requests.block_start[i] : requests.block_start[i + 1]])
        r = PlainRequest(
            i, requests.arrival[i], int(requests.prompt[i]), int(requests.generate[i]),
            rate[i], ids,
        )  # fmt: skip
        out.append(r)
        if r.arrival >= until:
            continue
        if not fleet[0].could_hold(r):
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
