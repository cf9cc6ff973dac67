"""Prefill and decode on replicas of their own."""

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.serving.outcome import Outcome, faults
from kvsim.serving.pools import TRANSFERS, TwoPools, simulate_pools
from kvsim.serving.simulate import simulate
from kvsim.traces.requests import Requests
from tests.support.served import OPTIONS, check_pools, check_turns_apart, tables_of

PLAYED = 60  # workloads; benchmarks/reference.py plays 32,000


@pytest.mark.parametrize("seed", range(0, PLAYED, 12))
def test_every_request_has_the_times_of_the_plain_pools(seed: int) -> None:
    for number in range(seed, seed + 12):
        check_pools(number, OPTIONS[number * 5 % len(OPTIONS)])


@pytest.mark.parametrize("seed", range(0, PLAYED, 12))
def test_turns_and_aborts_on_two_pools_are_those_of_the_plain_ones(seed: int) -> None:
    for number in range(seed, seed + 12):
        check_turns_apart(number, OPTIONS[number * 5 % len(OPTIONS)])


def test_a_turn_is_read_when_its_client_has_thought_about_what_was_decoded() -> None:
    costs = tables_of("full", 8, 128, "chunked")
    turns = Requests(
        np.zeros(3), np.full(3, 64), np.array([20, 1, 20]),
        parent=np.arange(-1, 2), think=np.full(3, 3.0),
    )  # fmt: skip
    p = simulate_pools(turns, costs, TwoPools(1, 1)).progress
    assert p.arrival[1:].tolist() == (p.last[:-1] + 3.0).tolist()
    assert p.replica.tolist() == [1, 0, 1]


def test_a_cache_is_sent_in_vain_if_its_client_has_hung_up() -> None:
    costs = tables_of("full", 8, 128, "chunked")
    one = Requests(np.zeros(1), np.array([512]), np.array([10]), abort_after=np.array([0.3]))
    run = simulate_pools(one, costs, TwoPools(1, 1, "whole", 1e7))
    assert run.progress.started[0] < 0.3
    assert np.isnan([run.progress.first[0], run.progress.last[0]]).all()
    assert run.replicas.emitted.tolist() == [1, 0]
    assert faults(run) == []


def test_a_prompt_beyond_the_context_is_refused_by_two_pools_as_by_one() -> None:
    costs = tables_of("full", 8, 128, "chunked")
    requests = Requests(np.zeros(2), np.array([10 * costs.context, 64]), np.array([10, 10]))
    run = simulate_pools(requests, costs, TwoPools(1, 1))
    assert Outcome(run).refused.tolist() == [True, False]
    assert np.isfinite(run.progress.last).tolist() == [False, True]


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
    [((0, 2), "--prefill-replicas: got 0"), ((2, 0), "--prefill-replicas: got 2 of 2 replicas")],
)
def test_empty_pools_are_refused(pools: tuple[int, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TwoPools(*pools)
    with pytest.raises(InputError, match="--transfer: got 'slowly'; expected layers or whole"):
        TwoPools(1, 1, "slowly")
