"""Every op and buffer of a pass, field by field: all techniques, stacks and kinds of models.

``python -m tests.frozen.ops`` writes ``ops.json.gz`` anew. A change of it is meant to be seen: say
in the commit which figures moved and why.
"""

import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import numpy as np

from kvsim.engine.roofline import all_ops, host_seconds, overhead_seconds, resource_seconds, seconds
from kvsim.graph import Op, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack, stack_names
from kvsim.models.configs import load_model
from kvsim.prediction.memory import TIERS, decode_point, prefill_point
from kvsim.techniques import parse
from tests.frozen import parts
from tests.frozen.moved import shortened

PLACE = Path(__file__).with_name("ops.json.gz")
MODELS = (
    "llama2-7b", "opt-6.7b", "gemma-2-2b", "deepseek-v2-lite", "mixtral-8x7b", "smollm2-135m",
    "nemotron-nano-9b-v2", "qwen3-next-80b-a3b", "gpt-oss-20b", "deepseek-v3.2", "gemma-3n-e4b",
    "phi-2", "granite-4.0-h-tiny",
)  # fmt: skip
"""One of every kind: heads and their widths, positions, windows, latents, experts, states."""
GPUS = ("a100-80g", "h100", "rtx4090", "b200", "t4")
SIMPLE = ("full", "kivi:bits=4,group=64,residual=32", "fp8", "selfdraft:gamma=2", "zipcache",
          "offload:host_share=0.5,bits=4", "values:n=64")  # fmt: skip
WEIGHTS = ("fp16", "int8", "int4", "fp8", "mxfp4", "fp8-block")
POINTS = {
    "prompts": (prefill_point(3.0, 700.0, 40.0), decode_point(5.0, 1290.0, 90.0, 13.0)),
    "windows": (prefill_point(2.0, 4096.0, 5.0), decode_point(1.0, 1.0, 2.0, 0.0)),
    "long": (prefill_point(1.0, 9000.0, 70.0), decode_point(2.0, 9000.0, 70.0, 64.0)),
}
NUMBERS = ("flops", "unpacked", "rows", "size", "columns", "slower", "launches", "fixed")
TRIED = 20  # places until a technique that runs at few of them is left out
Row = dict[str, Any]
T = TypeVar("T")


class Case(NamedTuple):
    """A technique where it runs, and the name of its points."""

    deployment: Deployment
    text: str
    points: str


def cases() -> dict[str, Case]:
    """By name: where it runs, a technique and points.

    Every stack meets every model with a simple technique, and every technique is somewhere.
    """
    found = dict(
        _case(f"{stack} {model}", stack, model, _of_all(SIMPLE, f"{stack} {model}"), "full")
        for stack, model in product(stack_names(), MODELS)
    )
    for text in parts.texts():
        for attempt in range(TRIED):
            key = f"{text} {attempt}"
            stack, model = _of_all(stack_names(), key), _of_all(MODELS, key)
            name, case = _case(key, stack, model, text, "")
            if case.text:
                found[name] = case
                break
    return found


def _of_all(names: Iterable[T], key: str) -> T:
    """One of them for a key, mostly the same one when names join or leave."""
    return max(names, key=lambda name: crc32(f"{name} for {key}".encode()))


def _case(key: str, stack: str, model: str, text: str, instead: str) -> tuple[str, Case]:
    hardware, shape = load_hardware(_of_all(GPUS, key)), load_model(model)
    weights, points = _of_all(WEIGHTS, key), _of_all(POINTS, key)
    if weights.startswith("fp8") and "fp8" not in hardware.flops:
        weights = "int8"
    tp = _of_all((1, 2, 4), key)
    tp = tp if shape.heads % tp == 0 and shape.kv_heads % tp == 0 else 1
    d = Deployment(shape, hardware, load_stack(stack), weights, tp)
    text = instead if parse(text).refuses(d) else text
    name = f"{text} on {stack}: {model}, {hardware.name}, {weights}, {tp}, {points}"
    return name, Case(d, text, points)


def stated(case: Case) -> dict[str, Row]:
    """What a technique states at two points: ops by phase and place, and what is held."""
    deployment, (prompt, p) = case.deployment, POINTS[case.points]
    technique = parse(case.text).for_batches(np.array([p.batch]))
    steps = {
        "prompt": [technique.prefill(deployment, prompt)],
        "between": technique.between(deployment, p),
        "decode": technique.cycle(deployment, p).steps,
    }
    rows: dict[str, Row] = {}
    for phase, some in steps.items():
        for i, step in enumerate(some):
            for j, (op, count) in enumerate(_once(step)):
                rows[f"{phase} {i} {j} {op.name}"] = _of(op, deployment) | {"times": count}
    rows["prompt holds"] = _held(technique.resident(deployment, prompt))
    rows["decode holds"] = _held(technique.resident(deployment, p))
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
    return {name: stated(case) for name, case in cases().items()}


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
