"""Kernel classes of real engines: against the twin, and sums by the quickest way."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.engine.attention import last_wave
from kvsim.engine.ops import all_reduce, routed_experts
from kvsim.engine.roofline import all_ops, seconds, tiled
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import STANDS_FOR, Kernel
from kvsim.machines.parallel import BUSIEST, NETWORK, busiest
from kvsim.machines.profiles import load_hardware, load_stack, with_numbers
from kvsim.models.configs import load_model
from kvsim.prediction.memory import decode_point, prefill_point
from kvsim.techniques import parse
from tests.support import scalar

APART = Kernel(
    memory=0.7, compute=0.6, floor=4e-6, half_size=40.0, half_columns=300.0, added=0.2,
    input_passes=3.0, traffic=5.0, narrow=1.3, wide=0.9, ungrouped=1.2, padding=50.0, split=6e-6,
    tile_rows=128.0, unpack_ops=9.0, walk=3e-8, unit_blocks=2.0,
)  # fmt: skip


def deployment(model: str, weights: str = "fp16", tp: int = 2) -> Deployment:
    stack = load_stack("fused")
    sums = replace(
        stack.sums, direct_share=0.4, direct=4e-6, direct_hop=2e-7, direct_second=3e-6,
        ring=15e-6, ring_hop=1e-6, ring_share=0.75,
    )  # fmt: skip
    kernels = dict(stack.kernels) | dict.fromkeys(STANDS_FOR, APART)
    stack = replace(stack, kernels=kernels, sums=sums)
    return Deployment(load_model(model), load_hardware("h100"), stack, weights, tp)


@pytest.mark.parametrize("model", ["llama3-8b", "deepseek-v2-lite", "mixtral-8x7b", "phi-2"])
@pytest.mark.parametrize("technique", ["full", "fp8"])
@pytest.mark.parametrize("weights", ["fp16", "fp8", "int4"])
def test_every_class_matches_the_scalar_twin(model: str, technique: str, weights: str) -> None:
    d, t = deployment(model, weights), parse(technique)
    if t.refuses(d):
        pytest.skip("refused")
    for step in (
        t.prefill(d, prefill_point(4.0, 700.0, 10.0)),
        t.forward(d, decode_point(32.0, 900.0, 100.0, 7.0)),
    ):
        for op, _ in all_ops(step):
            assert seconds(op, d) == pytest.approx(scalar.op_seconds(op, d), rel=1e-12, abs=0)


@given(st.floats(1.0, 1e6), st.sampled_from([16, 32]))
def test_sums_over_machines_are_rings_within_and_between(tokens: float, tp: int) -> None:
    d = deployment("deepseek-v3", tp=tp)
    nodes, rate, data = tp // 8, 450e9, 2.0 * tokens * d.shard.hidden
    within = 15e-6 + 14 * (1e-6 + data / 8 / (0.75 * rate))
    between = 2 * (nodes - 1) * (NETWORK.latency + data / tp / NETWORK.bandwidth)
    (op,) = all_reduce(d, "sum", data)
    rest = d.stack.time.gap + d.stack.kernel("allreduce").floor
    assert seconds(op, d) == pytest.approx(within + between + rest, rel=1e-9)


@given(st.floats(1.0, 1e6), st.sampled_from([2, 4, 8]))
def test_the_quickest_sum_is_taken(tokens: float, tp: int) -> None:
    d = deployment("llama3-8b", tp=tp)
    stack, rate, data = d.stack, 450e9, 2.0 * tokens * d.shard.hidden
    one = 4e-6 + (tp - 1) * (2e-7 + data / (0.4 * rate))
    two = 7e-6 + 2 * (tp - 1) * (2e-7 + data / tp / (0.4 * rate))
    ring = 15e-6 + 2 * (tp - 1) * (1e-6 + data / tp / (0.75 * rate))
    (op,) = all_reduce(d, "sum", data)
    expected = min(one, two, ring) + stack.time.gap + stack.kernel("allreduce").floor
    assert seconds(op, d) == pytest.approx(expected, rel=1e-9)


def test_formats_run_by_the_stacks_own_kernels_where_the_card_has_them() -> None:
    """nvfp4 is computed in fp4 where card and stack can, and widened elsewhere."""
    m = load_model("llama3-8b")
    for gpu, stack, kernel, dtype in (
        ("b200", "trtllm", "gemm-nvfp4", "fp4"),
        ("h100", "trtllm", "gemm-int4", "fp16"),
        ("b200", "fused", "gemm-int4", "fp16"),
    ):
        stored = Deployment(m, load_hardware(gpu), load_stack(stack), "nvfp4").weight_format
        assert (stored.kernel, stored.dtype) == (kernel, dtype), (gpu, stack)


def test_the_last_round_of_attention_s_blocks_takes_as_long_as_a_full_one() -> None:
    d = Deployment(load_model("llama3.1-8b"), load_hardware("a100-80g"), load_stack("hf-fa2"))
    shares = d.stack.kernel("attention")
    assert shares.unit_blocks * d.hardware.units == 216  # blocks at once; a sequence has eight
    points = [decode_point(batch, 900.0, 100.0, 7.0) for batch in (1.0, 21.0, 27.0, 30.0, 402.0)]
    found = [float(np.max(last_wave(d, point, shares))) for point in points]
    assert found == pytest.approx([1.0, 1.0, 1.0, 432 / 240, 15 * 216 / 3216])
    assert last_wave(replace(d, stack=load_stack("vllm")), points[3], Kernel()) == 1.0


def test_the_busiest_gpu_has_more_routed_tokens_the_more_gpus_there_are() -> None:
    assert float(busiest(1, 0.2)) == float(busiest(1, 0.0)) == 1.0
    assert [float(busiest(ep, 0.2)) for ep in (2, 8, 32)] == pytest.approx([1.2, 1.6, 2.0])
    assert float(busiest(32, 0.0)) == BUSIEST
    m, h = load_model("mixtral-8x7b"), load_hardware("h100")
    spread = Deployment(m, h, load_stack("vllm"), tp=4, ep=4)
    assert spread.routed_share == pytest.approx(1.2 / 4)
    p = decode_point(2.0, 100.0, 10.0, 0.0)
    uneven = replace(spread, stack=with_numbers(spread.stack, {"sums.skew": 0.4}))
    read = [routed_experts(d, p)[-1].bytes["hbm"] for d in (spread, uneven)]
    assert read[0] < read[1]  # of the GPU whose experts are called for more


def test_products_compute_whole_tiles() -> None:
    rows = np.array([1.0, 3.0, 64.0, 65.0, 128.0, 129.0, 256.0, 257.0, np.inf])
    computed = [1, 4, 64, 128, 128, 256, 256, 384]
    found = np.asarray(tiled(rows, 128.0))
    assert found[:-1] * rows[:-1] == pytest.approx(computed)
    assert found[-1] == 1.0
