"""The cheapest schedule over the day that meets the targets when it plays the trace.

Windows are played alone on mixes of replicas: those that the fleet programme proposes, those of the
fleet that always runs, each kind by itself, and then the mixes near the best ones. A second
programme chooses one mix for each window (planner/fleet/mixes.py), and the whole trace is played on
what it chooses. Where that misses a target, what the play added to its windows is noted, and it
chooses again. No schedule is dearer than the fleet that always runs.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from kvsim.errors import InfeasibleError
from kvsim.graph import Array
from kvsim.planner.fleet.arrays import Counts, FleetPlan, Schedule
from kvsim.planner.fleet.dispatch import losses_of
from kvsim.planner.fleet.mixes import Choice, Seen, as_mixes, choose
from kvsim.planner.fleet.near import CHEAPER, allowed, fewer
from kvsim.planner.fleet.play import Played
from kvsim.planner.fleet.proposal import propose, undominated
from kvsim.planner.fleet.proven import Found, Proven
from kvsim.planner.fleet.search import FleetSearch
from kvsim.planner.fleet.windows import Mix, WindowPlays, late_by_window, may_be_late

KINDS = 5  # of replica that mixes are made of, besides those of the fleets to begin with
LADDER = 3  # replicas of a kind by itself that are tried, from what it is thought to need
MIXES = 3  # new ones in a window, times the rounds of a search, at most
OVERFULL = 2.0  # utilisation above which a mix is not worth a simulation in its window
LITTLE = 1.25  # late requests of windows alone, of those that may be, that are worth a play
TRIED = 4  # one in so many rounds of a search plays a schedule with one replica less
HOPELESS = 2.0  # late requests of a mix, of all that may be, beyond which none of fewer is played


class ScheduleSearch(FleetSearch):
    """The search for a schedule of one trace; the classes are divided anew in each window."""

    def run(self) -> Found:
        """Search.

        Raises
        ------
        InfeasibleError
            If no schedule within the limits is found that meets the targets.
        """
        assert self.schedule is not None
        self.seen = Seen([{} for _ in self.demand.rate], may_be_late(self.traffic, self.targets))
        best, plan = self._always(), self._planned(self.schedule)
        if plan is None and best is None:
            raise InfeasibleError("no fleet carries the demand within the targets and limits")
        self.kinds = self._kinds([x.running for x in (best, plan) if x is not None])
        self._begin([x.running for x in (best, plan) if x is not None])
        best = self._cheapest(best, self.schedule)
        if best is None:
            raise InfeasibleError(f"none of {self.proposals} schedules met the targets when played")
        best = self._thinned(best, self.schedule)
        bound = best.cost if plan is None else min(plan.relaxed, best.cost)
        gap = 0.0 if plan is None else max(best.cost - plan.bound, 0.0) / best.cost
        return Found(
            best, self.current, bound, self.proposals, self.simulations, gap, self.seconds,
            self.windows.plays,
        )  # fmt: skip

    @cached_property
    def windows(self) -> WindowPlays:
        """What is seen of the windows."""
        return WindowPlays(
            self.traffic, self.configurations, self.current, self.targets, self.limits.late,
            self.load * (1 + self.limits.headroom), self.slowed,
        )  # fmt: skip

    def always(self) -> FleetSearch:
        """The same search for replicas that always run."""
        return FleetSearch(
            self.traffic, self.configurations, self.offers, self.targets, self.limits, None,
            self.load, self.slowdown, self.tell, self.rounds,
        )  # fmt: skip

    def slowed(self, _: Counts) -> float:
        """How many times as long all takes that some replicas do."""
        return self.slowdown

    def _always(self) -> Proven | None:
        """The cheapest fleet that always runs."""
        search = self.always()
        search.factor = self.factor.copy()
        try:
            return search.run().fleet
        except InfeasibleError:
            return None
        finally:
            self.proposals += search.proposals
            self.simulations += search.simulations

    def _planned(self, schedule: Schedule) -> FleetPlan | None:
        """The fleet programme's schedule, by what replicas carry."""
        try:
            return propose(self.current, self.demand, self.limits, schedule, (), ())
        except InfeasibleError:
            return None

    def _kinds(self, fleets: list[Counts]) -> list[int]:
        """The kinds that mixes are made of: those of some fleets, and the cheapest for a class."""
        mean = self.demand.mean
        serves = (self.offers.capacity > 0) & (mean > 0)[:, None]
        each = np.where(
            serves, self.offers.rent / np.where(serves, self.offers.capacity, 1), np.inf
        )
        come = mean > 0
        dearer = each[come] / each[come].min(axis=1, keepdims=True)
        some = [j for j in undominated(self.offers, self.limits) if np.isfinite(dearer[:, j]).any()]
        some.sort(key=lambda j: (float(mean[come] @ dearer[:, j]), float(dearer[:, j].min())))
        used = np.flatnonzero(np.any([x.any(axis=0) for x in fleets], axis=0)).tolist()
        return sorted({*used, *some[:KINDS]})

    def _begin(self, fleets: list[Counts]) -> None:
        """The mixes of some fleets, and each kind by itself."""
        kinds = len(self.offers)
        for w in range(len(self.demand.rate)):
            for running in fleets:
                self._see(w, as_mixes(running)[w])
            for j in self.kinds:
                one = tuple(int(i == j) for i in range(kinds))
                count = max(int(np.ceil(self.windows.busy(w, one))), 1)
                for n in range(max(count - 1, 1), count + LADDER):
                    some = tuple(n * i for i in one)
                    if self._try(w, some) and not self.seen.late[w][some].any():
                        break

    def _cheapest(self, best: Proven | None, schedule: Schedule) -> Proven | None:
        """Schedules of the mixes that were seen, until none is cheaper."""
        left = MIXES * self.rounds * len(self.seen.late)
        for _ in range(self.rounds):
            choice, left = self._chosen(best, schedule, left)
            if choice is None:
                break
            best = self._proven(choice) or best
        return best

    def _thinned(self, best: Proven, schedule: Schedule) -> Proven:
        """The best schedule without replicas that it does not need, as far as a few plays show.

        Windows alone are about what they are in the trace, so what misses by little is tried too.
        """
        left = self.rounds // TRIED
        while True:
            for cost, running, reserved in fewer(
                self.offers, self.demand, schedule, self.limits, best.running, best.reserved
            ):
                thin = Choice(running, reserved, cost, True)
                if cost >= best.cost * (1 - CHEAPER) or not self._worth_a_play(thin):
                    continue
                if not left:
                    return best
                left -= 1
                proven = self._proven(thin)
                if proven is not None:
                    best = proven
                    break
            else:
                return best

    def _worth_a_play(self, choice: Choice) -> bool:
        """Whether a schedule of mixes that were seen was not tried and may meet the targets."""
        mixes, seen = choice.mixes, self.seen
        if mixes in seen.missed or any(x not in seen.late[w] for w, x in enumerate(mixes)):
            return False
        late = sum(seen.late[w][x][0] for w, x in enumerate(mixes)) + sum(
            seen.delayed.get((w, mixes[w - 1], x), 0) for w, x in enumerate(mixes)
        )
        return bool((late <= LITTLE * seen.may_be).all())

    def _chosen(
        self, best: Proven | None, schedule: Schedule, left: int
    ) -> tuple[Choice | None, int]:
        """The cheapest schedule of mixes, if it is cheaper; all that are near it were seen.

        Parameters
        ----------
        left : simulations of mixes, at most; what is left of them is returned.
        """
        while True:
            try:
                choice = choose(self.seen, self.offers, self.demand, self.limits, schedule)
            except InfeasibleError:
                return None, left
            cheaper = best is None or choice.cost < best.cost * (1 - CHEAPER)
            better = cheaper and (best is None or not choice.beyond)
            known = self.windows.plays
            new = self._grow(choice.running if better or best is None else best.running, left)
            left -= self.windows.plays - known
            if not new:
                return (choice if better and not choice.beyond else None), left

    def _grow(self, running: Counts, left: int) -> int:
        """Play mixes near those of a schedule; how many are new."""
        near: list[tuple[float, int, Mix]] = []
        mixes = as_mixes(running)
        for w, mix in enumerate(mixes):
            beside = {mixes[w - 1], mixes[(w + 1) % len(mixes)]}
            late = mix not in self.seen.late[w] or bool(self.seen.late[w][mix].any())
            price = self._price(mix)
            some = {x for x in beside if late or self._price(x) < price}
            some.update(self._near(mix, late), self._kept(w, mix, beside))
            near += [(self._price(x) - price, w, x) for x in some - self.seen.late[w].keys()]
        new, before = 0, self.windows.plays
        for _, w, mix in sorted(near):
            if self.windows.plays - before >= left:
                break
            new += self._try(w, mix)
        return new

    def _near(self, mix: Mix, late: bool) -> Iterator[Mix]:
        """One replica less, or of one kind in place of one or two of another, if that is cheaper.

        Where requests are late, one replica more or of a dearer kind too.
        """
        own, price = np.array(mix), self._price(mix)
        unit = np.eye(len(mix), dtype=np.int64)
        used = np.flatnonzero(own)
        steps = [-unit[j] for j in used] + [unit[k] for k in self.kinds if late]
        for j in used:
            for k in (k for k in self.kinds if k != j):
                steps += [unit[k] - unit[j], 2 * unit[k] - unit[j], unit[k] - 2 * unit[j]]
        for step in steps:
            near = own + step
            if (near >= 0).all() and near.any():
                found = as_mixes(near[None])[0]
                if self._price(found) < price or (late and step.max() < 2 and step.min() > -2):
                    yield found

    def _kept(self, window: int, mix: Mix, beside: set[Mix]) -> Iterator[Mix]:
        """A replica more that runs before or after, where it is reserved or dear to start."""
        assert self.schedule is not None
        dear = self.schedule.start_up >= self.demand.hours[window]
        for j in (j for j in self.kinds if dear or np.isfinite(self.offers.reserved[j])):
            if max(x[j] for x in beside) > mix[j]:
                yield tuple(n + (i == j) for i, n in enumerate(mix))

    def _price(self, mix: Mix) -> float:
        return float(sum(n * x for n, x in zip(mix, self.offers.rent, strict=True) if n))

    def _try(self, window: int, mix: Mix) -> bool:
        """Play a mix in a window, if it is new, within the limits and may be of use."""
        known = self.seen.late[window]
        some = replace(self.limits, mixed=False)
        if mix in known or not allowed(self.offers, np.array(mix), some):
            return False
        if self.windows.busy(window, mix) > OVERFULL:
            return False
        most = HOPELESS * np.maximum(self.seen.may_be, 1)
        for other, late in known.items():
            smaller = all(n <= m for n, m in zip(mix, other, strict=True))
            alike = all((n > 0) == (m > 0) for n, m in zip(mix, other, strict=True))
            if smaller and alike and (late[0] > most).any():
                return False
        return self._see(window, mix)

    def _see(self, window: int, mix: Mix) -> bool:
        """Note the late requests of a mix, and of all that losses may leave of it."""
        failures = self.limits.failures
        rows = [self.windows.late(window, mix, self.windows.load)]
        every = np.full(len(mix), failures)
        for lost in losses_of(every, failures) if failures else ():
            left = tuple(max(n - m, 0) for n, m in zip(mix, lost, strict=True))
            if not any(left):
                return False
            rows.append(self.windows.late(window, left, self.load))
        self.seen.late[window][mix] = np.array(rows)
        return True

    def divided(self, running: Counts) -> Array:
        """Shares of the classes in each window. (w, c, j)"""
        return np.stack([self.windows.share(w, m) for w, m in enumerate(as_mixes(running))])

    def _proven(self, choice: Choice) -> Proven | None:
        """Play the trace on a schedule and note it; None if it misses the targets."""
        self.proposals += 1
        self.tell(f"schedule {self.proposals}: {choice.cost:.2f} USD/h {self.named(choice.most)}")
        share, headroom = self.divided(choice.running), self.limits.headroom
        self.slowdown = self.slowed(choice.running)
        played = self.played(choice.running, share, 1 + headroom)
        self._note(choice.mixes, played)
        if played.meets(self.targets):
            proven = played if not headroom else self.played(choice.running, share)
            if proven.meets(self.targets) and self._survives(choice.running, share):
                return Proven(choice.running, choice.reserved, share, choice.cost, proven)
        self.seen.missed.append(choice.mixes)
        return None

    def _note(self, mixes: tuple[Mix, ...], played: Played) -> None:
        """How many more or fewer requests were late than with the mixes of the windows alone."""
        windows = len(self.seen.late)
        found = late_by_window(played, self.targets, self.traffic.window, windows)
        self.seen.late[0][mixes[0]][0] = found[0]
        for w in range(1, windows):
            before, mix = mixes[w - 1], mixes[w]
            self.seen.delayed[w, before, mix] = found[w] - self.seen.late[w][mix][0]
