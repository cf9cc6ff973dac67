"""Ranks and stages of a replica in simulations: against the plain simulator and predictions."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.service import Service
from kvsim.serving.costs import StepCosts
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import Run, simulate
from kvsim.serving.world import limits_of
from kvsim.techniques import parse
from kvsim.traces.requests import Requests
from tests.support.plain.scheduler import simulate_plainly
from tests.support.served import compare, workload

FULL = parse("full")
SPREADS = ({"tp": 2, "pp": 2}, {"dp": 4, "ep": 4}, {"tp": 2, "dp": 2, "pp": 2})
LONGEST = 700


def deployed(**degrees: int) -> Deployment:
    return Deployment(
        load_model("qwen3-30b-a3b"),
        load_hardware("h200"),
        load_stack("vllm"),
        "fp16",
        **degrees,  # type: ignore[arg-type]
    )


@cache
def costs_of(seqs: int, tokens: int, **degrees: int) -> StepCosts:
    d = deployed(**degrees)
    rules = Rules(max_seqs=seqs, max_tokens=tokens).scale_to(d)
    return StepCosts(FULL, d, rules, LONGEST, LONGEST).with_density(6)


@pytest.mark.parametrize(
    ("gpu", "stack", "seqs", "tokens"),
    [("h100", "vllm", 1024, 8192), ("h200", "vllm-0.11", 1024, 8192), ("b200", "vllm", 1024, 16384),
     ("a100-80g", "vllm", 256, 2048), ("gb10", "vllm", 256, 2048), ("l40s", "vllm", 256, 2048),
     ("h100", "vllm-0.6", 256, 2048), ("h100", "fused", 256, 2048),
     ("rtx4090", "sglang", 2048, 2048), ("l40s", "sglang", 2048, 4096),
     ("h200", "sglang", 2048, 8192), ("b200", "sglang", 2048, 16384),
     ("h100", "trtllm", 2048, 8192), ("h100", "trtllm-1.0", 2048, 8192),
     ("a100-40g", "trtllm-2024", 256, 2048)],
)  # fmt: skip
def test_limits_of_a_pass_are_the_engines_on_the_card(
    gpu: str, stack: str, seqs: int, tokens: int
) -> None:
    where = Deployment(load_model("llama3-8b"), load_hardware(gpu), load_stack(stack))
    rules = Rules(max_seqs=0, max_tokens=0).scale_to(where)
    assert (rules.max_seqs, rules.max_tokens) == (seqs, tokens)
    assert Rules(max_seqs=7, max_tokens=99).scale_to(where).max_tokens == 99


def played(costs: StepCosts, count: int, prompt: int, generate: int, gap: float) -> Run:
    each = np.full(count, prompt), np.full(count, generate)
    return simulate(Requests(gap * np.arange(count, dtype=np.float64), *each), costs)


@pytest.mark.parametrize("degrees", SPREADS, ids=str)
@pytest.mark.parametrize(
    "change",
    [{}, {"prefill": "whole"}, {"blocks": 60}, {"blocks": 60, "admission": "request"}],
    ids=str,
)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_is_as_in_the_plain_simulator(
    degrees: dict[str, int], change: dict[str, Any], seed: int
) -> None:
    requests = workload(np.random.default_rng(seed), seed == 2)
    costs = costs_of(8, 128, **degrees)
    costs = costs.with_rules(replace(costs.rules, prefix_caching=seed == 2, **change))
    rate = np.full(len(requests), costs.rate)
    run = simulate(requests, costs, 2, "least-loaded", rate)
    limits = limits_of(costs, requests)
    expected, _ = simulate_plainly(requests, costs, limits, 2, "least-loaded", rate)
    compare(run.progress, expected, f"{degrees} {change} {seed}")


@pytest.mark.parametrize(("stack", "preempts"), [("trtllm", False), ("vllm", True)])
def test_engines_that_reserve_whole_requests_preempt_none(stack: str, preempts: bool) -> None:
    where = Deployment(load_model("llama3-8b"), load_hardware("h100"), load_stack(stack))
    rules = Rules(max_seqs=0, max_tokens=0, blocks=200).scale_to(where)
    requests = Requests(np.zeros(40), np.full(40, 100), np.full(40, 300))
    run = simulate(requests, StepCosts(FULL, where, rules, 400, 100).with_density(6))
    assert np.isfinite(run.progress.last).all()
    assert bool(run.progress.preempted.sum()) == preempts


@pytest.mark.parametrize("degrees", SPREADS, ids=str)
def test_one_request_takes_what_predict_says(degrees: dict[str, int]) -> None:
    run = played(costs_of(8, 2048, **degrees), 1, 512, 32, 0.0)
    alone = Prediction(FULL, deployed(**degrees), np.ones(1), 512, 32)
    first, last = (float(getattr(run.progress, name)[0]) for name in ("first", "last"))
    assert first == pytest.approx(float(alone.ttft_s[0]), rel=0.01)
    assert last - first == pytest.approx(float(alone.decode_s[0]), rel=0.01)


@pytest.mark.parametrize("prompts", [1, 3, 4])
def test_prompts_of_several_ranks_take_what_predict_says(prompts: int) -> None:
    """Each is read by a rank of its own; experts work for as many as there are."""
    degrees = {"dp": 4, "ep": 4}
    run = played(costs_of(8, 2048, **degrees), prompts, 512, 32, 0.0)
    together = Prediction(FULL, deployed(**degrees), np.array([float(prompts)]), 512, 32)
    assert run.progress.first == pytest.approx(float(together.prefill_s[0]), rel=0.01)


@pytest.mark.parametrize("degrees", SPREADS, ids=str)
def test_many_requests_flow_as_predict_says(degrees: dict[str, int]) -> None:
    """A full replica: prompts of all ranks and stages are read at once, not one after another."""
    d, seats = deployed(**degrees), 32
    costs = costs_of(seats // d.dp, 512, **degrees)
    run = played(costs, 6 * seats, 512, 64, 0.0)
    flow = 6 * seats * 64 / float(run.progress.last.max())
    steady = float(Service(FULL, d, np.array([float(seats)]), 512, 64).output_tok_s[0])
    assert 0.75 < flow / steady < 1.35


def test_rules_of_a_rank_are_those_of_a_replica_of_one() -> None:
    rules = Rules(max_seqs=32, max_tokens=512)
    vllm = replace(rules, ahead=True, admission="prompt")
    assert rules.scale_to(deployed(tp=2, ep=2)) == vllm
    spread = rules.scale_to(deployed(tp=2, dp=2, pp=2))
    assert (spread.max_seqs, spread.max_tokens) == (64, 2048)


@pytest.mark.parametrize("degrees", SPREADS, ids=str)
def test_a_part_of_a_prompt_is_one_lane_s(degrees: dict[str, int]) -> None:
    costs = costs_of(8, 128, **degrees)
    requests = Requests(np.zeros(1), np.array([256]), np.array([2]))
    limits = limits_of(costs, requests)
    assert int(limits.part) == 128 == int(limits.max_tokens) // costs.tables.lanes
    assert played(costs, 1, 256, 2, 0.0).replicas.passes[0] == 3  # two parts, one round
