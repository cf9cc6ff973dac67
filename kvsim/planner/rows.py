"""Further rows of the placement programme: buffers of weights, losses, counts already replayed."""

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pulp

from kvsim import solver
from kvsim.graph import Array

if TYPE_CHECKING:
    from kvsim.planner.programme import Programme, Variables

QUARTERS = (0.25, 0.5, 0.75, 1.0)  # ends of what the layer that streams most streams


def weight_buffers(
    problem: pulp.LpProblem,
    programme: Programme,
    counts: Variables,
    streamed: Variables,
    whole: bool,
    decided: Array | None,
) -> pulp.LpVariable | None:
    """The share of a layer's weights that the layer which streams most needs buffers for.

    Exact where counts are decided. Otherwise at least the mean, and where counts are whole, at
    least the lower end of the quarter that it is in.
    """
    if not streamed:
        return None
    widest = problem.add_variable("widest", 0, 1)
    for (o, k), x in streamed.items():
        most = counts[o, k] if decided is None else float(decided[o, k]) * widest
        problem.addConstraint(x <= most, f"streamed_{programme.names[o]}_{k}")
    if decided is not None:
        return widest
    layers = float(programme.layers.sum())
    problem.addConstraint(pulp.lpSum(streamed.values()) / layers <= widest, "widest_mean")
    if not whole:
        return widest
    z = [problem.add_variable(f"z_{i}", 0, 1, pulp.LpInteger) for i in range(len(QUARTERS))]
    problem.addConstraint(pulp.lpSum(z) == 1, "widest_one")
    lower = zip((0.0, *QUARTERS), z, strict=False)
    problem.addConstraint(pulp.lpSum(low * x for low, x in lower if low) <= widest, "widest_low")
    for (o, k), x in streamed.items():
        for i, high in enumerate(QUARTERS[:-1]):
            room = (1 - high) * int(programme.layers[k]) * (1 - z[i])
            name = f"widest_{i}_{programme.names[o]}_{k}"
            problem.addConstraint(x - high * counts[o, k] <= room, name)
    return widest


def losses(
    problem: pulp.LpProblem, programme: Programme, counts: Variables
) -> dict[tuple[int, int], pulp.LpVariable]:
    """Layers' shares of options carry the loss; they add up to the counts."""
    if programme.loss is None or programme.shape_of is None or not np.isfinite(programme.budget):
        return {}
    layers, options = programme.loss.shape
    x = {
        (i, o): problem.add_variable(f"x_{i}_{o}", 0, 1)
        for i, o in product(range(layers), range(options))
    }
    for i in range(layers):
        problem.addConstraint(pulp.lpSum(x[i, o] for o in range(options)) == 1, f"layer_{i}")
    for o, k in product(range(options), range(programme.layers.size)):
        mine = pulp.lpSum(x[i, o] for i in range(layers) if programme.shape_of[i] == k)
        problem.addConstraint(mine == counts[o, k], f"assigned_{programme.names[o]}_{k}")
    unit = programme.budget or 1.0
    lost = solver.weigh(
        [(v, float(programme.loss[key]) / unit) for key, v in x.items() if programme.loss[key]]
    )
    problem.addConstraint(lost <= programme.budget / unit, "loss")
    return x


def cut(
    problem: pulp.LpProblem,
    counts: Variables,
    programme: Programme,
    cuts: tuple[Array, ...],
) -> None:
    """Counts that were replayed already do not come again: some count must differ by one."""
    for i, known in enumerate(cuts):
        away = []
        for key, x in counts.items():
            least, most = 0, int(programme.layers[key[1]])
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
