"""Proposals from the kinds of replica that are worth a place in the programme.

A kind that another one equals or betters in all that the programme reads is left out: whatever
fleet has it, the same number of the other is no worse. Kinds of one GPU that differ in techniques
or memories are often so, and each of them costs a failure of its own and its shares.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvsim.planner.fleet.arrays import (
    Demand,
    FleetCut,
    FleetLimits,
    FleetPlan,
    Offers,
    Schedule,
)
from kvsim.planner.fleet.programme import solve
from kvsim.planner.fleet.survival import FatalLoss, Losses


def propose(
    offers: Offers,
    demand: Demand,
    limits: FleetLimits,
    schedule: Schedule | None,
    cuts: tuple[FleetCut, ...],
    losses: tuple[FatalLoss, ...],
) -> FleetPlan:
    """The programme's fleet; arrays are as wide as the offers.

    Raises
    ------
    InfeasibleError
        If no fleet of these offers is within the limits.
    """
    some = undominated(offers, limits)
    kinds = len(offers)

    def wide(array: np.ndarray) -> np.ndarray:
        found = np.zeros((*array.shape[:-1], kinds), array.dtype)
        found[..., some] = array
        return found

    def counts(of_each: tuple[int, ...], change: Callable[[np.ndarray], np.ndarray]) -> Losses:
        return tuple(change(np.array(of_each)).tolist())

    def changed(x: FatalLoss, change: Callable[[np.ndarray], np.ndarray]) -> FatalLoss:
        return FatalLoss(x.window, counts(x.lost, change), counts(x.left, change))

    fewer = [changed(x, lambda of_each: of_each[some]) for x in losses]
    same = tuple(x for x, y in zip(fewer, losses, strict=True) if sum(x.lost) == sum(y.lost))
    plan = solve(
        offers.only(some),
        demand,
        limits,
        schedule,
        tuple(replace(cut, replicas=cut.replicas[some]) for cut in cuts),
        same,
    )
    known = {*losses, *(changed(x, wide) for x in plan.losses)}
    return replace(
        plan, running=wide(plan.running), reserved=wide(plan.reserved), share=wide(plan.share),
        losses=tuple(sorted(known)),
    )  # fmt: skip


def undominated(offers: Offers, limits: FleetLimits) -> list[int]:
    """The kinds that no other equals or betters; of equal ones the first."""
    kinds = range(len(offers))
    if limits.mixed:  # which asks for several kinds, also where one would do
        return list(kinds)
    better = np.vstack([
        -offers.capacity, offers.late, offers.price, offers.reserved,
        *([offers.gpus] if np.isfinite(limits.gpus) else []),
        *([offers.host] if np.isfinite(limits.host) else []),
        *([offers.power] if np.isfinite(limits.power) else []),
    ])  # fmt: skip

    def beats(i: int, j: int) -> bool:
        """Whether kind i is no worse than kind j anywhere, and better or first."""
        if limits.gpus_of and (offers.kind[i] != offers.kind[j] or offers.gpus[i] > offers.gpus[j]):
            return False
        return bool(
            (better[:, i] <= better[:, j]).all() and (i < j or (better[:, i] < better[:, j]).any())
        )

    return [j for j in kinds if not any(beats(i, j) for i in kinds if i != j)]
