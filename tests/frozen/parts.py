"""What techniques state, part by part, at points that reach every setting and kind of layer.

``python -m tests.frozen.parts`` writes ``parts.csv.gz`` anew. A change of it is meant to be seen:
say in the commit which figures moved and why.
"""

import csv
import gzip
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from zlib import crc32

import numpy as np

from kvsim.engine.roofline import all_ops, resource_seconds
from kvsim.engine.timeline import makespan, steady
from kvsim.graph import Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import TIERS, decode_point, prefill_point, served_buffers
from kvsim.techniques import TECHNIQUES, parse
from tests.support.pairs import AXES, MODELS

PLACE = Path(__file__).with_name("parts.csv.gz")
FURTHER = (
    "offload:host_share=0.5,bits=4", "offload:schedule=column,parts=4", "kvpr:split=300,bits=8",
    "kvpr:schedule=column,bits=4,parts=2", "kcache:n=32,gpu_layers=5", "kcache:n=5000",
    "specache:speculative=false", "specache:bits=1,group=32,k=300", "shadowkv:rank=40",
    "zipcache:salient=1,high=16,probe=0.05", "zipcache:low=4,window=32", "quantspec:gamma=0",
    "quantspec:gamma=6,acceptance=0.5,group=64", "kivi:bits=4,residual=0", "kivi:bits=16",
    "kivi:group=64,residual=32", "h2o:heavy=0,recent=100", "streamingllm:sink=0,recent=64",
    "snapkv:budget=100,window=8", "magicdec:draft=snapkv,gamma=1", "magicdec:gamma=3,acceptance=1",
    "flexgen:weights_gpu=100,cache_gpu=50,bits=4", "flexgen:states_gpu=20",
    "infllm:k=4,local=512,cached=0,reuse=0.5", "gear:bits=2,rank=4,outliers=0.02",
    "gear:rank=0,residual=128", "gear-first:bits=8,rank=0.1", "gear-first:rank=0,outliers=0",
    "draft:model=llama2-7b,gamma=2,acceptance=0.6", "eagle:acceptance=0.7",
    "mikv:salient=1,high=16", "mikv:salient=0.2,high=16,group=32", "mikv:low=2,high=8,salient=0.3",
    "pyramidkv:budget=256", "duoattention:retrieval=0.25", "quest:page=32", "kvquant:bits=3",
    "turboquant:bits=2,group=64", "hierarchical:group=64", "lowrank:rank=64",
    "grouped:bits=16,value_bits=4", "quantspec:gamma=1", "quantspec:gamma=4",
    "quantspec:gamma=6", "magicdec:draft=snapkv,gamma=2", "magicdec:draft=snapkv,gamma=3",
    "magicdec:draft=streamingllm,gamma=3", "selfdraft:reads=streamingllm", "mikv + offload",
)  # fmt: skip
AT: dict[str, tuple[str, int, int]] = {
    "snapkv:budget=900,window=32": ("GQA", 0, 0), "h2o:heavy=450,recent=450": ("MHA", 0, 0),
    "full": ("learned", 4, 3), "kivi": ("learned", 0, 2), "selfdraft:gamma=2": ("windows", 1, 0),
    "eagle:acceptance=0.8,gamma=3": ("windows", 0, 1), "offload": ("GQA", 2, 3),
    "snapkv + selfdraft:gamma=2": ("GQA", 1, 1), "mikv + kvpr": ("GQA", 0, 1),
}  # fmt: skip
"""Kind of model, place and load of texts for which others would not reach a limit."""
PLACES = (
    ("a6000", "fused", "fp16", 1), ("h100", "vllm", "fp16", 2), ("rtx4090", "flexgen", "int8", 1),
    ("a100-80g", "kvsim", "int4", 1), ("t4", "hf-eager", "fp16", 1), ("h200", "sglang", "fp8", 4),
)  # fmt: skip
LOADS = ((4.0, 900, 200), (1.0, 6000, 50), (24.0, 300, 3), (8.0, 20000, 1))
LEARNED = MODELS | {"learned": "opt-6.7b", "sinks": "gpt-oss-20b"}
KINDS = (*LEARNED, "GQA", "MHA")


def texts() -> list[str]:
    """Every technique and term by itself, settings that change what they do, and pairs of axes."""
    alone = [term for terms in AXES.values() for term in terms]
    pairs = [
        f"{one} + {other}"
        for first, second in zip(AXES, [*AXES][1:] + [*AXES][:1], strict=True)
        for i, one in enumerate(AXES[first])
        for other in AXES[second][i % 3 :: 4]
    ]
    return list(dict.fromkeys([*TECHNIQUES, *FURTHER, *AT, *alone, *pairs]))


def rows(only: str = "") -> Iterator[tuple[str, str, str, float]]:
    """Technique, where it runs, the quantity and its value."""
    for text in texts():
        if only not in ("", text):
            continue
        number = crc32(text.encode())  # not its place in the list, which others join
        first = AT.get(text, (KINDS[number % len(KINDS)], number // 13, number // 97))
        for kind, place, load in (first, ("GQA", number // 31, number // 53)):
            gpu, stack, weights, tp = PLACES[place % len(PLACES)]
            many = LOADS[load % len(LOADS)]
            where = f"{LEARNED[kind]} {gpu} {stack} {weights} {tp} {many}"
            if found := _place(text, LEARNED[kind], gpu, stack, weights, tp):
                yield from ((text, where, *part) for part in _parts(text, found, *many))


def _place(text: str, model: str, gpu: str, stack: str, weights: str, tp: int) -> Deployment | None:
    d = Deployment(load_model(model), load_hardware(gpu), load_stack(stack), weights, tp)
    return None if parse(text).refuses(d) else d


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
    steps = {"prefill": [technique.prefill(d, reading)], "between": technique.between(d, p),
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
        total["steady s"] += _one(steady(step, d))
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


def kept() -> dict[str, dict[tuple[str, str], float]]:
    """What the file has: of each technique the values by place and quantity."""
    found: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    with gzip.open(PLACE, "rt", newline="") as file:
        for text, where, name, value in csv.reader(file):
            found[text][where, name] = float(value)
    return found


def write() -> None:
    """Write what holds now."""
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows((*row[:3], f"{row[3]:.12g}") for row in rows())
    PLACE.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


if __name__ == "__main__":
    write()
    sys.stdout.write(f"{len(list(kept()))} techniques in {PLACE.name}\n")
