"""Every op and buffer of a pass, field by field, on each stack with models of every kind.

``python -m tests.frozen.ops`` writes ``ops.json.gz`` anew. A change of it is meant to be seen: say
in the commit which figures moved and why.
"""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.engine.roofline import all_ops, host_seconds, overhead_seconds, resource_seconds, seconds
from kvsim.errors import InputError
from kvsim.graph import Op, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack, stack_names
from kvsim.models.configs import load_model
from kvsim.prediction.memory import TIERS, decode_point, prefill_point
from kvsim.techniques import parse
from tests.frozen.moved import shortened

PLACE = Path(__file__).with_name("ops.json.gz")
MODELS = (
    "llama2-7b", "opt-6.7b", "gemma-2-2b", "deepseek-v2-lite", "mixtral-8x7b", "smollm2-135m",
    "nemotron-nano-9b-v2", "qwen3-next-80b-a3b", "gpt-oss-20b", "deepseek-v3.2", "gemma-3n-e4b",
    "phi-2", "granite-4.0-h-tiny",
)  # fmt: skip
"""One of every kind: heads and their widths, positions, windows, latents, experts, states."""
GPUS = ("a100-80g", "h100", "rtx4090", "b200", "t4")
TECHNIQUES = (
    "full", "kivi:bits=4,group=64,residual=32", "fp8", "selfdraft:gamma=2", "full", "zipcache",
    "offload:host_share=0.5,bits=4", "kivi:bits=2,residual=0", "values:n=64", "specache",
    "kvpr:split=300,bits=8",
)  # fmt: skip
WEIGHTS = ("fp16", "int8", "int4", "fp8", "mxfp4", "fp8-block")
POINTS = {
    "prompt": prefill_point(3.0, 700.0, 40.0),
    "at a window's end": prefill_point(1.0, 4096.0, 5.0),
    "decode": decode_point(5.0, 1290.0, 90.0, 13.0),
    "one token": decode_point(1.0, 1.0, 2.0, 0.0),
    "long": decode_point(2.0, 9000.0, 50.0, 3.0),
}
NUMBERS = ("flops", "unpacked", "rows", "size", "columns", "slower", "launches", "fixed")
Row = dict[str, Any]


def cases() -> dict[str, tuple[Deployment, str, str]]:
    """By name: what runs, the technique and the point; every stack meets every model."""
    found: dict[str, tuple[Deployment, str, str]] = {}
    for i, stack in enumerate(stack_names()):
        for j, model in enumerate(MODELS):
            n = i * 5 + j * 3
            gpu, weights = GPUS[n % len(GPUS)], WEIGHTS[(i + j) % len(WEIGHTS)]
            point = [*POINTS][(i + 2 * j) % len(POINTS)]
            text, tp = TECHNIQUES[(2 * i + j) % len(TECHNIQUES)], (1, 2, 1, 4)[(i + j) % 4]
            try:
                d = Deployment(
                    load_model(model), load_hardware(gpu), load_stack(stack), weights, tp
                )
                assert d.shard
                text = "full" if parse(text).refuses(d) else text
            except InputError:
                d = Deployment(load_model(model), load_hardware("h100"), load_stack(stack))
                gpu, weights, tp, text = "h100", "fp16", 1, "full"
            found[f"{stack}: {text}, {model}, {gpu}, {weights}, {tp}, {point}"] = d, text, point
    return found


def stated(deployment: Deployment, text: str, point: str) -> dict[str, Row]:
    """What a technique states at a point: its ops, by phase and place, and what it holds."""
    technique, p = parse(text), POINTS[point]
    steps = (
        [technique.prefill(deployment, p)]
        if p.prefill
        else [*technique.between(deployment, p), *technique.cycle(deployment, p).steps]
    )
    rows: dict[str, Row] = {}
    for i, step in enumerate(steps):
        for j, (op, count) in enumerate(_once(step)):
            rows[f"{i} {j} {op.name}"] = _of(op, deployment) | {"times": count}
    rows["holds"] = _held(technique.resident(deployment, p))
    return rows


def _once(step: Step) -> Iterator[tuple[Op, int]]:
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


def _of(op: Op, deployment: Deployment) -> Row:
    """An op's fields but the usual ones, and its times."""
    usual = Op("")
    row: Row = {"name": op.name, "stream": op.stream, "kernel": op.kernel}
    row |= {name: _one(getattr(op, name)) for name in NUMBERS
            if getattr(op, name) is not getattr(usual, name)}  # fmt: skip
    row |= {f"{channel} B": _one(size) for channel, size in op.bytes.items()}
    row |= {f"{name} s": _one(took) for name, took in resource_seconds(op, deployment).items()}
    row |= {"dtype": op.dtype, "after": list(op.after), "ahead": bool(op.ahead)}
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


def everything() -> dict[str, dict[str, Row]]:
    """What the file should have."""
    return {name: stated(*case) for name, case in cases().items()}


def kept() -> dict[str, dict[str, Row]]:
    """What the file has."""
    found: dict[str, dict[str, Row]] = json.loads(gzip.decompress(PLACE.read_bytes()))
    return found


def write() -> None:
    """Write what holds now."""
    text = json.dumps(shortened(everything()), separators=(",", ":"))
    PLACE.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    write()
    sys.stdout.write(f"{len(kept())} cases in {PLACE.name}\n")
