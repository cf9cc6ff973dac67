"""Fleets that differ from another by one replica."""

from collections.abc import Iterator

import numpy as np

from kvsim.planner.fleet.arrays import Counts, FleetLimits, Offers

CHEAPER = 1e-9  # relative


def neighbours(offers: Offers, replicas: Counts, limits: FleetLimits) -> Iterator[Counts]:
    """Cheaper fleets with one replica less, or one of another kind, within the limits."""
    cost = float(offers.rent @ replicas)
    found: set[tuple[float, tuple[int, ...]]] = set()
    for j in np.flatnonzero(replicas):
        for other in (None, *range(len(replicas))):
            near = replicas.copy()
            near[j] -= 1
            if other is not None:
                near[other] += 1
            price = float(offers.rent @ near)
            if other != j and price < cost * (1 - CHEAPER) and allowed(offers, near, limits):
                found.add((price, tuple(near.tolist())))
    for _, counts in sorted(found):
        yield np.array(counts, np.int64)


def allowed(offers: Offers, replicas: Counts, limits: FleetLimits) -> bool:
    """Whether a fleet is within the limits on what is rented."""
    used = replicas > 0

    def total(of_each: np.ndarray) -> float:
        return float(replicas[used] @ of_each[used])

    of_kind = {
        kind: total(np.where([kind == k for k in offers.kind], offers.gpus, 0))
        for kind in limits.gpus_of
    }
    return bool(
        used.any()
        and total(offers.gpus) <= limits.gpus
        and 1 + limits.mixed <= used.sum() <= limits.configurations
        and total(offers.host) <= limits.host
        and (not np.isfinite(limits.power) or total(offers.power) <= limits.power)
        and all(of_kind[kind] <= most for kind, most in limits.gpus_of.items())
    )
