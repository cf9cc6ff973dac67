"""Planes below costs that touch them where a solution is, until it is priced as it is.

Costs are convex in the shares, so that Kelley's method applies: where a solution's shares cost more
than the planes say, the plane that touches the cost there is added.

References
----------
.. [1] J. E. Kelley, "The cutting-plane method for solving convex programs", Journal of the Society
   for Industrial and Applied Mathematics 8, 1960.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from kvsim.errors import InfeasibleError
from kvsim.graph import Array
from kvsim.planner.passes import Tangent, work
from kvsim.planner.placement import Coefficients
from kvsim.planner.planes import plane
from kvsim.planner.programme import Programme
from kvsim.planner.shares import Shares
from kvsim.planner.solving import Mix

Family = frozenset[str]

INSIDE = 0.01  # of the way to a box's middle, where a cost is touched
WORTH = 1e-4  # of the objective, by which a solution must be too cheap
ROUNDS = 12


def tangent(
    coefficients: Coefficients, programme: Programme, option: int, shape: int, at: Shares
) -> Tangent:
    """The plane that touches the cost of an option's layers near some shares.

    Parameters
    ----------
    coefficients : at the programme's batch alone.
    """
    c = coefficients
    own = next(o for o in c.options if o.name == programme.names[option])
    box = own.held(float(c.held[shape]))

    def cost(shares: Shares) -> Array:
        return c.layers(shares, own.parts, [shape])

    values = plane(box, cost, c.workload.prompt, at.towards(box.middle, INSIDE))
    return Tangent(option, shape, c.by_phase(values[:, :, 0, 0]))


def tangents(coefficients: Coefficients, programme: Programme, mix: Mix) -> tuple[Tangent, ...]:
    """Planes at a mix's shares, for its options with several corners."""
    c, p = coefficients, programme
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


class Tangents:
    """Planes that were needed at the batches of some coefficients, and what they prove.

    Parameters
    ----------
    wanted : whether planes are worth their time; without, programmes stay as they are.
    """

    def __init__(self, coefficients: Coefficients, wanted: bool) -> None:
        self.coefficients, self.wanted = coefficients, wanted
        self._known: dict[tuple[int, Family], tuple[Tangent, ...]] = {}  # by batch and family
        self._whole: dict[tuple[int, Family], float] = {}  # bounds with whole layers [s]

    def of(self, index: int, family: Family, programme: Programme) -> Programme:
        """A programme with the planes that are known."""
        known = self._known.get((index, family), ())
        return replace(programme, tangents=known) if known else programme

    def first(
        self, index: int, family: Family, programme: Programme, solve: Callable[..., Mix]
    ) -> Mix:
        """The programme's mix of whole layers, with all planes that its relaxation needs."""
        if self.wanted and (index, family) not in self._known:
            batch = self.coefficients.batches[index : index + 1]
            alone = replace(self.coefficients, batches=batch)
            found = tightened(alone, programme, lambda x: solve(x, whole=False))
            self._known[index, family] = found.tangents
        mix = solve(self.of(index, family, programme))
        self._whole[index, family] = mix.bound
        return mix

    def least(
        self, index: int, relaxed: dict[Family, float], first: Callable[[int, Family], Mix]
    ) -> float:
        """The least bound of all families, with whole layers where that decides. [s]

        Parameters
        ----------
        relaxed : bounds that are known already. [s]
        """
        bounds = dict(relaxed)
        for _ in relaxed if self.wanted else ():
            family = min(bounds, key=lambda f: bounds[f])
            before = bounds[family]
            if np.isfinite(before) and (index, family) not in self._whole:
                self._whole[index, family] = np.inf
                with suppress(InfeasibleError):
                    first(index, family)
            bounds[family] = max(before, self._whole.get((index, family), before))
            if bounds[family] == before:
                break
        return min(bounds.values(), default=np.inf)


def tightened(
    coefficients: Coefficients, programme: Programme, solve: Callable[[Programme], Mix]
) -> Programme:
    """The programme with the planes that its relaxation's solutions need."""
    c, p = coefficients, programme
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
