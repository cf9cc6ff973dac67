"""Planes below costs that touch them where a solution is, until it is priced as it is.

Costs are convex in the shares, so that Kelley's method applies: where a solution's shares cost more
than the planes say, the plane that touches the cost there is added.

References
----------
.. [1] J. E. Kelley, "The cutting-plane method for solving convex programs", Journal of the Society
   for Industrial and Applied Mathematics 8, 1960.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvsim.graph import Array
from kvsim.planner.passes import Tangent, work
from kvsim.planner.placement import Coefficients
from kvsim.planner.planes import plane
from kvsim.planner.programme import Programme
from kvsim.planner.shares import Option, Shares
from kvsim.planner.solving import Mix

INSIDE = 0.01  # of the way to a box's middle, where a cost is touched
WORTH = 1e-4  # of the objective, by which a solution must be too cheap
ROUNDS = 12


def tangent(c: Coefficients, p: Programme, option: int, shape: int, at: Shares) -> Tangent:
    """The plane that touches the cost of an option's layers near some shares.

    Parameters
    ----------
    c : at the programme's batch alone.
    """
    own = next(o for o in c.options if o.name == p.names[option])
    box = own.held(float(c.held[shape]))

    def cost(shares: Shares) -> Array:
        return c.layers(shares, own.parts, [shape])

    values = plane(box, cost, c.workload.prompt, _inside(box, at))
    return Tangent(option, shape, c.by_phase(values[:, :, 0, 0]))


def _inside(box: Option, at: Shares) -> Shares:
    middle = box.middle
    return Shares(**{k: x + INSIDE * (getattr(middle, k) - x) for k, x in vars(at).items()})


def tangents(c: Coefficients, p: Programme, mix: Mix) -> tuple[Tangent, ...]:
    """Planes at a mix's shares, of the options that have several corners and whose cost bends."""
    found = []
    for o, k in np.argwhere(mix.counts > 1e-6).tolist():
        rows = np.flatnonzero(p.option_of == o)
        weight = mix.corners[rows, k]
        if rows.size < 2 or weight.sum() <= 0:
            continue
        some = [c.corner(p, int(v), k)[1] for v in rows]
        at = Shares(**{
            key: float(weight @ [getattr(s, key) for s in some]) / float(weight.sum())
            for key in vars(some[0])
        })  # fmt: skip
        found.append(tangent(c, p, o, k, at))
    return tuple(found)


def tightened(c: Coefficients, p: Programme, solve: Callable[[Programme], Mix]) -> Programme:
    """The programme with the planes that its relaxation's solutions need."""
    for _ in range(ROUNDS):
        mix = solve(p)
        more = replace(p, tangents=(*p.tangents, *tangents(c, p, mix)))
        took = [work(x, mix.corners) + x.streaming.seconds @ mix.streamed.sum(axis=0)
                for x in (p, more)]  # fmt: skip
        before, after = (float(p.weight @ x.max(axis=1)) for x in took)
        if after <= before + WORTH * mix.objective:
            return p
        p = more
    return p
