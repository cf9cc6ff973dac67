"""Random mixes of placements, and how their lower bounds compare with their replay."""

from dataclasses import replace
from itertools import product

import numpy as np
from scipy.optimize import nnls

from kvsim import solver
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.arrangements import Arrangement, Use, orders
from kvsim.planner.costs import Shares
from kvsim.planner.milp import (
    Built,
    Programme,
    build_programme,
    resource_work,
)
from kvsim.planner.placement import Coefficients, tangent_at


@frozen
class Shuffled(Arrangement):
    """The layers of each shape in an order of chance."""

    seed: int = 0

    def _ordered(self, uses: tuple[Use, ...]) -> list[Use]:
        every = super()._ordered(uses)
        return [every[i] for i in np.random.default_rng(self.seed).permutation(len(every))]


def touched(c: Coefficients, p: Programme, random: np.random.Generator, each: int) -> Programme:
    """The programme with planes that touch every cost at some points of chance."""
    found = []
    for o, k in product(range(len(p.names)), range(p.layers.size)):
        rows = np.flatnonzero(p.option_of == o)
        points = np.array([[*vars(c.corner(p, int(v), k)[1]).values()] for v in rows])
        for weight in random.dirichlet(np.ones(rows.size), each if rows.size > 1 else 0):
            found.append(tangent_at(c, p, o, k, Shares(*(weight @ points).tolist())))
    return replace(p, tangents=tuple(found))


def bound_over_replay(
    c: Coefficients, p: Programme, random: np.random.Generator
) -> tuple[float, float]:
    """Of one random mix, reading the prompts and decoding, every token of the replay counted."""
    a, counts, corners, streamed = random_mix(c, p, random)
    every = [*orders(a), *(Shuffled(a.uses, seed=int(random.integers(1000))) for _ in range(2))]
    order = every[int(random.integers(len(every)))]
    found = c.workload.predict(order.technique(c.deployment, c.workload.prompt), c.deployment,
                               c.batches)  # fmt: skip
    bound = lower_bound(p, corners, streamed.sum(axis=0))
    if p.halves is not None:
        bound = np.maximum(bound, decided_bound(p, counts, streamed))
    passes = float(found.prefill_s[0]), float(found.decode_s[0])
    return float(bound[0] / passes[0]), float(p.weight[1:] @ bound[1:] / passes[1])


def lower_bound(programme: Programme, corners: Array, streamed: Array | None = None) -> Array:
    """What the programme says of a mix, phase by phase, without solving. (q,) [s]

    Parameters
    ----------
    streamed : layers' worth of streamed weights, by shape. (k,)
    """
    took = resource_work(programme, corners)
    if streamed is not None:
        took = took + programme.streaming.seconds @ streamed
    return np.asarray(took.max(axis=1))


def decide_streaming(built: Built, streamed: Array) -> None:
    """Stream so many layers' worth of weights, by option and shape. (o, k)"""
    for key, x in built.w.items():
        built.problem.addConstraint(x == float(streamed[key]), f"{x.name}_decided")


def decided_bound(p: Programme, counts: Array, streamed: Array) -> Array:
    """What all rows of the programme say of a mix by phase, its order left open. (q,) [s]"""
    built = build_programme(p, counts=counts)
    decide_streaming(built, streamed)
    solution = solver.solve(built.problem, 1e-9, 20.0)
    assert solution.has_values, solution
    times = np.array([t.value() for t in built.t])
    took = float(p.weight @ times)
    return times * min(1.0, solution.bound / took if np.isfinite(solution.bound) else 1.0)


def random_mix(
    c: Coefficients, p: Programme, random: np.random.Generator
) -> tuple[Arrangement, Array, Array, Array]:
    """Two options per shape of layer at shares anywhere in their boxes, as they can be written."""
    corners, uses, prompt = np.zeros((len(p.option_of), p.layers.size)), [], c.workload.prompt
    counts, streamed = np.zeros((2, len(p.names), p.layers.size))
    for k, layers in enumerate(p.layers):
        some = random.choice(len(p.names), min(2, len(p.names)), replace=False)
        first, row = int(random.integers(1, int(layers))), []
        for o, count in zip(some, (first, int(layers) - first), strict=True):
            rows = np.flatnonzero(p.option_of == o)
            points = np.array([[*vars(c.corner(p, int(v), k)[1]).values()] for v in rows])
            split = 0.0
            while not split:  # where nothing is recomputed, layers only copy: another option
                host, split, cpu = random.dirichlet(np.ones(rows.size)) @ points
                split = np.floor(split * prompt) / prompt
                if not points[:, 1].any():
                    break
            host, cpu = round(host, 6), round(cpu, 6)
            at = np.array([host, split, cpu, 1.0])
            weight, _ = nnls(np.column_stack([points, np.ones(rows.size)]).T, at)
            corners[rows, k] += weight * count
            parts, share = c.corner(p, int(rows[0]), k)[0].parts, round(random.random(), 6)
            share *= float(random.choice([0.0, 1.0]))
            counts[o, k], streamed[o, k] = count, share * count
            row.append(Use(Shares(host, split, cpu), parts, count, share))
        uses.append(tuple(row))
    return Arrangement(tuple(uses)), counts, corners, streamed
