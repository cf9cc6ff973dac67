"""The compiled simulator against the plain one, and what must hold in every run."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from kvsim import techniques
from kvsim.configs import load_model
from kvsim.deployment import Deployment
from kvsim.profiles import load_hardware, load_stack
from kvsim.serving.costs import StepCosts
from kvsim.serving.rules import ADMISSIONS, PREEMPTIONS, PREFILLS, PRIORITIES, Rules
from kvsim.serving.simulate import ROUTES, engine_of, simulate
from kvsim.serving.state import FINISHED, REFUSED
from kvsim.traces.requests import Requests
from tests import serving_reference as plain

TECHNIQUES = ("full", "kivi", "offload", "quantspec", "specache", "kcache")
OPTIONS = list(product(PREFILLS, PRIORITIES, PREEMPTIONS, (False, True), ROUTES))
WORKLOADS = 504  # 21 of each combination of options
LONGEST = 700


@cache
def tables_of(name: str, max_seqs: int, max_tokens: int, prefill: str) -> StepCosts:
    """Costs of a technique on a slow link, so that copies matter."""
    d = Deployment(load_model("llama3.2-1b"), load_hardware("rtx4090"), load_stack("fused"))
    rules = Rules(max_seqs=max_seqs, max_tokens=max_tokens, prefill=prefill)
    costs = StepCosts(techniques.parse(name), d, rules, LONGEST, LONGEST)
    assert costs.tables
    return costs


def workload(random: np.random.Generator, prefix: bool) -> Requests:
    """A few dozen requests that crowd each other."""
    count = int(random.integers(3, 30))
    arrival = np.cumsum(random.exponential(10 ** random.uniform(-4, -1), count))
    prompt = random.integers(1, 400, count)
    generate = random.integers(1, random.integers(2, 120), count)
    generate[random.random(count) < 0.1] = 1
    if not prefix:
        return Requests(arrival, prompt, generate)
    chains: list[list[int]] = []
    for length in prompt:
        full = int(-(-length // 32))
        base = chains[random.integers(len(chains))] if chains and random.random() < 0.7 else []
        keep = int(random.integers(0, min(len(base), full) + 1))
        fresh = max((max(c, default=-1) for c in chains), default=-1) + 1
        chains.append(base[:keep] + list(range(fresh, fresh + full - keep)))
    ids = np.concatenate([np.array(c, dtype=np.int64) for c in chains])
    start = np.concatenate([[0], np.cumsum([len(c) for c in chains])])
    return Requests(arrival, prompt, generate, ids, start, 32)


@pytest.mark.parametrize("seed", range(0, WORKLOADS, 12))
def test_every_request_has_the_times_of_the_plain_simulator(seed: int) -> None:
    for number in range(seed, seed + 12):
        random = np.random.default_rng(number)
        prefill, priority, preemption, prefix, route = OPTIONS[number % len(OPTIONS)]
        name = TECHNIQUES[random.integers(len(TECHNIQUES))]
        seqs, tokens = [(3, 64), (8, 128), (64, 2048)][random.integers(3)]
        base = tables_of(name, seqs, tokens, prefill)
        requests = workload(random, prefix)
        need = int(np.max(requests.prompt + requests.generate)) // 16
        rules = replace(
            base.rules, priority=priority, preemption=preemption, prefix_caching=prefix,
            admission=str(random.choice(ADMISSIONS)),
            blocks=int(need * random.uniform(0.9, 4)),
            host_cache=float(random.choice([0.0, 2e6, 1e9])),
        )  # fmt: skip
        costs = replace(base, rules=rules)
        object.__setattr__(costs, "_checked", base._checked)
        rate = np.full(len(requests), costs.rate)
        if random.random() < 0.3:
            rate = random.uniform(1, 4, len(requests))
        replicas = int(random.integers(1, 4))
        until = float(random.choice([np.inf, requests.arrival[-1]]))
        run = simulate(requests, costs, replicas, route, rate, until)
        engine = engine_of(costs, requests)
        expected, _ = plain.simulate(requests, costs, engine, replicas, route, rate, until)
        compare(run.progress, expected, f"workload {number}")
        check(run, finite=until < np.inf)


def compare(progress: Any, expected: list[plain.Request], where: str) -> None:
    """Equal fates, and times to 1e-9."""
    for column in ("started", "first", "last"):
        want = np.array([getattr(r, column) for r in expected])
        np.testing.assert_allclose(
            getattr(progress, column), want, rtol=1e-9, atol=0, err_msg=f"{where} {column}"
        )
    for column in ("preempted", "hits", "replica"):
        want = np.array([getattr(r, column) for r in expected])
        np.testing.assert_array_equal(getattr(progress, column), want, f"{where} {column}")
    names = {"finished": FINISHED, "refused": REFUSED}
    for status, r in zip(progress.status, expected, strict=True):
        assert (status in names.values()) == (r.status in names), where
        assert names.get(r.status, status) == status, where


def check(run: Any, finite: bool) -> None:
    """Nothing is lost, nothing is served early, memory is never exceeded."""
    p = run.progress
    done = p.status == FINISHED
    if not finite:
        assert (done | (p.status == REFUSED)).all()
