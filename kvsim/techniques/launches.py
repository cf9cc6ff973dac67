"""How many kernels kvsim's own implementations issue for each op that a technique states.

Serving engines fuse an op into one kernel, and techniques state ops as they do. Eager PyTorch
issues many: to append, to look up, to merge. That is a fact of the implementation, so
``launches.csv`` has it by pass, part of the technique and op; parts that share an op add up. Where
more tokens than ``ALONE`` are ranked, several programs share the work, and its last column says how
many kernels that takes besides.
``benchmarks/launches.py`` counts what a real step dispatches, and holds the file to it.
"""

import csv
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Literal

import numpy as np

from kvsim.graph import Number, Op
from kvsim.techniques.layers import LayerPass

ALONE = 4096  # tokens that one program ranks alone, in ``validate/kernels/topk_triton.py``
MODEL = "model"
"""The part of what every technique does in the same way."""
Pass = Literal["prefill", "draft", "decode"]


def dispatched(
    ops: Iterable[Op], parts: Iterable[str], kind: Pass, tokens: Number = 0.0
) -> tuple[Op, ...]:
    """Ops with the kernels that the implementations of these parts issue for each of them.

    Parameters
    ----------
    tokens : cached per sequence after the pass. [tokens]
    """
    known, names = _kernels(), (MODEL, *parts)
    found = []
    for op in ops:
        rows = [known[key] for name in names if (key := (kind, name, op.name)) in known]
        kernels: Number = sum(few for few, _ in rows)
        if more := sum(more for _, more in rows):
            kernels = kernels + more * (np.asarray(tokens) > ALONE)
        found.append(replace(op, launches=kernels * op.launches) if np.any(kernels) else op)
    return tuple(found)


def of_layer(at: LayerPass, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """A layer's ops as the stack issues them."""
    if not at.d.stack.time.counted_launches:
        return ops
    kind: Pass = "prefill" if at.p.prefill else "decode" if at.parts.keeps else "draft"
    names = (name for part in at.parts.every() for name in part.kernels)
    return dispatched(ops, names, kind, at.p.length)


@cache
def _kernels() -> dict[tuple[str, str, str], tuple[int, int]]:
    text = (files("kvsim.techniques") / "launches.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {
        (row["pass"], row["part"], row["op"]): (int(row["kernels"]), int(row["more"] or 0))
        for row in rows
    }
