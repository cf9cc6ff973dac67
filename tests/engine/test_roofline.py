"""Single terms of an op's time and of what is resident, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.engine import attention
from kvsim.engine.buffers import resident_once, sequences_alive
from kvsim.engine.formats import Format
from kvsim.engine.ops import all_reduce
from kvsim.engine.roofline import host_seconds
from kvsim.engine.timeline import makespan
from kvsim.graph import Group, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Kernel
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.memory import prefill_point
from tests.support.arithmetic import B, decoding

PLAIN = Deployment(load_model("llama3-8b"), load_hardware("h100"), load_stack("fused"))


@pytest.mark.parametrize(
    ("launches", "expected"), [(3.0, 3 * 2e-6 + 5e-6), (0.25, 0.25 * (2e-6 + 5e-6)), (0.0, 0.0)]
)
def test_the_host_issues_every_launch_and_runs_the_code_around_an_op(
    launches: float, expected: float
) -> None:
    """The code around it runs once for several kernels, and with the op's share of the steps."""
    fused = load_stack("fused")
    kernels = dict(fused.kernels) | {"topk": Kernel(host=5e-6)}
    stack = replace(fused, kernels=kernels, time=replace(fused.time, launch=2e-6))
    op = Op("select", kernel="topk", launches=launches)
    assert host_seconds(op, replace(PLAIN, stack=stack)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_ring_waits_for_two_rounds_of_transfers(tp: int) -> None:
    """Every GPU passes on a part of the data to each other one, and then a sum: 2 (tp - 1)."""
    d = replace(PLAIN, tp=tp)
    latency = d.hardware.links["link"].latency
    assert latency > 0
    (op,) = all_reduce(d, "sum", 8e6)
    assert op.fixed == pytest.approx(2 * (tp - 1) * latency, rel=1e-12)
    assert op.bytes["link"] == pytest.approx(2 * 8e6 * (tp - 1) / tp, rel=1e-12)
    shot = replace(d.stack, sums=replace(d.stack.sums, one_shot=True))
    (op,) = all_reduce(replace(d, stack=shot), "sum", 8e6)
    assert (op.fixed, op.bytes["link"]) == (latency, 8e6 * (tp - 1))


@pytest.mark.parametrize(
    ("prompt", "alive"), [(1.0, 8192), (2.0, 4096), (3.0, 8192 / 3), (8192.0, 1), (9000.0, 1)]
)
def test_prompts_of_a_part_fill_it(prompt: float, alive: float) -> None:
    assert PLAIN.stack.memory.prefill_chunk == 8192
    found = sequences_alive(PLAIN, prefill_point(1e5, prompt, 1.0))
    assert found == pytest.approx(alive, rel=1e-12)
    assert sequences_alive(PLAIN, Point(1e5, prompt, 1.0, prompt, prompt + 1)) == 1e5
    few = sequences_alive(PLAIN, prefill_point(np.array([2.0, 1e5]), 1.0, 1.0))
    assert np.asarray(few).tolist() == [2.0, 8192.0]


def test_tables_and_products_outside_the_layers_lie_beside_the_embedding() -> None:
    """Gemma 3n: numbers of further tables, and products of the hidden state with ``once`` rows."""
    point = Point(4.0, 100.0, 1.0, 100.0, 200.0)

    def embedding(**more: int) -> float:
        d = replace(PLAIN, model=replace(PLAIN.model, **more))  # type: ignore[arg-type]
        return float(resident_once(d, point, 0.0)["gpu"]["embedding"])

    hidden, plain = PLAIN.model.hidden, embedding()
    assert plain == 2 * 2 * hidden * PLAIN.model.vocab
    assert embedding(once=300) - plain == 2 * 300 * hidden
    assert embedding(tables=12345) - plain == 2 * 12345
    assert embedding(learned_positions=77) - plain == 2 * 77 * hidden


@pytest.mark.parametrize(
    ("bits", "value_bits", "expected"),
    [
        (8, 16, 64 * (2 + 1)),  # fp16 values are neither read nor written anew
        (16, 8, 32 * (2 + 1)),
        (8, 8, (64 + 32) * (2 + 1)),
        (16, 16, 0.0),
    ],
)
def test_packing_touches_the_sides_that_are_packed(
    bits: float, value_bits: float, expected: float
) -> None:
    stored = Format(bits, value_bits=value_bits)
    assert stored.packing(64, 32) == pytest.approx(expected, rel=1e-12)
    assert stored.unpacked(64, 32, 10.0) == 640.0 * (bits < 16) + 320.0 * (value_bits < 16)


def test_a_kernel_that_pads_widens_its_padding_too() -> None:
    """Fp8 numbers of 8,001 cached tokens and of 50 more that the kernel computes for nothing."""
    apart = Kernel(padding=50.0, unpack_ops=9.0)
    kernels = dict(PLAIN.stack.kernels) | {"attention": apart, "attention-fp8": apart}
    d, point = replace(PLAIN, stack=replace(PLAIN.stack, kernels=kernels)), decoding(8000, 1)
    shape = d.shard.layout[0][0][0]
    (packed,) = attention.ops(d, point, shape, stored=Format(8))
    assert packed.unpacked == B * (8001 + 50) * d.shard.kv_width
    (plain,) = attention.ops(d, point, shape)
    assert plain.unpacked == 0
    moved = 2 * B * 50 * d.shard.kv_width
    (less,) = attention.ops(PLAIN, point, shape)
    assert plain.bytes["hbm"] - less.bytes["hbm"] == pytest.approx(moved, rel=1e-9)


def test_an_op_takes_no_time_where_it_has_no_work() -> None:
    """Two ops of which each has work at some points only."""
    ops = (Op("a", fixed=np.array([0.0, 0.5, 0.0])), Op("b", fixed=np.array([0.0, 0.0, 0.25])))
    stack = replace(PLAIN.stack, time=replace(PLAIN.stack.time, gap=0.0))
    step = Step((Group((ops,), 3),), ())
    took = np.asarray(makespan(step, replace(PLAIN, stack=stack)))
    floor = PLAIN.stack.kernel("pointwise").floor
    assert took == pytest.approx([0.0, 3 * (0.5 + floor), 3 * (0.25 + floor)], rel=1e-12)
