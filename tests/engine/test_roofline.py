"""Single terms of an op's time and of what is resident, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.engine.buffers import sequences_alive
from kvsim.engine.roofline import host_seconds
from kvsim.engine.timeline import makespan
from kvsim.graph import Group, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Kernel
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.memory import prefill_point

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


def test_an_op_takes_no_time_where_it_has_no_work() -> None:
    """Two ops of which each has work at some points only."""
    ops = (Op("a", fixed=np.array([0.0, 0.5, 0.0])), Op("b", fixed=np.array([0.0, 0.0, 0.25])))
    stack = replace(PLAIN.stack, time=replace(PLAIN.stack.time, gap=0.0))
    step = Step((Group((ops,), 3),), ())
    took = np.asarray(makespan(step, replace(PLAIN, stack=stack)))
    floor = PLAIN.stack.kernel("pointwise").floor
    assert took == pytest.approx([0.0, 3 * (0.5 + floor), 3 * (0.25 + floor)], rel=1e-12)
