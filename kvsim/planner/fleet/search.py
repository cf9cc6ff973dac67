"""The cheapest fleet, by playing fleets: one `solve` answers every question about them.

Replicas of one kind are counted up from what they carry when they are always busy, then between the
last count that missed the targets and the first that kept them; each verdict is a play of the
traffic itself. Kinds come in the order of their bound on cost, and one whose bound is above the
best fleet so far is not played. Pass budgets and batch limits are tried where one replica less may
do, then pairs of kinds, of which each takes the requests that it serves for less.

What was played is remembered, and every fleet that answered one question is offered to the next:
a comparison, a what-if and the answer are the same function with another question, so none can name
a cheaper fleet that the others missed.

The probability that a fleet keeps its targets is over other days of the traffic, drawn from it in
blocks of time, and over the error of the times, whose logarithm is normal with the spread seen on
rows that no fit saw. Both are drawn once for all fleets.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import combinations, combinations_with_replacement
from math import ceil, floor, inf, isfinite, nan, sqrt

import numpy as np

from kvsim.evidence.ledger import WITHIN_80
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.fleet.demand import Counts, FleetTargets, Traffic
from kvsim.planner.fleet.milp import cheapest_schedule, scheduled_cost
from kvsim.planner.fleet.offers import (
    CapacityQuestion,
    Configuration,
    FleetLimits,
    ReplicaKind,
    Schedule,
    Spread,
    count_replicas,
    known_spread,
    list_kinds,
)
from kvsim.planner.fleet.play import Excess, Fleet, Played, play, serve

ROUNDING = 1e-9  # relative, of costs
PASSED_OVER = 0.9  # of the fewest replicas by halving, from which each count is played
BOUND_SHARE = 0.9  # of the replicas that are always busy, from which counts are tried
PREFIX_BOUND_SHARE = 0.5  # likewise where more replicas keep more prefixes
MOST_OF_BOUND, MOST_BEYOND = 16, 16  # replicas that are tried at most: times the bound, and more
DAYS, FEWER_DAYS = 32, 10  # that a probability is taken over
OTHER_DAYS = 100  # that choose no fleet, at most: the probability that is stated is over them
DAYS_REQUESTS = 200_000  # of all days together: those of long traces are fewer
LOWER_BATCH_LIMITS = (128, 64, 32, 16, 8)  # tried where the time per token is what is missed
PAIRED_PER_GPU = 2  # kinds of each card that pairs are made of
PAIRED_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)  # replicas of one kind of a pair
FEWEST_PLAYS = 14
PAIRED_REQUESTS = 350_000  # that are played for pairs at most, whatever their number
ALL_PAIRED_REQUESTS = 6_000_000  # likewise, for all questions together
TUNED_REQUESTS = 2_000_000  # that are played with other budgets, for all questions together
NEARLY = 1.3  # times its targets, up to which a fleet is played with other pass budgets
LARGER_PASSES = 2.0  # times its target of TTFT, up to which it is played with the largest passes
POOLED = 0.8
"""Where so many replicas were too few for a load, this share of them, times the ratio of the loads,
is taken as too few for another load: more replicas even out bursts better."""
GUESSES = (1.0, 1.25, 1.6, 2.5)  # times a known fleet's replicas by the load: a first cap on cost
SCHEDULED_KINDS = 3  # that a schedule is made of
SCHEDULE_ROUNDS, SCHEDULE_STEP = 12, 1.12  # windows that miss need so many times the replicas
LIGHT = 8  # times the replicas that are always busy: what waiting leaves
FEW_AT_REST, MOST_AT_REST = 32, 64  # replicas that show what is reached with hardly any load
REQUESTS_AT_REST = 2000  # that show it, of a long trace


def allow_all(_: Configuration) -> bool:
    """Every kind of replica may be rented."""
    return True


@frozen
class FleetQuestion:
    """What changes from one question about fleets to another.

    Attributes
    ----------
    targets, limits
        What must be kept, and what may be rented.
    load
        Clients, in times of the trace's.
    least
        What the fleet for a smaller load costs: one that costs less is not taken, as it keeps the
        targets by the luck of the days that were drawn. [USD/h]
    sure
        Probability with which the targets are to be kept; 0: on the trace with times as predicted.
    schedule
        Whether replicas start and stop; None: they always run.
    only
        Which kinds of replica may be rented.
    """

    targets: FleetTargets
    limits: FleetLimits
    load: float = 1.0
    least: float = 0.0
    sure: float = 0.0
    schedule: Schedule | None = None
    only: Callable[[Configuration], bool] = allow_all


@frozen
class Certainty:
    """How likely a fleet keeps the targets.

    Attributes
    ----------
    likely
        Probability by target, and of both.
    spread
        The error of the times.
    days
        Days that it was taken over.
    """

    likely: dict[str, float]
    spread: Spread
    days: int

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval of the probability of both: it holds four times in five."""
        z, n = WITHIN_80, self.days
        middle = (self.likely["both"] + z**2 / n / 2) / (1 + z**2 / n)
        half = z * sqrt(self.likely["both"] * (1 - self.likely["both"]) / n + (z / n / 2) ** 2)
        return max(middle - half / (1 + z**2 / n), 0.0), min(middle + half / (1 + z**2 / n), 1.0)


class FleetSolver:
    """All fleets that one traffic can be served by, and what is known of them so far.

    Parameters
    ----------
    question
        What is asked.
    tell
        Is told what is being done.

    Raises
    ------
    InputError
        If the model fits nowhere.
    InfeasibleError
        If no technique is admitted.
    """

    def __init__(self, question: CapacityQuestion, tell: Callable[[str], None]) -> None:
        self.question, self.tell = question, tell
        self.kinds: list[ReplicaKind] = list_kinds(question, tell)
        self.fleets: list[Fleet] = []  # that answered a question
        self._load_of: dict[int, float] = {}  # that each of them was found for
        self.plays, self._tuning = 0, 0  # all of them, and those with other budgets and limits
        self._tunable, self._pairable = float(TUNED_REQUESTS), float(ALL_PAIRED_REQUESTS)
        self.judged = [question.targets]  # that every play is held against
        self._excess: dict[tuple[object, ...], dict[FleetTargets, Excess]] = {}
        self._at_rest: dict[int, Played] = {}
        self._traffic: dict[tuple[float, int], Traffic] = {}
        self._busy: dict[int, float] = {}
        self._spreads: dict[frozenset[tuple[int, str]], Spread] = {}
        self._windows: dict[tuple[int, int, float], int] = {}
        self._too_few: dict[tuple[int, FleetTargets, float, int, float], dict[float, int]] = {}
        self._kind_of = {id(x): kind for kind in self.kinds for x in kind.choices}

    # traffic

    def traffic(self, load: float = 1.0, day: int = 0) -> Traffic:
        """Return the traffic of so many times as many clients, on the trace's day or another."""
        key = load, day
        if key not in self._traffic:
            if len(self._traffic) > 3 * DAYS:
                self._traffic.clear()
            self._traffic[key] = self.question.traffic.varied(load, day)
        return self._traffic[key]

    def count_days(self, asked: FleetQuestion) -> tuple[int, int]:
        """Days that a probability is taken over, and how many of them may be missed.

        They are as few as the missed ones allow, so that every load is judged as strictly: 1 of 13
        would ask for more certainty than 1 of 10.
        """
        days, miss = self._affordable_days(asked, DAYS), 1 - asked.sure
        may_miss = floor(miss * days + ROUNDING)
        return (ceil(may_miss / miss - ROUNDING) if may_miss else days), may_miss

    def _affordable_days(self, asked: FleetQuestion, most: int) -> int:
        """Days that can be played: long traces have fewer."""
        affordable = int(DAYS_REQUESTS / asked.load / self.question.traffic.work)
        return min(max(affordable, FEWER_DAYS), most)

    # verdicts

    def play(self, fleet: Fleet, load: float = 1.0, day: int = 0, slowdown: float = 1.0) -> Played:
        """Play traffic on a fleet."""
        self.plays += 1
        return play(self.traffic(load, day), fleet, slowdown)

    def measure_excess(
        self, fleet: Fleet, asked: FleetQuestion, load: float, day: int = 0, slowdown: float = 1.0
    ) -> Excess:
        """How far a fleet is beyond the targets; played once."""
        used = fleet.replicas > 0
        key = (
            tuple(id(x) for x, some in zip(fleet.kinds, used, strict=True) if some),
            fleet.running[:, used].tobytes(), fleet.share[..., used].round(6).tobytes(), load, day,
            slowdown,
        )  # fmt: skip
        found = self._excess.setdefault(key, {})
        if asked.targets not in found:
            played = self.play(fleet, load, day, slowdown)
            found |= {x: played.measure_excess(x) for x in {*self.judged, asked.targets}}
        return found[asked.targets]

    def stressed(self, fleet: Fleet, asked: FleetQuestion) -> Iterator[tuple[Fleet, float]]:
        """What a fleet must keep its targets as: with headroom, and after every loss."""
        limits, load = asked.limits, asked.load
        if limits.headroom:
            yield fleet, load * (1 + limits.headroom)
        yield fleet, load
        used = np.flatnonzero(fleet.replicas)
        for lost in combinations_with_replacement(used.tolist(), limits.failures):
            if not lost:
                continue
            left = np.maximum(fleet.running - np.bincount(lost, minlength=len(fleet.kinds)), 0)
            rest = self.fleet(fleet.kinds, left, asked)
            yield rest, load

    def keeps(self, fleet: Fleet, asked: FleetQuestion) -> bool:
        """Whether a fleet keeps the targets as surely as asked."""
        return self._missed(fleet, asked) is None

    def _missed(self, fleet: Fleet, asked: FleetQuestion) -> Excess | None:
        """How far a fleet is beyond the targets where it does not keep them; None if it does.

        Of the days that are too many to miss, it is the one that is missed by least.
        """
        cases = list(self.stressed(fleet, asked))
        idle = any(not x.running.any(axis=1).all() for x, _ in cases)
        if idle or fleet.cost < asked.least * (1 - ROUNDING):
            return Excess(inf, inf, inf)
        today = self._worst(cases, asked)
        if today.both > 1 or not asked.sure:
            return today if today.both > 1 else None
        days, may_miss = self.count_days(asked)
        left, missed = self._scenarios(fleet, 1, days), list[Excess]()
        while may_miss < len(missed) + len(left):  # else all that are left may be missed
            worst = self._worst(cases, asked, *left.pop(0))
            missed += [worst] if worst.both > 1 else []
            if len(missed) > may_miss:
                return min(missed, key=lambda x: x.both)
        return None

    def _worst(
        self,
        cases: Sequence[tuple[Fleet, float]],
        asked: FleetQuestion,
        day: int = 0,
        slowdown: float = 1.0,
    ) -> Excess:
        """How far a fleet is beyond each target in the worst of what it must keep them under."""
        found = Excess(0.0, 0.0, 0.0)
        for x, load in cases:
            over = self.measure_excess(x, asked, load, day, slowdown)
            found = Excess(*map(max, zip(found, over, strict=True)))
            if found.both > 1:
                break
        return found

    def _scenarios(self, fleet: Fleet, first: int, count: int) -> list[tuple[int, float]]:
        """Days from the first on, and slowdowns, that stand for what may come; slowest first."""
        spread, shares = self.spread(fleet), (np.arange(count) + 0.5) / count
        days = first + np.random.default_rng(0).permutation(count)
        slowdowns = [round(spread.slowdown(float(share)), 6) for share in shares]
        return sorted(zip(days.tolist(), slowdowns, strict=True), key=lambda x: -x[1])

    def spread(self, fleet: Fleet) -> Spread:
        """The error of the times of a fleet's replicas."""
        if self.question.spread is not None:
            return self.question.spread
        used = {
            (id(x.costs.deployment), x.technique): x
            for x, n in zip(fleet.kinds, fleet.replicas, strict=True)
            if n
        }
        key = frozenset(used)
        if key not in self._spreads:
            self._spreads[key] = known_spread(list(used.values()))
        return self._spreads[key]

    def certainty(self, fleet: Fleet, asked: FleetQuestion, chosen: bool = False) -> Certainty:
        """How likely a fleet keeps the targets; of a chosen one on days that did not choose it."""
        cases = list(self.stressed(fleet, asked))
        kept = np.zeros(3)
        first, count = 1, self.count_days(asked)[0]
        if chosen:
            first, count = 1 + DAYS, self._affordable_days(asked, OTHER_DAYS)
        scenarios = self._scenarios(fleet, first, count)
        for day, slowdown in scenarios:
            each = [self.measure_excess(x, asked, load, day, slowdown) for x, load in cases]
            kept += [max(x) <= 1 for x in zip(*each, strict=True)]
        likely = dict(zip(Excess._fields, (kept / len(scenarios)).tolist(), strict=True))
        return Certainty(likely, self.spread(fleet), len(scenarios))

    # fleets

    def fleet(
        self,
        kinds: tuple[Configuration, ...],
        running: Counts,
        asked: FleetQuestion,
        reserved: Counts | None = None,
    ) -> Fleet:
        """Make a fleet of some replicas; requests are divided so that all kinds are equally busy.

        Parameters
        ----------
        kinds, running
            Kinds of replica, and how many run in each window. (w, j)
        asked
            Says what replicas are paid for.
        reserved
            Replicas that are rented with a commitment. (j,)
        """
        demand = self.question.traffic.demand
        if asked.schedule is None:
            counts = running.max(axis=0)
            cost = float(sum(n * x.rent for n, x in zip(counts, kinds, strict=True) if n))
            reserved = np.array(
                [n if x.reserved < x.price else 0 for n, x in zip(counts, kinds, strict=True)]
            )
        else:
            reserved = np.zeros(len(kinds), np.int64) if reserved is None else reserved
            cost = scheduled_cost(kinds, demand, asked.schedule, running, reserved)
        needs = np.stack([self._needed(x) for x in kinds], axis=1)
        share = np.zeros((len(running), *needs.shape))
        for w, counts in enumerate(running):
            share[w] = divide(needs, np.asarray(counts, float))
        return Fleet(kinds, running, share, reserved, cost)

    def make_steady(self, asked: FleetQuestion, *replicas: tuple[Configuration, int]) -> Fleet:
        """Make a fleet that runs in all windows."""
        counts = np.array([n for _, n in replicas], np.int64)
        running = np.tile(counts, (len(self.question.traffic.demand.hours), 1))
        return self.fleet(tuple(x for x, _ in replicas), running, asked)

    def _needed(self, x: Configuration) -> Array:
        """Replicas that each class alone needs, by the estimate made to fit what was played."""
        kind = self._kind_of[id(x)]
        total = float(kind.needed.sum())
        return kind.needed * (self.busy(kind) / total if isfinite(total) and total > 0 else 1.0)

    def known_busy(self, kind: ReplicaKind) -> float:
        """Replicas that the whole traffic keeps busy; NaN where no answer needed to know."""
        return self._busy.get(id(kind), nan)

    def busy(self, kind: ReplicaKind) -> float:
        """Replicas that the whole traffic keeps busy: the time of one that gets all at once."""
        key = id(kind)
        if key not in self._busy:
            requests = self.question.traffic.requests.without_sessions()
            at_once = replace(requests, arrival=np.zeros(len(requests)))
            outcome = serve(at_once, kind.choices[0], 1)
            self.plays += 1
            last = outcome.run.progress.last
            takes = float(np.nanmax(np.where(np.isfinite(last), last, 0.0), initial=0.0))
            most = max(x.ttft for x in self.question.targets.classes)
            lasts = requests.duration + (most if isfinite(most) else takes)
            self._busy[key] = max(takes / max(lasts, 1e-9), 1e-6)
        return self._busy[key]

    def _bound(self, kind: ReplicaKind, asked: FleetQuestion) -> int:
        """Replicas from which counts are tried: fewer are busy all the time, or were too few."""
        more = ceil(self._bound_share(kind, asked) * self.busy(kind) * asked.load - ROUNDING)
        known = (self._known_too_few(kind, asked, sure) for sure in {0.0, asked.sure})
        missed = [
            floor(n if load == asked.load else POOLED * n * asked.load / load)
            for each in known
            for load, n in each.items()
        ]
        return max(more, asked.limits.failures + 1, max(missed, default=0) + 1)

    def _known_too_few(
        self, kind: ReplicaKind, asked: FleetQuestion, sure: float
    ) -> dict[float, int]:
        """The most replicas of a kind that were too few, by load."""
        limits = asked.limits
        key = id(kind), asked.targets, limits.headroom, limits.failures, sure
        return self._too_few.setdefault(key, {})

    def _bound_share(self, kind: ReplicaKind, asked: FleetQuestion) -> float:
        """Of the replicas that are always busy, how many may do."""
        prefixes = kind.choices[0].costs.rules.prefix_caching
        share = PREFIX_BOUND_SHARE if prefixes else BOUND_SHARE
        requests = self.question.traffic.requests
        token = max(x.tpot for x in self.question.targets.classes)
        after = token * float(requests.generate.max()) if isfinite(token) else 0.0
        rest = 1 - after / (requests.duration + after + 1e-9)  # answers end after the last arrival
        return share * rest * (1 + asked.limits.headroom)

    # search

    def cheapest(self, asked: FleetQuestion) -> Fleet | None:
        """The cheapest of the fleets that answered any question so far, if one does for this."""
        for fleet in sorted(self.fleets, key=lambda x: (x.cost, x.complexity)):
            if self.allows(fleet, asked) and self.keeps(fleet, asked):
                return fleet
        return None

    def solve(self, asked: FleetQuestion) -> Fleet | None:
        """Find the cheapest fleet for a question; None if none keeps what is asked."""
        best = self.cheapest(asked) or self._guess(asked)
        steady = replace(asked, schedule=None)
        kinds = [k for k in self.kinds if asked.only(k.choices[0])]
        best = self._of_one_kind(kinds, steady, best)
        if asked.limits.configurations > 1:
            best = self._paired(kinds, steady, best)
        if asked.schedule is not None:
            best = self._scheduled(kinds, asked, best)
        return None if best is None else self._remember(best, asked)

    def _remember(self, fleet: Fleet, asked: FleetQuestion) -> Fleet:
        """Offer a fleet to later questions, once; return the one that is known."""
        known = next((x for x in self.fleets if x is fleet or x.rents_as(fleet)), None)
        if known is None:
            self.fleets.append(known := fleet)
            self._load_of[id(fleet)] = asked.load
        elif known is not fleet:
            self._load_of[id(known)] = max(self._load_of[id(known)], asked.load)
        return known

    def _plays_of(self, requests: int, asked: FleetQuestion) -> int:
        """How many plays so many requests are enough for; a few are always made."""
        return max(int(requests / asked.load / self.question.traffic.work), FEWEST_PLAYS)

    def _guess(self, asked: FleetQuestion) -> Fleet | None:
        """The cheapest known fleet with more replicas, if one does: a first cap on cost."""
        steady, some = replace(asked, schedule=None), list[Fleet]()
        for fleet in sorted(self.fleets, key=lambda x: x.cost / self._load_of[id(x)]):
            scaled = fleet.replicas * asked.load / self._load_of[id(fleet)]
            for factor in GUESSES if not some else ():
                counts = np.ceil(scaled * factor - ROUNDING).astype(np.int64)
                more = self.make_steady(asked, *zip(fleet.kinds, counts.tolist(), strict=True))
                some += [more] if self.allows(more, asked) else []
        return next((x for x in some if self.keeps(x, steady)), None)

    def _of_one_kind(
        self, kinds: list[ReplicaKind], asked: FleetQuestion, best: Fleet | None
    ) -> Fleet | None:
        """The cheapest fleet of one kind: always the one that may be cheapest is looked at next.

        A kind may cost what the fewest replicas do at first, then what keeps them always busy, then
        what the trace itself needs, and at last what is as sure as asked.
        """
        today, kept = replace(asked, sure=0.0), list[Fleet]()
        queue: list[tuple[float, int, int, bool, Fleet | None]] = [
            ((asked.limits.failures + 1) * kind.rent, kind.choices[0].complexity, i, False, None)
            for i, kind in enumerate(kinds)
        ]
        heapify(queue)
        while queue:
            least, complexity, i, bounded, drafted = heappop(queue)
            cap = inf if best is None else best.cost
            if least > cap * (1 + ROUNDING):
                break
            if not bounded:
                bound = self._bound(kinds[i], asked) * kinds[i].rent
                heappush(queue, (bound, complexity, i, True, None))
                continue
            if drafted is None:
                found = self._search_kind(kinds[i], today, cap)
                if found is not None and asked.sure:
                    heappush(queue, (found.cost, complexity, i, True, found))
                    continue
            else:
                found = self._search_kind(kinds[i], asked, cap, drafted)
            if found is not None:
                kept.append(found)
                best = found if self._improves_on(found, best) else best
        for x in kept:
            if best is not None and x is not best and costs_as(x, best):
                self._remember(x, asked)
        return best

    def allows(self, fleet: Fleet, asked: FleetQuestion) -> bool:
        """Whether a question allows a fleet."""
        used = [x for x, n in zip(fleet.kinds, fleet.replicas, strict=True) if n]
        return bool(
            all(map(asked.only, used))
            and within_limits(fleet, asked.limits)
            and (asked.schedule is not None or not fleet.changes)
        )

    @staticmethod
    def _improves_on(fleet: Fleet, best: Fleet | None) -> bool:
        """Whether a fleet is cheaper, or as cheap and plainer."""
        if best is None or fleet.cost < best.cost * (1 - ROUNDING):
            return True
        return costs_as(fleet, best) and fleet.complexity < best.complexity

    def _search_kind(
        self, kind: ReplicaKind, asked: FleetQuestion, cap: float, drafted: Fleet | None = None
    ) -> Fleet | None:
        """The fewest replicas of a kind that keep what is asked, within a cap on cost.

        Parameters
        ----------
        drafted
            What keeps a part of it; no fewer replicas keep all.
        """
        x = next((x for x in kind.choices if self._able(x, asked)), None)
        low = asked.limits.failures
        if drafted is not None:
            x, low = drafted.kinds[0], int(drafted.replicas[0]) - 1
        if x is None:
            return None
        self.tell(f"how many {x.name}")
        bound = self._bound(kind, asked)
        most = min(_most_within(x, asked.limits), MOST_OF_BOUND * bound + MOST_BEYOND)
        if isfinite(cap):
            most = min(most, floor(cap * (1 + ROUNDING) / x.rent))
        first = self.make_steady(asked, (x, max(bound, low + 1)))
        found = self._find_fewest(first, low, most, isfinite(cap), asked)
        if not asked.least:
            missed = self._known_too_few(kind, asked, asked.sure)
            few = most if found is None else int(found.replicas[0]) - 1
            missed[asked.load] = max(missed.get(asked.load, 0), few)
        return found

    def _able(self, x: Configuration, asked: FleetQuestion) -> bool:
        """Whether a replica keeps the targets where hardly anything runs."""
        slower = 1.0
        if asked.sure:
            days, may_miss = self.count_days(asked)
            spread = self.spread(self.make_steady(asked, (x, 1)))
            slower = spread.slowdown(1 - (may_miss + 0.5) / days)
        over = slower * self.at_rest(x).measure_excess(asked.targets).both
        if over <= 1 or over > NEARLY:
            return over <= 1
        busy = self.busy(self._kind_of[id(x)]) * asked.load  # part of a long trace was seen at rest
        return self.keeps(self.make_steady(asked, (x, max(ceil(LIGHT * busy), FEW_AT_REST))), asked)

    def _find_fewest(
        self, first: Fleet, low: int, most: int, capped: bool, asked: FleetQuestion
    ) -> Fleet | None:
        """The fleet with the fewest replicas of its last kind that keeps what is asked.

        Counts go up from those of the first fleet, then by halves between what misses and what
        keeps. Where one replica less may do, other pass budgets and batch limits are tried; in
        pairs, where requests are divided anew for each count, where two less may do, too.

        Parameters
        ----------
        first
            Where counts begin; other kinds have as many replicas throughout.
        low
            So many are too few.
        most
            May be rented.
        capped
            Whether most of them probably are too few, so that they are played first.
        """

        def sized(fleet: Fleet, count: int) -> Fleet:
            counts = [*fleet.replicas[:-1].tolist(), count]
            return self.make_steady(asked, *zip(fleet.kinds, counts, strict=True))

        least, high = low, min(max(int(first.replicas[-1]), low + 1), most)
        if high <= low:
            return None
        best = first
        if capped:
            found = self._tuned(sized(first, most), asked)
            if found is None:
                return None
            best = found
        while not self.keeps(sized(best, high), asked):
            low = high
            if high < most:
                high = min(max(high + 1, ceil(1.4 * high)), most)
                continue
            found = self._tuned(sized(best, high), asked)
            if found is None:
                return None
            best = found
        while True:
            while high - low > 1:
                middle = (low + high) // 2 if high - low > 2 else high - 1
                if self.keeps(sized(best, middle), asked):
                    high = middle
                else:
                    low = middle
            if not asked.sure:  # by chance fewer may keep what more do not; over days it evens out
                some = range(max(least + 1, ceil(PASSED_OVER * high)), high)
                high = next((n for n in some if self.keeps(sized(best, n), asked)), high)
            best, low = sized(best, high), least
            fewer = [n for n in (high - 1, high - 2)[: len(first.kinds)] if n > least]
            found = next(filter(None, (self._tuned(sized(best, n), asked) for n in fewer)), None)
            if found is None:
                return best
            best, high = found, int(found.replicas[-1])

    def _tuned(self, fleet: Fleet, asked: FleetQuestion) -> Fleet | None:
        """A fleet that keeps what is asked, with other budgets and limits if it nearly does so."""
        if not self.allows(fleet, asked):
            return None
        if self.keeps(fleet, asked):
            return fleet
        if not self.question.tunes or self._tunable <= 0:
            return None
        before = self.plays
        found = self._retuned(fleet, asked)
        self._tuning += self.plays - before
        self._tunable -= (self.plays - before) * asked.load * self.question.traffic.work
        return found

    def _retuned(self, fleet: Fleet, asked: FleetQuestion) -> Fleet | None:
        """A fleet that keeps what is asked with other pass budgets and batch limits, if one does.

        Each time the kind of replica is changed whose change comes nearest, then the others. Large
        passes read prompts sooner, small ones let a prompt join the next pass earlier; and both
        may shorten the time per token, so all are played.
        """

        def today(fleet: Fleet) -> float:
            return self._worst(list(self.stressed(fleet, asked)), asked).both

        left = list(range(len(fleet.kinds)))
        while left:
            tried = [(today(fleet), -1, -1, fleet)]
            for j in left:
                for y in self._settings(fleet, j, asked):
                    kinds = (*fleet.kinds[:j], y, *fleet.kinds[j + 1 :])
                    other = self.make_steady(
                        asked, *zip(kinds, fleet.replicas.tolist(), strict=True)
                    )
                    tried.append((today(other), len(tried), j, other))
            for over, _, _, other in sorted(tried)[:3]:
                if over <= 1 and self.keeps(other, asked):
                    return other
            _, _, changed, fleet = min(tried)
            if changed < 0:
                return None
            left.remove(changed)
        return None

    def _settings(self, fleet: Fleet, j: int, asked: FleetQuestion) -> list[Configuration]:
        """A kind of replica with the pass budgets and batch limits that may be what a fleet needs.

        There are none for a fleet that is far from its targets.
        """
        missed = self._missed(fleet, asked)
        if missed is None:
            return []
        ttft, tpot, _ = missed
        x = fleet.kinds[j]
        choices, rules = self._kind_of[id(x)].choices, x.costs.rules
        smaller = rules.max_tokens / min(y.costs.rules.max_tokens for y in choices)
        if ttft > LARGER_PASSES or tpot > NEARLY * smaller:
            return []
        if ttft > NEARLY:
            return [max(choices, key=lambda y: y.costs.rules.max_tokens)]
        if tpot <= 1 < ttft:
            return [*choices]
        limits = [n * x.costs.deployment.dp for n in LOWER_BATCH_LIMITS]
        return [*choices, *(self.limit_batch(x, n) for n in limits if n < rules.max_seqs)]

    def limit_batch(self, replica: Configuration, seqs: int) -> Configuration:
        """The same replica with another batch limit; made once."""
        kind = self._kind_of[id(replica)]
        made: dict[tuple[int, int], Configuration] = self.__dict__.setdefault("_made", {})
        if (id(replica), seqs) not in made:
            made[id(replica), seqs] = replica.limited(seqs)
            self._kind_of[id(made[id(replica), seqs])] = kind
        return made[id(replica), seqs]

    # pairs

    def _paired(
        self, kinds: list[ReplicaKind], asked: FleetQuestion, best: Fleet | None
    ) -> Fleet | None:
        """The cheapest fleet of two kinds, if it is cheaper than the best of one."""
        some: list[ReplicaKind] = []
        cap = inf if best is None else best.cost
        kinds = [k for k in kinds if k.rent < cap]
        for gpu in dict.fromkeys(k.gpu for k in kinds):
            mine = [k for k in kinds if k.gpu == gpu]
            mine.sort(key=lambda k: (int(np.isinf(k.needed).sum()), self.busy(k) * k.rent))
            some += mine[:PAIRED_PER_GPU]
        pairs: list[tuple[Array, Fleet, int]] = []
        for one, other in combinations(some, 2):
            x, y = one.choices[0], other.choices[0]
            needs = np.stack([self._needed(x), self._needed(y)], axis=1)
            if not np.isfinite(needs.min(axis=1)).all():
                continue
            needs *= asked.load * min(self._bound_share(k, asked) for k in (one, other))
            most = min(_most_within(y, asked.limits), 2 * self._bound(other, asked) + MOST_BEYOND)
            pairs += ((needs, self.make_steady(asked, (x, n), (y, 1)), most) for n in PAIRED_COUNTS)
        before, each = self.plays - self._tuning, asked.load * self.question.traffic.work
        enough = min(self._plays_of(PAIRED_REQUESTS, asked), int(self._pairable / each))
        ranked = self._rank(pairs, best)
        while ranked and self.plays - self._tuning <= before + enough and self._pairable > 0:
            place, most = ranked.pop(0)
            needs, pair, _ = pairs[place]
            (x, y), n = pair.kinds, int(pair.replicas[0])
            self.tell(f"{count_replicas(n, x.name)} together with {y.name}")
            low = self._utilised(needs, n, most) - 1
            found = self._find_fewest(pair, low, most, True, asked)
            if found is not None:
                best, left = found, {i for i, _ in ranked}
                ranked = [(i, m) for i, m in self._rank(pairs, best) if i in left]
        self._pairable -= (self.plays - self._tuning - before) * each
        return best

    def _rank(
        self, pairs: list[tuple[Array, Fleet, int]], best: Fleet | None
    ) -> list[tuple[int, int]]:
        """Pairs that may be cheaper than the best fleet, with the most replicas of the second kind.

        Those whose replicas would be busy least come first.
        """
        found = []
        for place, (needs, pair, most) in enumerate(pairs):
            (x, y), n = pair.kinds, int(pair.replicas[0])
            if best is not None:
                most = min(most, floor((best.cost * (1 - ROUNDING) - n * x.rent) / y.rent))
            if most > 0:
                found.append((_utilisation(needs, n, most), place, most))
        return [(place, most) for busy, place, most in sorted(found) if busy <= 1]

    def _utilised(self, needs: Array, first: int, most: int) -> int:
        """How many of a second kind leave neither kind busy all the time."""
        return next(m for m in range(1, most + 1) if _utilisation(needs, first, m) <= 1)

    # schedules

    def _scheduled(
        self, kinds: list[ReplicaKind], asked: FleetQuestion, best: Fleet | None
    ) -> Fleet | None:
        """The cheapest schedule: replicas by window from what each needs alone, then played."""
        assert asked.schedule is not None
        demand = self.question.traffic.demand
        some = sorted(kinds, key=lambda k: self.busy(k) * min(k.rent, k.choices[0].price))
        if best is not None:
            mine = [self._kind_of[id(x)] for x in best.kinds]
            some = [*mine, *(k for k in some if k not in mine)]
        chosen = [k.choices[0] for k in some[: max(SCHEDULED_KINDS, 0)]]
        if best is not None:
            own = {id(self._kind_of[id(x)]): x for x in best.kinds}
            chosen = [own.get(id(self._kind_of[id(x)]), x) for x in chosen]
            best = self.fleet(best.kinds, best.running, asked, best.reserved)
        needs = np.array(
            [[self._window_needs(w, x, asked) for x in chosen] for w in range(len(demand.hours))],
            float,
        )
        factor = np.ones(len(needs))
        for _ in range(SCHEDULE_ROUNDS):
            plan = cheapest_schedule(
                chosen, demand, asked.schedule, needs * factor[:, None], asked.limits
            )
            if plan is None:
                break
            running, reserved = plan
            fleet = self.fleet(tuple(chosen), running, asked, reserved)
            if best is not None and fleet.cost >= best.cost * (1 - ROUNDING):
                break
            if self.keeps(fleet, asked):
                best = self._drop_unneeded(fleet, asked)
                break
            factor = factor * np.where(self._late_windows(fleet, asked), SCHEDULE_STEP, 1.0)
        return best

    def _window_needs(self, window: int, x: Configuration, asked: FleetQuestion) -> float:
        """Replicas of a kind that one window alone needs; infinite if none do."""
        key = window, id(x), asked.load
        if key not in self._windows:
            part = self.traffic(asked.load).of_window(window)
            self._windows[key] = self._fewest_of(part, x, asked)
        return float(self._windows[key]) if self._windows[key] else inf

    def _fewest_of(self, part: Traffic, x: Configuration, asked: FleetQuestion) -> int:
        """Replicas that a part of the traffic needs; 0 if none do."""
        if not len(part.requests):
            return 1
        share = np.ones((1, part.classes, 1))

        def keeps(count: int) -> bool:
            one = Fleet((x,), np.array([[count]]), share, np.zeros(1, np.int64), 0.0)
            self.plays += 1
            return play(part, one).meets(asked.targets)

        low, high = 0, 1
        while not keeps(high):
            low, high = high, 2 * high
            if high > MOST_OF_BOUND * max(len(part.requests), 1) or high > 1024:
                return 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if keeps(middle) else (middle, high)
        return high

    def _late_windows(self, fleet: Fleet, asked: FleetQuestion) -> Array:
        """Which windows have more late requests than all may have on average; one at least."""
        cases = list(self.stressed(fleet, asked))
        late = np.zeros(len(fleet.running))
        for x, load in cases:
            traffic = self.traffic(load)
            played = self.play(x, load)
            ttft, tpot = asked.targets.list_limits(played.prompt)
            missed = (played.ttft > ttft) | (played.tpot > tpot)
            count = np.maximum(np.bincount(traffic.window, minlength=len(late)), 1)
            late = np.maximum(late, np.bincount(traffic.window, missed, len(late)) / count)
        return np.asarray(late > min(1 - asked.targets.share, float(late.max()) * 0.999))

    def _drop_unneeded(self, fleet: Fleet, asked: FleetQuestion) -> Fleet:
        """A schedule without the replicas that it does not need, window by window."""
        for w in range(len(fleet.running)):
            for j in np.flatnonzero(fleet.running[w]):
                running = fleet.running.copy()
                running[w, j] -= 1
                if not running[w].any():
                    continue
                reserved = np.minimum(fleet.reserved, running.min(axis=0))
                less = self.fleet(fleet.kinds, running, asked, reserved)
                if less.cost < fleet.cost * (1 - ROUNDING) and self.keeps(less, asked):
                    fleet = less
        return fleet

    # what can be reached

    def at_rest(self, replica: Configuration) -> Played:
        """What a kind of replica does with hardly any load; played once.

        Fewer clients than the trace's have one request for each replica at least: a trace of a few
        requests is played whole, and its longest ones are not passed over.
        """
        if id(replica) not in self._at_rest:
            busy = self.busy(self._kind_of[id(replica)])
            anyone = FleetQuestion(self.question.targets, FleetLimits())
            count = min(max(ceil(LIGHT * busy), FEW_AT_REST), MOST_AT_REST)
            least, most = (
                n / len(self.question.traffic.requests) for n in (MOST_AT_REST, REQUESTS_AT_REST)
            )
            load = min(max(count / (LIGHT * busy), least), most, 1.0)
            self._at_rest[id(replica)] = self.play(self.make_steady(anyone, (replica, count)), load)
        return self._at_rest[id(replica)]

    def bound(self, asked: FleetQuestion, best: Fleet) -> float:
        """Price below which no fleet is: its replicas would be busy all the time. [USD/h]

        A kind of which one replica costs more than a known fleet is in none that is cheaper.
        """
        kinds = [k for k in self.kinds if asked.only(k.choices[0])]
        if asked.schedule is None:
            kinds = [k for k in kinds if k.rent <= best.cost * (1 + ROUNDING)]
        each = np.array([self._needed(k.choices[0]) * k.rent for k in kinds])
        each = np.where(np.isfinite(each), each, np.inf).min(axis=0)
        return float(each[np.isfinite(each)].sum()) * asked.load


def costs_as(one: Fleet, other: Fleet) -> bool:
    """Whether two fleets have the same price."""
    return abs(one.cost - other.cost) <= ROUNDING * other.cost


def within_limits(fleet: Fleet, limits: FleetLimits) -> bool:
    """Whether a fleet is within the limits on what is rented.

    Parameters
    ----------
    fleet
        The fleet.
    limits
        GPUs in all and of a kind, host memory, power, and kinds of replica.
    """
    counted = [(int(n), x) for n, x in zip(fleet.replicas, fleet.kinds, strict=True) if n]
    of_gpu = {g: sum(n * x.gpus for n, x in counted if x.gpu == g) for g in limits.gpus_of}
    return bool(
        len(counted) <= limits.configurations
        and fleet.total("gpus") <= limits.gpus
        and all(of_gpu[g] <= most for g, most in limits.gpus_of.items())
        and fleet.total("host") <= limits.host
        and (not isfinite(limits.power) or fleet.total("power") <= limits.power)
    )


def _most_within(x: Configuration, limits: FleetLimits) -> int:
    """The most replicas of a kind that the limits allow."""
    shares = [
        (limits.gpus, x.gpus),
        (limits.gpus_of.get(x.gpu, inf), x.gpus),
        (limits.host, x.host),
        (limits.power, x.power if isfinite(limits.power) else 0.0),
    ]
    most = min((bound / each for bound, each in shares if each > 0), default=inf)
    return floor(min(most, 1e6) + ROUNDING)


def divide(needs: Array, counts: Array) -> Array:
    """Divide classes of requests among kinds of replica so that all are equally busy.

    Of two kinds each takes the classes that it serves for less of its time than the other does; one
    class is split. More kinds share all classes by what they carry.

    Parameters
    ----------
    needs
        Replicas that each class keeps busy at the mean rates, by kind; infinite where it cannot be
        served. (c, j)
    counts
        Replicas of each kind. (j,)

    Returns
    -------
    array
        Shares that add up to 1 by class. (c, j)
    """
    share = np.zeros(needs.shape)
    used = np.flatnonzero(counts)
    if used.size < 2:
        share[:, used[0] if used.size else 0] = 1.0
        return share
    if used.size > 2:
        able = np.where(np.isfinite(needs), counts / np.maximum(needs, 1e-12), 0.0)
        able = np.where(able.sum(axis=1, keepdims=True) > 0, able, counts)
        return np.asarray(able / able.sum(axis=1, keepdims=True))
    a, b = used
    first, second = needs[:, a] / counts[a], needs[:, b] / counts[b]
    there = np.isfinite(first), np.isfinite(second)
    with np.errstate(invalid="ignore"):  # a class that neither can serve
        ratio = first / np.where(second > 0, second, 1.0)
    ratio = np.where(there[0] & there[1], ratio, np.where(there[0], -1.0, np.inf))
    order = np.argsort(ratio, kind="stable")
    mine, others = (
        np.where(some, each, 0.0)[order] for some, each in zip(there, (first, second), strict=True)
    )
    rest = others.sum() - np.cumsum(others)
    only = int((there[0] & ~there[1]).sum()), int(there[0].sum())
    split = int(np.searchsorted(np.cumsum(mine) - rest, 0.0))  # the class with which a has as much
    to = np.zeros(len(order))
    to[: int(np.clip(split, *only))] = 1.0
    if only[0] <= split < only[1]:
        more = rest[split] + others[split] - mine[:split].sum()
        to[split] = np.clip(more / max(mine[split] + others[split], 1e-12), 0.0, 1.0)
    share[order, a], share[order, b] = to, 1 - to
    return share


def _utilisation(needs: Array, first: int, second: int) -> float:
    """How busy the busier of two kinds is, by the estimate."""
    counts = np.array([first, second], float)
    share = divide(needs, counts)
    load = np.where(share > 0, share * np.where(np.isfinite(needs), needs, 1e9), 0.0).sum(axis=0)
    return float((load / counts).max())
