"""Sums between GPUs that go through the host: who is told, and how far ranges reach."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.report.caveats import (
    SLOWEST_SUMS,
    describe_host_link,
    predict_slow_host,
    sums_through_host,
    widen_ranges,
)
from kvsim.techniques import parse


def predicted(gpu: str, tp: int, stack: str = "vllm") -> Prediction:
    d = Deployment(load_model("llama3.1-8b"), load_hardware(gpu), load_stack(stack), "fp16", tp)
    return Prediction(parse("full"), d, np.array([8.0]), 2048, 64)


@pytest.mark.parametrize(
    ("gpu", "tp", "told"), [("l40s", 8, True), ("rtx4090", 2, True), ("l40s", 1, False),
                            ("h100", 8, False), ("h100-nvl", 2, False)],
)  # fmt: skip
def test_only_cards_without_a_link_of_their_own_are_told(gpu: str, tp: int, told: bool) -> None:
    p = predicted(gpu, tp)
    assert sums_through_host(p.deployment) == told == bool(describe_host_link(p))
    ranges = {"ttft_s": {"low": 0.1, "high": 0.2}}
    assert (widen_ranges(ranges, p) == ranges) != told


def test_a_given_rate_is_no_assumption_and_moves_large_sums() -> None:
    p = predicted("l40s", 8)
    given = replace(p, deployment=p.deployment.with_sums_at(SLOWEST_SUMS, "given"))
    assert float(given.ttft_s[0]) == float(predict_slow_host(p).ttft_s[0])
    assert not describe_host_link(given)
    assert widen_ranges({"ttft_s": {"low": 0.1, "high": 0.2}}, given)["ttft_s"]["high"] == 0.2


@pytest.mark.parametrize("stack", ["vllm", "fused"])
def test_a_slow_host_moves_large_sums_at_the_slowest_rate(stack: str) -> None:
    """What the prompts' sums take beyond the rest is their bytes at 2 GB/s."""
    p = predicted("l40s", 8, stack)
    slow = predict_slow_host(p)
    d = p.deployment
    moved = 2 * 7 / 8 * 2 * 8 * 2048 * d.model.hidden * 2 * d.model.layers
    assert float(slow.prefill_s[0]) > moved / SLOWEST_SUMS
    assert float(slow.prefill_s[0]) == pytest.approx(moved / SLOWEST_SUMS, rel=0.25)
    high = widen_ranges({"ttft_s": {"low": 0.1, "high": 0.2}}, p)["ttft_s"]["high"]
    assert high == float(slow.ttft_s[0]) and "2 GB/s" in describe_host_link(p)[0]
