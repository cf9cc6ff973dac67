"""What any fleet that carries the demand has at least, and none has a use for beyond.

Neither excludes the cheapest fleet; they keep the solver from searching where there is none, and
make the price of parts of replicas a bound that means something. What was seen to miss the targets
is excluded here too.
"""

import numpy as np
import pulp

from kvsim.graph import Array
from kvsim.planner.fleet.arrays import Demand, FleetCut, FleetLimits, Offers


def most_useful(
    offers: Offers, demand: Demand, limits: FleetLimits, cuts: tuple[FleetCut, ...]
) -> list[int]:
    """Replicas of each kind beyond which more of them change nothing but the price. (j,)

    So many carry all that the kind can serve, with headroom and after every failure, and are no
    fleet that is cut. Tight bounds make the programme quick to solve.
    """
    peak = demand.rate.max(axis=0)
    serves = offers.capacity > 0
    each = np.where(serves, peak[:, None] / np.where(serves, offers.capacity, 1.0), 0.0)
    needed = np.ceil((1 + limits.headroom) * each.sum(axis=0)) + limits.failures
    beyond = np.max([cut.replicas + cut.beyond for cut in cuts], axis=0, initial=1)
    return [int(n) for n in np.maximum(needed, beyond)]


def who_serves(offers: Offers, rate: Array) -> list[tuple[int, ...]]:
    """The sets of kinds that can serve some class, each once, without those that hold another.

    Parameters
    ----------
    rate : of each class; those that do not come need nothing. (c,) [1/s]
    """
    served = {
        tuple(np.flatnonzero(offers.capacity[c] > 0).tolist()) for c in np.flatnonzero(rate > 0)
    }
    return sorted(s for s in served if not any(set(t) < set(s) for t in served))


def exclude(
    problem: pulp.LpProblem,
    replicas: list[pulp.LpVariable],
    most: list[int],
    cuts: tuple[FleetCut, ...],
) -> None:
    """Rows that fleets which missed the targets, and those that are hardly larger, do not meet."""
    for i, cut in enumerate(cuts):
        beyond = []
        for j, rented in enumerate(replicas):
            if not cut.replicas[j]:
                beyond.append(rented)
                continue
            more = problem.add_variable(f"more_{i}_{j}", cat="Binary")
            extra = problem.add_variable(f"beyond_{i}_{j}", lowBound=0)
            problem.addConstraint(extra <= most[j] * more, f"cut_any_{i}_{j}")
            problem.addConstraint(extra <= rented - int(cut.replicas[j]) * more, f"cut_{i}_{j}")
            beyond.append(extra)
        problem.addConstraint(pulp.lpSum(beyond) >= cut.beyond, f"cut_{i}")
