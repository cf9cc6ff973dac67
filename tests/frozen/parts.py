"""What techniques state, part by part, at points that reach every setting and kind of layer."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from kvsim.engine.roofline import all_ops, resource_seconds
from kvsim.engine.timeline import makespan, steady_seconds
from kvsim.graph import Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import TIERS, decode_point, prefill_point, served_buffers
from kvsim.techniques import parse
from tests.frozen.store import Answer, Kind


def state(case: str) -> Answer:
    """Return times, work and memory of a case.

    Its name is ``TECHNIQUE | MODEL | GPU | STACK | WEIGHTS | TP | BATCH | PROMPT | GENERATE``.
    """
    text, model, gpu, stack, weights, tp, *load = case.split(" | ")
    d = Deployment(load_model(model), load_hardware(gpu), load_stack(stack), weights, int(tp))
    batch, prompt, generate = load
    return dict(_parts(text, d, float(batch), int(prompt), int(generate)))


def _parts(
    text: str, d: Deployment, batch: float, prompt: int, generate: int
) -> Iterator[tuple[str, float]]:
    batches = np.array([batch])
    batches = batches * parse(text).for_batches(batches).tiles()
    technique = parse(text).for_batches(batches)
    p = decode_point(batches[:, None], float(prompt), float(generate), generate / 2)
    reading = prefill_point(batches[:, None], float(prompt), float(generate))
    cycle = technique.cycle(d, p)
    yield "tokens of a round", _one(cycle.tokens)
    steps = {"prefill": [technique.prefill(d, reading)], "between": technique.predecoding(d, p),
             "decode": cycle.steps}  # fmt: skip
    for phase, some in steps.items():
        for name, value in _of_steps(some, d).items():
            yield f"{phase} {name}", value
    for name, point in (("prefill", reading), ("decode", p)):
        yield from _held(f"{name} holds", technique.resident(d, point))
    yield from _held("serving holds", served_buffers(technique, d, batches, prompt, generate))
    found = Prediction(technique, d, batches, prompt, generate)
    for name in ("ttft_s", "decode_s", "gpu_bytes", "host_bytes", "max_batch"):
        yield name, _one(getattr(found, name))
    few = Prediction(technique, d, batches, prompt, generate, contexts=16)
    yield "decode_s of 16 contexts", _one(few.decode_s)


def _of_steps(steps: Sequence[Step], d: Deployment) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        total["steady s"] += _one(steady_seconds(step, d))
        total["makespan s"] += _one(makespan(step, d))
        for op, count in all_ops(step):
            total[f"{op.stream} flops"] += count * _one(op.flops)
            total["launches"] += count * float(op.launches)
            total["fixed s"] += count * _one(op.fixed)
            total["rows and unpacked"] += count * (_one(op.rows) + _one(op.unpacked))
            for channel, size in op.bytes.items():
                total[f"{op.stream} {channel} B"] += count * _one(size)
            for resource, took in resource_seconds(op, d).items():
                total[f"{op.stream} {resource} s"] += count * _one(took)
    return total


def _held(name: str, buffers: object) -> Iterator[tuple[str, float]]:
    for tier in TIERS:
        for buffer, size in buffers.get(tier, {}).items():  # type: ignore[attr-defined]
            yield f"{name} {tier} {buffer}", _one(size)


def _one(value: object) -> float:
    return float(np.ravel(np.asarray(value, dtype=float))[0])


PARTS = Kind("parts", state, every=3)
