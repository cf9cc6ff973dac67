"""Random workloads under random rules, played by the compiled simulator and by the plain one.

Every check raises AssertionError where a request's times differ by more than 1e-9, or its fate, or
what the memories hold. ``benchmarks/reference.py`` plays them all; the tests play some.
"""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from kvsim import techniques
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import faults
from kvsim.serving.pools import TRANSFERS, TwoPools, simulate_pools
from kvsim.serving.records import (
    ABORTED,
    FINISHED,
    HOST,
    MEMORIES,
    NVME,
    POOLS,
    REFUSED,
    TIER_LINKS,
)
from kvsim.serving.rules import ADMISSIONS, PREEMPTIONS, PREFILLS, PREFIX_LOADS, PRIORITIES, Rules
from kvsim.serving.scheduler import ROUTES
from kvsim.serving.simulate import Run, simulate
from kvsim.serving.world import limits_of
from kvsim.traces.requests import Requests
from tests.support.plain.memory import PlainRequest
from tests.support.plain.pools import simulate_pools_plainly, simulate_sessions_apart_plainly
from tests.support.plain.scheduler import PlainReplica, simulate_plainly
from tests.support.plain.sessions import simulate_sessions_plainly

TECHNIQUES = ("full", "kivi", "offload", "quantspec", "specache", "kcache")
OPTIONS = list(product(PREFILLS, PRIORITIES, PREEMPTIONS, (False, True), ROUTES))
"""What every workload can be played under; the last but one is whether prefixes are cached."""
Options = tuple[str, str, str, bool, str]
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


def costs_of(options: Options, requests: Requests, random: np.random.Generator) -> StepCosts:
    """A technique, a batch, and memory for few of the requests or for most."""
    prefill, priority, preemption, prefix, _ = options
    name = TECHNIQUES[random.integers(len(TECHNIQUES))]
    seqs, tokens = [(3, 64), (8, 128), (64, 2048)][random.integers(3)]
    base = tables_of(name, seqs, tokens, prefill)
    need = int(np.max(requests.prompt + requests.generate)) // 16
    rules = replace(
        base.rules, priority=priority, preemption=preemption, prefix_caching=prefix,
        admission=str(random.choice(ADMISSIONS)), blocks=int(need * random.uniform(0.9, 4)),
        host_cache=float(random.choice([0.0, 2e6, 1e9])), ahead=len(requests) % 2 == 0,
    )  # fmt: skip
    return base.with_rules(with_tiers(rules, random) if prefix else rules)


def rates_of(costs: StepCosts, count: int, random: np.random.Generator) -> Array:
    """Tokens per round: the technique's own, or another for every request."""
    own = random.uniform(1, 4, count)
    return own if random.random() < 0.3 else np.full(count, costs.rate)


def check_fleet(number: int, options: Options, conduct: bool = False) -> None:
    """A few replicas; requests may follow others, have classes, and be aborted."""
    random = np.random.default_rng(number)
    requests = workload(random, options[3])
    if conduct:
        requests = with_conduct(requests, random)
    costs = costs_of(options, requests, random)
    rate = rates_of(costs, len(requests), random)
    replicas, route = int(random.integers(1, 4)), options[4]
    until = float(random.choice([np.inf, requests.arrival[-1]]))
    run = simulate(requests, costs, replicas, route, rate, until)
    plain = simulate_sessions_plainly if requests.depends else simulate_plainly
    limits = limits_of(costs, requests)
    expected, fleet = plain(requests, costs, limits, replicas, route, rate, until)
    where = f"workload {number} under {options}"
    compare(run.progress, expected, where)
    compare_memories(run, fleet, where)
    assert faults(run, whole=until == np.inf) == [], where


def check_turns(number: int, options: Options) -> None:
    """The same with turns of sessions, classes of priority and aborts."""
    check_fleet(number, options, conduct=True)


def check_pools(number: int, options: Options, conduct: bool = False) -> None:
    """Replicas that read prompts, and others that decode; turns, classes and aborts as well."""
    random = np.random.default_rng(number)
    requests = workload(random, options[3])
    if conduct:
        requests = with_conduct(requests, random)
    costs = costs_of(options, requests, random)
    rate = rates_of(costs, len(requests), random)
    sides = int(random.integers(1, 3)), int(random.integers(1, 3))
    link = float(10 ** random.uniform(8, 10))
    pools = TwoPools(*sides, str(random.choice(TRANSFERS)), link)
    run = simulate_pools(requests, costs, pools, options[4], rate)
    where = f"workload {number} under {options}"
    plain = simulate_sessions_apart_plainly if requests.depends else simulate_pools_plainly
    compare(run.progress, plain(requests, costs, pools, options[4], rate), where)
    assert faults(run) == [], where


def check_turns_apart(number: int, options: Options) -> None:
    """Both pools, with turns of sessions, classes of priority and aborts."""
    check_pools(number, options, conduct=True)


def with_tiers(rules: Rules, random: np.random.Generator) -> Rules:
    """More memories for prefix blocks, on links so slow that copies matter."""
    rules = replace(
        rules,
        nvme_cache=float(random.choice([0.0, 5e6, 1e9])),
        remote_cache=float(random.choice([0.0, 8e6, 1e9])),
    )
    if rules.nvme_cache:
        rates = 10 ** random.uniform(7, 9.5, 2)
        rules = replace(rules, nvme_read=float(rates[0]), nvme_write=float(rates[1]))
    if rules.remote_cache:
        rules = replace(rules, nic=float(10 ** random.uniform(7, 9.5)))
    if rules.tiers:
        rules = replace(
            rules,
            prefix_load=str(random.choice(PREFIX_LOADS)),
            cache_block=int(random.choice([0, 32, 64, 96])),
            cache_ttl=float(random.choice([0.1, 1.0, np.inf])),
        )
    return rules


def with_conduct(requests: Requests, random: np.random.Generator) -> Requests:
    """The same requests with turns, thoughts, classes and aborts, some of them or all."""
    count = len(requests)
    changes: dict[str, Any] = {}
    if random.random() < 0.6:
        parent = np.array([int(random.integers(-1, i)) if i else -1 for i in range(count)])
        changes["parent"] = np.where(random.random(count) < 0.6, parent, -1)
        if random.random() < 0.7:
            changes["think"] = random.exponential(10 ** random.uniform(-3, -1), count)
        if requests.block_ids is not None and random.random() < 0.5:
            requests = with_answers(requests, changes["parent"])
    if random.random() < 0.6:
        changes["priority"] = random.integers(0, random.integers(1, 9), count)
    if random.random() < 0.6:
        wait = random.exponential(10 ** random.uniform(-2, 0), count)
        changes["abort_after"] = np.where(random.random(count) < 0.7, wait + 1e-4, np.inf)
    return replace(requests, **changes)


def with_answers(requests: Requests, parent: Any) -> Requests:
    """The same turns, of which many begin with the prompt and the answer of the one before."""
    prompt, ids = requests.prompt.copy(), [list(some) for some in requests.blocks()]
    fresh = max(max(some, default=0) for some in ids) + 1
    for turn, before in enumerate(parent.tolist()):
        length = 0 if before < 0 else int(prompt[before] + requests.generate[before])
        if 0 < length <= LONGEST // 2:
            prompt[turn] = length + prompt[turn] % 50
            some = ids[before][: prompt[before] // 32]
            missing = -(-int(prompt[turn]) // 32) - len(some)
            ids[turn] = some + list(range(fresh, fresh + missing))
            fresh += missing
    start = np.concatenate([[0], np.cumsum([len(some) for some in ids])])
    return replace(requests, prompt=prompt, block_ids=np.concatenate(ids), block_start=start)


def compare_memories(run: Run, fleet: list[PlainReplica], where: str) -> None:
    """Equal units in every memory, equal bytes on every link."""
    pools: Any = run.world.pools
    for index, plain in enumerate(fleet):
        places = {"host": POOLS * index + HOST, "nvme": POOLS * index + NVME, "remote": -1}
        for name, place in places.items():
            kept, want = pools[place], plain.stores[name]
            counts = (len(want.units), want.stored, want.dropped)
            assert (kept.count, kept.stored, kept.dropped) == counts, (where, name)
        moved = [plain.link_bytes.get(link, 0.0) for link in TIER_LINKS]
        np.testing.assert_allclose(run.replicas[index].link_bytes, moved, err_msg=where)
        found = [plain.whose.get(name, 0) for name in MEMORIES]
        np.testing.assert_array_equal(run.replicas[index].found, found, where)


def compare(progress: Any, expected: list[PlainRequest], where: str) -> None:
    """Equal fates, and times to 1e-9."""
    for column in ("started", "first", "last"):
        want = np.array([getattr(r, column) for r in expected])
        np.testing.assert_allclose(
            getattr(progress, column), want, rtol=1e-9, atol=0, err_msg=f"{where} {column}"
        )
    for column in ("preempted", "hits", "replica"):
        want = np.array([getattr(r, column) for r in expected])
        np.testing.assert_array_equal(getattr(progress, column), want, f"{where} {column}")
    names = {"finished": FINISHED, "refused": REFUSED, "aborted": ABORTED}
    for status, r in zip(progress.status, expected, strict=True):
        assert (status in names.values()) == (r.status in names), where
        assert names.get(r.status, status) == status, where
