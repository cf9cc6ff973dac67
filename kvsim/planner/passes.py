"""Rows of the placement programme about time: what every pass takes at least."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pulp

from kvsim import solver
from kvsim.frozen import frozen
from kvsim.graph import Array

if TYPE_CHECKING:
    from kvsim.planner.programme import Programme, Variables

SAME = 1e-9  # of a pass: a tangent that is nowhere higher by more adds nothing


@frozen
class Tangent:
    """A plane below the seconds of one option's layers of one shape, at the option's corners.

    Attributes
    ----------
    seconds
        By phase, resource and corner. (q, r, v) [s]
    """

    option: int
    shape: int
    seconds: Array


def add_times(
    problem: pulp.LpProblem,
    programme: Programme,
    corners: Variables,
    streamed: Variables,
    passes: list[pulp.LpVariable],
    unit: float,
    apart: bool,
) -> None:
    """A pass takes at least the work of every stream, and at least the chain."""
    p, y, w, t = programme, corners, streamed, passes
    options = p.option_of.tolist()
    groups = [[o] for o in range(len(p.names))] if apart else [list(range(len(p.names)))]
    for i, q in enumerate(p.phases):
        head = p.head[i].max() / unit if apart else p.head[i] / unit
        parts = [problem.add_variable(f"T_{q}_{p.names[o]}", 0) for (o,) in groups] if apart else []
        if apart:
            problem.addConstraint(pulp.lpSum(parts) - t[i] / unit <= -float(head), f"blocks_{q}")
        for j, r in enumerate(p.resources):
            per_layer, moved = p.seconds[i, j] / unit, p.streaming.seconds[i, j] / unit
            if not (per_layer.any() or p.head[i, j] or (w and moved.any())):
                continue
            bent = _bent(problem, p, y, (i, j), unit)
            for g, some in enumerate(groups):
                mine = [
                    (v, k) for v, k in y
                    if per_layer[v, k] and (o := options[v]) in some and (o, k) not in bent
                ]  # fmt: skip
                work = solver.weigh(
                    [(y[key], float(per_layer[key])) for key in mine]
                    + [(x, float(moved[k])) for (o, k), x in w.items() if moved[k] and o in some]
                    + [(x, 1.0) for (o, k), x in bent.items() if o in some]
                )
                if apart:
                    problem.addConstraint(work <= parts[g], f"{r}_{q}_{p.names[g]}")
                else:
                    problem.addConstraint(work - t[i] / unit <= -float(head[j]), f"{r}_{q}")


def _bent(
    problem: pulp.LpProblem, p: Programme, y: Variables, at: tuple[int, int], unit: float
) -> dict[tuple[int, int], pulp.LpVariable]:
    """Seconds of an option's layers of a shape, where there is more than one plane below them."""
    found: dict[tuple[int, int], pulp.LpVariable] = {}
    for i, tangent in enumerate(p.tangents):
        o, k = tangent.option, tangent.shape
        mine = np.flatnonzero(p.option_of == o)
        first, further = p.seconds[at][mine, k] / unit, tangent.seconds[at] / unit
        if (further <= first + SAME * float(np.max(first, initial=0.0))).all():
            continue
        name = f"{p.resources[at[1]]}_{p.phases[at[0]]}_{p.names[o]}_{k}"
        planes: Iterable[tuple[str, Array]] = [(f"{name}_{i}", further)]
        if (o, k) not in found:
            found[o, k] = problem.add_variable(f"bent_{name}", 0)
            planes = [(name, first), *planes]
        for row, plane in planes:
            work = pulp.lpSum(float(x) * y[v, k] for v, x in zip(mine.tolist(), plane, strict=True))
            problem.addConstraint(work <= found[o, k], f"plane_{row}")
    return found


def work(programme: Programme, corners: Array) -> Array:
    """What layers take at least of every resource, without streamed weights. (q, r) [s]"""
    p = programme
    each = np.einsum("qrvk,vk->qrvk", p.seconds, corners)
    total: Array = each.sum(axis=(2, 3)) + p.head
    for o, k in dict.fromkeys((x.option, x.shape) for x in p.tangents):
        mine = np.flatnonzero(p.option_of == o)
        first = each[:, :, mine, k].sum(axis=2)
        some = [x.seconds @ corners[mine, k] for x in p.tangents if (x.option, x.shape) == (o, k)]
        total += np.max([first, *some], axis=0) - first
    return total
