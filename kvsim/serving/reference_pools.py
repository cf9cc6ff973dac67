"""Two pools in plain Python: what ``pools`` must equal."""

from dataclasses import replace
from math import ceil, isnan
from typing import Any

import numpy as np

from kvsim.serving.costs import StepCosts
from kvsim.serving.pools import TwoPools
from kvsim.serving.reference import fleet_of, simulate_plainly
from kvsim.serving.reference_memory import EPS, PlainRequest, by_class
from kvsim.serving.rules import Rules
from kvsim.serving.world import limits_of
from kvsim.traces.requests import Requests


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
        size = float(costs.tables.gpu_bytes[plain.blocks(r.prompt)])
        speed = pools.rate / costs.deployment.tp
        if pools.transfer == "whole":
            end = max(r.first, senders[r.replica]) + size / speed
        else:
            last_layer = size / max(len(costs.deployment.model.caches), 1) / speed
            end = max(r.started, senders[r.replica]) + size / speed
            end = max(end, r.first + last_layer)
        senders[r.replica] = end
        if requests.generate[r.index] > 1:
            coming.append((end, r.index))
    rules = costs.rules
    alone = costs.with_rules(
        Rules(rules.max_seqs, rules.max_tokens, rules.block_tokens, rules.blocks, rules.prefill,
              rules.priority, rules.preemption, rules.admission)
    )  # fmt: skip
    fleet = fleet_of(alone, limits_of(alone, requests), requests, pools.decode)
    for now, index in sorted(coming):
        for replica in fleet:
            replica.advance(now)
        r = out[index]
        chosen = min(fleet, key=lambda f: f.score(replace(r, arrival=now), "least-loaded"))
        chosen.advance(now)
        chosen.clock = max(chosen.clock, now)
        r.generate, r.status, r.handed, r.made = int(requests.generate[index]), "swapped", True, 1
        r.left = ceil((r.generate - 1) / r.rate - EPS)
        r.replica = pools.prefill + fleet.index(chosen)
        by_class(chosen.swapped, r, r)
    for replica in fleet:
        replica.advance(float("inf"))
    return out
