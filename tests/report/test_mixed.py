"""What answers say of passes that mix prompts with many decoding sequences."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from kvsim.engine.roofline import all_ops, seconds
from kvsim.graph import Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.report.caveats import (
    MIXED_RANGE,
    PlayedRun,
    describe_mixed_passes,
)
from kvsim.serving.costs import StepCosts
from kvsim.serving.rules import Rules
from kvsim.techniques import parse
from kvsim.traces.requests import Requests


def run(stack: str = "vllm", prefill: str = "chunked") -> PlayedRun:
    d = Deployment(load_model("llama3.1-8b"), load_hardware("h100"), load_stack(stack))
    costs = StepCosts(parse("full"), d, Rules(max_seqs=64, prefill=prefill), 4096, 4096)
    requests = Requests(np.zeros(2), np.array([500, 1500]), np.array([100, 300]))
    return SimpleNamespace(costs=costs, requests=requests)


def test_the_range_is_that_of_attention_in_such_a_pass() -> None:
    (said,) = describe_mixed_passes(run(), 40.0)
    low, high = (float(x) / 100 for x in re.findall(r"([\d.]+) %", said))
    assert high / low == pytest.approx((MIXED_RANGE[1] - 1) / (MIXED_RANGE[0] - 1), rel=0.05)
    assert "40 sequences and 1,000 prompt tokens" in said
    d = run().costs.deployment
    p = Point(40.0, 1100.0, 1.0, 1100.0, 1101.0)
    (step,) = parse("full").cycle(d, p).steps
    took = {"attn": 0.0, "": 0.0}
    for op, count in all_ops(step):
        took["attn" if op.name == "attn" else ""] += count * float(np.ravel(seconds(op, d))[0])
    alone = took["attn"] / sum(took.values())  # a pass that only decodes: its products are fewer
    assert 0.1 * alone < high / (MIXED_RANGE[1] - 1) < alone


def test_nothing_is_said_where_nothing_mixes() -> None:
    assert not describe_mixed_passes(run(), 16.0)
    assert not describe_mixed_passes(run("sglang"), 40.0)
    assert not describe_mixed_passes(run(prefill="whole"), 40.0)
