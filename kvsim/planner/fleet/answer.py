"""``kvsim capacity``: the fleet for a trace, what it is compared with, and what holds it back.

Where the targets cannot be met at all, they are loosened to the nearest that can; where the limits
allow no fleet for the whole load, it is reduced to what they allow.
"""

from collections.abc import Callable
from dataclasses import field, replace

import numpy as np

from kvsim.errors import InfeasibleError
from kvsim.frozen import frozen
from kvsim.planner.fleet.comparisons import (
    FULL_KV,
    ONE_KIND,
    OtherFleet,
    find_alternatives,
    find_robust_fleet,
    fleet_for,
    fleet_of_one_kind,
    fleets_without_limits,
    full_kv_market,
    place_in_market,
    relaxed_limits,
    search_of,
    simplify_fleet,
)
from kvsim.planner.fleet.demand import ClassTarget, FleetTargets, Traffic, as_time
from kvsim.planner.fleet.offers import (
    CapacityQuestion,
    FleetLimits,
    Rated,
    Terms,
    add_variants,
    known_spread,
    shortlist,
)
from kvsim.planner.fleet.play import Market, Played, measure_market, play
from kvsim.planner.fleet.search import (
    Certainty,
    FleetSearch,
    SearchResult,
    SimulatedFleet,
    certainty,
    most_held,
)

# targets that can be met

TARGET_ROOM = 1.2  # a target that cannot be met is replaced by what can, and so much more
TARGET_NAMES = ("ttft", "tpot")
LIGHT_LOAD_REPLICAS = 8  # times the replicas that a trace needs, to see what waiting leaves


def reachable_targets(
    rated: list[Rated],
    traffic: Traffic,
    targets: FleetTargets,
    tell: Callable[[str], None],
) -> tuple[FleetTargets, str]:
    """The nearest targets that some configuration meets with hardly any load, and in words."""
    tell("looking for targets that can be met")
    played = [_play_at_rest(x, traffic) for x in rated]
    each = [_reached_by_class(one, targets) for one in played]
    alone = _single_changes(each, targets)
    if alone:  # one of the two targets need not change, so it does not
        changed: tuple[str, ...] = (min(alone, key=lambda name: alone[name][1]),)
        nearest = alone[changed[0]][0]
    else:
        changed = TARGET_NAMES
        nearest = min(range(len(rated)), key=lambda i: max(played[i].over(targets)))
    reached = each[nearest]
    missed = [
        f"{name.upper()} p{100 * targets.share:g} of {as_time(getattr(target, name))}"
        f"{_describe_class(targets, target)} cannot be met"
        f"{_describe_best(rated, [x[target.above] for x in each], nearest, (name, target))}"
        for target in targets.each
        if target.above in reached
        for name in TARGET_NAMES
        if getattr(reached[target.above], name) > getattr(target, name)
    ]

    def loosened(target: ClassTarget) -> ClassTarget:
        can = reached.get(target.above, FleetTargets(0.0, 0.0))
        longer = {x: max(getattr(target, x), TARGET_ROOM * getattr(can, x)) for x in changed}
        return replace(target, **longer)

    why = "; ".join(missed) or "the targets are met by no replica under load"
    return targets.changed(loosened), f"{why}; {_describe_change(alone, changed)}"


def _single_changes(
    each: list[dict[int, FleetTargets]], targets: FleetTargets
) -> dict[str, tuple[int, float]]:
    """For each target that would do alone if it were longer: who, and how many times as long."""
    found = {}
    for name, other in (TARGET_NAMES, TARGET_NAMES[::-1]):
        over = {
            i: max(
                TARGET_ROOM * getattr(reached[t.above], name) / getattr(t, name)
                for t in targets.each
                if t.above in reached
            )
            for i, reached in enumerate(each)
            if all(
                TARGET_ROOM * getattr(reached[t.above], other) <= getattr(t, other)
                for t in targets.each
                if t.above in reached
            )
        }
        who = min(over, key=lambda i: over[i], default=None)
        if who is not None and 1 < over[who] < np.inf:
            found[name] = who, over[who]
    return found


def _describe_change(alone: dict[str, tuple[int, float]], changed: tuple[str, ...]) -> str:
    """Which of the targets was changed here, and whether the other would do instead."""
    if len(changed) > 1:
        return "no longer TTFT alone would do, nor a longer TPOT, so both are longer here"
    (name,) = changed
    said = f"{name.upper()} alone is {alone[name][1]:.3g} times as long here"
    others = [x for x in alone if x != name]
    if not others:
        return f"{said}, as a longer {_other_target(name)} alone would not do"
    longer = f"{alone[others[0]][1]:.3g} times as long"
    return f"{said}; {_other_target(name)} alone, {longer}, would do as well"


def _other_target(name: str) -> str:
    return TARGET_NAMES[1 - TARGET_NAMES.index(name)].upper()


def _reached_by_class(played: Played, targets: FleetTargets) -> dict[int, FleetTargets]:
    """What is reached of each class that has targets, by the length that it begins above."""
    return {
        target.above: played.reached(targets.share, rows)
        for rows, target in played.by_class(targets)
    }


def _describe_best(
    rated: list[Rated], reached: list[FleetTargets], nearest: int, missed: tuple[str, ClassTarget]
) -> str:
    """The least of a time that any configuration has, or that of the nearest to all targets."""
    name, target = missed
    times = [getattr(x, name) for x in reached]
    least = int(np.argmin(times))
    if times[least] > getattr(target, name):
        said = f": {rated[least].configuration.name} comes nearest with {as_time(times[least])}"
    else:
        said = (
            f" together with the other targets: {rated[nearest].configuration.name}, the nearest "
            f"to all of them, has {as_time(times[nearest])}"
        )
    return f"{said} and hardly any load"


def _describe_class(targets: FleetTargets, target: ClassTarget) -> str:
    """Which prompts a target is of, where it is not of all."""
    if not targets.longer:
        return ""
    bound = f"above {target.above:,}" if target.above else f"up to {targets.longer[0].above:,}"
    return f" for prompts {bound} tokens"


def _play_at_rest(rated: Rated, traffic: Traffic) -> Played:
    """What a configuration does when its replicas wait for requests."""
    needed = float(rated.needed[np.isfinite(rated.needed)].sum())
    count = min(
        max(int(np.ceil(LIGHT_LOAD_REPLICAS * needed)), LIGHT_LOAD_REPLICAS),
        8 * LIGHT_LOAD_REPLICAS,
    )
    shape = (len(traffic.demand.rate), traffic.classes, 1)
    running = np.full((shape[0], 1), count)
    light = min(count / max(LIGHT_LOAD_REPLICAS * needed, 1e-9), 1.0)
    return play(traffic, [rated.configuration], running, np.ones(shape), max(light, 1e-3))


# the answer

LOADS = (0.5, 1.5, 2.0)
BATCH_LIMITS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LOAD_HALVINGS = 8  # halvings of the load that limits allow


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
    found: SearchResult
    at_load: dict[float, Played]
    after_loss: dict[int, Played]
    alternatives: list[OtherFleet]
    limits: list[OtherFleet]
    at_other_loads: dict[float, OtherFleet]
    sure: Certainty
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def fleet(self) -> SimulatedFleet:
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
    rated = _make_shortlist(q, tell)
    market = measure_market(rated, q.traffic, q.targets, tell=tell)
    shortfall, load = "", 1.0
    if not (market.offers.capacity > 0).any(axis=1).all():
        q, rated, market, shortfall = _loosen_targets(q, rated, tell)
    search = search_of(q, market, tell=tell)
    try:
        found = search.run()
    except InfeasibleError:
        most = load  # is known to be too much
        if not shortfall and not _limits_bind(q, market, tell):
            q, rated, market, shortfall = _loosen_targets(q, rated, tell)
            most = 2 * load
        load, search, found = _largest_load(q, market, most, tell)
        if load < 1.0:
            reason = f"the limits allow a fleet for {100 * load:.0f} % of the trace's load"
            shortfall = f"{shortfall}; {reason}" if shortfall else reason
    found = simplify_fleet(search, found)  # what nothing gains from is not rented
    whole, chosen = market, OtherFleet("", found, market.configurations)
    one = replace(q.limits, configurations=1)
    if chosen.within(whole, one):
        uniform = chosen.named(ONE_KIND)
    else:
        uniform = fleet_of_one_kind(q, market, load)
        if uniform.found and not chosen.cheaper(uniform):
            found = uniform.found  # as cheap, and simpler to run
            chosen = uniform
    without = full_kv_market(market)
    plain = chosen.named(FULL_KV)
    if not chosen.within(without, q.limits):
        plain = fleet_for(FULL_KV, q, without, q.limits, load)
        if plain.found and not chosen.cheaper(plain) and _is_as_simple(plain, chosen):
            market, found, chosen = without, plain.found, plain
            search = search_of(q, market, load=load, tell=tell)
            if np.count_nonzero(found.fleet.replicas) == 1:
                uniform = plain.named(ONE_KIND)
    best, others = find_alternatives(q, whole, load, chosen, (uniform, plain), tell)
    if best.cheaper(chosen):
        market, search = whole, search_of(q, whole, load=load, tell=tell)
        found = place_in_market(best, whole, search, found)
        chosen = replace(best, found=found, configurations=whole.configurations)
    used = [market.configurations[j] for j in np.flatnonzero(found.fleet.replicas)]
    sure = certainty(search, found.fleet, q.spread or known_spread(used))
    others.append(find_robust_fleet(q, rated, whole, load, chosen, sure, tell))
    market, search, found = _trim_batch_limits(market, search, found, sure)
    return CapacityAnswer(
        question=question,
        shortfall=shortfall,
        targets=q.targets,
        load=load,
        market=market,
        found=found,
        at_load={x: search.played(found.fleet.running, found.fleet.share, x) for x in LOADS},
        after_loss=_play_losses(search, found.fleet),
        alternatives=others,
        limits=fleets_without_limits(q, whole, load, chosen, tell),
        at_other_loads={x: _fleet_at_load(q, whole, chosen, load, x) for x in LOADS},
        sure=sure,
    )


def _fleet_at_load(
    q: CapacityQuestion, market: Market, chosen: OtherFleet, load: float, times: float
) -> OtherFleet:
    """The cheapest fleet for another load."""
    label = f"{times:g} times the load"
    kept = chosen.at(label, q, load * times) if load == 1 else None
    if kept is not None and times > 1:
        return kept
    found = fleet_for(label, q, market, q.limits, load * times)
    return kept if kept is not None and kept.cheaper(found) else found


def _is_as_simple(plain: OtherFleet, other: OtherFleet) -> bool:
    """Whether a fleet is of no more kinds than another."""
    assert plain.found is not None and other.found is not None
    kinds = [np.count_nonzero(x.fleet.replicas) for x in (plain.found, other.found)]
    return bool(kinds[0] <= kinds[1])


def _make_shortlist(q: CapacityQuestion, tell: Callable[[str], None]) -> list[Rated]:
    terms = Terms(q.traffic, q.targets, q.rules, q.admission, q.largest_loss, q.utilisation)
    return add_variants(shortlist(q.rentable, terms, tell), q.traffic.requests, q.extras)


def _loosen_targets(
    q: CapacityQuestion, rated: list[Rated], tell: Callable[[str], None]
) -> tuple[CapacityQuestion, list[Rated], Market, str]:
    """The question with targets that can be met, what may be rented then, and why."""
    targets, shortfall = reachable_targets(rated, q.traffic, q.targets, tell)
    q = replace(q, targets=targets)
    rated = _make_shortlist(q, tell)
    return q, rated, measure_market(rated, q.traffic, targets, tell=tell), shortfall


def _limits_bind(q: CapacityQuestion, market: Market, tell: Callable[[str], None]) -> bool:
    """Whether some fleet meets the targets where nothing else limits it."""
    without = FleetLimits(late=q.limits.late)
    if q.limits == without:
        return False  # that is what was tried
    try:
        search_of(replace(q, limits=without), market, tell=tell).run()
    except InfeasibleError:
        return False
    return True


def _largest_load(
    q: CapacityQuestion, market: Market, high: float, tell: Callable[[str], None]
) -> tuple[float, FleetSearch, SearchResult]:
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
    while high - low > 2.0**-LOAD_HALVINGS and low < 1.0:
        middle = (low + high) / 2
        tell(f"within the limits at {100 * middle:.0f} % of the load")
        search = search_of(q, market, load=middle, tell=tell)
        try:
            best = (middle, search, search.run())
            low = middle
        except InfeasibleError:
            high = middle
    if best is None:
        part, named = f"even {100 * high:.1f} % of the trace's load", relaxed_limits(q.limits)
        raise InfeasibleError(
            f"the limits leave no fleet for {part}; loosen {' or '.join(named)}"
            if named
            else f"no fleet was found that carries {part} within the targets; allow other GPUs, "
            "more of them in a replica (--tp), or longer times"
        )
    return best


def _trim_batch_limits(
    market: Market, search: FleetSearch, found: SearchResult, sure: Certainty
) -> tuple[Market, FleetSearch, SearchResult]:
    """The same fleet with batch limits that it does not reach wherever it meets the targets.

    That is in the trace itself, at the other loads, after a loss, and with the longer times of its
    likelihood.
    """
    fleet = found.fleet
    plays = [search.played(fleet.running, fleet.share, x) for x in LOADS]
    plays += _play_losses(search, fleet).values()
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


def _play_losses(search: FleetSearch, fleet: SimulatedFleet) -> dict[int, Played]:
    """The trace without one replica of each kind; kinds whose last one it is leave theirs."""
    lost = {}
    for j in np.flatnonzero(fleet.replicas):
        left = fleet.running.copy()
        left[:, j] = np.maximum(left[:, j] - 1, 0)
        if left.any(axis=1).all():
            lost[int(j)] = search.after_loss(left)
    return lost
