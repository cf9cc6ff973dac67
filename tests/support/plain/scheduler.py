"""Continuous batching one pass at a time, in plain Python: what the compiled simulator must equal.

Written from the rules as docs/serving.md states them, with lists and dictionaries, and with
NumPy's own interpolation. No pass is ever skipped or summed up. This is the documented meaning of
the compiled simulator: tests compare the two request by request.
"""

from dataclasses import dataclass
from math import ceil, inf
from typing import Any

from kvsim.serving.costs import StepCosts
from kvsim.serving.records import TIER_LINKS
from kvsim.serving.world import get_link_rates
from kvsim.traces.requests import Requests
from tests.support.plain.memory import EPS, PlainRequest, PlainSequence, by_class, line, plane
from tests.support.plain.prompts import PlainPrompts
from tests.support.plain.tiers import PlainStore


@dataclass(eq=False)
class PlainReplica(PlainPrompts):
    """One replica and its scheduler."""

    just_done: int = 0
    passes: int = 0
    copying: float = 0.0
    began: float = 0.0
    ended: float = 0.0

    def step(self, until: float = inf) -> None:
        """Put one pass together and compute it, or wait until something can be computed."""
        limits = self.limits
        self.budget, self.preempted, self.copying = limits.max_tokens, 0, 0.0
        self.next_ready = inf
        follows = limits.ahead and self.batch and self.clock == self.ended
        self.seen = self.began if follows else inf
        self.late_seats = self.just_done if follows else 0
        if not follows:
            self.late = self.late_kept = 0
            self.late_blocks = []
        begins = self.clock
        for s in self.batch:
            s.chunk, s.runs = 0, False
        if limits.chunked and limits.decode_first:
            self.decode(True)
            self.read_prompts()
        elif limits.chunked:
            self.read_prompts()
            self.decode(not any(s.chunk for s in self.batch))
        else:
            if not (limits.decode_first and any(not s.todo for s in self.batch)):
                self.read_prompts()
            if not any(s.chunk for s in self.batch):
                self.decode(True)
        self.just_done = self.late = self.late_kept = 0
        self.late_blocks = []
        if any(s.chunk or s.runs for s in self.batch):
            self.play()
            self.began, self.ended = begins, self.clock
        elif self.next_ready < inf:
            self.clock = max(min(self.next_ready, until), self.clock) + self.copying
        else:
            if self.batch:
                self.preempt()
            self.clock += self.copying

    def decode(self, force: bool) -> None:
        """Sequences decode in order of class, then of admission, while budget and memory last."""
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
        """Take out the last sequence: of the last class, the one admitted last."""
        s = self.batch[-1]
        r = s.request
        r.preempted += 1
        self.preempted += 1
        if not s.todo:
            r.made = r.generate - ceil(s.left * s.growth - EPS)
            r.left = s.left
        size = int(self.t.gpu_bytes[self.blocks(r.prompt + r.made - 1)])
        self.drop(s)
        if not s.todo and self.limits.swap and self.make_host_room(size):
            self.host_swapped += size
            self.copying += size / self.t.d2h
            by_class(self.swapped, r, r)
        else:
            by_class(self.waiting, r, r, front=True)
        return s

    def drop(self, sequence: PlainSequence) -> None:
        """Give back the memory of a sequence."""
        self.share(sequence, self.known(sequence), own=True)
        self.batch.remove(sequence)
        for _, block in sorted(sequence.shares.items(), reverse=True):  # by place
            self.unpin(block)

    def swap_in(self, request: PlainRequest) -> bool:
        """Bring a swapped sequence back, if it fits."""
        length = request.prompt + request.made - 1
        sequence = PlainSequence(request, 0, 0, 0, length=length, left=request.left, runs=True)
        sequence.growth = (request.generate - request.made) / request.left
        by_class(self.batch, sequence, request)
        if not self.grow(sequence, sequence.length + sequence.growth):
            self.batch.remove(sequence)
            return False
        if request.handed:
            request.handed, request.first = False, self.clock
            return True
        size = int(self.t.gpu_bytes[self.blocks(length)])
        self.host_swapped -= size
        self.copying += size / self.t.h2d
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
            alone, ends = (
                ceil(len(running) * t.width / t.lanes),
                [s for s in reading if s.chunk == s.todo],
            )
            chunks = [s.chunk for s in reading]
            most = max(*chunks, ceil(sum(chunks) / t.lanes))  # of the lane with most
            for values, more in ((cost.token, most), (cost.head, ceil(len(ends) / t.lanes))):
                took += line(n.tokens, values, alone + more) - line(n.tokens, values, alone)
            if t.ranks > 1:  # padded decoding ranks, then the prompts of all ranks
                padded, every = alone * t.ranks, ceil(sum(chunks) * t.ranks / t.lanes)
                for sign, count in ((1, padded + max(*chunks, every)), (-1, padded)):
                    took += sign * line(n.tokens, cost.routed, count)
            own = [plane(n.chunks, n.starts, cost.chunk, s.chunk, s.done) for s in reading]
            took += max(*own, sum(own) / t.lanes)
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
        unused = len(self.unused)
        for s in [s for s in self.batch if not s.todo and not s.left]:
            r = s.request
            r.made, r.last, r.status = r.generate, self.clock, "finished"
            self.just_done += 1
            before, kept = self.private() + self.pinned(), len(self.unused)
            self.drop(s)
            self.late += before - self.private() - self.pinned()
            self.late_kept += (len(self.unused) - kept) * self.each
        if self.limits.ahead:
            self.late_blocks = self.unused[unused:]

    def load(self, now: float) -> int:
        """Unfinished requests; what a pass in progress will complete is not complete yet."""
        unfinished = len(self.batch) + len(self.waiting) + len(self.swapped)
        return unfinished + (self.just_done if self.clock > now else 0)

    def score(self, request: PlainRequest, route: str) -> tuple[int, int]:
        """The replica with the lowest is chosen."""
        if not (self.batch or self.waiting or self.swapped):
            self.clock = max(self.clock, request.arrival)
        if route == "least-loaded":
            return 0, self.load(request.arrival)
        found = self.found_blocks(request)
        if route == "prefix-aware":
            return -found, self.load(request.arrival)
        to_read = self.unread() - found * int(self.limits.block_tokens)
        return to_read, self.load(request.arrival)

    def receive(self, request: PlainRequest, number: int) -> None:
        """A request arrives at this replica, which is one of a fleet by its number."""
        self.clock = max(self.clock, request.arrival)
        request.replica = number
        by_class(self.waiting, request, request)

    def advance(self, until: float) -> None:
        """Play passes until one ends at or after that time."""
        while self.clock < until and (self.batch or self.waiting or self.swapped):
            self.step(until)


def fleet_of(
    costs: StepCosts, limits: Any, requests: Requests, replicas: int
) -> list[PlainReplica]:
    """Idle replicas, with one remote store for all."""
    rules, gpus = costs.rules, costs.deployment.gpus
    ids = requests.block_ids
    different = 0 if ids is None or not ids.size or not limits.part_bytes else int(ids.max()) + 1

    def store(size: float) -> PlainStore:
        return PlainStore(
            min(int(size / gpus) // int(limits.unit_bytes), different) if different else 0
        )

    remote, names = store(rules.remote_cache), TIER_LINKS
    return [
        PlainReplica(
            costs.tables, limits,
            stores={"host": store(rules.host_cache), "nvme": store(rules.nvme_cache),
                    "remote": remote},
            rates=dict(zip(names, map(float, get_link_rates(costs)), strict=True)),
        )
        for _ in range(replicas)
    ]  # fmt: skip


def plain_requests(requests: Requests, rate: Any, limits: Any) -> list[PlainRequest]:
    """All requests, waiting to arrive."""
    out, original = [], list[list[int]]()
    for i in range(len(requests)):
        ids: list[int] = []
        if requests.block_ids is not None and requests.block_start is not None:
            ids = list(requests.block_ids[requests.block_start[i] : requests.block_start[i + 1]])
        r = PlainRequest(
            i, requests.arrival[i], int(requests.prompt[i]), int(requests.generate[i]),
            rate[i], ids, priority=0 if requests.priority is None else int(requests.priority[i]),
        )  # fmt: skip
        original.append(ids)
        r.named = min(len(ids) * int(limits.parts), r.prompt // int(limits.block_tokens))
        out.append(r)
    each, seen = requests.block_tokens, set[int]()
    for after, before in enumerate(() if requests.parent is None else requests.parent.tolist()):
        if before < 0 or before in seen or not each:
            continue
        seen.add(before)
        one, two = out[before], out[after]
        whole, length = one.prompt // each, one.prompt + one.generate
        mine, other = original[before], original[after]
        if two.prompt >= length and len(mine[:whole]) == whole and mine[:whole] == other[:whole]:
            one.ids, full = other, (length - 1) // int(limits.block_tokens)
            one.named = min(len(other) * int(limits.parts), full)
    return out


def simulate_plainly(
    requests: Requests,
    costs: StepCosts,
    limits: Any,
    replicas: int,
    route: str,
    rate: Any,
    until: float = inf,
    refused: list[bool] | None = None,
) -> tuple[list[PlainRequest], list[PlainReplica]]:
    """The final state of every request, and the replicas at the end."""
    fleet = fleet_of(costs, limits, requests, replicas)
    out = plain_requests(requests, rate, limits)
    turn = 0
    for i, r in enumerate(out):
        if r.arrival >= until:
            continue
        if refused[i] if refused else not fleet[0].could_hold(r):
            r.status = "refused"
            continue
        if route != "round-robin" or costs.rules.remote_cache:
            for replica in fleet:
                replica.advance(r.arrival)
        if route == "round-robin":
            chosen = fleet[turn]
            turn = (turn + 1) % replicas
        else:
            chosen = min(fleet, key=lambda f: f.score(r, route))
        chosen.advance(r.arrival)
        chosen.receive(r, fleet.index(chosen))
    for replica in fleet:
        replica.advance(until)
    return out, fleet
