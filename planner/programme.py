"""Choices for layers and shares of placement as one mixed-integer programme over plain arrays.

Layers of one shape cost the same time, so time and memory are linear in counts:

    n[o,k]      layers of shape k that do option o, whole numbers
    y[v,k]      those of them at corner v of the option's shares; they sum to n
    x[l,o]      whether layer l does o, between 0 and 1; only where losses differ by layer
    w           share of the weights that is streamed
    use[o]      whether any layer does o, which its transient buffers cost once
    T[q]        time of one pass of phase q: prefill, and points of the growing context

For every phase and every stream T is at least the work of all layers, and at least their chains:
what a layer adds if nothing that could be prefetched delays it, or what the CPU takes where it
attends for both halves of a batch in turn, since layers before and after wait for both. Each holds
for every order of the layers, so the optimum is below every mix; which mix, replay decides.

Shares are continuous inside an option: the corners' coefficients are values of a plane that
touches the cost in the middle of the option's shares, below it everywhere (``planes``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pulp
from numpy.typing import NDArray

from kvsim.graph import Array


@dataclass(frozen=True)
class Programme:
    """Coefficients: o options, v corners, k shapes of layers, q phases, r resources.

    Attributes
    ----------
    names
        Of options. (o,)
    option_of
        The option of each corner. (v,)
    layers
        Layers of each shape. (k,)
    resources
        Names of what a layer occupies: streams, and ``chain``. (r,)
    phases
        Names of passes. (q,)
    seconds
        Of one layer. (q, r, v, k) [s]
    head
        What a pass takes besides its layers. (q, r) [s]
    weight
        How often a pass counts in the objective. (q,)
    gpu, host
        Memory of one layer, at each time when memory may be fullest. (m, v, k) [B]
    once_gpu, once_host
        What is needed once for an option that any layer does: buffers, and all that layers share;
        options share it too, so that the largest counts. (m, o) [B]
    streamed
        What streaming all weights would take: seconds of each phase's resource (q, r), and bytes
        that leave the GPU's memory and fill the host's. [s, B, B]
    limits
        On ``gpu`` and ``host`` [B], and on sums of phases: name -> (weights by phase, bound) [s].
    loss, budget
        Of each layer under each option, and of all together; no budget without losses. (l, o)
    shape_of
        The shape of each layer. (l,)
    """

    names: tuple[str, ...]
    option_of: NDArray[np.int64]
    layers: NDArray[np.int64]
    resources: tuple[str, ...]
    phases: tuple[str, ...]
    seconds: Array
    head: Array
    weight: Array
    gpu: Array
    host: Array
    once_gpu: Array
    once_host: Array
    streamed: tuple[Array, float, float]
    memory: tuple[float, float]
    most_streamed: float = 1.0  # of the weights
    times: Mapping[str, tuple[Array, float]] = field(default_factory=dict)
    loss: Array | None = None
    budget: float = np.inf
    shape_of: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Built:
    """The programme in PuLP, and its variables."""

    problem: pulp.LpProblem
    n: dict[tuple[int, int], pulp.LpVariable]
    y: dict[tuple[int, int], pulp.LpVariable]
    w: pulp.LpVariable
    t: list[pulp.LpVariable]
    x: dict[tuple[int, int], pulp.LpVariable]


def build(programme: Programme, whole: bool = True, cuts: tuple[Array, ...] = ()) -> Built:
    """The programme; with ``whole`` counts are whole numbers, else it is the relaxation.

    Parameters
    ----------
    cuts : counts that are known already and may not come again. (o, k) each
    """
    problem = pulp.LpProblem("placement", pulp.LpMinimize)
    options, corners, shapes = (
        range(len(programme.names)),
        range(len(programme.option_of)),
        range(programme.layers.size),
    )
    kind = pulp.LpInteger if whole else pulp.LpContinuous

    def layers_of(name: str, k: int, kind: str) -> pulp.LpVariable:
        return problem.add_variable(name, 0, int(programme.layers[k]), kind)

    n = {
        (o, k): layers_of(f"n_{programme.names[o]}_{k}", k, kind)
        for o, k in product(options, shapes)
    }
    y = {(v, k): layers_of(f"y_{v}_{k}", k, pulp.LpContinuous) for v, k in product(corners, shapes)}
    w = problem.add_variable("w", 0, programme.most_streamed)
    t = [problem.add_variable(f"T_{q}", 0) for q in programme.phases]
    most = float(programme.layers.sum())
    costly = [
        o
        for o in options
        if (programme.once_gpu[:, o] > 0).any() or (programme.once_host[:, o] > 0).any()
    ]
    use = {
        o: problem.add_variable(
            f"use_{programme.names[o]}", 0, 1, pulp.LpInteger if whole else "Continuous"
        )
        for o in costly
    }
    unit = float(np.max(programme.seconds.sum(axis=(2, 3)), initial=0.0)) or 1.0
    problem.setObjective(pulp.lpSum(float(c) * x for c, x in zip(programme.weight, t, strict=True)))
    for k in shapes:
        total = pulp.lpSum(n[o, k] for o in options)
        problem.addConstraint(total == int(programme.layers[k]), f"layers_{k}")
    for o, k in product(options, shapes):
        mine = [y[v, k] for v in corners if programme.option_of[v] == o]
        problem.addConstraint(pulp.lpSum(mine) == n[o, k], f"shares_{programme.names[o]}_{k}")
    _times(problem, programme, y, w, t, unit)
    _memory(problem, programme, y, w, use)
    for o, x in use.items():
        total = pulp.lpSum(n[o, k] for k in shapes)
        problem.addConstraint(total <= most * x, f"used_{programme.names[o]}")
    for name, (weights, limit) in programme.times.items():
        used = pulp.lpSum(float(c / limit) * x for c, x in zip(weights, t, strict=True) if c)
        problem.addConstraint(used <= 1, name)
    assigned = _losses(problem, programme, n)
    _cut(problem, n, programme, cuts)
    return Built(problem, n, y, w, t, assigned)


def _times(
    problem: pulp.LpProblem,
    p: Programme,
    y: Mapping[tuple[int, int], pulp.LpVariable],
    w: pulp.LpVariable,
    t: list[pulp.LpVariable],
    unit: float,
) -> None:
    """A pass takes at least the work of every stream, and at least the chain."""
    extra = p.streamed[0]
    for (i, q), (j, r) in product(enumerate(p.phases), enumerate(p.resources)):
        per_layer = p.seconds[i, j]
        if not (per_layer.any() or p.head[i, j] or extra[i, j]):
            continue
        work = pulp.LpAffineExpression(
            [(x, float(per_layer[v, k]) / unit) for (v, k), x in y.items() if per_layer[v, k]]
            + ([(w, float(extra[i, j]) / unit)] if extra[i, j] else [])
        )
        problem.addConstraint(work - t[i] / unit <= -float(p.head[i, j]) / unit, f"{r}_{q}")


def _memory(
    problem: pulp.LpProblem,
    p: Programme,
    y: Mapping[tuple[int, int], pulp.LpVariable],
    w: pulp.LpVariable,
    use: Mapping[int, pulp.LpVariable],
) -> None:
    """Layers, the largest of the transient buffers, and weights where they are."""
    _, leaves, fills = p.streamed
    sides = (("gpu", p.gpu, p.once_gpu, -leaves), ("host", p.host, p.once_host, fills))
    for (tier, each, once, moved), limit in zip(sides, p.memory, strict=True):
        scale = limit or 1.0
        for m in range(len(each)):
            used = pulp.LpAffineExpression(
                [(x, float(each[m, v, k]) / scale) for (v, k), x in y.items() if each[m, v, k]]
                + ([(w, moved / scale)] if moved else [])
            )
            if any(once[m, o] > 0 for o in use):
                buffers = problem.add_variable(f"buffers_{tier}_{m}", 0)
                for o, x in use.items():
                    if once[m, o] > 0:
                        part = float(once[m, o]) / scale * x
                        name = f"buffers_{tier}_{m}_{p.names[o]}"
                        problem.addConstraint(part <= buffers, name)
                used += buffers
            problem.addConstraint(used <= limit / scale, f"memory_{tier}_{m}")


def _losses(
    problem: pulp.LpProblem, p: Programme, n: Mapping[tuple[int, int], pulp.LpVariable]
) -> dict[tuple[int, int], pulp.LpVariable]:
    """Layers' shares of options carry the loss; they add up to the counts."""
    if p.loss is None or p.shape_of is None or not np.isfinite(p.budget):
        return {}
    layers, options = p.loss.shape
    x = {
        (i, o): problem.add_variable(f"x_{i}_{o}", 0, 1)
        for i, o in product(range(layers), range(options))
    }
    for i in range(layers):
        problem.addConstraint(pulp.lpSum(x[i, o] for o in range(options)) == 1, f"layer_{i}")
    for o, k in product(range(options), range(p.layers.size)):
        mine = pulp.lpSum(x[i, o] for i in range(layers) if p.shape_of[i] == k)
        problem.addConstraint(mine == n[o, k], f"assigned_{p.names[o]}_{k}")
    unit = p.budget or 1.0
    lost = pulp.LpAffineExpression(
        [(v, float(p.loss[key]) / unit) for key, v in x.items() if p.loss[key]]
    )
    problem.addConstraint(lost <= p.budget / unit, "loss")
    return x


def _cut(
    problem: pulp.LpProblem,
    n: Mapping[tuple[int, int], pulp.LpVariable],
    p: Programme,
    cuts: tuple[Array, ...],
) -> None:
    """Counts that were replayed already do not come again: some count must differ by one."""
    for i, known in enumerate(cuts):
        away = []
        for key, x in n.items():
            least, most = 0, int(p.layers[key[1]])
            value = round(float(known[key]))
            if value == least:
                away.append(x)
            elif value == most:
                away.append(most - x)
            else:
                up = problem.add_variable(f"up_{i}_{key[0]}_{key[1]}", 0)
                side = problem.add_variable(f"side_{i}_{key[0]}_{key[1]}", 0, 1, pulp.LpInteger)
                name = f"cut_{i}_{key[0]}_{key[1]}"
                problem.addConstraint(up <= most * side, f"{name}_side")
                down = problem.add_variable(f"down_{i}_{key[0]}_{key[1]}", 0)
                problem.addConstraint(down <= most * (1 - side), f"{name}_down")
                problem.addConstraint(x - value == up - down, name)
                away.append(up + down)
        problem.addConstraint(pulp.lpSum(away) >= 1, f"cut_{i}")
