"""The cheapest fleet that meets the targets when it plays the trace.

The programme proposes a fleet, the simulation says whether it meets the targets. Where it does not,
what its replicas are thought to carry is lowered and the programme is solved again without that
fleet; where it does with room to spare, it is raised. In the end no fleet with one replica less, or
with one replica of another kind, is cheaper and meets them.
"""

from collections.abc import Callable

import numpy as np

from kvsim.errors import InfeasibleError
from kvsim.graph import Array
from kvsim.planner.fleet.arrays import (
    Counts,
    Demand,
    FleetCut,
    FleetLimits,
    FleetPlan,
    Offers,
    Schedule,
)
from kvsim.planner.fleet.configurations import Configuration
from kvsim.planner.fleet.dispatch import losses_of, utilisation
from kvsim.planner.fleet.near import CHEAPER, neighbours
from kvsim.planner.fleet.play import Played, play
from kvsim.planner.fleet.proposal import propose
from kvsim.planner.fleet.proven import Found, Proven
from kvsim.planner.fleet.survival import FatalLoss
from kvsim.planner.fleet.targets import FleetTargets
from kvsim.planner.fleet.traffic import Traffic

ROUNDS = 24  # fleets that the programme proposes, at most
LOWER = 0.94  # what a kind of replica that misses a target is thought to carry, of what it was
MOST_SPARE = 1.3  # load up to which a fleet that meets the targets is tried
SPARE = 1.03  # load from which a fleet has room to spare
OVERFULL = 1.3  # utilisation above which a smaller fleet is not worth a simulation
DISPATCHES = 3  # divisions of the classes among a fleet's replicas that are tried


class FleetSearch:
    """One trace, one set of limits; it remembers what it simulated."""

    def __init__(
        self,
        traffic: Traffic,
        configurations: list[Configuration],
        offers: Offers,
        targets: FleetTargets,
        limits: FleetLimits,
        schedule: Schedule | None = None,
        load: float = 1.0,
        slowdown: float = 1.0,
        tell: Callable[[str], None] = lambda _: None,
        rounds: int = ROUNDS,
    ) -> None:
        """Remember what is searched; the traffic's own speed is a load of 1."""
        self.rounds = rounds
        self.traffic, self.configurations, self.targets = traffic, configurations, targets
        self.limits, self.schedule, self.tell = limits, schedule, tell
        self.load, self.slowdown = load, slowdown
        self.offers = offers
        self.demand = Demand(traffic.demand.rate * load, traffic.demand.hours)
        self.factor = np.ones(len(offers))
        self.simulations = self.proposals = 0
        self.seconds = self.relaxed = 0.0
        self.cuts: tuple[FleetCut, ...] = ()
        self.losses: tuple[FatalLoss, ...] = ()

    def run(self) -> Found:
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
        return Found(best, self.current, bound, self.proposals, self.simulations, gap, self.seconds)

    @property
    def current(self) -> Offers:
        """What the replicas are thought to carry by now."""
        return self.offers.times(self.factor)

    def _propose(self) -> tuple[Proven | None, FleetPlan]:
        """The programme's fleets, until it has none that is cheaper."""
        best: Proven | None = None
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
            if spare < SPARE:
                break
        assert plan is not None
        return best, plan

    def _prove(self, plan: FleetPlan) -> Proven | None:
        """Play the trace with the programme's fleet; None if it misses the targets."""
        for _ in range(DISPATCHES):
            share = self.dispatch(plan.replicas)
            played = self.played(plan.running, share)
            if played.meets(self.targets):
                if not self._survives(plan.running, share):
                    return None
                return Proven(plan.running, plan.reserved, share, plan.cost, played)
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
                self.factor[j] *= LOWER

    def _spare(self, proven: Proven) -> float:
        """How much faster the trace may be until a target is missed."""
        low, high = 1.0, MOST_SPARE
        if self.played(proven.running, proven.share, high).meets(self.targets):
            return high
        for _ in range(3):
            middle = (low * high) ** 0.5
            if self.played(proven.running, proven.share, middle).meets(self.targets):
                low = middle
            else:
                high = middle
        return low

    def _survives(self, running: Counts, share: Array) -> bool:
        """Whether the fleet meets the targets with headroom, and after every loss."""
        headroom = self.limits.headroom
        if headroom and not self.played(running, share, 1 + headroom).meets(self.targets):
            return False
        if not self.limits.failures:
            return True
        most = running.max(axis=0)
        for lost in losses_of(most, self.limits.failures):
            left = np.maximum(running - np.array(lost), 0)
            if not left.any(axis=1).all():
                return False
            if not self.after_loss(left).meets(self.targets):
                if self.schedule is None:  # neither do others that a loss leaves with these
                    self.cuts += (FleetCut(left[0], 1 + self.limits.failures),)
                return False
        return True

    def after_loss(self, running: Counts) -> Played:
        """The trace on what is left of a fleet, its classes divided anew."""
        return self.played(running, self.divided(running))

    def divided(self, running: Counts) -> Array:
        """Shares of the classes, the same in all windows. (w, c, j)"""
        return np.tile(self._shared(running[0], self.demand), (len(running), 1, 1))

    def _shared(self, replicas: Counts, demand: Demand) -> Array:
        """Shares of the classes for some replicas; even ones if they cannot carry them. (c, j)"""
        found, share = utilisation(self.current, demand, replicas, 1.0)
        if np.isfinite(found):
            served = share.sum(axis=1, keepdims=True) > 0
            return np.where(served, share, self._evenly(replicas))
        return self._evenly(replicas)

    def _evenly(self, replicas: Counts) -> Array:
        weight = replicas.astype(float) if replicas.any() else np.ones(len(replicas))
        return np.tile(weight / weight.sum(), (self.offers.classes, 1))

    def dispatch(self, replicas: Counts) -> Array:
        """The shares that keep the busiest kind of replica least busy. (w, c, j)"""
        found, share = utilisation(self.current, self.demand, replicas, self.limits.late)
        if not np.isfinite(found):
            share = self._shared(replicas, self.demand)
        share = np.where(share.sum(axis=1, keepdims=True) > 0, share, self._evenly(replicas))
        return np.tile(share, (len(self.demand.rate), 1, 1))

    def played(self, running: Counts, share: Array, load: float = 1.0) -> Played:
        """The trace on a fleet."""
        self.simulations += 1
        return play(
            self.traffic, self.configurations, running, share, self.load * load, self.slowdown
        )

    def keeps(self, running: Counts, share: Array) -> Played | None:
        """What a fleet does, if it meets the targets, with headroom and after every loss."""
        played = self.played(running, share)
        return played if played.meets(self.targets) and self._survives(running, share) else None

    # what is near

    def _descend(self, best: Proven) -> Proven:
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

    def tried(self, replicas: Counts) -> Proven | None:
        """A fleet if it meets the targets, and is not surely too small."""
        busiest, _ = utilisation(self.current, self.demand, replicas, 1.0)
        if busiest > OVERFULL or any(cut.excludes(replicas) for cut in self.cuts):
            return None
        running = np.tile(replicas, (len(self.demand.rate), 1))
        share = self.dispatch(replicas)
        played = self.keeps(running, share)
        if played is None:
            self.cuts += (FleetCut(replicas),)
            return None
        cost = float(self.offers.rent @ replicas)
        reserved = np.where(self.offers.reserved < self.offers.price, replicas, 0)
        return Proven(running, reserved, share, cost, played)

    def named(self, replicas: Counts) -> str:
        """A fleet in words."""
        return ", ".join(
            f"{n} x {self.configurations[j].name}" for j, n in enumerate(replicas) if n
        )
