"""Choices for layers and shares of placement as one mixed-integer programme over plain arrays.

Layers of one shape cost the same time, so time and memory are linear in counts:

    n[o,k]      layers of shape k that do option o, whole numbers
    y[v,k]      those of them at corner v of the option's shares; they sum to n
    x[l,o]      whether layer l does o, between 0 and 1; only where losses differ by layer
    w[o,k]      layers' worth of weights that layers of shape k under option o stream, at most n
    z[s]        how much of its weights any layer streams at most, which their buffers cost once
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
from dataclasses import field
from itertools import product

import numpy as np
import pulp
from numpy.typing import NDArray

from kvsim import solver
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.assigning import LossRow, add_loss_rows
from kvsim.planner.halves import Halves
from kvsim.planner.passes import Tangent, add_times
from kvsim.planner.rows import cut, losses, weight_buffers
from kvsim.planner.runs import add_runs

Variables = Mapping[tuple[int, int], pulp.LpVariable]


@frozen
class Streaming:
    """Weights that come from the host in every pass.

    Attributes
    ----------
    seconds
        Of one layer's weights. (q, r, k) [s]
    gpu, host
        Bytes of one layer that leave the GPU's memory and fill the host's. (k,) [B]
    buffers
        GPU memory where some layer streams all of its weights. [B]
    most
        Of a layer's weights; 0 where the user wants none streamed.
    """

    seconds: Array
    gpu: Array
    host: Array
    buffers: float
    most: float = 1.0


@frozen
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
        Buffers that an option needs once, if any layer does it, and what all layers share, by
        buffer; options share each, so that the largest counts. (m, s, v) [B]
    streaming
        What streaming weights takes.
    limits
        On ``gpu`` and ``host`` [B], and on sums of phases: name -> (weights by phase, bound) [s].
    loss, budget
        Of each layer under each option, and of all together; no budget without losses. (l, o)
    shape_of
        The shape of each layer. (l,)
    halves
        Of layers whose batch passes in halves, where there are some.
    tangents
        Further planes below the seconds of an option's layers, of which the highest counts.
    buffered
        Shapes whose layers' shares are those that buffers are of; all if None. A layer with a
        window recomputes less than its corner says. (k,)
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
    streaming: Streaming
    memory: tuple[float, float]
    times: Mapping[str, tuple[Array, float]] = field(default_factory=dict)
    loss: Array | None = None
    budget: float = np.inf
    shape_of: NDArray[np.int64] | None = None
    halves: Halves | None = None
    tangents: tuple[Tangent, ...] = ()
    buffered: NDArray[np.bool] | None = None

    def least(self) -> float:
        """What no mix undercuts whatever the memory: each resource at its quickest corners. [s]

        Infinite where even that misses a limit in time, and where no option divides the batch.
        """
        if not self.names:
            return np.inf
        quickest = (self.head + self.seconds.min(axis=2) @ self.layers).max(axis=1)
        late = any(weights @ quickest > limit for weights, limit in self.times.values())
        return np.inf if late else float(self.weight @ quickest)


@frozen
class Built:
    """The programme in PuLP, and its variables."""

    problem: pulp.LpProblem
    n: dict[tuple[int, int], pulp.LpVariable]
    y: dict[tuple[int, int], pulp.LpVariable]
    w: dict[tuple[int, int], pulp.LpVariable]
    t: list[pulp.LpVariable]
    x: dict[tuple[int, int], pulp.LpVariable]


def build(
    programme: Programme,
    whole: bool = True,
    cuts: tuple[Array, ...] = (),
    apart: bool = False,
    counts: Array | None = None,
    streamed: Array | None = None,
    loss_rows: tuple[LossRow, ...] | None = None,
) -> Built:
    """The programme; with ``whole`` counts are whole numbers, else it is the relaxation.

    Parameters
    ----------
    cuts : counts that are known already and may not come again. (o, k) each
    apart : whether the layers of each option take their own time, as blocks of layers do whose
        copies are no more than one load ahead; otherwise the work of all layers overlaps.
    counts : of layers, where they are decided; buffers are then exact. (o, k)
    streamed : layers' worth of weights, where that is decided too. (o, k)
    loss_rows : in place of layers' shares of options, what is known of the losses of counts.
    """
    problem = pulp.LpProblem("placement", pulp.LpMinimize)
    options, corners, shapes = (
        range(len(programme.names)),
        range(len(programme.option_of)),
        range(programme.layers.size),
    )
    kind = pulp.LpInteger if whole and counts is None else pulp.LpContinuous

    def layers_of(name: str, k: int, kind: str) -> pulp.LpVariable:
        return problem.add_variable(name, 0, int(programme.layers[k]), kind)

    n = {
        (o, k): layers_of(f"n_{programme.names[o]}_{k}", k, kind)
        for o, k in product(options, shapes)
    }
    y = {(v, k): layers_of(f"y_{v}_{k}", k, pulp.LpContinuous) for v, k in product(corners, shapes)}
    w = {}
    if programme.streaming.most:
        w = {(o, k): layers_of(f"w_{programme.names[o]}_{k}", k, pulp.LpContinuous) for o, k in n}
    t = [problem.add_variable(f"T_{q}", 0) for q in programme.phases]
    most = float(programme.layers.sum())
    once = np.maximum(programme.once_gpu.max(axis=(0, 1)), programme.once_host.max(axis=(0, 1)))
    costly = [o for o in options if once[programme.option_of == o].max() > 0]
    use = {o: problem.add_variable(f"use_{programme.names[o]}", 0, 1, kind) for o in costly}
    unit = float(np.max(programme.seconds.sum(axis=(2, 3)), initial=0.0)) or 1.0
    problem.setObjective(pulp.lpSum(float(c) * x for c, x in zip(programme.weight, t, strict=True)))
    for k in shapes:
        total = pulp.lpSum(n[o, k] for o in options)
        problem.addConstraint(total == int(programme.layers[k]), f"layers_{k}")
    for o, k in product(options, shapes):
        mine = [y[v, k] for v in corners if programme.option_of[v] == o]
        problem.addConstraint(pulp.lpSum(mine) == n[o, k], f"shares_{programme.names[o]}_{k}")
    decided = {} if counts is None else {key: float(counts[key]) for key in n}
    for key, value in decided.items():
        problem.addConstraint(n[key] == value, f"counted_{programme.names[key[0]]}_{key[1]}")
    add_times(problem, programme, y, w, t, unit, apart)
    if whole and not apart:
        add_runs(problem, programme, n, y, w, t, unit)
    widest = weight_buffers(problem, programme, n, w, whole, counts)
    _memory(problem, programme, y, w, use, widest, counts)
    for o, x in use.items():
        total = pulp.lpSum(n[o, k] for k in shapes)
        problem.addConstraint(total <= most * x, f"used_{programme.names[o]}")
        if counts is not None:
            x.lowBound = float(counts[o].sum() > 0)
    for name, (weights, limit) in programme.times.items():
        used = pulp.lpSum(float(c / limit) * x for c, x in zip(weights, t, strict=True) if c)
        problem.addConstraint(used <= 1, name)
    if streamed is not None:
        for key, x in w.items():
            problem.addConstraint(x == float(streamed[key]), f"{x.name}_decided")
    assigned = {}
    if loss_rows is None:
        assigned = losses(problem, programme, n)
    else:
        add_loss_rows(problem, programme, n, loss_rows)
    cut(problem, n, programme, cuts)
    return Built(problem, n, y, w, t, assigned)


def _memory(
    problem: pulp.LpProblem,
    p: Programme,
    y: Variables,
    w: Variables,
    use: Mapping[int, pulp.LpVariable],
    widest: pulp.LpVariable | None,
    counts: Array | None,
) -> None:
    """Layers, the largest of the transient buffers, and weights where they are.

    An option's buffers are those of its layers' mean shares. Where the number of layers is not
    decided, at least those of its cheapest corner, and what others need more if all took part;
    and no less than the mean of what layers of one shape need.
    """
    s = p.streaming
    layers = np.full(len(p.names), p.layers.sum()) if counts is None else counts.sum(axis=1)
    shapes = range(p.layers.size) if p.buffered is None else np.flatnonzero(p.buffered).tolist()
    corners = range(len(p.option_of))
    sides = (("gpu", p.gpu, p.once_gpu, -s.gpu), ("host", p.host, p.once_host, s.host))
    for (tier, each, once, moved), limit in zip(sides, p.memory, strict=True):
        scale = limit or 1.0
        for m in range(len(each)):
            used = solver.weigh(
                [(x, float(each[m, v, k]) / scale) for (v, k), x in y.items() if each[m, v, k]]
                + [(x, float(moved[k]) / scale) for (_, k), x in w.items() if moved[k]]
            )
            if widest is not None and tier == "gpu" and s.buffers:
                used += s.buffers / scale * widest
            for b, sizes in enumerate(once[m] / scale):
                if not sizes.any():
                    continue
                largest = problem.add_variable(f"buffer_{tier}_{m}_{b}", 0)
                used += largest
                for k in shapes:  # the largest is no smaller than the mean
                    mean = [(y[v, k], float(sizes[v] / p.layers[k])) for v in corners if sizes[v]]
                    row = solver.weigh(mean) <= largest
                    problem.addConstraint(row, f"{largest.name}_mean_{k}")
                for o, x in use.items():
                    mine = np.flatnonzero(p.option_of == o)
                    least = float(sizes[mine].min())
                    more = {v: float(sizes[v] - least) / max(layers[o], 1) for v in mine.tolist()}
                    part = least * x + pulp.lpSum(more[v] * y[v, k] for v, k in y if more.get(v))
                    problem.addConstraint(part <= largest, f"{largest.name}_{p.names[o]}")
            problem.addConstraint(used <= limit / scale, f"memory_{tier}_{m}")
