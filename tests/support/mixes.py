"""Random mixes of placements, and how their lower bounds compare with their replay."""

import numpy as np
from scipy.optimize import nnls

from kvsim.planner.mixes import Arrangement, Use, orders
from kvsim.planner.placement import Coefficients
from kvsim.planner.programme import Programme
from kvsim.planner.shares import Shares
from kvsim.planner.solving import lower_bound


def bound_over_replay(
    c: Coefficients, p: Programme, random: np.random.Generator
) -> tuple[float, float]:
    """Of one random mix, reading the prompts and decoding, every token of the replay counted."""
    a, corners, streamed = random_mix(c, p, random)
    order = list(orders(a))[int(random.integers(len(list(orders(a)))))]
    found = c.workload.predict(order.technique(c.deployment, c.workload.prompt), c.deployment,
                               c.batches)  # fmt: skip
    bound = lower_bound(p, corners, streamed)
    passes = float(found.prefill_s[0]), float(found.decode_s[0])
    return float(bound[0] / passes[0]), float(p.weight[1:] @ bound[1:] / passes[1])


def random_mix(
    c: Coefficients, p: Programme, random: np.random.Generator
) -> tuple[Arrangement, np.ndarray, np.ndarray]:
    """Two options per shape of layer at shares anywhere in their boxes, as they can be written."""
    corners, uses, prompt = np.zeros((len(p.option_of), p.layers.size)), [], c.workload.prompt
    streamed = np.zeros(p.layers.size)
    for k, layers in enumerate(p.layers):
        some = random.choice(len(p.names), min(2, len(p.names)), replace=False)
        first, row = int(random.integers(1, int(layers))), []
        for o, count in zip(some, (first, int(layers) - first), strict=True):
            rows = np.flatnonzero(p.option_of == o)
            points = np.array([[*vars(c.corner(p, int(v))[1]).values()] for v in rows])
            host, split, cpu = random.dirichlet(np.ones(rows.size)) @ points
            host, split = round(host, 6), np.floor(split * prompt) / prompt
            at = np.array([host, split, cpu, 1.0])
            weight, _ = nnls(np.column_stack([points, np.ones(rows.size)]).T, at)
            corners[rows, k] += weight * count
            parts, share = c.corner(p, int(rows[0]))[0].parts, round(random.random(), 6)
            share *= float(random.choice([0.0, 1.0]))
            streamed[k] += share * count
            row.append(Use(Shares(host, split, cpu), parts, count, share))
        uses.append(tuple(row))
    return Arrangement(tuple(uses)), corners, streamed
