"""Prefill and decode on replicas of their own."""

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.serving.outcome import Outcome
from kvsim.serving.pools import TRANSFERS, TwoPools, simulate_pools
from kvsim.serving.simulate import simulate
from kvsim.traces.requests import Requests
from tests.support.served import OPTIONS, check_pools, tables_of

PLAYED = 60  # workloads; benchmarks/reference.py plays 32,000


@pytest.mark.parametrize("seed", range(0, PLAYED, 12))
def test_every_request_has_the_times_of_the_plain_pools(seed: int) -> None:
    for number in range(seed, seed + 12):
        check_pools(number, OPTIONS[number * 5 % len(OPTIONS)])


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
