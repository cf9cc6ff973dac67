"""``kvsim capacity``: the fleet for a trace, what it is compared with, and what holds it back."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from kvsim.errors import InfeasibleError, InputError
from kvsim.limits import ENGINE_SHARE
from kvsim.planner.admit import Admission
from kvsim.planner.fleet.arrays import FleetLimits, Schedule
from kvsim.planner.fleet.certainty import Certainty, Spread, certainty, known
from kvsim.planner.fleet.configurations import Configuration
from kvsim.planner.fleet.market import Market, measured
from kvsim.planner.fleet.play import FleetTargets, Played
from kvsim.planner.fleet.reachable import reachable
from kvsim.planner.fleet.search import FleetSearch, Found, Proven
from kvsim.planner.fleet.shortlist import Rated, Rentable, Terms, shortlist
from kvsim.planner.fleet.traffic import Traffic
from kvsim.serving.rules import Rules

LOADS = (0.5, 1.5, 2.0)
BATCH_LIMITS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
PARTS = 8  # halvings of the load that limits allow


@dataclass(frozen=True)
class CapacityQuestion:
    """What is asked.

    Attributes
    ----------
    largest_loss
        Relative loss of quality that may be known of a setting.
    utilisation
        Share of each GPU's memory that the engine uses.
    spread
        How far predictions have been off; what the ledger of errors has if None.
    """

    traffic: Traffic
    rentable: list[Rentable]
    admission: Admission
    targets: FleetTargets
    limits: FleetLimits
    rules: Rules
    spread: Spread | None = None
    largest_loss: float = 0.0
    utilisation: float = ENGINE_SHARE
    schedule: Schedule | None = None


@dataclass(frozen=True)
class OtherFleet:
    """Another fleet for the same question; None if there is none, with the reason."""

    label: str
    found: Found | None
    configurations: list[Configuration]
    reason: str = ""


@dataclass(frozen=True)
class CapacityAnswer:
    """The fleet and all that is said of it.

    Attributes
    ----------
    shortfall
        Why what was asked is not met; empty if it is. The fleet is then for `targets` and `load`.
    targets, load
        What the fleet meets, and how much of the trace's load.
    market
        Every configuration that was measured, and what it carries.
    at_load, after_loss
        The fleet at other loads, and without one replica of a kind.
    alternatives
        Other fleets: one kind of replica, full KV, each GPU alone, more certain.
    """

    question: CapacityQuestion
    shortfall: str
    targets: FleetTargets
    load: float
    market: Market
    found: Found
    at_load: dict[float, Played]
    after_loss: dict[int, Played]
    alternatives: list[OtherFleet]
    sure: Certainty
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def fleet(self) -> Proven:
        """The fleet that was found and simulated."""
        return self.found.fleet

    @property
    def used(self) -> list[int]:
        """Configurations of which the fleet has replicas."""
        return [int(j) for j in np.flatnonzero(self.fleet.replicas)]


def make_capacity(
    question: CapacityQuestion, tell: Callable[[str], None] = lambda _: None
) -> CapacityAnswer:
    """Find the cheapest fleet that meets the targets when it plays the trace.

    Where no fleet does, the targets are loosened to the best there is, or the load is reduced to
    what the limits allow, and the answer says so.

    Parameters
    ----------
    tell : is told what is being done.

    Raises
    ------
    InputError
        If the model fits on none of the GPUs.
    InfeasibleError
        If the limits leave no fleet at all.
    """
    q = question
    rated = _shortlist(q, tell)
    market = measured(rated, q.traffic, q.targets, tell)
    targets, shortfall = q.targets, ""
    if not (market.offers.capacity > 0).any(axis=1).all():
        targets, shortfall = reachable(rated, q.traffic, q.targets, tell)
        q = replace(q, targets=targets)
        market = measured(_shortlist(q, tell), q.traffic, targets, tell)
    load = 1.0
    try:
        search, found = _search(q, market, tell=tell)
    except InfeasibleError:
        load, search, found = _most_load(q, market, tell)
        reason = f"the limits allow a fleet for {load:.0%} of the trace's load"
        shortfall = f"{shortfall}; {reason}" if shortfall else reason
    whole = market
    used = [market.configurations[j] for j in np.flatnonzero(found.fleet.replicas)]
    spread = q.spread or known(used)
    market, search, found = _trimmed(q, market, search, found, load)
    return CapacityAnswer(
        question=question,
        shortfall=shortfall,
        targets=targets,
        load=load,
        market=market,
        found=found,
        at_load={x: search.played(found.fleet.running, found.fleet.share, x) for x in LOADS},
        after_loss=_losses(search, found.fleet),
        alternatives=_alternatives(q, whole, load, spread, tell),
        sure=certainty(search, found.fleet, targets, spread),
    )


def _shortlist(q: CapacityQuestion, tell: Callable[[str], None]) -> list[Rated]:
    terms = Terms(q.traffic, q.targets, q.rules, q.admission, q.largest_loss, q.utilisation)
    return shortlist(q.rentable, terms, tell)


def _search(
    q: CapacityQuestion,
    market: Market,
    limits: FleetLimits | None = None,
    load: float = 1.0,
    slowdown: float = 1.0,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[FleetSearch, Found]:
    search = FleetSearch(
        q.traffic, market.configurations, market.offers, q.targets, limits or q.limits,
        q.schedule, load, slowdown, tell,
    )  # fmt: skip
    return search, search.run()


def _most_load(
    q: CapacityQuestion, market: Market, tell: Callable[[str], None]
) -> tuple[float, FleetSearch, Found]:
    """The largest share of the load for which the limits allow a fleet.

    Raises
    ------
    InfeasibleError
        If they allow none at all.
    """
    low, high, best = 0.0, 1.0, None
    for _ in range(PARTS):
        middle = (low + high) / 2
        tell(f"within the limits at {middle:.0%} of the load")
        try:
            best = (middle, *_search(q, market, load=middle, tell=tell))
            low = middle
        except InfeasibleError:
            high = middle
    if best is None:
        raise InfeasibleError(
            f"the limits leave no fleet for even {high:.1%} of the trace's load; "
            "allow more GPUs, host memory, power or configurations"
        )
    return best


def _trimmed(
    q: CapacityQuestion, market: Market, search: FleetSearch, found: Found, load: float
) -> tuple[Market, FleetSearch, Found]:
    """The same fleet with batch limits that it just does not reach."""
    most = {g.kind: 0 for g in found.fleet.played.groups}
    for g in found.fleet.played.groups:
        most[g.kind] = max(most[g.kind], g.most_running)
    some = list(market.configurations)
    for j, running in most.items():
        limit = min((x for x in BATCH_LIMITS if x >= running), default=running)
        if limit < some[j].costs.rules.max_seqs:
            some[j] = some[j].limited(limit)
    market = replace(market, configurations=some)
    search.configurations = some
    played = search.played(found.fleet.running, found.fleet.share)
    return market, search, replace(found, fleet=replace(found.fleet, played=played))


def _losses(search: FleetSearch, fleet: Proven) -> dict[int, Played]:
    """The trace without one replica of each kind; kinds whose last one it is leave theirs."""
    lost = {}
    for j in np.flatnonzero(fleet.replicas):
        left = fleet.running.copy()
        left[:, j] = np.maximum(left[:, j] - 1, 0)
        if left.any(axis=1).all():
            lost[int(j)] = search.after_loss(left)
    return lost


def _alternatives(
    q: CapacityQuestion,
    market: Market,
    load: float,
    spread: Spread,
    tell: Callable[[str], None],
) -> list[OtherFleet]:
    """Other fleets for the same question."""
    one = replace(q.limits, configurations=1)
    some: list[tuple[str, Market, FleetLimits, float]] = [
        ("one kind of replica", market, one, 1.0),
        ("full KV", market.where(lambda x: x.costs.technique.name == "full"), q.limits, 1.0),
    ]
    gpus = dict.fromkeys(x.gpu for x in market.configurations)
    if len(gpus) > 1:
        some += [
            (f"{gpu} alone", market.where(lambda x, gpu=gpu: x.gpu == gpu), one, 1.0)  # type: ignore[misc]
            for gpu in gpus
        ]
    some.append(("95 % certain", market, q.limits, spread.slowdown))
    answers = []
    for label, part, limits, slowdown in some:
        tell(f"for comparison: {label}")
        try:
            if not part.configurations:
                raise InfeasibleError("none on the shortlist")
            _, other = _search(q, part, limits, load, slowdown, tell)
        except (InfeasibleError, InputError) as problem:
            answers.append(OtherFleet(label, None, part.configurations, str(problem)))
            continue
        answers.append(OtherFleet(label, other, part.configurations))
    return answers
