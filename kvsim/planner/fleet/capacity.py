"""``kvsim capacity``: the fleet for a trace, what it is compared with, and what holds it back."""

from collections.abc import Callable
from dataclasses import field, replace

import numpy as np

from kvsim.errors import InfeasibleError
from kvsim.frozen import frozen
from kvsim.planner.fleet.arrays import FleetLimits
from kvsim.planner.fleet.beside import (
    FULL_KV,
    ONE_KIND,
    OtherFleet,
    alternatives,
    fleet_for,
    full_kv,
    of_market,
    of_one_kind,
    plainer,
    search_of,
    set_limits,
    without_limits,
)
from kvsim.planner.fleet.certainty import Certainty, certainty, known, most_held
from kvsim.planner.fleet.market import Market, measured
from kvsim.planner.fleet.play import Played
from kvsim.planner.fleet.proven import Found, Proven
from kvsim.planner.fleet.question import CapacityQuestion
from kvsim.planner.fleet.reachable import reachable
from kvsim.planner.fleet.search import FleetSearch
from kvsim.planner.fleet.shortlist import Rated, Terms, shortlist
from kvsim.planner.fleet.surer import surer
from kvsim.planner.fleet.targets import FleetTargets
from kvsim.planner.fleet.variants import varied

LOADS = (0.5, 1.5, 2.0)
BATCH_LIMITS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
PARTS = 8  # halvings of the load that limits allow


@frozen
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
        Other fleets: one kind of replica, several, full KV, each GPU alone, more certain.
    limits
        Fleets without each limit that was set, and with longer targets.
    at_other_loads
        Fleets that other loads need.
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
    limits: list[OtherFleet]
    at_other_loads: dict[float, OtherFleet]
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
    market = measured(rated, q.traffic, q.targets, tell=tell)
    shortfall, load = "", 1.0
    if not (market.offers.capacity > 0).any(axis=1).all():
        q, rated, market, shortfall = _loosened(q, rated, tell)
    search = search_of(q, market, tell=tell)
    try:
        found = search.run()
    except InfeasibleError:
        most = load  # is known to be too much
        if not shortfall and not _within_targets(q, market, tell):
            q, rated, market, shortfall = _loosened(q, rated, tell)
            most = 2 * load
        load, search, found = _most_load(q, market, most, tell)
        if load < 1.0:
            reason = f"the limits allow a fleet for {100 * load:.0f} % of the trace's load"
            shortfall = f"{shortfall}; {reason}" if shortfall else reason
    found = plainer(search, found)  # what nothing gains from is not rented
    whole, chosen = market, OtherFleet("", found, market.configurations)
    one = replace(q.limits, configurations=1)
    if chosen.within(whole, one):
        uniform = chosen.named(ONE_KIND)
    else:
        uniform = of_one_kind(q, market, load)
        if uniform.found and not chosen.cheaper(uniform):
            found = uniform.found  # as cheap, and simpler to run
            chosen = uniform
    without = full_kv(market)
    plain = chosen.named(FULL_KV)
    if not chosen.within(without, q.limits):
        plain = fleet_for(FULL_KV, q, without, q.limits, load)
        if plain.found and not chosen.cheaper(plain) and _as_simple(plain, chosen):
            market, found, chosen = without, plain.found, plain
            search = search_of(q, market, load=load, tell=tell)
            if np.count_nonzero(found.fleet.replicas) == 1:
                uniform = plain.named(ONE_KIND)
    best, others = alternatives(q, whole, load, chosen, (uniform, plain), tell)
    if best.cheaper(chosen):
        market, search = whole, search_of(q, whole, load=load, tell=tell)
        found = of_market(best, whole, search, found)
        chosen = replace(best, found=found, configurations=whole.configurations)
    used = [market.configurations[j] for j in np.flatnonzero(found.fleet.replicas)]
    sure = certainty(search, found.fleet, q.spread or known(used))
    others.append(surer(q, rated, whole, load, chosen, sure, tell))
    market, search, found = _trimmed(market, search, found, sure)
    return CapacityAnswer(
        question=question,
        shortfall=shortfall,
        targets=q.targets,
        load=load,
        market=market,
        found=found,
        at_load={x: search.played(found.fleet.running, found.fleet.share, x) for x in LOADS},
        after_loss=_losses(search, found.fleet),
        alternatives=others,
        limits=without_limits(q, whole, load, chosen, tell),
        at_other_loads={x: _at_load(q, whole, chosen, load, x) for x in LOADS},
        sure=sure,
    )


def _at_load(
    q: CapacityQuestion, market: Market, chosen: OtherFleet, load: float, times: float
) -> OtherFleet:
    """The cheapest fleet for another load."""
    label = f"{times:g} times the load"
    kept = chosen.at(label, q, load * times) if load == 1 else None
    if kept is not None and times > 1:
        return kept
    found = fleet_for(label, q, market, q.limits, load * times)
    return kept if kept is not None and kept.cheaper(found) else found


def _as_simple(plain: OtherFleet, other: OtherFleet) -> bool:
    """Whether a fleet is of no more kinds than another."""
    assert plain.found is not None and other.found is not None
    kinds = [np.count_nonzero(x.fleet.replicas) for x in (plain.found, other.found)]
    return bool(kinds[0] <= kinds[1])


def _shortlist(q: CapacityQuestion, tell: Callable[[str], None]) -> list[Rated]:
    terms = Terms(q.traffic, q.targets, q.rules, q.admission, q.largest_loss, q.utilisation)
    return varied(shortlist(q.rentable, terms, tell), q.traffic.requests, q.extras)


def _loosened(
    q: CapacityQuestion, rated: list[Rated], tell: Callable[[str], None]
) -> tuple[CapacityQuestion, list[Rated], Market, str]:
    """The question with targets that can be met, what may be rented then, and why."""
    targets, shortfall = reachable(rated, q.traffic, q.targets, tell)
    q = replace(q, targets=targets)
    rated = _shortlist(q, tell)
    return q, rated, measured(rated, q.traffic, targets, tell=tell), shortfall


def _within_targets(q: CapacityQuestion, market: Market, tell: Callable[[str], None]) -> bool:
    """Whether some fleet meets the targets where nothing else limits it."""
    without = FleetLimits(late=q.limits.late)
    if q.limits == without:
        return False  # that is what was tried
    try:
        search_of(replace(q, limits=without), market, tell=tell).run()
    except InfeasibleError:
        return False
    return True


def _most_load(
    q: CapacityQuestion, market: Market, high: float, tell: Callable[[str], None]
) -> tuple[float, FleetSearch, Found]:
    """The largest share of the load for which the limits allow a fleet, the whole load at most.

    Parameters
    ----------
    high : a share that is known to be too much, or twice the whole load.

    Raises
    ------
    InfeasibleError
        If they allow none at all.
    """
    low, best = 0.0, None
    while high - low > 2.0**-PARTS and low < 1.0:
        middle = (low + high) / 2
        tell(f"within the limits at {100 * middle:.0f} % of the load")
        search = search_of(q, market, load=middle, tell=tell)
        try:
            best = (middle, search, search.run())
            low = middle
        except InfeasibleError:
            high = middle
    if best is None:
        part, named = f"even {100 * high:.1f} % of the trace's load", set_limits(q.limits)
        raise InfeasibleError(
            f"the limits leave no fleet for {part}; loosen {' or '.join(named)}"
            if named
            else f"no fleet was found that carries {part} within the targets; allow other GPUs, "
            "more of them in a replica (--tp), or longer times"
        )
    return best


def _trimmed(
    market: Market, search: FleetSearch, found: Found, sure: Certainty
) -> tuple[Market, FleetSearch, Found]:
    """The same fleet with batch limits that it does not reach wherever it meets the targets.

    That is in the trace itself, at the other loads, after a loss, and with the longer times of its
    likelihood.
    """
    fleet = found.fleet
    plays = [search.played(fleet.running, fleet.share, x) for x in LOADS]
    plays += _losses(search, fleet).values()
    within = most_held([fleet.played, *(p for p in plays if p.meets(search.targets))])
    held = [within, *(x.held for x in sure.slowed if x.both <= 1)]
    some = list(market.configurations)
    for j in sorted({j for each in held for j in each}):
        running = max(each.get(j, 0) for each in held)
        limit = min((x for x in BATCH_LIMITS if x >= running), default=running)
        if limit < some[j].costs.rules.max_seqs:
            some[j] = some[j].limited(limit)
    market = replace(market, configurations=some)
    search.configurations = some
    played = search.played(fleet.running, fleet.share)
    return market, search, replace(found, fleet=replace(fleet, played=played))


def _losses(search: FleetSearch, fleet: Proven) -> dict[int, Played]:
    """The trace without one replica of each kind; kinds whose last one it is leave theirs."""
    lost = {}
    for j in np.flatnonzero(fleet.replicas):
        left = fleet.running.copy()
        left[:, j] = np.maximum(left[:, j] - 1, 0)
        if left.any(axis=1).all():
            lost[int(j)] = search.after_loss(left)
    return lost
