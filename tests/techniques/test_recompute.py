"""KVPR's split and what the prompt sends home."""

import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.memory import decode_point, prefill_point
from tests.support.arithmetic import last_layer, moved

PROMPT, GENERATE, BATCH = 4000, 6000, 8
D = Deployment(load_model("llama2-7b"), load_hardware("a6000"), load_stack("fused"))


def split_at(decoded: int) -> float:
    """Tokens recomputed in a step: those whose inputs are copied, two bytes per number."""
    point = decode_point(BATCH, PROMPT, GENERATE, decoded)
    inputs = last_layer("kvpr", D, point)["load_inputs"]
    return moved(inputs, "h2d") / (2 * BATCH * D.model.hidden)


def test_a_prompt_keeps_at_home_what_any_step_loads() -> None:
    """What the first step recomputes all do; what only later ones do is loaded before."""
    first, last = split_at(0), split_at(GENERATE - 1)
    assert 0 < first < min(PROMPT, last)
    read = last_layer("kvpr", D, prefill_point(BATCH, PROMPT, GENERATE))
    sent = BATCH * (PROMPT - first) * 4 * D.model.hidden
    assert moved(read["store_kv"], "d2h") == pytest.approx(sent, rel=1e-12)
