"""What the serving simulator makes of small workloads under every rule, in all its figures."""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome, Targets
from kvsim.serving.pools import TRANSFERS, TwoPools, simulate_pools
from kvsim.serving.rules import ADMISSIONS, PREEMPTIONS, PREFILLS, PRIORITIES
from kvsim.serving.scheduler import ROUTES
from kvsim.serving.simulate import Run, simulate
from kvsim.traces.requests import Requests
from tests.frozen.store import Answer, Kind
from tests.support.served import tables_of, with_conduct, with_tiers, workload

TECHNIQUES = ("full", "kivi", "offload", "quantspec", "specache", "kcache", "h2o", "kvpr")
OPTIONS = list(product(PREFILLS, PRIORITIES, PREEMPTIONS, (False, True)))
SIZES = ((3, 64), (8, 128), (64, 2048))
REPLICA = ("pools", "plain", "plain", "plain", "plain")
TARGETS = Targets(0.5, 0.02)


def played(number: int) -> dict[str, Any]:
    """Every figure of one workload."""
    random = np.random.default_rng(1000 + number)
    prefill, priority, preemption, prefix = OPTIONS[number % len(OPTIONS)]
    name = TECHNIQUES[number % len(TECHNIQUES)]
    base = tables_of(name, *SIZES[number % len(SIZES)], prefill)
    how = REPLICA[number % len(REPLICA)]
    requests = workload(random, prefix)
    if how == "plain" and number % 2:
        requests = with_conduct(requests, random)
    need = int(np.max(requests.prompt + requests.generate)) // 16
    rules = replace(
        base.rules, priority=priority, preemption=preemption,
        prefix_caching=prefix, admission=ADMISSIONS[number % len(ADMISSIONS)],
        blocks=int(need * random.uniform(1, 4)), host_cache=(0.0, 2e6, 1e9)[number % 3],
    )  # fmt: skip
    if rules.prefix_caching:
        rules = with_tiers(rules, random)
    costs = base.with_rules(rules)
    run = _run(number, how, requests, costs)
    found = Outcome(run, TARGETS)
    columns = ("started", "first", "last", "preempted", "hits", "replica", "made", "status")
    sums = {
        name: float(np.nansum(getattr(run.progress, name) * np.arange(1, len(requests) + 1)))
        for name in columns
    }
    return json.loads(json.dumps(found.summary() | {"of requests": sums}))  # type: ignore[no-any-return]


def _run(number: int, how: str, requests: Requests, costs: StepCosts) -> Run:
    route = ROUTES[number % len(ROUTES)]
    rate = np.full(len(requests), costs.rate)
    if how == "pools":
        pools = TwoPools(1 + number % 2, 1 + number % 3, TRANSFERS[number % len(TRANSFERS)], 1e9)
        return simulate_pools(requests, costs, pools, route, rate)
    until = float(requests.arrival[-1]) if number % 7 == 0 else np.inf
    return simulate(requests, costs, 1 + number % 3, route, rate, until)


def stated(name: str) -> dict[str, float]:
    """The tables behind a technique's runs, as sums that weigh every entry."""
    found: dict[str, float] = {}
    for prefill in PREFILLS:
        costs = tables_of(name, 8, 128, prefill)
        found[f"{prefill} capacity"] = float(costs.capacity)
        found[f"{prefill} rate"] = float(costs.rate)
        found |= {f"{prefill} error of {k}": float(v) for k, v in (costs.error or {}).items()}
        for field, value in zip(costs.tables._fields, costs.tables, strict=True):
            for i, array in enumerate(_arrays(value)):
                flat = np.ravel(np.nan_to_num(array.astype(float), posinf=0.0))
                found[f"{prefill} {field} {i}"] = float(flat @ np.linspace(1, 2, flat.size))
    return found


def _arrays(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [array for each in value for array in _arrays(each)]
    array = np.asarray(value)
    if array.dtype.names:
        return [array[name] for name in array.dtype.names]
    return [array]


def compute(case: str) -> Answer:
    """Play ``workload NUMBER``, or sum up ``tables of TECHNIQUE``."""
    kind, _, which = case.rpartition(" ")
    return played(int(which)) if kind == "workload" else stated(which)


RUNS = Kind("runs", compute, every=5)
