"""How many kernels kvsim's own implementations issue for each op that a technique states.

Serving engines fuse an op into one kernel, and techniques state ops as they do. Eager PyTorch
issues many: to append, to look up, to merge. That is a fact of the implementation, so
``launches.csv`` has it by pass, part of the technique and op; parts that share an op add up.
``benchmarks/launches.py`` counts what a real step dispatches, and holds the file to it.
"""

import csv
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Literal

from kvsim.graph import Op
from kvsim.techniques.layers import LayerPass

MODEL = "model"
"""The part of what every technique does in the same way."""
Pass = Literal["prefill", "draft", "decode"]


def dispatched(ops: Iterable[Op], parts: Iterable[str], kind: Pass) -> tuple[Op, ...]:
    """Ops with the kernels that the implementations of these parts issue for each of them."""
    known, names = _kernels(), (MODEL, *parts)
    found = []
    for op in ops:
        kernels = sum(known.get((kind, name, op.name), 0) for name in names)
        found.append(replace(op, launches=kernels * op.launches) if kernels else op)
    return tuple(found)


def of_layer(at: LayerPass, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """A layer's ops as the stack issues them."""
    if not at.d.stack.time.counted_launches:
        return ops
    kind: Pass = "prefill" if at.p.prefill else "decode" if at.parts.keeps else "draft"
    return dispatched(ops, (name for part in at.parts.every() for name in part.kernels), kind)


@cache
def _kernels() -> dict[tuple[str, str, str], int]:
    text = (files("kvsim.techniques") / "launches.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {(row["pass"], row["part"], row["op"]): int(row["kernels"]) for row in rows}
