"""Memory that an engine keeps free because its largest pass took it."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack, with_numbers
from kvsim.models.configs import load_model
from kvsim.options import ENGINE_SHARE
from kvsim.prediction.memory import (
    decode_point,
    given_memory,
    held_beside,
    largest_batch,
    left_for_caches,
    tier_bytes,
)
from kvsim.prediction.pool import pool
from kvsim.serving.kv_budget import Room
from kvsim.serving.rules import Rules
from kvsim.techniques import parse

FULL = parse("full")


def deployed(numbers: dict[str, float], stack: str = "vllm", tp: int = 1) -> Deployment:
    machine, software = load_hardware("rtx4090"), load_stack(stack)
    own = with_numbers(software.for_gpu(machine.name), numbers)
    return Deployment(load_model("llama3.1-8b"), machine, own, tp=tp)


def sharing(rule: str = "") -> Deployment:
    """Stack ``fused`` with one of the engines' rules of what their share of memory is of."""
    d = deployed({}, "fused")
    memory = replace(d.stack.memory, **{rule: True}) if rule else d.stack.memory
    return replace(d, stack=replace(d.stack, memory=memory))


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


def test_a_share_of_what_is_free_is_larger_than_the_same_share_less_all_else() -> None:
    """TensorRT-LLM takes 0.9 of what is free, vLLM frees 0.9 of the whole: 0.1 of the rest more."""
    machine = load_hardware("rtx4090")
    whole, free = (pool(FULL, sharing(rule), 1024, 1024) for rule in ("", "share_of_free"))
    beside = 0.9 * machine.gpu_memory - whole.bytes
    assert free.bytes == pytest.approx(0.9 * (machine.gpu_memory - beside), rel=1e-12)
    assert free.bytes - whole.bytes == pytest.approx(0.1 * beside, rel=1e-9)


def test_a_static_share_holds_weights_and_caches_alone() -> None:
    """SGLang: passes take what is beside the share, and of the share where that is too little."""
    d, usual = sharing("share_is_static"), sharing()
    plain, static = (pool(FULL, x, 1024, 1024, 0.8) for x in (usual, d))
    kept = FULL.resident(d, decode_point(1.0, 1024.0, 1024.0, 1023.0))["gpu"]
    held = float(np.ravel(kept["weights"] + kept["embedding"])[0])
    assert static.bytes == pytest.approx(0.8 * d.hardware.gpu_memory - held, rel=1e-12)
    assert static.bytes > plain.bytes
    assert pool(FULL, d, 1024, 1024, 1.0) == pool(FULL, usual, 1024, 1024, 1.0)


def test_sequences_of_load_tests_fit_as_counted() -> None:
    """Llama-3.1-70B in fp8 on an H200, 0.9 x (1024 + 8192) tokens, a cache in fp8: TensorRT-LLM
    had 48 to 52 sequences in flight (requests times tpot over latency, aic-core-0.12.0)."""
    machine, software = load_hardware("h200"), load_stack("trtllm")
    d = Deployment(load_model("llama3.1-70b"), machine, software, "fp8")
    assert 46 <= pool(parse("fp8"), d, 921, 7372).concurrency <= 54


@pytest.mark.parametrize("rule", ["", "share_of_free", "share_is_static"])
@pytest.mark.parametrize("given", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("batch", [1.0, 7.0, 30.0])
def test_what_is_given_leaves_as_much_as_caches_take(rule: str, given: float, batch: float) -> None:
    """Two statements of one rule: what a share leaves, and the share that is needed."""
    d = sharing(rule)
    kept = FULL.resident(d, decode_point(batch, 1024.0, 1024.0, 1023.0))
    weights, beside = (float(np.max(x)) for x in held_beside(kept))
    caches = float(np.max(tier_bytes(kept, "gpu"))) - beside
    usable = given * d.hardware.gpu_memory
    fits = caches <= left_for_caches(d, usable, beside, weights)
    assert fits == (float(np.max(given_memory(d, kept))) <= usable)


@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize(("prompt", "generate"), [(921, 7372), (2048, 512)])
def test_plans_simulations_and_predictions_count_the_same_sequences(
    stack: str, prompt: int, generate: int
) -> None:
    """The planner's largest batch, the simulator's cache and what `predict` prints as the pool."""
    machine = load_hardware("h200")
    d = Deployment(load_model("llama3.1-70b"), machine, load_stack(stack), "fp8")
    t, usable = parse("fp8"), ENGINE_SHARE * machine.gpu_memory
    most = float(np.max(largest_batch(t, d, prompt, generate, usable, 1e13, served=True)))
    room = Room(t, d, Rules(max_seqs=int(most)), prompt + generate, prompt)
    assert int(room.capacity / room.decode_bytes[-1]) == most
    assert pool(t, d, prompt, generate).concurrency == pytest.approx(most, rel=0.01, abs=1.0)
