"""Two pools in plain Python: what ``pools`` must equal."""

from dataclasses import replace
from heapq import heappush
from math import ceil, inf, isnan, nan
from typing import Any

import numpy as np

from kvsim.serving.costs import StepCosts
from kvsim.serving.pools import TwoPools
from kvsim.serving.rules import Rules
from kvsim.serving.world import limits_of
from kvsim.traces.requests import Requests
from tests.support.plain.memory import EPS, PlainRequest, by_class
from tests.support.plain.scheduler import PlainReplica, fleet_of, simulate_plainly
from tests.support.plain.sessions import PlainSessions


def simulate_pools_plainly(
    requests: Requests, costs: StepCosts, pools: TwoPools, route: str, rate: Any
) -> list[PlainRequest]:
    """The final state of every request; its replica is the one it ended on, prefill ones first."""
    limits = limits_of(costs, requests)
    one = replace(requests, generate=np.ones(len(requests), np.int64))
    plain = fleet_of(costs, limits, requests, 1)[0]
    refused = [
        not plain.could_hold(PlainRequest(i, 0.0, int(p), int(g), 1.0, []))
        for i, (p, g) in enumerate(zip(requests.prompt, requests.generate, strict=True))
    ]
    out, _ = simulate_plainly(one, costs, limits, pools.prefill, route, rate, refused=refused)
    senders = dict.fromkeys(range(pools.prefill), 0.0)
    coming = []
    for r in sorted(out, key=lambda r: (isnan(r.first), r.first)):
        if r.status != "finished":
            continue
        senders[r.replica] = end = arrives(r, costs, pools, plain, senders[r.replica])
        if requests.generate[r.index] > 1:
            coming.append((end, r.index))
    fleet = decoders(requests, costs, pools)
    for now, index in sorted(coming):
        for replica in fleet:
            replica.advance(now)
        r = out[index]
        r.generate = int(requests.generate[index])
        chosen = take_over(fleet, r, now)
        r.replica = pools.prefill + fleet.index(chosen)
    for replica in fleet:
        replica.advance(float("inf"))
    return out


def arrives(
    request: PlainRequest, costs: StepCosts, pools: TwoPools, plain: Any, sent: float
) -> float:
    """When a cache has left its replica, whose others have left at ``sent``. [s]"""
    size = float(costs.tables.gpu_bytes[plain.blocks(request.prompt)])
    speed = pools.rate / costs.deployment.gpus
    if pools.transfer == "whole":
        return max(request.first, sent) + size / speed
    last_layer = size / max(len(costs.deployment.model.caches), 1) / speed
    return max(max(request.started, sent) + size / speed, request.first + last_layer)


def decoders(requests: Requests, costs: StepCosts, pools: TwoPools) -> list[PlainReplica]:
    """Idle replicas that only decode, without prefixes."""
    rules = costs.rules
    alone = costs.with_rules(
        Rules(rules.max_seqs, rules.max_tokens, rules.block_tokens, rules.blocks, rules.prefill,
              rules.priority, rules.preemption, rules.admission, rules.ahead)
    )  # fmt: skip
    return fleet_of(alone, limits_of(alone, requests), requests, pools.decode)


def take_over(fleet: list[PlainReplica], request: PlainRequest, now: float) -> PlainReplica:
    """The least loaded replica takes a request with its cache."""
    chosen = min(fleet, key=lambda f: f.score(replace(request, arrival=now), "least-loaded"))
    chosen.advance(now)
    chosen.clock = max(chosen.clock, now)
    request.status, request.handed, request.made, request.first = "swapped", True, 1, nan
    request.left = ceil((request.generate - 1) / request.rate - EPS)
    by_class(chosen.swapped, request, request)
    return chosen


class PlainSessionsApart(PlainSessions):
    """Turns and aborts, with replicas that only read prompts and others that only decode."""

    def __init__(self, requests: Requests, costs: StepCosts, pools: TwoPools, rate: Any) -> None:
        super().__init__(requests, costs, limits_of(costs, requests), pools.prefill, rate)
        self.costs, self.pools = costs, pools
        self.decoders = decoders(requests, costs, pools)
        self.fleet = self.readers + self.decoders
        self.generate = [r.generate for r in self.out]
        self.sent = [0.0] * pools.prefill

    def begin(self, until: float) -> None:
        """As elsewhere; then every prompt yields one token."""
        super().begin(until)
        for r in self.out:
            r.generate = 1

    def follow(self) -> None:
        """Caches of prompts that have been read leave, one after another."""
        for r in self.out:
            if r.status == "finished" and r.generate < self.generate[r.index]:
                self.sent[r.replica] = arrives(
                    r, self.costs, self.pools, self.readers[0], self.sent[r.replica]
                )
                r.status, r.generate = "on its way", self.generate[r.index]
                r.first = r.last = nan
                key = 2 * (len(self.out) + r.index)  # after what else happens at that time
                heappush(self.events, (self.sent[r.replica], key))
        super().follow()

    def happen(self, time: float, key: int, route: str) -> None:
        """A cache arrives, or what happens elsewhere too."""
        if key < 2 * len(self.out):
            super().happen(time, key, route)
        elif (r := self.out[key // 2 - len(self.out)]).status == "on its way":
            r.replica = self.fleet.index(take_over(self.decoders, r, time))

    def take_out(self, replica: PlainReplica, request: PlainRequest) -> None:
        """A cache that is on its way is nowhere."""
        if request.status != "on its way":
            super().take_out(replica, request)


def simulate_sessions_apart_plainly(
    requests: Requests, costs: StepCosts, pools: TwoPools, route: str, rate: Any
) -> list[PlainRequest]:
    """The final state of every request of sessions on two pools."""
    sessions = PlainSessionsApart(requests, costs, pools, rate)
    sessions.play(route, inf)
    return sessions.out
