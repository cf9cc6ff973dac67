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

from bisect import bisect_left
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
    Spread,
    count_replicas,
    known_spread,
    list_kinds,
)
from kvsim.planner.fleet.play import (
    HOPELESS,
    Excess,
    Fleet,
    Played,
    TargetsLostError,
    play,
    serve,
    stop_if_lost,
)

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
SCHEDULED_KINDS = 3  # that a schedule is made of
MOST_IN_WINDOW = 1024  # replicas that are tried for one window
SCHEDULE_ROUNDS, SCHEDULE_STEP = 12, 1.12  # windows that miss need so many times the replicas
LIGHT = 8  # times the replicas that are always busy: what waiting leaves
FEW_AT_REST, MOST_AT_REST = 32, 64  # replicas that show what is reached with hardly any load
REQUESTS_AT_REST = 2000  # that show it, of a long trace


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
        self.kinds, self.left_out = list_kinds(question, tell)
        self.fleets: list[Fleet] = []  # that answered a question
        self.plays, self._tuning = 0, 0  # all of them, and those with other budgets and limits
        self._tunable, self._pairable = float(TUNED_REQUESTS), float(ALL_PAIRED_REQUESTS)
        self.judged = [question.targets]  # that every play is held against
        self._excess: dict[tuple[object, ...], dict[FleetTargets, Excess]] = {}
        self._at_rest: dict[int, Played] = {}
        self._traffic: dict[tuple[float, int], Traffic] = {}
        self._busy: dict[int, float] = {}
        self._spreads: dict[frozenset[tuple[int, str]], Spread] = {}
        self._windows: dict[tuple[int, int, float], float] = {}
        self._limited: dict[tuple[int, int], Configuration] = {}
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

    def count_days(self, asked: CapacityQuestion) -> tuple[int, int]:
        """Days that a probability is taken over, and how many of them may be missed.

        They are as few as the missed ones allow, so that every load is judged as strictly: 1 of 13
        would ask for more certainty than 1 of 10.
        """
        days, miss = self._affordable_days(asked, DAYS), 1 - asked.sure
        may_miss = floor(miss * days + ROUNDING)
        return (ceil(may_miss / miss - ROUNDING) if may_miss else days), may_miss

    def _affordable_days(self, asked: CapacityQuestion, most: int) -> int:
        """Days that can be played: long traces have fewer."""
        affordable = int(DAYS_REQUESTS / asked.load / self.question.traffic.work)
        return min(max(affordable, FEWER_DAYS), most)

    # verdicts

    def play(self, fleet: Fleet, load: float = 1.0, day: int = 0, slowdown: float = 1.0) -> Played:
        """Play traffic on a fleet."""
        self.plays += 1
        return play(self.traffic(load, day), fleet, slowdown)

    def measure_excess(
        self,
        fleet: Fleet,
        asked: CapacityQuestion,
        load: float,
        day: int = 0,
        slowdown: float = 1.0,
    ) -> Excess:
        """How far a fleet is beyond the targets, infinite if far beyond TTFT; played once."""
        found = self._excess.setdefault((*fleet.key, load, day, slowdown), {})
        if asked.targets not in found:
            judged, traffic = {*self.judged, asked.targets}, self.traffic(load, day)
            self.plays += 1
            try:
                lost = stop_if_lost(traffic, judged, slowdown)
                played = play(traffic, fleet, slowdown, lost)
                found |= {x: played.measure_excess(x) for x in judged}
            except TargetsLostError:
                found |= dict.fromkeys(judged, Excess(inf, inf, inf))
        return found[asked.targets]

    def stressed(self, fleet: Fleet, asked: CapacityQuestion) -> Iterator[tuple[Fleet, float]]:
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

    def keeps(self, fleet: Fleet, asked: CapacityQuestion) -> bool:
        """Whether a fleet keeps the targets as surely as asked."""
        return self._missed(fleet, asked) is None

    def _missed(self, fleet: Fleet, asked: CapacityQuestion) -> Excess | None:
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
        asked: CapacityQuestion,
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
        used = {(id(x.costs.deployment), x.technique): x for x, _ in fleet.rented}
        key = frozenset(used)
        if key not in self._spreads:
            self._spreads[key] = known_spread(list(used.values()))
        return self._spreads[key]

    def certainty(self, fleet: Fleet, asked: CapacityQuestion, chosen: bool = False) -> Certainty:
        """How likely a fleet keeps the targets; of a chosen one on days that did not choose it."""
        cases = list(self.stressed(fleet, asked))
        kept = np.zeros(3)
        first, count = 1, self.count_days(asked)[0]
        if chosen:
            first, count = 1 + DAYS, self._affordable_days(asked, OTHER_DAYS)
        scenarios = self._scenarios(fleet, first, count)
        for day, slowdown in scenarios:
            each = [
                self.play(x, load, day, slowdown).measure_excess(asked.targets)
                if chosen
                else self.measure_excess(x, asked, load, day, slowdown)
                for x, load in cases
            ]
            kept += [max(x) <= 1 for x in zip(*each, strict=True)]
        likely = dict(zip(Excess._fields, (kept / len(scenarios)).tolist(), strict=True))
        return Certainty(likely, self.spread(fleet), len(scenarios))

    # fleets

    def fleet(
        self,
        kinds: tuple[Configuration, ...],
        running: Counts,
        asked: CapacityQuestion,
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
        if asked.start_up is None:
            counts = running.max(axis=0)
            cost = float(sum(n * x.rent for n, x in zip(counts, kinds, strict=True) if n))
            reserved = np.array(
                [n if x.reserved < x.price else 0 for n, x in zip(counts, kinds, strict=True)]
            )
        else:
            reserved = np.zeros(len(kinds), np.int64) if reserved is None else reserved
            cost = scheduled_cost(
                kinds, self.question.traffic.hours, asked.start_up, running, reserved
            )
        needs = np.stack([self._needed(x) for x in kinds], axis=1)
        share = np.zeros((len(running), *needs.shape))
        for w, counts in enumerate(running):
            share[w] = divide(needs, np.asarray(counts, float))
        return Fleet(kinds, running, share, reserved, cost)

    def make_steady(self, asked: CapacityQuestion, *replicas: tuple[Configuration, int]) -> Fleet:
        """Make a fleet that runs in all windows."""
        counts = np.array([n for _, n in replicas], np.int64)
        running = np.tile(counts, (len(self.question.traffic.hours), 1))
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

    def _bound(self, kind: ReplicaKind, asked: CapacityQuestion) -> int:
        """Replicas from which counts are tried: fewer would be busy all the time."""
        busy = self._bound_share(kind, asked) * self.busy(kind) * asked.load
        return max(ceil(busy - ROUNDING), asked.limits.failures + 1)

    def _bound_share(self, kind: ReplicaKind, asked: CapacityQuestion) -> float:
        """Of the replicas that are always busy, how many may do."""
        prefixes = kind.choices[0].costs.rules.prefix_caching
        share = PREFIX_BOUND_SHARE if prefixes else BOUND_SHARE
        requests = self.question.traffic.requests
        token = max(x.tpot for x in self.question.targets.classes)
        after = token * float(requests.generate.max()) if isfinite(token) else 0.0
        rest = 1 - after / (requests.duration + after + 1e-9)  # answers end after the last arrival
        return share * rest * (1 + asked.limits.headroom)

    # search

    def cheapest(self, asked: CapacityQuestion) -> Fleet | None:
        """The cheapest of the fleets that answered any question so far, if one does for this."""
        for fleet in sorted(self.fleets, key=lambda x: (x.cost, x.complexity)):
            if self.allows(fleet, asked) and self.keeps(fleet, asked):
                return fleet
        return None

    def solve(self, asked: CapacityQuestion) -> Fleet | None:
        """Find the cheapest fleet for a question; None if none keeps what is asked."""
        best = self.cheapest(asked)
        steady = replace(asked, start_up=None)
        kinds = [k for k in self.kinds if asked.only(k.choices[0])]
        best = self._of_one_kind(kinds, steady, best)
        if asked.limits.configurations > 1:
            best = self._paired(kinds, steady, best)
        if asked.start_up is not None:
            best = self._scheduled(kinds, asked, best)
        return None if best is None else self._remember(best)

    def _remember(self, fleet: Fleet) -> Fleet:
        """Offer a fleet to later questions, once; return the one that is known."""
        same = (x for x in self.fleets if x.key == fleet.key and costs_as(x, fleet))
        known = next(same, None)
        if known is None:
            self.fleets.append(fleet)
        return known or fleet

    def _of_one_kind(
        self, kinds: list[ReplicaKind], asked: CapacityQuestion, best: Fleet | None
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
                self._remember(x)
        return best

    def allows(self, fleet: Fleet, asked: CapacityQuestion) -> bool:
        """Whether a question allows a fleet."""
        return bool(
            all(asked.only(x) for x, _ in fleet.rented)
            and asked.limits.allow(fleet.kinds, fleet.replicas)
            and (asked.start_up is not None or not fleet.changes)
        )

    @staticmethod
    def _improves_on(fleet: Fleet, best: Fleet | None) -> bool:
        """Whether a fleet is cheaper, or as cheap and plainer."""
        if best is None or not costs_as(fleet, best):
            return best is None or fleet.cost < best.cost
        return fleet.complexity < best.complexity

    def _search_kind(
        self, kind: ReplicaKind, asked: CapacityQuestion, cap: float, drafted: Fleet | None = None
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
        most = min(asked.limits.count_most(x), MOST_OF_BOUND * bound + MOST_BEYOND)
        if isfinite(cap):
            most = min(most, floor(cap * (1 + ROUNDING) / x.rent))
        first = self.make_steady(asked, (x, max(bound, low + 1)))
        return self._find_fewest(first, low, most, isfinite(cap), asked)

    def _able(self, x: Configuration, asked: CapacityQuestion) -> bool:
        """Whether a replica keeps the targets where hardly anything runs."""
        over = self.slowest(x, asked) * self.at_rest(x).measure_excess(asked.targets).both
        if over <= 1 or over > NEARLY:
            return over <= 1
        busy = self.busy(self._kind_of[id(x)]) * asked.load  # part of a long trace was seen at rest
        return self.keeps(self.make_steady(asked, (x, max(ceil(LIGHT * busy), FEW_AT_REST))), asked)

    def slowest(self, replica: Configuration, asked: CapacityQuestion) -> float:
        """Times as long as predicted at which a replica keeps targets as surely as asked."""
        if not asked.sure:
            return 1.0
        days, may_miss = self.count_days(asked)
        spread = self.spread(self.make_steady(asked, (replica, 1)))
        return spread.slowdown(1 - (may_miss + 0.5) / days)

    def _find_fewest(
        self, first: Fleet, low: int, most: int, capped: bool, asked: CapacityQuestion
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

    def _tuned(self, fleet: Fleet, asked: CapacityQuestion) -> Fleet | None:
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

    def _retuned(self, fleet: Fleet, asked: CapacityQuestion) -> Fleet | None:
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

    def _settings(self, fleet: Fleet, j: int, asked: CapacityQuestion) -> list[Configuration]:
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
        if ttft > HOPELESS or tpot > NEARLY * smaller:
            return []
        if ttft > NEARLY:
            return [max(choices, key=lambda y: y.costs.rules.max_tokens)]
        if tpot <= 1 < ttft:
            return [*choices]
        limits = [n * x.costs.deployment.dp for n in LOWER_BATCH_LIMITS]
        return [*choices, *(self.limit_batch(x, n) for n in limits if n < rules.max_seqs)]

    def limit_batch(self, replica: Configuration, seqs: int) -> Configuration:
        """The same replica with another batch limit; made once."""
        key = id(replica), seqs
        if key not in self._limited:
            self._limited[key] = made = replace(replica, costs=replica.costs.with_fewer(seqs))
            self._kind_of[id(made)] = self._kind_of[id(replica)]
        return self._limited[key]

    # pairs

    def _paired(
        self, kinds: list[ReplicaKind], asked: CapacityQuestion, best: Fleet | None
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
            most = min(asked.limits.count_most(y), 2 * self._bound(other, asked) + MOST_BEYOND)
            pairs += ((needs, self.make_steady(asked, (x, n), (y, 1)), most) for n in PAIRED_COUNTS)
        before, each = self.plays - self._tuning, asked.load * self.question.traffic.work
        enough = min(max(int(PAIRED_REQUESTS / each), FEWEST_PLAYS), int(self._pairable / each))
        queue = [(0.0, place) for place in range(len(pairs))]  # least busy first
        while queue and self.plays - self._tuning <= before + enough and self._pairable > 0:
            known, place = heappop(queue)
            needs, pair, most = pairs[place]
            (x, y), n = pair.kinds, int(pair.replicas[0])
            if best is not None:
                most = min(most, floor((best.cost * (1 - ROUNDING) - n * x.rent) / y.rent))
            busy = _utilisation(needs, n, most) if most > 0 else inf
            if busy > 1 or busy > known:
                if busy <= 1:
                    heappush(queue, (busy, place))
                continue
            self.tell(f"{count_replicas(n, x.name)} together with {y.name}")
            fewest = next(m for m in range(1, most + 1) if _utilisation(needs, n, m) <= 1)
            best = self._find_fewest(pair, fewest - 1, most, True, asked) or best
        self._pairable -= (self.plays - self._tuning - before) * each
        return best

    # schedules

    def _scheduled(
        self, kinds: list[ReplicaKind], asked: CapacityQuestion, best: Fleet | None
    ) -> Fleet | None:
        """The cheapest schedule: replicas by window from what each needs alone, then played."""
        assert asked.start_up is not None
        hours, own = self.question.traffic.hours, dict[int, Configuration]()
        if best is not None:
            best = self.fleet(best.kinds, best.running, asked, best.reserved)
            own = {id(self._kind_of[id(x)]): x for x in best.kinds}
        some = sorted(kinds, key=lambda k: (id(k) not in own, self.busy(k) * k.rent))
        chosen = [own.get(id(k), k.choices[0]) for k in some[:SCHEDULED_KINDS]]
        needs = np.array(
            [[self._window_needs(w, x, asked) for x in chosen] for w in range(len(hours))],
            float,
        )
        factor = np.ones(len(needs))
        for _ in range(SCHEDULE_ROUNDS):
            plan = cheapest_schedule(
                chosen, hours, asked.start_up, needs * factor[:, None], asked.limits
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

    def _window_needs(self, window: int, x: Configuration, asked: CapacityQuestion) -> float:
        """Replicas of a kind that one window alone needs; infinite if none do."""
        key = window, id(x), asked.load
        if key not in self._windows:
            part = self.traffic(asked.load).of_window(window)
            share = np.ones((1, part.classes, 1))

            def keeps(count: int) -> bool:
                one = Fleet((x,), np.array([[count]]), share, np.zeros(1, np.int64), 0.0)
                self.plays += 1
                return play(part, one).meets(asked.targets)

            most, high = min(len(part.requests), MOST_IN_WINDOW), 1
            while most and not keeps(high) and high < most:
                high *= 2
            low = high // 2 + 1
            fewest = low + bisect_left(range(low, high + 1), True, key=keeps) if most else 1
            self._windows[key] = inf if fewest > high else float(fewest)
        return self._windows[key]

    def _late_windows(self, fleet: Fleet, asked: CapacityQuestion) -> Array:
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

    def _drop_unneeded(self, fleet: Fleet, asked: CapacityQuestion) -> Fleet:
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
            anyone = replace(self.question, limits=FleetLimits(), start_up=None)
            count = min(max(ceil(LIGHT * busy), FEW_AT_REST), MOST_AT_REST)
            least, most = (
                n / len(self.question.traffic.requests) for n in (MOST_AT_REST, REQUESTS_AT_REST)
            )
            load = min(max(count / (LIGHT * busy), least), most, 1.0)
            self._at_rest[id(replica)] = self.play(self.make_steady(anyone, (replica, count)), load)
        return self._at_rest[id(replica)]

    def bound(self, asked: CapacityQuestion, best: Fleet) -> float:
        """Price below which no fleet is: its replicas would be busy all the time. [USD/h]

        A kind of which one replica costs more than a known fleet is in none that is cheaper.
        """
        kinds = [k for k in self.kinds if asked.only(k.choices[0])]
        if asked.start_up is None:
            kinds = [k for k in kinds if k.rent <= best.cost * (1 + ROUNDING)]
        each = np.array([self._needed(k.choices[0]) * k.rent for k in kinds])
        each = np.where(np.isfinite(each), each, np.inf).min(axis=0)
        return float(each[np.isfinite(each)].sum()) * asked.load


def costs_as(one: Fleet, other: Fleet) -> bool:
    """Whether two fleets have the same price."""
    return abs(one.cost - other.cost) <= ROUNDING * other.cost


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
    upto = np.concatenate([[0.0], np.cumsum(mine + others)])  # where a has as much as b has
    split = np.interp(others.sum(), upto, np.arange(len(upto)))
    split = np.clip(split, (there[0] & ~there[1]).sum(), there[0].sum())
    to = np.clip(split - np.arange(len(order)), 0.0, 1.0)
    share[order, a], share[order, b] = to, 1 - to
    return share


def _utilisation(needs: Array, first: int, second: int) -> float:
    """How busy the busier of two kinds is, by the estimate."""
    counts = np.array([first, second], float)
    share = divide(needs, counts)
    load = np.where(share > 0, share * np.where(np.isfinite(needs), needs, 1e9), 0.0).sum(axis=0)
    return float((load / counts).max())
