"""Every op and buffer of a pass, field by field: all techniques, stacks and kinds of models."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvsim.engine.roofline import all_ops, host_seconds, overhead_seconds, resource_seconds, seconds
from kvsim.graph import Op, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.memory import TIERS, decode_point, prefill_point
from kvsim.techniques import parse
from tests.frozen.store import Answer, Kind

POINTS = {
    "prompts": (prefill_point(3.0, 700.0, 40.0), decode_point(5.0, 1290.0, 90.0, 13.0)),
    "windows": (prefill_point(2.0, 4096.0, 5.0), decode_point(1.0, 1.0, 2.0, 0.0)),
    "long": (prefill_point(1.0, 9000.0, 70.0), decode_point(2.0, 9000.0, 70.0, 64.0)),
    "batches": (prefill_point(3.0, 9000.0, 70.0), decode_point(5.0, 9000.0, 70.0, 13.0)),
}
NUMBERS = ("flops", "unpacked", "rows", "size", "columns", "slower", "launches", "fixed")
CASE = re.compile(r"(.*) on ([^ ]+): ([^ ]+), ([^ ]+), ([^ ]+), (\d), (\w+)")
Row = dict[str, Any]


def state(case: str) -> Answer:
    """Return what a technique states at two points: ops by phase and place, and what is held.

    A case is named ``TECHNIQUE on STACK: MODEL, GPU, WEIGHTS, TP, POINTS``.
    """
    found = CASE.fullmatch(case)
    assert found, case
    text, stack, model, gpu, weights, tp, points = found.groups()
    deployment = Deployment(
        load_model(model), load_hardware(gpu), load_stack(stack), weights, int(tp)
    )
    prompt, p = POINTS[points]
    technique = parse(text).for_batches(np.array([p.batch]))
    steps = {
        "prompt": [technique.prefill(deployment, prompt)],
        "between": technique.predecoding(deployment, p),
        "decode": technique.cycle(deployment, p).steps,
    }
    rows: dict[str, Row] = {}
    for phase, some in steps.items():
        for i, step in enumerate(some):
            for j, (op, count) in enumerate(_distinct(step)):
                rows[f"{phase} {i} {j} {op.name}"] = _fields(op, deployment) | {"times": count}
    rows["prompt holds"] = _held(technique.resident(deployment, prompt))
    rows["decode holds"] = _held(technique.resident(deployment, p))
    return rows


def _distinct(step: Step) -> Iterator[tuple[Op, int]]:
    """Ops that differ, each with its count."""
    counts: dict[int, int] = {}
    different: list[Op] = []
    for op, count in all_ops(step):
        at = next((i for i, known in enumerate(different) if _equal(known, op)), len(different))
        if at == len(different):
            different.append(op)
        counts[at] = counts.get(at, 0) + count
    yield from ((op, counts[i]) for i, op in enumerate(different))


def _equal(one: Op, other: Op) -> bool:
    return one is other or repr(one) == repr(other)


def _fields(op: Op, deployment: Deployment) -> Row:
    """An op's fields but the usual ones, and its times."""
    usual = Op("")
    row: Row = {"name": op.name, "stream": op.stream, "kernel": op.kernel}
    row |= {name: _one(getattr(op, name)) for name in NUMBERS
            if getattr(op, name) is not getattr(usual, name)}  # fmt: skip
    row |= {f"{channel} B": _one(size) for channel, size in op.bytes.items()}
    row |= {f"{name} s": _one(took) for name, took in resource_seconds(op, deployment).items()}
    row |= {"dtype": op.dtype, "after": list(op.after), "ahead": bool(op.prefetch)}
    return row | {
        "sync": bool(op.sync),
        "s": _one(seconds(op, deployment)),
        "overhead s": _one(overhead_seconds(op, deployment)),
        "host s": host_seconds(op, deployment),
    }


def _held(buffers: Any) -> Row:
    return {
        f"{tier} {name}": _one(size)
        for tier in TIERS
        for name, size in buffers.get(tier, {}).items()
    }


def _one(value: Any) -> float:
    found = float(np.ravel(np.asarray(value, dtype=float))[0])
    return found if np.isfinite(found) else -1.0


PASSES = Kind("passes", state, every=8)
DEFAULTS = Kind("techniques", state)
"""Every technique with its default settings, and layers of every kind, compared in every run."""
