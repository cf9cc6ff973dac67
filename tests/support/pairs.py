"""Pairs of terms of different axes: what every composition promises, or why it is refused."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations

import numpy as np

from kvsim.engine.roofline import all_ops, seconds
from kvsim.engine.timeline import makespan, steady_seconds
from kvsim.errors import InputError
from kvsim.graph import Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.memory import prefill_point
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from tests.support import scalar

AXES = {
    "selection": [
        "streamingllm", "h2o", "snapkv", "pyramidkv", "duoattention", "quest", "infllm",
        "values:n=64", "pairs", "landmarks",
    ],
    "storage": [
        "fp8", "bits=4", "grouped:bits=8,value_bits=4", "kivi", "turboquant:bits=3", "kvquant",
        "zipcache", "gear", "mikv", "hierarchical", "lowrank",
    ],
    "placement": [
        "offload", "offload:host_share=0.5", "kvpr", "place:cpu_share=0.4", "fastdecode",
        "place:values_host=1", "place:weights_host=0.5,parts=2", "place:host_share=0.4,split=200",
    ],
    "drafting": [
        "draft:model=smollm2-135m,acceptance=0.7,gamma=2", "eagle:acceptance=0.8/0.6,gamma=2",
        "mtp", "selfdraft:gamma=2", "selfdraft:gamma=2,reads=snapkv", "selfdraft:reads=upper",
    ],
}  # fmt: skip
MODELS = {
    "MHA": "llama2-7b",
    "GQA": "llama3-8b",
    "MLA": "deepseek-v2-lite",
    "MoE": "mixtral-8x7b",
    "windows": "gemma-2-2b",
    "hybrid": "nemotron-nano-9b-v2",
    "delta": "qwen3-next-80b-a3b",
    "shared": "gemma-3n-e4b",
    "indexed": "deepseek-v3.2",
}
TOLERANCE = 1e-12
BATCH = np.array([[8.0], [32.0]])
CONTEXT = np.array([[700.0, 20000.0]])
SHAPE = (2, 2)


def pairs() -> list[str]:
    """Every pair of terms of two axes."""
    return [
        f"{one} + {other}"
        for first, second in combinations(AXES, 2)
        for one in AXES[first]
        for other in AXES[second]
    ]


@cache
def deployment(kind: str) -> Deployment:
    return Deployment(load_model(MODELS[kind]), load_hardware("h100"), load_stack("fused"))


def point(batch: float | np.ndarray, context: float | np.ndarray) -> Point:
    return Point(batch, context, 1.0, context - 100, context + 100)


def passes(t: Technique, d: Deployment, p: Point) -> list[Step]:
    prompt = Point(p.batch, 0.0 * p.context, p.prompt, p.prompt, p.max_length, prefill=True)
    return [t.prefill(d, prompt), *t.predecoding(d, p), *t.cycle(d, p).steps]


def refusal(text: str, kind: str) -> str:
    """Why a composition cannot run, or nothing; an empty reason is a fault."""
    d = deployment(kind)
    try:
        t = parse(text)
    except InputError as error:
        return str(error)
    if "smollm2-135m" in text:  # a draft of the model's own vocabulary
        t = t.changed(model=MODELS[kind])
    return t.refuses(d)


def check(text: str, kind: str) -> str:
    """The reason of a refusal, or nothing after every promise has been held."""
    reason = refusal(text, kind)
    if reason:
        assert "\n" not in reason and len(reason) < 200, reason
        return reason
    d, t = deployment(kind), parse(text)
    if "smollm2-135m" in text:
        t = t.changed(model=MODELS[kind])
    p = point(BATCH, CONTEXT)
    assert parse(str(t)) == t
    assert t.tokens_per_round >= 1
    times = [(makespan(step, d), steady_seconds(step, d)) for step in passes(t, d, p)]
    i, j = 1, 0
    single = passes(t, d, point(float(BATCH[i, 0]), float(CONTEXT[0, j])))
    for step, whole in zip(single, times, strict=True):
        for names in (
            ({op.name for op in layer}, layer) for g in step.groups for layer in g.layers
        ):
            assert len(names[0]) == len(names[1]), "an op's name twice in a layer"
        twin = scalar.makespan(step, d), scalar.steady(step, d)
        for got, expected in zip(whole, twin, strict=True):
            value = float(np.broadcast_to(got, SHAPE)[i, j])
            assert abs(value - expected) <= TOLERANCE * expected, (value, expected)
        least = max(scalar.busy(step, d).values())
        assert twin[1] >= least * (1 - TOLERANCE)
        assert max(twin) <= scalar.serial(step, d) * (1 + TOLERANCE)
    for step in passes(t, d, p):
        for op, _ in all_ops(step):
            for n in (op.flops, op.rows, op.fixed, *op.bytes.values(), seconds(op, d)):
                assert np.isfinite(n).all() and (np.asarray(n) >= 0).all(), op
    for tier in resident_tiers(t, d):
        assert all((np.asarray(size) >= 0).all() for size in tier.values()), tier
        total = sum((np.asarray(size) for size in tier.values()), np.zeros(SHAPE[0]))
        assert (np.diff(total) >= 0).all(), "memory grows with the batch"
    return ""


def resident_tiers(t: Technique, d: Deployment) -> Iterator[dict[str, np.ndarray]]:
    batch = np.array([8.0, 32.0])
    for p in (prefill_point(batch, 4000.0, 500.0), Point(batch, 4400.0, 1.0, 4000.0, 4500.0)):
        for buffers in t.resident(d, p).values():
            yield {name: np.broadcast_to(size, batch.shape) for name, size in buffers.items()}
