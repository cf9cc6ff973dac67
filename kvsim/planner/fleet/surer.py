"""The cheapest fleet that keeps its targets with 95 %, by the likelihood that is said of fleets."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvsim.errors import InfeasibleError, InputError
from kvsim.graph import Array
from kvsim.planner.fleet.arrays import Counts, FleetPlan
from kvsim.planner.fleet.beside import COMPARED, OtherFleet, plainer, search_of
from kvsim.planner.fleet.certainty import Certainty, Spread, known, surely
from kvsim.planner.fleet.configurations import Configuration
from kvsim.planner.fleet.market import Market, measured
from kvsim.planner.fleet.play import Played
from kvsim.planner.fleet.proven import Proven
from kvsim.planner.fleet.question import CapacityQuestion
from kvsim.planner.fleet.scheduled import ScheduleSearch
from kvsim.planner.fleet.search import FleetSearch
from kvsim.planner.fleet.shortlist import Rated

CERTAIN = "95 % certain"  # the fleet that keeps its targets with `SURE`
SLOWEST = 100.0  # slowdown beyond which no fleet is sought: it would say nothing
NEAREST = 6  # configurations that are measured once more for slower replicas, the cheapest


class SureSearch(FleetSearch):
    """A search for fleets that keep their targets with `SURE`.

    Every fleet is tried with times as long as its own replicas' spread says that they are with that
    likelihood at most, and those that do are judged by their likelihood itself.
    """

    def __init__(self, search: FleetSearch, spreads: list[Spread]) -> None:
        """Search what another does, with the spread of every kind of replica."""
        super().__init__(
            search.traffic, search.configurations, search.offers, search.targets,
            search.limits, search.schedule, search.load, tell=search.tell, rounds=search.rounds,
        )  # fmt: skip
        self.spreads = spreads

    def _widest(self, running: Counts) -> Spread:
        used = np.flatnonzero(running.any(axis=0))
        return max((self.spreads[j] for j in used), key=lambda x: x.sigma)

    def _prove(self, plan: FleetPlan) -> Proven | None:
        self.slowdown = self._widest(plan.running).slowdown()
        return super()._prove(plan)

    def keeps(self, running: Counts, share: Array) -> Played | None:
        """What a fleet does with times that long, if it keeps the targets with `SURE`."""
        self.slowdown = self._widest(running).slowdown()
        return super().keeps(running, share)

    def _survives(self, running: Counts, share: Array) -> bool:
        kept = super()._survives(running, share)
        return kept and surely(self, running, share, self._widest(running))


class SureSchedule(SureSearch, ScheduleSearch):
    """The same for schedules: windows are tried with what runs in them, then what runs that day."""

    def always(self) -> FleetSearch:
        """The same search for replicas that always run."""
        return SureSearch(super().always(), self.spreads)

    def slowed(self, running: Counts) -> float:
        """How many times as long some replicas take with `SURE` at most."""
        return self._widest(running).slowdown()


def surer(
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
        return chosen.named(CERTAIN)
    given = question.spread
    if given is not None and given.slowdown() > SLOWEST:
        reason = f"with this spread times are up to {given.slowdown():.3g} times as long"
        return OtherFleet(CERTAIN, None, market.configurations, reason)
    tell(f"for comparison: {CERTAIN}")
    each = _cheapest(question, market, load, slower=True)
    if not any(x.found for x in each):
        cheap = sorted(range(len(rated)), key=lambda j: float(market.cost_alone[j]))[:NEAREST]
        some = [rated[j] for j in cheap]
        slowdowns = np.array([_spread(question, x.configuration).slowdown() for x in some])
        each = _cheapest(
            question,
            measured(some, question.traffic, question.targets, slowdowns),
            load,
            slower=False,
        )
    uniform, mixed = each  # of several kinds only where that is cheaper, as the chosen fleet is
    return mixed if mixed.cheaper(uniform) or uniform.found is None else uniform


def _spread(q: CapacityQuestion, x: Configuration) -> Spread:
    return q.spread or known([x])


def _cheapest(q: CapacityQuestion, market: Market, load: float, slower: bool) -> list[OtherFleet]:
    """The cheapest fleet of one kind, and of any.

    Parameters
    ----------
    slower : replicas carry less than the market says, in proportion to their slowdown.
    """
    spreads, each = [_spread(q, x) for x in market.configurations], []
    for limits in (replace(q.limits, configurations=1), q.limits):
        kind = SureSearch if q.schedule is None else SureSchedule
        search = kind(search_of(q, market, limits, load, rounds=COMPARED), spreads)
        if slower:
            search.factor = 1 / np.array([x.slowdown() for x in spreads])
        try:
            each.append(OtherFleet(CERTAIN, plainer(search, search.run()), market.configurations))
        except (InfeasibleError, InputError) as problem:
            each.append(OtherFleet(CERTAIN, None, market.configurations, str(problem)))
    return each
