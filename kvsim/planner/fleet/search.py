"""The cheapest fleet that meets the targets when it plays the trace, and how likely it does.

The programme proposes a fleet, the simulation says whether it meets the targets. Where it does not,
what its replicas are thought to carry is lowered and the programme is solved again without that
fleet; where it does with room to spare, it is raised. In the end no fleet with one replica less, or
with one replica of another kind, is cheaper and meets them.

All times of a stack are taken to be off by one factor, whose logarithm is normal with the spread
that was seen on rows the stack was not fitted to. The fleet plays the trace with times so many
times as long, at slowdowns that stand for parts of that distribution; the likelihood is the share
of it at which the targets are met. More slowdown does not always mean longer waits, as bursts meet
by chance, so no single slowdown says where a fleet begins to miss. Whether the trace itself comes
again is another question, which half, one and a half and twice the load speak to.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf

import numpy as np

from kvsim.errors import InfeasibleError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.fleet.demand import Counts, Demand
from kvsim.planner.fleet.milp import (
    FatalLoss,
    FleetCut,
    FleetPlan,
    even_shares,
    possible_losses,
    propose,
    utilisation,
)
from kvsim.planner.fleet.offers import SURE, CapacityQuestion, FleetLimits, Offers, Spread
from kvsim.planner.fleet.play import Market, Played, play

# simulated fleets


@frozen
class SimulatedFleet:
    """A fleet that meets the targets in simulation.

    Attributes
    ----------
    running, share
        Replicas by window and kind (w, j), and what they serve (w, c, j).
    cost
        Mean price. [USD/h]
    """

    running: Counts
    reserved: Counts
    share: Array
    cost: float
    played: Played

    @property
    def replicas(self) -> Counts:
        """The most that run at once. (j,)"""
        return np.asarray(self.running.max(axis=0))


@frozen
class SearchResult:
    """The answer of a search.

    Attributes
    ----------
    fleet
        The cheapest fleet that was proven.
    bound
        What parts of replicas would cost. [USD/h]
    proposals, simulations
        How many fleets the programme proposed, and how many were simulated.
    mixes
        How many mixes of replicas were simulated in one window of a schedule.
    gap
        Cost above the programme's own bound, relative.
    """

    fleet: SimulatedFleet
    offers: Offers
    bound: float
    proposals: int
    simulations: int
    gap: float
    seconds: float
    mixes: int = 0


# neighbours

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
            if other != j and price < cost * (1 - CHEAPER) and within_limits(offers, near, limits):
                found.add((price, tuple(near.tolist())))
    for _, counts in sorted(found):
        yield np.array(counts, np.int64)


def within_limits(offers: Offers, replicas: Counts, limits: FleetLimits) -> bool:
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


# likelihood

FASTER_PLAYS, SLOWER_PLAYS = 5, 50  # equally likely slowdowns that are played on either side of 1
LIKELIHOOD_ROUNDING = 1e-9


@frozen
class SlowedPlay:
    """A fleet with longer times.

    Attributes
    ----------
    slowdown
        Everything takes so many times as long as predicted.
    weight
        Share of the distribution of slowdowns that it stands for.
    ttft, tpot
        In parts of their targets, of whatever was asked that is worst off.
    held
        Sequences that one replica of each kind held at most, in the trace, with headroom on top,
        and after every loss.
    """

    slowdown: float
    weight: float
    ttft: float
    tpot: float
    held: Mapping[int, int]

    @property
    def both(self) -> float:
        """The worse of the two."""
        return max(self.ttft, self.tpot)


@frozen
class Certainty:
    """How likely what was asked is kept: the targets, with headroom and after every loss.

    Attributes
    ----------
    slowed
        The plays that say so, the slowest first.
    """

    spread: Spread
    slowed: tuple[SlowedPlay, ...]

    @property
    def likely(self) -> dict[str, float]:
        """Probability of each target, and of both."""
        names = ("ttft", "tpot", "both")
        return {
            name: 1 - sum(x.weight for x in self.slowed if getattr(x, name) > 1) for name in names
        }

    @property
    def sure(self) -> bool:
        """Whether both targets are kept with `SURE`."""
        return self.likely["both"] >= SURE - LIKELIHOOD_ROUNDING

    def met_up_to(self, name: str) -> float:
        """The longest slowdown that was played below every one that missed; 1 is known to meet."""
        missed = min((x.slowdown for x in self.slowed if getattr(x, name) > 1), default=inf)
        return max(
            (x for x in (1.0, *(y.slowdown for y in self.slowed)) if x < missed), default=0.0
        )


def most_held(plays: Iterable[Played]) -> dict[int, int]:
    """Sequences that one replica of each kind held at most."""
    most: dict[int, int] = {}
    for g in (g for played in plays for g in played.groups):
        most[g.kind] = max(most.get(g.kind, 0), g.most_running)
    return most


# search

MAX_PROPOSALS = 24  # fleets that the programme proposes, at most
# What a kind of replica that misses a target is thought to carry, of what it was.
CAPACITY_STEP = 0.94
MAX_SPARE_LOAD = 1.3  # load up to which a fleet that meets the targets is tried
SPARE_LOAD = 1.03  # load from which a fleet has room to spare
OVERFULL_FLEET = 1.3  # utilisation above which a smaller fleet is not worth a simulation
MAX_DISPATCHES = 3  # divisions of the classes among a fleet's replicas that are tried


class FleetSearch:
    """One trace, one set of limits; it remembers what it simulated."""

    def __init__(
        self,
        question: CapacityQuestion,
        market: Market,
        limits: FleetLimits | None = None,
        load: float = 1.0,
        tell: Callable[[str], None] = lambda _: None,
        rounds: int = MAX_PROPOSALS,
        spreads: Sequence[Spread] | None = None,
    ) -> None:
        """Remember what is searched.

        Parameters
        ----------
        market : the kinds of replica that are considered, and what they carry.
        limits : in place of the question's.
        load : the trace so many times as fast; its own speed is 1.
        tell : is told what is being done.
        rounds : fleets that the programme proposes, at most.
        spreads : known error of each kind of replica. Where it is given, fleets must keep the
            targets with `SURE`: each is tried with times as long as they are with that likelihood
            at most, and one that does is judged by its likelihood itself.
        """
        self.question, self.market, self.load, self.tell = question, market, load, tell
        self.rounds, self.spreads = rounds, spreads
        self.traffic, self.targets = question.traffic, question.targets
        self.limits, self.schedule = limits or question.limits, question.schedule
        self.configurations, self.offers = market.configurations, market.offers
        traffic = question.traffic
        self.demand = Demand(traffic.demand.rate * load, traffic.demand.hours)
        self.factor = np.ones(len(self.offers))
        self.simulations = self.proposals = 0
        self.seconds = self.relaxed = 0.0
        self.cuts: tuple[FleetCut, ...] = ()
        self.losses: tuple[FatalLoss, ...] = ()

    def run(self) -> SearchResult:
        """Search.

        Raises
        ------
        InfeasibleError
            If no fleet within the limits is found that meets the targets.
        """
        best, plan = self._propose()
        if best is None:
            raise InfeasibleError(f"none of {self.proposals} fleets met the targets in simulation")
        best = self._descend(best)
        bound = min(self.relaxed, best.cost)
        gap = max(best.cost - plan.bound, 0.0) / best.cost
        return SearchResult(
            best, self.current, bound, self.proposals, self.simulations, gap, self.seconds
        )

    @property
    def current(self) -> Offers:
        """What the replicas are thought to carry by now."""
        return self.offers.times(self.factor)

    def _propose(self) -> tuple[SimulatedFleet | None, FleetPlan]:
        """The programme's fleets, until it has none that is cheaper."""
        best: SimulatedFleet | None = None
        plan: FleetPlan | None = None
        for _ in range(self.rounds):
            try:
                plan = propose(self.current, self.demand, self.limits, None, self.cuts, self.losses)
            except InfeasibleError:
                if best is None or plan is None:
                    raise
                break
            self.seconds, self.losses = self.seconds + plan.seconds, plan.losses
            if not self.relaxed:  # of what was measured, before anything is raised or lowered
                self.relaxed = plan.relaxed
            if best is not None and plan.cost >= best.cost * (1 - CHEAPER):
                break
            self.proposals += 1
            self.tell(f"fleet {self.proposals}: {plan.cost:.2f} USD/h {self.named(plan.replicas)}")
            proven = self._prove(plan)
            if proven is None:
                self.cuts += (FleetCut(plan.replicas),)
                continue
            best = proven
            spare = self._spare(proven)
            used = proven.replicas > 0
            self.factor[used] *= max(spare, 1.0)
            if spare < SPARE_LOAD:
                break
        assert plan is not None
        return best, plan

    def _prove(self, plan: FleetPlan) -> SimulatedFleet | None:
        """Play the trace with the programme's fleet; None if it misses the targets."""
        for _ in range(MAX_DISPATCHES):
            share = self.dispatch(plan.replicas)
            played = self.played(plan.running, share, slowdown=self.slowdown(plan.running))
            if played.meets(self.targets):
                if not self._survives(plan.running, share):
                    return None
                return SimulatedFleet(plan.running, plan.reserved, share, plan.cost, played)
            before = self.factor.copy()
            self._lower(played)
            if (self.factor == before).all():
                return None
            if utilisation(self.current, self.demand, plan.replicas, self.limits.late)[0] > 1:
                return None
        return None

    def _lower(self, played: Played) -> None:
        """Lower what the kinds carry that miss most."""
        for j in np.unique(played.kind):
            mine = played.kind == j
            if not played.meets(self.targets, mine):
                self.factor[j] *= CAPACITY_STEP

    def _spare(self, proven: SimulatedFleet) -> float:
        """How much faster the trace may be until a target is missed."""
        low, high = 1.0, MAX_SPARE_LOAD
        slowdown = self.slowdown(proven.running)
        if self.played(proven.running, proven.share, high, slowdown).meets(self.targets):
            return high
        for _ in range(3):
            middle = (low * high) ** 0.5
            if self.played(proven.running, proven.share, middle, slowdown).meets(self.targets):
                low = middle
            else:
                high = middle
        return low

    def _survives(self, running: Counts, share: Array) -> bool:
        """Whether the fleet meets the targets with headroom, after every loss, and surely."""
        headroom, slowdown = self.limits.headroom, self.slowdown(running)
        if headroom and not self.played(running, share, 1 + headroom, slowdown).meets(self.targets):
            return False
        return self._survives_losses(running, slowdown) and (
            self.spreads is None or is_sure(self, running, share, self._widest(running))
        )

    def _survives_losses(self, running: Counts, slowdown: float) -> bool:
        """Whether the fleet meets the targets after every loss."""
        if not self.limits.failures:
            return True
        most = running.max(axis=0)
        for lost in possible_losses(most, self.limits.failures):
            left = np.maximum(running - np.array(lost), 0)
            if not left.any(axis=1).all():
                return False
            if not self.after_loss(left, slowdown).meets(self.targets):
                if self.schedule is None:  # neither do others that a loss leaves with these
                    self.cuts += (FleetCut(left[0], 1 + self.limits.failures),)
                return False
        return True

    def after_loss(self, running: Counts, slowdown: float = 1.0) -> Played:
        """The trace on what is left of a fleet, its classes divided anew."""
        return self.played(running, self.divided(running), slowdown=slowdown)

    def divided(self, running: Counts) -> Array:
        """Shares of the classes, the same in all windows. (w, c, j)"""
        return np.tile(self._shared(running[0], self.demand), (len(running), 1, 1))

    def _shared(self, replicas: Counts, demand: Demand) -> Array:
        """Shares of the classes for some replicas; even ones if they cannot carry them. (c, j)"""
        found, share = utilisation(self.current, demand, replicas, 1.0)
        if np.isfinite(found):
            served = share.sum(axis=1, keepdims=True) > 0
            return np.where(served, share, even_shares(self.offers, replicas))
        return even_shares(self.offers, replicas)

    def dispatch(self, replicas: Counts) -> Array:
        """The shares that keep the busiest kind of replica least busy. (w, c, j)"""
        found, share = utilisation(self.current, self.demand, replicas, self.limits.late)
        if not np.isfinite(found):
            share = self._shared(replicas, self.demand)
        evenly = even_shares(self.offers, replicas)
        share = np.where(share.sum(axis=1, keepdims=True) > 0, share, evenly)
        return np.tile(share, (len(self.demand.rate), 1, 1))

    def played(
        self, running: Counts, share: Array, load: float = 1.0, slowdown: float = 1.0
    ) -> Played:
        """The trace on a fleet."""
        self.simulations += 1
        load *= self.load
        return play(self.traffic, self.configurations, running, share, load, slowdown)

    def _widest(self, running: Counts) -> Spread:
        """The widest spread of the kinds that run."""
        assert self.spreads is not None
        used = np.flatnonzero(running.any(axis=0))
        return max((self.spreads[int(j)] for j in used), key=lambda x: x.sigma)

    def slowdown(self, running: Counts) -> float:
        """How many times as long replicas take in what must meet the targets."""
        return 1.0 if self.spreads is None else self._widest(running).slowdown()

    def keeps(self, running: Counts, share: Array) -> Played | None:
        """What a fleet does, if it meets the targets, with headroom and after every loss."""
        played = self.played(running, share, slowdown=self.slowdown(running))
        return played if played.meets(self.targets) and self._survives(running, share) else None

    # what is near

    def _descend(self, best: SimulatedFleet) -> SimulatedFleet:
        """Cheaper neighbours, until none meets the targets."""
        while True:
            for replicas in neighbours(self.offers, best.replicas, self.limits):
                proven = self.tried(replicas)
                if proven is not None:
                    best = proven
                    self.tell(f"cheaper: {best.cost:.2f} USD/h {self.named(best.replicas)}")
                    break
            else:
                return best

    def tried(self, replicas: Counts) -> SimulatedFleet | None:
        """A fleet if it meets the targets, and is not surely too small."""
        busiest, _ = utilisation(self.current, self.demand, replicas, 1.0)
        if busiest > OVERFULL_FLEET or any(cut.excludes(replicas) for cut in self.cuts):
            return None
        running = np.tile(replicas, (len(self.demand.rate), 1))
        share = self.dispatch(replicas)
        played = self.keeps(running, share)
        if played is None:
            self.cuts += (FleetCut(replicas),)
            return None
        cost = float(self.offers.rent @ replicas)
        reserved = np.where(self.offers.reserved < self.offers.price, replicas, 0)
        return SimulatedFleet(running, reserved, share, cost, played)

    def named(self, replicas: Counts) -> str:
        """A fleet in words."""
        return ", ".join(
            f"{n} x {self.configurations[j].name}" for j, n in enumerate(replicas) if n
        )


def certainty(search: FleetSearch, fleet: SimulatedFleet, spread: Spread) -> Certainty:
    """How likely a fleet keeps what was asked."""
    return Certainty(spread, tuple(play_slowed(search, fleet.running, fleet.share, spread)))


def is_sure(search: FleetSearch, running: Counts, share: Array, spread: Spread) -> bool:
    """Whether a fleet keeps what was asked with `SURE`, without playing more than that needs."""
    seen: tuple[SlowedPlay, ...] = ()
    for one in play_slowed(search, running, share, spread):
        seen = (*seen, one)
        if not Certainty(spread, seen).sure:
            return False
    return True


def play_slowed(
    search: FleetSearch, running: Counts, share: Array, spread: Spread
) -> Iterator[SlowedPlay]:
    """A fleet at the slowdowns that stand for a spread, the slowest first."""
    upper = [1 - (i + 0.5) / (2 * SLOWER_PLAYS) for i in range(SLOWER_PLAYS)]
    lower = [0.5 - (i + 0.5) / (2 * FASTER_PLAYS) for i in range(FASTER_PLAYS)]
    for likely in (*upper, *lower):
        slowdown = spread.slowdown(likely)
        plays = tuple(_play_demanded(search, running, share, slowdown))
        over = [x.over(search.targets) for x in plays]
        yield SlowedPlay(
            slowdown,
            weight=0.5 / (SLOWER_PLAYS if likely > 0.5 else FASTER_PLAYS),
            ttft=max(x[0] for x in over),
            tpot=max(x[1] for x in over),
            held=most_held(plays),
        )


def _play_demanded(
    search: FleetSearch, running: Counts, share: Array, slowdown: float
) -> Iterator[Played]:
    """What must meet the targets: the trace, with headroom on top, and after every loss."""
    yield search.played(running, share, slowdown=slowdown)
    if search.limits.headroom:
        yield search.played(running, share, 1 + search.limits.headroom, slowdown)
    if search.limits.failures:
        for lost in possible_losses(running.max(axis=0), search.limits.failures):
            yield search.after_loss(np.maximum(running - np.array(lost), 0), slowdown)
