"""Memory that an engine keeps free because its largest pass took it."""

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack, with_numbers
from kvsim.models.configs import load_model
from kvsim.prediction.memory import decode_point
from kvsim.prediction.pool import pool
from kvsim.techniques import parse

FULL = parse("full")


def deployed(numbers: dict[str, float], stack: str = "vllm", tp: int = 1) -> Deployment:
    machine, software = load_hardware("rtx4090"), load_stack(stack)
    own = with_numbers(software.on(machine.name), numbers)
    return Deployment(load_model("llama3.1-8b"), machine, own, tp=tp)


def workspace(d: Deployment, batch: float) -> float:
    kept = FULL.resident(d, decode_point(batch, 1024.0, 1024.0, 1023.0))["gpu"]
    return float(np.ravel(kept["workspace"])[0])


def test_a_measured_pool_has_the_tokens_that_are_predicted() -> None:
    """vLLM 0.19 on an RTX 4090 printed 2,588 blocks of 16 tokens; no number was fitted to them."""
    assert pool(FULL, deployed({}), 1024, 1024).tokens == pytest.approx(2588 * 16, rel=0.05)


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_of_all_sequences_are_kept_free_on_every_gpu(tp: int) -> None:
    d = deployed({"memory.reserved_sequences": 512.0, "memory.sampling_bytes": 30.0}, tp=tp)
    assert workspace(d, 1.0) - workspace(
        deployed({"memory.reserved_sequences": 0.0}, tp=tp), 1.0
    ) == pytest.approx(512 * 128256 * 30, rel=0.01)
    assert workspace(d, 8.0) == workspace(d, 1.0)


def test_activations_of_a_part_of_prompts_are_kept_free_where_they_are_more() -> None:
    few = deployed({"memory.reserved_sequences": 1.0, "memory.sampling_bytes": 1.0})
    more = deployed({
        "memory.reserved_sequences": 1.0, "memory.sampling_bytes": 1.0,
        "memory.prefill_chunk_tokens": 2 * few.stack.memory.prefill_chunk,
    })  # fmt: skip
    assert workspace(more, 1.0) == pytest.approx(2 * workspace(few, 1.0), rel=0.01)


def test_engines_that_reserve_nothing_keep_what_a_pass_needs() -> None:
    d = deployed({}, "fused")
    assert d.stack.memory.reserved_sequences == 0
    assert workspace(d, 64.0) > workspace(d, 1.0)
