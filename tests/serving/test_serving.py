"""The compiled simulator against the plain one, and what must hold in every run."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from kvsim import techniques
from kvsim.engine.roofline import all_ops
from kvsim.errors import InputError
from kvsim.graph import Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point
from kvsim.serving import spend
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome, faults
from kvsim.serving.records import (
    ABORTED,
    FINISHED,
    HOST,
    LINKS,
    MEMORIES,
    NVME,
    POOLS,
    REFUSED,
)
from kvsim.serving.reference import PlainReplica, simulate_plainly
from kvsim.serving.reference_memory import PlainRequest
from kvsim.serving.rounds import drawn_rate
from kvsim.serving.routes import ROUTES
from kvsim.serving.rules import ADMISSIONS, LOADS, PREEMPTIONS, PREFILLS, PRIORITIES, Rules
from kvsim.serving.simulate import Run, simulate
from kvsim.serving.world import limits_of
from kvsim.traces.requests import Requests

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
        if prefix:
            rules = with_tiers(rules, random)
        costs = replace(base, rules=rules)
        object.__setattr__(costs, "_checked", base._checked)
        rate = np.full(len(requests), costs.rate)
        if random.random() < 0.3:
            rate = random.uniform(1, 4, len(requests))
        replicas = int(random.integers(1, 4))
        until = float(random.choice([np.inf, requests.arrival[-1]]))
        run = simulate(requests, costs, replicas, route, rate, until)
        limits = limits_of(costs, requests)
        expected, fleet = simulate_plainly(requests, costs, limits, replicas, route, rate, until)
        compare(run.progress, expected, f"workload {number}")
        compare_memories(run, fleet, f"workload {number}")
        assert faults(run, whole=until == np.inf) == [], number


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
            prefix_load=str(random.choice(LOADS)),
            cache_block=int(random.choice([0, 32, 64, 96])),
            cache_ttl=float(random.choice([0.1, 1.0, np.inf])),
        )
    return rules


def compare_memories(run: Run, fleet: list[PlainReplica], where: str) -> None:
    """Equal units in every memory, equal bytes on every link."""
    pools: Any = run.world.pools
    for index, plain in enumerate(fleet):
        places = {"host": POOLS * index + HOST, "nvme": POOLS * index + NVME, "remote": -1}
        for name, place in places.items():
            kept, want = pools[place], plain.stores[name]
            counts = (len(want.units), want.stored, want.dropped)
            assert (kept.count, kept.stored, kept.dropped) == counts, (where, name)
        moved = [plain.link_bytes.get(link, 0.0) for link in LINKS]
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


def test_a_round_of_many_tokens_can_be_drawn_or_taken_at_its_mean() -> None:
    costs = tables_of("quantspec", 8, 128, "chunked")
    generate = np.full(4000, 101)
    drawn = drawn_rate(costs, generate, seed=1)
    assert (drawn_rate(costs, generate, seed=1) == drawn).all()
    assert (drawn >= 1).all()
    assert (drawn <= 5).all()
    rounds = 100 / drawn
    # a request's last round may be cut short, by less than one round on average
    assert 100 / costs.rate <= rounds.mean() <= 100 / costs.rate + 1
    plain = tables_of("full", 8, 128, "chunked")
    assert (drawn_rate(plain, generate, seed=1) == 1).all()


@pytest.mark.parametrize("name", ["full", "kivi", "kvpr", "quantspec", "h2o"])
def test_tables_are_as_near_to_direct_evaluation_as_they_say(name: str) -> None:
    costs = tables_of(name, 8, 128, "chunked")
    random = np.random.default_rng(5)
    batch = random.integers(1, 8, 40).astype(float)
    context = random.integers(1, LONGEST, 40).astype(float)
    direct = costs.passes.round(batch, context)
    table = spend.pass_seconds(costs.tables, batch=batch, context=context)
    assert np.abs(table / direct - 1).max() <= max(2 * costs.error["rounds"], 1e-9)


@pytest.mark.parametrize("name", ["full", "kivi", "gear", "quantspec", "specache", "h2o"])
def test_rounds_are_read_to_two_parts_in_a_thousand(name: str) -> None:
    """Also where costs have teeth or kinks; what the tables say of themselves is measured."""
    assert tables_of(name, 8, 128, "chunked").error["rounds"] <= 2e-3


def test_one_request_alone_takes_what_predict_says() -> None:
    """Prefill, then one round per token at its own context: the prediction for batch 1."""
    d = Deployment(load_model("llama3.2-1b"), load_hardware("rtx4090"), load_stack("fused"))
    costs = StepCosts(techniques.parse("full"), d, Rules(prefill="whole"), 700, 512)
    run = simulate(Requests(np.zeros(1), np.array([512]), np.array([100])), costs)
    alone = Prediction(techniques.parse("full"), d, np.ones(1), 512, 100)
    assert run.progress.first[0] == pytest.approx(alone.ttft_s[0], rel=2e-3)
    span = run.progress.last[0] - run.progress.first[0]
    assert span == pytest.approx(alone.decode_s[0], rel=2e-3)


def test_a_request_larger_than_the_cache_is_refused_and_the_others_are_served() -> None:
    base = tables_of("full", 8, 128, "chunked")
    costs = replace(base, rules=replace(base.rules, blocks=10))
    object.__setattr__(costs, "_checked", base._checked)
    run = simulate(Requests(np.zeros(2), np.array([300, 30]), np.array([5, 5])), costs)
    assert run.progress.status.tolist() == [REFUSED, FINISHED]
    assert faults(run) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seqs": 0}, "--max-seqs: got 0; expected a whole number from 1 to"),
        ({"max_tokens": -1}, "--max-tokens: got -1"),
        ({"block_tokens": True}, "--block-tokens: got True; expected a whole number"),
        ({"blocks": 10**12}, "--blocks: got 1000000000000"),
        ({"prefill": "some"}, "--prefill: got 'some'; expected chunked or whole"),
        ({"priority": ""}, "--priority: got ''"),
        ({"preemption": "kill"}, "--preemption: got 'kill'"),
        ({"admission": "never"}, "--admission: got 'never'"),
        ({"host_cache": float("nan")}, "--host-cache: got nan"),
        ({"host_cache": -1.0}, "--host-cache: got -1.0"),
    ],
)
def test_rules_out_of_range_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as problem:
        Rules(**change)
    assert message in str(problem.value)


def test_two_gpus_swap_a_sequence_in_half_the_time_of_one() -> None:
    """Each copies its own half over its own link."""
    one = Deployment(load_model("llama3.2-1b"), load_hardware("rtx4090"), load_stack("fused"))
    tables = [
        StepCosts(techniques.parse("full"), d, Rules(max_seqs=2), LONGEST, LONGEST).tables
        for d in (one, replace(one, tp=2))
    ]
    took = [np.array([t.gpu_bytes[-1] / t.d2h, t.gpu_bytes[-1] / t.h2d]) for t in tables]
    np.testing.assert_allclose(took[1] / took[0], 0.5, rtol=1e-6)


@pytest.mark.parametrize("name", ["full", "kvpr", "fastdecode"])
def test_utilisation_is_what_the_ops_move_and_compute(name: str) -> None:
    """One request alone, its passes counted one by one."""
    kind = techniques.parse(name)
    d = Deployment(load_model("llama3.2-1b"), load_hardware("rtx4090"), load_stack("fused"))
    generate = 40
    costs = StepCosts(kind, d, Rules(prefill="whole"), LONGEST, 512)
    run = simulate(Requests(np.zeros(1), np.array([512]), np.array([generate])), costs)
    kind = kind.for_batches(np.ones(1))
    tiles = float(kind.tiles())
    steps = [kind.prefill(d, Point(tiles, 0.0, 512 / tiles, 512.0, 513.0, prefill=True))]
    steps += kind.between(d, decode_point(tiles, 512.0, 2.0, 0.0))
    for length in np.arange(512.0, 511.0 + generate):
        steps += kind.cycle(d, Point(tiles, length, 1.0, length, length + 1.0)).steps
    found = Outcome(run).utilisation
    for channel in ("hbm", "h2d", "d2h", "dram"):
        moved = sum(
            count * float(np.ravel(op.bytes.get(channel, 0.0))[0])
            for step in steps
            for op, count in all_ops(step)
        )
        expected = moved / d.bandwidth[channel] / run.replicas.clock[0]
        assert found[channel] == pytest.approx(expected, rel=5e-3), channel
    flops = sum(
        count * float(np.ravel(op.flops)[0]) / d.flops(op.dtype)
        for step in steps
        for op, count in all_ops(step)
        if op.stream != "cpu"
    )
    assert found["compute"] == pytest.approx(flops / run.replicas.clock[0], rel=5e-3)
    assert 0 < found["hbm"] < 1 and max(found.values()) < 1
    assert found["h2d"] > 0 or name == "full"
