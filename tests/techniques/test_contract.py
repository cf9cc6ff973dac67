"""What every technique promises, whatever the model."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvsim.engine.roofline import all_ops, seconds
from kvsim.engine.timeline import makespan, steady_seconds
from kvsim.errors import InputError
from kvsim.graph import Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware, Link
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import TIERS, decode_point, prefill_point
from kvsim.techniques import TECHNIQUES, parse
from kvsim.techniques.technique import Technique
from tests.support import scalar
from tests.support.drives import with_drive
from tests.support.sampled import some

TOLERANCE = 1e-12  # relative
SLACK = 1 + 1e-9

FURTHER = {  # settings beside the defaults that change what a technique does
    "offload": ["offload:host_share=0.5,bits=4", "offload:schedule=column,parts=4"],
    "kvpr": ["kvpr:split=300,bits=8", "kvpr:schedule=column,bits=4,parts=2"],
    "kcache": ["kcache:n=32,gpu_layers=5", "kcache:n=5000,gpu_layers=1000"],
    "specache": ["specache:speculative=false", "specache:bits=1,group=32,k=300"],
    "zipcache": ["zipcache:salient=1,high=16,probe=0.05", "zipcache:low=4,window=32"],
    "quantspec": ["quantspec:gamma=0", "quantspec:gamma=6,acceptance=0.5,group=64"],
    "kivi": ["kivi:bits=4,residual=0", "kivi:bits=16", "kivi:group=64,residual=32"],
    "h2o": ["h2o:heavy=0,recent=100", "h2o:heavy=9e6,recent=1"],
    "streamingllm": ["streamingllm:sink=0,recent=64", "streamingllm:recent=9e6"],
    "snapkv": ["snapkv:budget=100,window=8", "snapkv:budget=9e6"],
    "magicdec": ["magicdec:draft=snapkv,gamma=1", "magicdec:gamma=0,acceptance=1"],
    "flexgen": [
        "flexgen:weights_gpu=100,cache_gpu=50,bits=4",
        "flexgen:states_gpu=20,weights_disk=60,cache_disk=30,states_disk=70",
    ],
    "infllm": ["infllm:k=4,local=512,cached=0,reuse=0.5", "infllm:local=9e6"],
    "gear": ["gear:bits=2,rank=4,outliers=0.02", "gear:rank=0,residual=128"],
    "gear-first": ["gear-first:bits=8,rank=0.1", "gear-first:rank=0,outliers=0"],
    "draft": ["draft:model=llama2-7b,gamma=2,acceptance=0.6"],
    "ngram": ["ngram:acceptance=0.4", "ngram:gamma=1,acceptance=0.6"],
    "eagle": ["eagle:acceptance=0.7", "eagle:gamma=1,acceptance=0.8"],
    "mikv": ["mikv:salient=1,high=16", "mikv:salient=0.2,high=16,group=32"],
}
VARIANTS = {name: [name, *FURTHER.get(name, [])] for name in TECHNIQUES}
MODELS = {
    "MHA": "llama2-7b",
    "GQA": "llama3-8b",
    "MQA": "falcon-7b",
    "MLA": "deepseek-v2-lite",
    "MoE": "mixtral-8x7b",
    "sliding": "gemma-2-2b",
}
BATCH = np.array([[8.0], [64.0]])
CONTEXT = np.array([[600.0, 3000.0, 50000.0]])
SHAPE = (2, 3)


@cache
def deployment(kind: str, gpu: str = "h100", stack: str = "fused", tp: int = 1) -> Deployment:
    hardware = with_drive(load_hardware(gpu))
    return Deployment(load_model(MODELS[kind]), hardware, load_stack(stack), tp=tp)


def refusal(kind: str, text: str) -> str:
    """Why a technique cannot run on a model, or nothing."""
    return parse(text).refuses(deployment(kind))


TEXTS = [text for variants in VARIANTS.values() for text in variants]
CASES = [
    pytest.param(kind, text, id=f"{text}-{kind}")
    for text in TEXTS
    for kind in some(list(MODELS), text, 2)
    if not refusal(kind, text)
]


def point(batch: Any, context: Any) -> Point:
    """A round that follows a generation of 100 tokens, with as many to come."""
    return Point(batch, context, 1.0, context - 100, context + 100)


def passes(t: Technique, d: Deployment, p: Point) -> list[Step]:
    prompt = replace(p, context=0.0 * p.context, new=p.prompt, prefill=True)
    return [t.prefill(d, prompt), *t.predecoding(d, p), *t.cycle(d, p).steps]


def times(step: Step, d: Deployment) -> tuple[Any, Any]:
    return makespan(step, d), steady_seconds(step, d)


def test_variants_are_of_their_technique() -> None:
    assert FURTHER.keys() <= TECHNIQUES.keys()
    for name, variants in VARIANTS.items():
        assert {parse(text).name for text in variants} == {name}
        assert str(parse(name)) == str(TECHNIQUES[name]())


@pytest.mark.parametrize("name", TECHNIQUES)
def test_class_cites_its_paper(name: str) -> None:
    assert "References\n" in (TECHNIQUES[name].__doc__ or "")


@pytest.mark.parametrize("text", TEXTS)
def test_settings_are_read_back(text: str) -> None:
    t = parse(text)
    assert parse(str(t)) == t
    assert str(parse(str(t))) == str(t)


def legal_waits(layer: tuple[Op, ...]) -> Iterator[tuple[Op, set[str]]]:
    """Each op with everything it may wait for.

    Early ops are issued before the rest of the layer before them: they see only early ops of
    their own layer, and others from two layers back on.
    """
    names, early = [op.name for op in layer], [op.name for op in layer if op.prefetch]
    for i, op in enumerate(layer):
        before = [other.name for other in layer[:i] if other.prefetch]
        far = {f"{name}@-{back}" for name in names for back in ((2, 3) if op.prefetch else (1, 2))}
        if op.prefetch:
            yield op, {*before, *far}
        else:
            yield op, {*names[:i], *early, *far, *(f"{name}@step-1" for name in names)}


@pytest.mark.parametrize(("kind", "text"), CASES)
def test_ops_are_sound(kind: str, text: str) -> None:
    """Names, waits, and numbers of every op in every phase."""
    t, d = parse(text), deployment(kind)
    for step in passes(t, d, point(BATCH, CONTEXT)):
        for group in step.groups:
            assert group.count > 0
            for layer in group.layers:
                assert len({op.name for op in layer}) == len(layer)
                for op, legal in legal_waits(layer):
                    assert set(op.after) <= legal, op
        assert all(not op.after for op in step.head)
        for op, count in all_ops(step):
            for n in (op.flops, op.rows, op.fixed, *op.bytes.values(), seconds(op, d)):
                assert np.isfinite(n).all(), op
                assert (np.asarray(n) >= 0).all(), op
            assert ((np.asarray(op.size) > 0) | (np.asarray(op.flops) == 0)).all(), op
            assert count > 0


@pytest.mark.parametrize(("kind", "text"), CASES)
def test_arrays_equal_the_scalar_twin(kind: str, text: str) -> None:
    t, d = parse(text), deployment(kind)
    p = point(BATCH, CONTEXT)
    tokens = t.cycle(d, p).tokens
    assert (np.asarray(tokens) >= 1).all()
    grids = [times(step, d) for step in passes(t, d, p)]
    for whole, further in grids[1:]:
        assert np.shape(whole) == np.shape(further) == SHAPE
    for index in some([(0, 1), (1, 2)], f"{text} on {kind}", 2):
        one = point(float(BATCH[index[0], 0]), float(CONTEXT[0, index[1]]))
        for step, grid in zip(passes(t, d, one), grids, strict=True):
            whole, further = (float(np.broadcast_to(time, SHAPE)[index]) for time in grid)
            assert whole == pytest.approx(scalar.makespan(step, d), rel=TOLERANCE, abs=0)
            assert further == pytest.approx(scalar.steady(step, d), rel=TOLERANCE, abs=0)
            assert min(whole, further) >= max(scalar.busy(step, d).values()) * (1 - TOLERANCE)
            assert max(whole, further) <= scalar.serial(step, d) * (1 + TOLERANCE)


def improved(h: Hardware) -> Iterator[tuple[str, Hardware]]:
    """The same machine with one thing doubled."""
    for name, link in h.links.items():
        faster = Link(2 * link.bandwidth, link.latency)
        yield name, replace(h, links={**h.links, name: faster})
    yield "FLOP/s", replace(h, flops={dtype: 2 * rate for dtype, rate in h.flops.items()})
    yield "host FLOP/s", replace(h, cpu_flops=2 * h.cpu_flops)


@pytest.mark.parametrize(("kind", "text"), CASES)
def test_a_better_machine_is_never_slower(kind: str, text: str) -> None:
    t, d = parse(text), deployment(kind)
    p = point(BATCH, CONTEXT)
    before = [times(step, d) for step in passes(t, d, p)]
    for what, hardware in some(list(improved(d.hardware)), f"{text} on {kind}", 3):
        better = replace(d, hardware=hardware)
        for step, old in zip(passes(t, better, p), before, strict=True):
            for now, then in zip(times(step, better), old, strict=True):
                assert (now <= np.asarray(then) * SLACK).all(), what


@pytest.mark.parametrize(("kind", "text"), CASES)
def test_memory(kind: str, text: str) -> None:
    """A tier's need is the sum of its named buffers in its worst phase, and grows with the batch.

    A larger GPU or host never makes the largest batch smaller.
    """
    t, d = parse(text), deployment(kind)
    batches = np.array([8.0, 16.0, 24.0, 800.0])
    prediction = Prediction(t, d, batches, prompt=4000, generate=500)
    totals = {"gpu": prediction.gpu_bytes, "host": prediction.host_bytes}
    totals |= {"disk": prediction.disk_bytes}
    for tier in TIERS:
        whole, named = totals[tier], prediction.buffers.get(tier, {})
        assert all((np.asarray(size) >= 0).all() for size in named.values())
        assert whole == pytest.approx(sum(named.values(), np.zeros(4)), rel=TOLERANCE, abs=0)
        for i, b in enumerate(batches.tolist()):
            phases = prefill_point(b, 4000, 500), decode_point(b, 4000, 500, 499.0)
            sums = [
                sum(float(size) for size in t.resident(d, phase).get(tier, {}).values())
                for phase in phases
            ]
            assert whole[i] == pytest.approx(max(sums), rel=TOLERANCE, abs=0)
        assert (np.diff(whole) >= 0).all()
    h = d.hardware
    for larger in (
        replace(h, gpu_memory=2 * h.gpu_memory),
        replace(h, host_memory=2 * h.host_memory),
    ):
        roomy = replace(prediction, deployment=replace(d, hardware=larger))
        assert (roomy.max_batch >= prediction.max_batch).all()


def test_refusals_name_one_reason() -> None:
    refused = set()
    for kind in MODELS:
        for name in TECHNIQUES:
            reason = parse(name).refuses(deployment(kind))
            if reason:
                refused.add((kind, name))
                assert "\n" not in reason
                assert reason.strip() == reason
    assert {("MLA", "kcache"), ("MLA", "fastdecode"), ("MLA", "quest")} <= refused
    without = deployment("MHA", "t4")
    unsaid = {"draft"}  # a model that the user has to name
    assert {name for name in TECHNIQUES if parse(name).refuses(without)} == {"fp8", *unsaid}
    for d, name in ((without, "fp8"), (deployment("MLA"), "kcache")):
        with pytest.raises(InputError, match=f"^{name} cannot run here: .+$"):
            Prediction(parse(name), d, np.ones(1), 10, 10)


@pytest.mark.parametrize("text", [v for variants in VARIANTS.values() for v in variants[:2]])
def test_tensor_parallel(text: str) -> None:
    """Every GPU holds less, and all of them sum up twice a layer."""
    t, p = parse(text), point(8.0, 3000.0)
    weights, sizes = [], []
    for tp in (1, 2, 4, 8):
        d = deployment("MHA", tp=tp)
        for step in passes(t, d, p):
            sums = {op.name for op, _ in all_ops(step) if op.kernel == "allreduce"}
            assert sums == ({"out_sum", "mlp_sum"} if tp > 1 else set())
            assert steady_seconds(step, d) == pytest.approx(
                scalar.steady(step, d), rel=TOLERANCE, abs=0
            )
            assert 0 < makespan(step, d) < np.inf
        resident = t.resident(d, p)
        weights.append(sum(float(tier.get("weights", 0.0)) for tier in resident.values()))
        sizes.append(sum(float(size) for size in resident["gpu"].values()))
        assert t.resident(d, p).keys() == resident.keys()
    for each in (weights, sizes):
        assert each == sorted(each, reverse=True)
    assert [w / weights[0] for w in weights] == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8])
