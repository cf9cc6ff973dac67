"""Caches as engines ship them: names, layers at the ends, kernels as measured, rankings."""

import numpy as np
import pytest

from kvsim.engine.roofline import all_ops
from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.plan import make_plan
from kvsim.planner.question import Admission, PlanLimits, Workload
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point
from kvsim.report.predict import predict_points
from kvsim.report.sweep import sweep_grid
from kvsim.techniques import parse
from kvsim.techniques.papers.cache import FORMATS, find_kernel, load_kernels
from kvsim.techniques.released import engines_running


def place(model: str = "qwen3-4b", stack: str = "vllm", gpu: str = "h100") -> Deployment:
    return Deployment(load_model(model), load_hardware(gpu), load_stack(stack).for_gpu(gpu))


def gain(technique: str, batch: int, prompt: int, model: str = "qwen3-4b") -> float:
    column = np.array([float(batch)])
    full, low = (
        Prediction(parse(t), place(model), column, prompt, 64, contexts=2).tpot_s[0]
        for t in ("full", technique)
    )
    return float(full / low)


def test_an_engines_name_is_a_technique() -> None:
    for name in FORMATS:
        assert str(parse(name)) == f"cache:format={name}"
    both = parse("turboquant_3bit_nc + snapkv:budget=512")
    assert [term.name for term in both.terms] == ["cache", "snapkv"]


def test_nvfp4_needs_tensor_cores_for_it() -> None:
    assert "no FP4 tensor cores" in parse("cache:format=nvfp4").refuses(place())


def test_layers_at_either_end_stay_in_16_bits() -> None:
    d = place()
    kinds = [parts.storage.name for shapes, count, parts in parse("turboquant_3bit_nc").layout(d)
             for _ in range(count * len(shapes))]  # fmt: skip
    assert kinds == ["fp16"] * 2 + ["cache"] * 32 + ["fp16"] * 2


def unpacking(model: str, batch: float, context: float) -> float:
    """Time per layer that a measured kernel takes beyond one that unpacks in registers. [s]"""
    point = decode_point(batch, context, 64, 0.0)
    (step,) = parse("turboquant_4bit_nc").cycle(place(model), point).steps
    return max(float(op.fixed) for op, _ in all_ops(step) if op.name == "unpack")


@pytest.mark.parametrize(("model", "head_dim"), [("qwen2.5-0.5b", 64), ("qwen3-4b", 128)])
def test_a_short_head_takes_as_long_as_a_whole_vector(model: str, head_dim: int) -> None:
    m, kernel = load_model(model), find_kernel("vllm@h100", "turboquant_4bit_nc")
    assert kernel is not None and m.head_dim == head_dim
    for batch, context in ((1.0, 128.0), (64.0, 4096.0)):
        numbers = 2 * batch * m.heads * 128 * (context + 1)
        unpacked = kernel.unpack_ops * numbers / (place().flops("fp32") / 2)
        expected = kernel.layer_s + max(kernel.walk_s * (context + 1), unpacked)
        assert unpacking(model, batch, context) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", [k.format for k in load_kernels() if k.engine == "vllm"])
def test_memory_is_that_of_the_format(name: str) -> None:
    kernel = find_kernel("vllm@h100", name)
    assert kernel is not None
    d = place(gpu="b200" if name == "nvfp4" else "h100")
    m = d.model
    p = Prediction(parse(name), d, np.ones(1), 4096, 2)
    per_head = (kernel.key_bits + kernel.value_bits) * m.head_dim / 8 + kernel.vector_bytes
    inner = m.layers - 2 * kernel.edge_layers
    expected = 4097 * m.kv_heads * (inner * per_head + 2 * kernel.edge_layers * 4 * m.head_dim)
    assert p.buffers["gpu"]["kv"] == pytest.approx(expected, rel=0.01)


def test_a_measured_kernel_loses_where_it_was_measured_to() -> None:
    assert gain("turboquant_3bit_nc", 80, 576) < 0.8
    assert gain("turboquant_4bit_nc", 1, 16384, "qwen2.5-0.5b") < 0.5
    assert gain("int8_per_token_head", 64, 8192) > gain("int2_per_token_head", 64, 8192)


def test_a_format_needs_its_engine() -> None:
    d = place(stack="fused")
    refused = parse("turboquant_3bit_nc").refuses(d)
    assert "are in vllm alone" in refused and "give --stack vllm" in refused
    with pytest.raises(InputError, match=r"nearest|expected"):
        parse("cache:format=turboquant_5bit")


def test_no_idealised_kernel_stands_above_a_measured_one() -> None:
    d = place()
    for name in ("kivi:bits=2", "turboquant:bits=3", "kvquant"):
        assert "needs a kernel that unpacks in registers" in parse(name).needs_kernel("vllm@h100")
        assert not parse(name).needs_kernel("fused")
    assert not parse("turboquant_3bit_nc").needs_kernel("vllm@h100")
    assert not parse("fp8").needs_kernel("vllm@h100")
    for batch in (8, 64):
        techniques = [parse(t) for t in ("fp8", "kivi:bits=2", "turboquant:bits=3")]
        found = predict_points(d, techniques, [batch], [8192], [64])
        assert "fp8 is fastest" in str(found.answer.verdict)
        grid = sweep_grid(d, techniques, np.array([batch]), [8192], 64, "")
        assert "Highest throughput: fp8" in str(grid.answer.verdict)
        assert grid.tables[0].rows[0]["technique"] == "fp8"
    unserved = predict_points(d, [parse(t) for t in ("fp8", "snapkv")], [64], [8192], [64])
    assert "Among techniques that engines run, fp8 is fastest" in unserved.answer.verdict
    assert "No engine implements snapkv, which would reach" in unserved.answer.verdict
    assert "kivi" not in engines_running("kivi", d) + engines_running("eagle3+kivi", d)
    assert engines_running("kivi", place(stack="hf-eager")) == ["hf"]


def test_a_plan_prefers_what_runs_unless_nothing_else_is_left() -> None:
    limits, asked = PlanLimits(80e9, 1e11, loss=0.1), Workload(16384, 64, 32)
    chosen = {}
    for only in ((), ("kivi",)):
        plan = make_plan(place(), asked, "throughput", limits, Admission(only=only))
        chosen[only] = plan.choice.technique
        other = [a for a in plan.alternatives if "kivi" in a.prediction.technique.name]
        assert only or "needs a kernel" in other[0].reason
    assert not chosen[()].needs_kernel("vllm") and chosen["kivi",].name == "kivi"
