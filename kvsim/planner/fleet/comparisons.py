"""Fleets that the chosen one is compared with: other replicas, limits, loads and certainty."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InfeasibleError, InputError
from kvsim.frozen import frozen
from kvsim.planner.fleet.demand import as_time
from kvsim.planner.fleet.offers import (
    CapacityQuestion,
    Configuration,
    FleetLimits,
    Rated,
    Spread,
    known_spread,
)
from kvsim.planner.fleet.play import Market, measure_market
from kvsim.planner.fleet.schedules import ScheduleSearch
from kvsim.planner.fleet.search import (
    CHEAPER,
    MAX_PROPOSALS,
    Certainty,
    FleetSearch,
    SearchResult,
    within_limits,
)

# other fleets for the same question

TARGET_FACTOR = 2.0  # times as long as a target, to see what it costs
PRICE_ROUNDING = 1e-6  # relative: prices that the programme's solver rounds
COMPARISON_PROPOSALS = 8  # fleets that are proposed for a comparison, at most
ONE_KIND, FULL_KV = "one kind of replica", "full KV"


@frozen
class OtherFleet:
    """Another fleet for the same question; None if there is none, with the reason."""

    label: str
    found: SearchResult | None
    configurations: list[Configuration]
    reason: str = ""

    def within(self, market: Market, limits: FleetLimits) -> bool:
        """Whether it is a fleet of this market and of as many kinds of replica as limits say.

        The cheapest fleet of all is the cheapest of every part of a market that has its replicas.
        """
        if self.found is None:
            return False
        used = np.flatnonzero(self.found.fleet.replicas)
        names = {x.name for x in market.configurations}
        some = 1 + limits.mixed <= len(used) <= limits.configurations
        return bool(some and all(self.configurations[j].name in names for j in used))

    @property
    def cost(self) -> float:
        """Mean price; infinite if there is none. [USD/h]"""
        return self.found.fleet.cost if self.found else float("inf")

    def cheaper(self, other: "OtherFleet") -> bool:
        """Whether it is the cheaper one by more than rounding."""
        return self.cost < other.cost * (1 - PRICE_ROUNDING)

    def named(self, label: str) -> "OtherFleet":
        """The same fleet as the answer to something else."""
        return replace(self, label=label)

    def at(self, label: str, question: CapacityQuestion, load: float) -> "OtherFleet | None":
        """The same fleet where it does under another load too, else None.

        Nothing cheaper does then with more: it did not with less.
        """
        if self.found is None:
            return None
        market = Market(self.configurations, self.found.offers, np.array([]))
        fleet = self.found.fleet
        search = search_of(question, market, load=load)
        played = search.keeps(fleet.running, fleet.share)
        if played is None:
            return None
        return replace(
            self, label=label, found=replace(self.found, fleet=replace(fleet, played=played))
        )


def search_of(
    question: CapacityQuestion,
    market: Market,
    limits: FleetLimits | None = None,
    load: float = 1.0,
    tell: Callable[[str], None] = lambda _: None,
    rounds: int = MAX_PROPOSALS,
    spreads: Sequence[Spread] | None = None,
) -> FleetSearch:
    """A market's search for the cheapest fleet, before it is run."""
    kind = FleetSearch if question.schedule is None else ScheduleSearch
    return kind(question, market, limits, load, tell, rounds, spreads)


def fleet_for(
    label: str, question: CapacityQuestion, market: Market, limits: FleetLimits, load: float
) -> OtherFleet:
    """The cheapest fleet of a market, or why there is none.

    Where no proposal meets the targets, one of a single kind may: there are fewer to choose from.
    """
    try:
        if not market.configurations:
            raise InfeasibleError("none on the shortlist")
        search = search_of(question, market, limits, load, rounds=COMPARISON_PROPOSALS)
        found = simplify_fleet(search, search.run())
    except (InfeasibleError, InputError) as problem:
        if limits.configurations > 1 and not limits.mixed and market.configurations:
            one = replace(limits, configurations=1)
            return fleet_for(label, question, market, one, load)
        return OtherFleet(label, None, market.configurations, str(problem))
    return OtherFleet(label, found, market.configurations)


def simplify_fleet(search: FleetSearch, found: SearchResult) -> SearchResult:
    """The same replicas with less to set up, where they do as well for the price.

    That is full KV and nothing beside it, else their technique with nothing beside it.
    """
    if search.schedule is not None:
        return found
    replicas = found.fleet.replicas
    for as_full in (True, False):
        plain = np.zeros_like(replicas)
        for j in np.flatnonzero(replicas):
            mine = search.configurations[j]
            technique = "full" if as_full else mine.technique
            twins = [k for k, x in enumerate(search.configurations) if _is_twin(x, mine, technique)]
            plain[twins[0] if twins else j] += replicas[j]
        if (plain == replicas).all() or not within_limits(search.offers, plain, search.limits):
            continue
        proven = search.tried(plain)
        if proven is not None and proven.cost <= found.fleet.cost * (1 + CHEAPER):
            return replace(found, fleet=proven)
    return found


def _is_twin(x: Configuration, other: Configuration, technique: str) -> bool:
    """Whether a kind is another's GPUs with a technique and nothing beside."""
    d, mine = x.costs.deployment, other.costs.deployment
    same = (d.hardware.name, d.parallelism, d.weights) == (
        mine.hardware.name,
        mine.parallelism,
        mine.weights,
    )
    return same and x.technique == technique and not x.extras


def fleet_of_one_kind(question: CapacityQuestion, market: Market, load: float) -> OtherFleet:
    """The cheapest fleet of one kind of replica."""
    one = replace(question.limits, configurations=1)
    return fleet_for(ONE_KIND, question, market, one, load)


def full_kv_market(market: Market) -> Market:
    """The replicas of a market that run no technique."""
    return market.where(lambda x: x.costs.technique.name == "full")


def find_alternatives(
    question: CapacityQuestion,
    market: Market,
    load: float,
    chosen: OtherFleet,
    known: tuple[OtherFleet, ...],
    tell: Callable[[str], None],
) -> tuple[OtherFleet, list[OtherFleet]]:
    """Other fleets for the same question, after those that are known, and the cheapest of all.

    A search among fewer replicas may come upon a cheaper fleet than that among all.

    Parameters
    ----------
    chosen : the cheapest fleet that is known.
    known : the cheapest of one kind, and of full KV.
    """
    one = replace(question.limits, configurations=1)
    some = [(ONE_KIND, market, one), (FULL_KV, full_kv_market(market), question.limits)]
    if question.limits.configurations > 1 and len(market.configurations) > 1:
        mixed = replace(question.limits, mixed=True)
        some.append(("several kinds of replica", market, mixed))
    for label, uses in (
        ("GPU memory alone for prefixes", _uses_tiers),
        ("no prefill apart", _uses_pools),
    ):
        if any(map(uses, market.configurations)):
            some.append((label, market.where(lambda x, uses=uses: not uses(x)), question.limits))  # type: ignore[misc]
    gpus = dict.fromkeys(x.gpu for x in market.configurations)
    if len(gpus) > 1:
        some += [
            (f"{gpu} alone", market.where(lambda x, gpu=gpu: x.gpu == gpu), one)  # type: ignore[misc]
            for gpu in gpus
        ]
    found = list(known)
    for label, part, limits in some[len(known) :]:
        if chosen.within(part, limits):
            found.append(chosen.named(label))
            continue
        tell(f"for comparison: {label}")
        found.append(fleet_for(label, question, part, limits, load))
    best = min([chosen, *found], key=lambda x: x.cost)
    if not best.cheaper(chosen):
        return chosen, found
    return best, [
        best.named(x.label) if best.within(part, limits) else x
        for x, (_, part, limits) in zip(found, some, strict=True)
    ]


def place_in_market(
    other: OtherFleet, market: Market, search: FleetSearch, found: SearchResult
) -> SearchResult:
    """A fleet of some of a market's replicas as one of the market."""
    assert other.found is not None
    fleet, names = other.found.fleet, [x.name for x in market.configurations]
    place = [names.index(x.name) for x in other.configurations]

    def spread(of_some: NDArray[Any]) -> NDArray[Any]:
        whole = np.zeros((*of_some.shape[:-1], len(names)), of_some.dtype)
        whole[..., place] = of_some
        return whole

    running, share = spread(fleet.running), spread(fleet.share)
    proven = replace(
        fleet,
        running=running,
        share=share,
        reserved=spread(fleet.reserved),
        played=search.played(running, share),
    )
    return replace(
        found,
        fleet=proven,
        offers=search.current,
        bound=min(found.bound, fleet.cost),
    )


def break_even_price(chosen: OtherFleet, alone: OtherFleet, gpu: str) -> float | None:
    """Price of a GPU at which a fleet of it alone would cost what the chosen one does. [USD/h]

    What the chosen fleet has of that GPU becomes cheaper with it. None where there is no such fleet
    or it has no more of them.
    """
    if chosen.found is None or alone.found is None:
        return None
    fleet, other = chosen.found.fleet.replicas, alone.found.fleet.replicas
    some, mine = chosen.configurations, [x.gpu == gpu for x in chosen.configurations]
    rest = sum(n * x.rent for n, x, own in zip(fleet, some, mine, strict=True) if not own)
    has = sum(n * x.gpus for n, x, own in zip(fleet, some, mine, strict=True) if own)
    more = sum(n * x.gpus for n, x in zip(other, alone.configurations, strict=True)) - has
    return float(rest / more) if more > 0 and rest > 0 else None


def relaxed_limits(limits: FleetLimits) -> dict[str, FleetLimits]:
    """The options that limit a fleet, each with what is left without it."""
    free, found = FleetLimits(), {}
    for name, called in (
        ("gpus", "--max-gpus"),
        ("gpus_of", "--max-gpus"),
        ("host", "--max-host"),
        ("power", "--max-power"),
        ("configurations", "--configurations"),
        ("headroom", "--headroom"),
        ("failures", "--failures"),
    ):
        if getattr(limits, name) != getattr(free, name):
            found[called] = replace(limits, **{name: getattr(free, name)})
    return found


def fleets_without_limits(
    question: CapacityQuestion,
    market: Market,
    load: float,
    chosen: OtherFleet,
    tell: Callable[[str], None],
) -> list[OtherFleet]:
    """Fleets without each limit that was set, and with targets twice as long.

    The former carry the whole trace, also where the limits allow a part of it. The latter are found
    from what replicas carry within the targets, so a cheaper one may exist.
    """
    some = []
    whole = "" if load == 1 else "the whole trace "
    for called, changed in relaxed_limits(question.limits).items():
        some.append((f"{whole}without {called}", question, changed, 1.0))
    for name in ("ttft", "tpot"):
        target = getattr(question.targets, name)
        if any(getattr(x, name) != float("inf") for x in question.targets.each):
            loose = question.targets.times(name, TARGET_FACTOR)
            said = f"{name.upper()} at most {as_time(TARGET_FACTOR * target)}"
            if question.targets.longer:
                said = f"{name.upper()} {TARGET_FACTOR:g} times as long in every class"
            some.append((said, replace(question, targets=loose), question.limits, load))
    found = []
    for label, other, limits, carried in some:
        tell(f"for comparison: {label}")
        free = fleet_for(label, other, market, limits, carried)
        if carried == load and chosen.cheaper(free):  # it does what is looser, too
            free = chosen.named(label)
        found.append(free)
    return found


def _uses_tiers(x: Configuration) -> bool:
    return x.tiers


def _uses_pools(x: Configuration) -> bool:
    return x.apart is not None


# robust fleets

ROBUST = "95 % certain"  # the fleet that keeps its targets with `SURE`
MAX_SLOWDOWN = 100.0  # slowdown beyond which no fleet is sought: it would say nothing
REMEASURED = 6  # configurations that are measured once more for slower replicas, the cheapest


def find_robust_fleet(
    question: CapacityQuestion,
    rated: list[Rated],
    market: Market,
    load: float,
    chosen: OtherFleet,
    sure: Certainty,
    tell: Callable[[str], None],
) -> OtherFleet:
    """The cheapest fleet that keeps its targets with ``SURE``: the chosen one if it does.

    What replicas carry with longer times is derived from what they carry without; where that finds
    no fleet, it is measured.
    """
    if sure.sure:
        return chosen.named(ROBUST)
    given = question.spread
    if given is not None and given.slowdown() > MAX_SLOWDOWN:
        reason = f"with this spread times are up to {given.slowdown():.3g} times as long"
        return OtherFleet(ROBUST, None, market.configurations, reason)
    tell(f"for comparison: {ROBUST}")
    each = _cheapest_robust(question, market, load, slower=True)
    if not any(x.found for x in each):
        cheap = sorted(range(len(rated)), key=lambda j: float(market.cost_alone[j]))[:REMEASURED]
        some = [rated[j] for j in cheap]
        slowdowns = np.array([_spread_of(question, x.configuration).slowdown() for x in some])
        each = _cheapest_robust(
            question,
            measure_market(some, question.traffic, question.targets, slowdowns),
            load,
            slower=False,
        )
    uniform, mixed = each  # of several kinds only where that is cheaper, as the chosen fleet is
    return mixed if mixed.cheaper(uniform) or uniform.found is None else uniform


def _spread_of(q: CapacityQuestion, x: Configuration) -> Spread:
    return q.spread or known_spread([x])


def _cheapest_robust(
    q: CapacityQuestion, market: Market, load: float, slower: bool
) -> list[OtherFleet]:
    """The cheapest fleet of one kind, and of any.

    Parameters
    ----------
    slower : replicas carry less than the market says, in proportion to their slowdown.
    """
    spreads, each = [_spread_of(q, x) for x in market.configurations], []
    for limits in (replace(q.limits, configurations=1), q.limits):
        search = search_of(q, market, limits, load, rounds=COMPARISON_PROPOSALS, spreads=spreads)
        if slower:
            search.factor = 1 / np.array([x.slowdown() for x in spreads])
        try:
            each.append(
                OtherFleet(ROBUST, simplify_fleet(search, search.run()), market.configurations)
            )
        except (InfeasibleError, InputError) as problem:
            each.append(OtherFleet(ROBUST, None, market.configurations, str(problem)))
    return each
