"""What replicas carry by a closed estimate: which of very many are worth simulating.

Of one class, or of all together, a replica needs laps and load as `planner.carry` derives them:

    laps = max(memory, host memory, seats, work / (TPOT x tokens - fixed))
    load = fixed x laps + work
"""

import numpy as np

from kvsim.graph import Array
from kvsim.planner.classes import Classes
from kvsim.planner.fleet.configurations import Configuration
from kvsim.planner.fleet.targets import FleetTargets
from kvsim.planner.fleet.traffic import Traffic
from kvsim.planner.load import Loads, loads_of


def loads(configurations: list[Configuration], traffic: Traffic, targets: FleetTargets) -> Loads:
    """Coefficients of every configuration at the trace's mean rates."""
    per_s = traffic.demand.mean
    classes = Classes(traffic.prompt, traffic.generate, per_s, traffic.of, traffic.requests.prompt)
    return loads_of([x.costs for x in configurations], classes, targets.ttft)


def replicas_needed(found: Loads, targets: FleetTargets, max_seqs: Array) -> Array:
    """Replicas that each class alone needs of each configuration; infinite where it cannot.

    Parameters
    ----------
    max_seqs : of each configuration. (j,)

    Returns
    -------
    (c, j)
    """
    slack = targets.tpot * found.tokens - found.fixed
    in_time = found.work / np.where(slack > 0, slack, np.nan) if np.isfinite(targets.tpot) else 0.0
    laps = np.maximum.reduce([
        found.gpu / found.room,
        found.host / found.host_room,
        found.seats / max_seqs,
        np.broadcast_to(in_time, found.work.shape),
    ])  # fmt: skip
    needed = found.fixed * laps + found.work
    fits = (found.longest <= found.room) & (slack > 0)
    return np.where(fits & np.isfinite(needed), np.maximum(needed, 1e-9), np.inf)


def late_of_class(found: Loads, traffic: Traffic) -> Array:
    """Share of each class whose prompt takes longer than the TTFT target even alone. (c, j)"""
    of_class = np.bincount(traffic.of, minlength=traffic.classes) / len(traffic.of)
    return np.asarray(np.minimum(found.late / of_class[:, None], 1.0))
