"""Which replicas are worth simulating, of all GPUs, degrees of parallelism and techniques.

Every deployment is rated with full KV first; the techniques are then tried on the best of them.
What an estimate says is only good for leaving out what is much dearer than the best.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvsim.errors import InfeasibleError, InputError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.planner.admit import Admission
from kvsim.planner.candidates import options_of
from kvsim.planner.fleet.configurations import Configuration
from kvsim.planner.fleet.estimate import late_of_class, loads, replicas_needed
from kvsim.planner.fleet.targets import FleetTargets
from kvsim.planner.fleet.traffic import Traffic
from kvsim.planner.workload import PlanLimits
from kvsim.serving.rules import Rules
from kvsim.techniques import parse

DEPLOYMENTS = 8  # kept with full KV
TRIED = 2  # of them with every other technique
WORTH = 0.99  # cost at which another technique is worth a look, of full KV on the same deployment
SETTINGS = 2  # per deployment, besides full KV
WHOLE = 2  # deployments that are kept because a whole one is cheaper than one of the best
DEAREST = 4.0  # cost of all requests, or of one class, of the cheapest, that is still looked at


@frozen
class Rentable:
    """A deployment that can be rented as one replica, with the prices of all of it. [USD/h, W]"""

    deployment: Deployment
    gpu: str
    price: float
    reserved: float = np.inf
    power: float = np.inf


@frozen
class Rated:
    """A configuration with the closed estimate of what it carries.

    Attributes
    ----------
    needed
        Replicas that each class alone needs; infinite where it cannot. (c,)
    late
        Share of each class that misses a target on an idle replica as well. (c,)
    """

    configuration: Configuration
    needed: Array
    late: Array

    @property
    def cost(self) -> Array:
        """Price of each class. (c,) [USD/h]"""
        return np.asarray(self.needed * self.configuration.rent)

    @property
    def cost_of_all(self) -> float:
        """Price of all classes. [USD/h]"""
        return float(self.cost.sum())


@frozen
class Terms:
    """What every configuration is rated for.

    Attributes
    ----------
    admission, largest_loss
        Which techniques, and what relative loss of quality may be known of them.
    utilisation
        Share of each GPU's memory that the engine uses.
    """

    traffic: Traffic
    targets: FleetTargets
    rules: Rules
    admission: Admission
    largest_loss: float
    utilisation: float


def shortlist(
    rentable: list[Rentable], terms: Terms, tell: Callable[[str], None] = lambda _: None
) -> list[Rated]:
    """The configurations to simulate, the cheapest by estimate first.

    Raises
    ------
    InputError
        If the model fits nowhere.
    InfeasibleError
        If no technique is admitted.
    """
    techniques = terms.admission.candidates()
    others = tuple(t for t in techniques if t.name != "full")
    full = replace(terms.admission, techniques=(parse("full"),), only=(), without=())
    lossless, rest = replace(terms, admission=full), terms
    if others:
        rest = replace(terms, admission=replace(full, techniques=others))
    plain: list[tuple[Rentable, Rated]] = []
    reason: InputError | InfeasibleError | None = None
    for one in rentable:
        try:
            rated = _rated(one, lossless)
        except (InputError, InfeasibleError) as problem:
            reason = problem
            continue
        plain += [(one, r) for r in rated]
    if not plain:
        assert reason is not None
        raise reason
    best = _best([r for _, r in plain], DEPLOYMENTS)
    kept = best if len(others) < len(techniques) else []
    for one, known in plain:
        if others and any(known is r for r in best[:TRIED]):
            tell(f"estimating techniques on {one.gpu}")
            kept = kept + _better(one, known, rest)
    if not kept:
        raise InfeasibleError("none of the admitted techniques can run on these GPUs")
    return _best(kept, len(kept))


def _better(one: Rentable, full: Rated, terms: Terms) -> list[Rated]:
    """Settings that need fewer replicas than full KV for all classes, or for one."""
    try:
        rated = _rated(one, terms)
    except (InputError, InfeasibleError):
        return []
    known = np.where(np.isfinite(full.cost), full.cost, np.inf)
    worth = [r for r in rated if (r.cost < WORTH * known).any()]
    worth.sort(key=lambda r: (float(np.isinf(r.cost).sum()), r.cost_of_all))
    best: list[Rated] = []
    for r in worth:  # two settings of one technique are rarely both worth it
        if r.configuration.costs.technique.name not in {
            x.configuration.costs.technique.name for x in best
        }:
            best.append(r)
    return best[:SETTINGS]


def _rated(one: Rentable, terms: Terms) -> list[Rated]:
    """Every admitted setting on a deployment, with its estimate."""
    d, traffic, targets = one.deployment, terms.traffic, terms.targets.loosest
    rules = terms.rules.over(d)
    here = PlanLimits(
        gpu_memory=d.hardware.gpu_memory * terms.utilisation,
        host_memory=d.hardware.host_memory,
        ttft=targets.ttft,
        tpot=targets.tpot,
        loss=terms.largest_loss,
    )
    options = options_of(d, traffic.requests, here, rules, terms.admission)
    some = [Configuration(x, one.gpu, one.price, one.reserved, one.power) for x in options]
    found = loads(some, traffic, targets)
    needed = replicas_needed(found, targets, np.array([float(rules.max_seqs)]))
    late = late_of_class(found, traffic)
    return [Rated(x, needed[:, j], late[:, j]) for j, x in enumerate(some)]


def _best(rated: list[Rated], most: int) -> list[Rated]:
    """The cheapest of all classes together and of each class, without those far dearer.

    Little load is cheapest on the cheapest replica that carries it, not on the one of which it
    keeps the cheapest part busy: replicas that are cheaper whole than the best of these stay too.
    """
    cost = np.array([r.cost for r in rated])
    cheapest = np.min(cost, axis=0)
    ratio = cost / np.where(np.isfinite(cheapest) & (cheapest > 0), cheapest, 1.0)
    worst = np.where(np.isfinite(ratio).any(axis=1), np.nanmin(ratio, axis=1), np.inf)
    order = sorted(
        range(len(rated)),
        key=lambda i: (int(np.isinf(cost[i]).sum()), rated[i].cost_of_all, float(worst[i])),
    )
    first = [i for i in dict.fromkeys(np.argmin(cost, axis=0).tolist()) if np.isfinite(worst[i])]
    near = [i for i in order if worst[i] <= DEAREST]
    whole = [max(float(r.needed.sum()), 1.0) * r.configuration.rent for r in rated]
    cheaper = sorted((i for i in order if whole[i] < whole[order[0]]), key=whole.__getitem__)
    some = [*order[:1], *first, *cheaper[:WHOLE], *near, *order[:2]]
    chosen = list(dict.fromkeys(some))[:most]
    return [rated[i] for i in sorted(chosen, key=order.index)]
