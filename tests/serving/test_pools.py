"""Prefill and decode on replicas of their own."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.serving.outcome import Outcome, faults
from kvsim.serving.pools import TRANSFERS, TwoPools, simulate_pools
from kvsim.serving.reference_pools import simulate_pools_plainly
from kvsim.serving.routes import ROUTES
from kvsim.serving.rules import PREEMPTIONS, PREFILLS, PRIORITIES
from kvsim.serving.simulate import simulate
from kvsim.traces.requests import Requests
from tests.serving.test_serving import compare, tables_of, with_tiers, workload

PLAYED = 96  # workloads


@pytest.mark.parametrize("seed", range(0, PLAYED, 12))
def test_every_request_has_the_times_of_the_plain_pools(seed: int) -> None:
    for number in range(seed, seed + 12):
        random = np.random.default_rng(number)
        prefix = bool(random.integers(2))
        name = str(random.choice(["full", "kivi", "quantspec", "specache"]))
        base = tables_of(name, *[(3, 64), (8, 128)][random.integers(2)], PREFILLS[number % 2])
        requests = workload(random, prefix)
        need = int(np.max(requests.prompt + requests.generate)) // 16
        rules = replace(
            base.rules, priority=str(random.choice(PRIORITIES)), prefix_caching=prefix,
            preemption=str(random.choice(PREEMPTIONS)), blocks=int(need * random.uniform(0.9, 4)),
            host_cache=float(random.choice([2e6, 1e9])),
        )  # fmt: skip
        costs = base.with_rules(with_tiers(rules, random) if prefix else rules)
        pools = TwoPools(
            int(random.integers(1, 3)), int(random.integers(1, 3)),
            str(random.choice(TRANSFERS)), float(10 ** random.uniform(8, 10)),
        )  # fmt: skip
        rate = np.full(len(requests), costs.rate)
        route = ROUTES[number % len(ROUTES)]
        run = simulate_pools(requests, costs, pools, route, rate)
        compare(
            run.progress,
            simulate_pools_plainly(requests, costs, pools, route, rate),
            f"workload {number}",
        )
        assert faults(run) == [], number


def test_a_cache_that_goes_layer_by_layer_arrives_while_its_prompt_is_read() -> None:
    costs = tables_of("full", 8, 128, "chunked")
    requests = Requests(np.zeros(1), np.array([512]), np.array([10]))
    last = {}
    for transfer in TRANSFERS:
        run = simulate_pools(requests, costs, TwoPools(1, 1, transfer, 1e9))
        last[transfer] = float(run.progress.last[0])
        assert run.progress.replica[0] == 1
    alone = float(simulate(requests, costs).progress.last[0])
    whole = float(costs.tables.gpu_bytes[32]) / 1e9
    assert last["whole"] == pytest.approx(alone + whole, rel=1e-9)
    assert alone < last["layers"] < last["whole"]


def test_decoding_on_other_replicas_never_waits_for_prompts() -> None:
    costs = tables_of("full", 64, 2048, "chunked")
    requests = Requests(np.linspace(0, 0.2, 20), np.full(20, 512), np.full(20, 30))
    apart = Outcome(simulate_pools(requests, costs, TwoPools(1, 1, "whole", 1e12)))
    together = Outcome(simulate(requests, costs, 2))
    longest = apart.gaps()["p99"], together.gaps()["p99"]
    assert longest[0] is not None and longest[1] is not None
    assert longest[0] < longest[1] / 1.5
    assert apart.output_tokens == together.output_tokens == requests.generate.sum()


@pytest.mark.parametrize(
    ("pools", "words"),
    [((0, 2), "--prefill-replicas: got 0"), ((2, 0), "--prefill-replicas: got 2 with 0 others")],
)
def test_empty_pools_are_refused(pools: tuple[int, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TwoPools(*pools)
    with pytest.raises(InputError, match="--transfer: got 'slowly'; expected layers or whole"):
        TwoPools(1, 1, "slowly")
