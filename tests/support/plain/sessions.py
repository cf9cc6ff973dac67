"""Turns and aborts in plain Python, event by event: what ``sessions`` must equal."""

from heapq import heapify, heappop, heappush
from math import inf, nextafter
from typing import Any

from kvsim.serving.costs import StepCosts
from kvsim.traces.requests import Requests
from tests.support.plain.memory import PlainRequest
from tests.support.plain.scheduler import PlainReplica, fleet_of, plain_requests


class PlainSessions:
    """A fleet, its requests, and when they arrive or are aborted."""

    def __init__(
        self, requests: Requests, costs: StepCosts, limits: Any, replicas: int, rate: Any
    ) -> None:
        self.fleet = self.readers = fleet_of(costs, limits, requests, replicas)
        self.out = plain_requests(requests, rate, limits)
        count = len(self.out)
        self.parent = [-1] * count if requests.parent is None else requests.parent.tolist()
        self.think = [0.0] * count if requests.think is None else requests.think.tolist()
        self.abort_after = (
            [inf] * count if requests.abort_after is None else requests.abort_after.tolist()
        )
        self.events: list[tuple[float, int]] = []  # time, and 2 x request or 1 more for an abort
        self.turn = 0

    def play(self, route: str, until: float) -> None:
        """The replica furthest behind makes a pass, unless something happens before that."""
        self.begin(until)
        while True:
            due = min(self.events[0][0] if self.events else inf, until)
            busy = [f for f in self.fleet if f.batch or f.waiting or f.swapped]
            clocks = sorted(f.clock for f in busy)
            if busy and clocks[0] < due:
                one = min(busy, key=lambda f: f.clock)
                others = clocks[1] if len(clocks) > 1 else inf
                one.step(max(min(due, others), nextafter(one.clock, inf)))
                self.follow()
            elif self.events and due < until:
                self.happen(*heappop(self.events), route)
            else:
                return

    def begin(self, until: float) -> None:
        """Refuse what never fits, and note when the first turns arrive."""
        for r in self.out:
            if not self.fleet[0].could_hold(r) and r.arrival < until:
                r.status = "refused"
            elif (before := self.parent[r.index]) >= 0:
                if self.out[before].status in ("refused", "aborted"):
                    r.status = "aborted"
            else:
                self.events.append((float(r.arrival), 2 * r.index))
        heapify(self.events)

    def happen(self, time: float, key: int, route: str) -> None:
        """A request arrives, or its client hangs up."""
        if key % 2:
            self.abort(self.out[key // 2], time)
        else:
            self.arrive(self.out[key // 2], route)

    def follow(self) -> None:
        """Turns whose parents have finished are to come."""
        for r in self.out:
            before = self.parent[r.index]
            if before >= 0 and self.out[before].status == "finished" and r.status == "waiting":
                self.parent[r.index] = -1
                r.arrival = max(r.arrival, self.out[before].last + self.think[r.index])
                heappush(self.events, (float(r.arrival), 2 * r.index))

    def arrive(self, request: PlainRequest, route: str) -> None:
        """A request comes to the replica that suits it."""
        if route == "round-robin":
            chosen = self.readers[self.turn]
            self.turn = (self.turn + 1) % len(self.readers)
        else:
            chosen = min(self.readers, key=lambda f: f.score(request, route))
        chosen.receive(request, self.fleet.index(chosen))
        heappush(
            self.events, (request.arrival + self.abort_after[request.index], 2 * request.index + 1)
        )

    def abort(self, request: PlainRequest, time: float) -> None:
        """A client hangs up, so that later turns of the session never come."""
        if request.status in ("finished", "refused", "aborted"):
            return
        if request.replica >= 0:
            self.take_out(self.fleet[request.replica], request)
        request.status = "aborted"
        for follows in self.out:
            if self.parent[follows.index] == request.index:
                self.abort(follows, time)

    def take_out(self, replica: PlainReplica, request: PlainRequest) -> None:
        """Free what a request holds, wherever it is."""
        if request in replica.waiting:
            replica.waiting.remove(request)
        elif request in replica.swapped:
            replica.swapped.remove(request)
            length = request.prompt + request.made - 1
            if not request.handed:
                replica.host_swapped -= int(replica.t.gpu_bytes[replica.blocks(length)])
        else:
            replica.drop(next(s for s in replica.batch if s.request is request))


def simulate_sessions_plainly(
    requests: Requests, costs: StepCosts, limits: Any, replicas: int, route: str, rate: Any,
    until: float = inf,
) -> tuple[list[PlainRequest], list[PlainReplica]]:  # fmt: skip
    """What becomes of every request, and the replicas at the end."""
    sessions = PlainSessions(requests, costs, limits, replicas, rate)
    sessions.play(route, until)
    return sessions.out, sessions.fleet
