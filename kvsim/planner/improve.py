"""Placements that no single technique offers: the programme's mixes, replayed and polished."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np

from kvsim.errors import InfeasibleError
from kvsim.graph import Array
from kvsim.planner.choose import distinct
from kvsim.planner.grid import grid
from kvsim.planner.improved import BatchBounds, Improved, clearly_better, keep_best, turn
from kvsim.planner.mixes import Arrangement
from kvsim.planner.placement import Coefficients
from kvsim.planner.programme import Programme
from kvsim.planner.question import Question
from kvsim.planner.replays import Replays
from kvsim.planner.shares import ALONE, options_for
from kvsim.planner.solving import Mix, solve
from kvsim.planner.tangents import Tangents
from kvsim.planner.tighter import lowered, rounded
from kvsim.planner.workload import PlanLimits
from kvsim.prediction.generate import Prediction

TRIED = 3  # batches whose mixes are replayed
ROUGH = 5e-3  # gap of a mix that is only to be replayed
NEAR = 3  # batches beside a known mix's that are replayed
NEARLY = 0.03  # behind the best mix: families that a change by a tenth may make the best
CONTENDERS = 2  # of them
REPAIRS = 3  # times that the memory is lowered by what a replay exceeds it


class Placements:
    """The programme for one question, at all batches.

    Parameters
    ----------
    also : batches to look at besides a geometric grid.
    only : batches to look at instead of all these.
    families : what layers may do beside each other.
    """

    def __init__(
        self,
        q: Question,
        also: tuple[float, ...] = (),
        only: tuple[float, ...] = (),
        families: tuple[frozenset[str], ...] = ALONE,
    ) -> None:
        self.q, self._asked = q, families
        w, d = q.workload, q.deployment
        # on several ranks or stages nothing is placed anywhere else
        ways = options_for(d, halves=not w.service) if d.alone else []
        every, ways = frozenset[str]().union(*families), [o for o in ways if o.needs <= self._names]
        self.considered = dict.fromkeys(o.kind for o in ways)  # of every family
        options = [o for o in ways if o.kind in every]
        batches = np.array(only) if only else np.concatenate([grid(q, self.streams), also])
        self.coefficients = Coefficients(d, w, distinct(batches), options)
        kinds = {o.kind for o in options}
        left = {f: f & kinds for f in families}
        moving = [g for f, g in left.items() if g - {"full"} and (g == f or g not in ALONE)]
        self.families = moving or ([frozenset(kinds)] if kinds else [])
        self._begin()

    def _begin(self) -> None:
        """Nothing is solved yet."""
        self._bounds: Array | None = None  # by family and batch [s]
        self._rough = np.zeros((0, 0), dtype=bool)  # which of them ignore the memory
        self.solves, self.polishes = 0, True
        self.beside: Placements | None = None  # of other families, which bounds are of too
        self.best_of: dict[frozenset[str], Improved] = {}  # of every family, at any batch
        self._replays = Replays(self.q, self.coefficients)
        self._tangents = Tangents(self.coefficients, wanted=not self.q.workload.service)

    def under(self, question: Question) -> "Placements":
        """The same batches and times under other limits."""
        other = copy(self)
        other.q = question
        other._begin()
        return other

    @property
    def replays(self) -> int:
        """Mixes that the engine has played."""
        return self._replays.count

    @cached_property
    def _names(self) -> set[str]:
        """Of the techniques that the user considers."""
        return {t.name for t in self.q.admission.candidates()}

    @property
    def streams(self) -> bool:
        """Whether weights may be streamed: where the user considers what does that."""
        return bool(self._names & {"offload", "flexgen", "kvpr"})

    def _programme(self, index: int, limits: PlanLimits, family: frozenset[str]) -> Programme:
        p = self.coefficients.programme(index, limits, family)
        p = self._tangents.of(index, family, p)
        return p if self.streams else replace(p, streaming=replace(p.streaming, most=0.0))

    def bounds(self, value: float = np.inf) -> BatchBounds:
        """The relaxation at every batch and of every family that might be better than an objective.

        For the others what no memory could make quicker is bound enough.
        """
        batches, worth, started = self.coefficients.batches, clearly_better(value), perf_counter()
        every = [[self._programme(i, self.q.limits, family) for i in range(batches.size)]
                 for family in self.families]  # fmt: skip
        shape = len(every), batches.size
        self._bounds = np.array([[p.least() for p in row] for row in every]).reshape(shape)
        goals = [[self.q.goal(*x) for x in zip(row, batches, strict=True)]
                 for row in self._bounds.tolist()]  # fmt: skip
        self._rough = np.array(goals).reshape(shape) >= worth
        for family, index in np.argwhere(~self._rough):
            self._bounds[family, index] = self._relaxed(every[family][index])
        took, least = perf_counter() - started, np.min(self._bounds, axis=0, initial=np.inf)
        return BatchBounds(batches, least, took)

    def _relaxed(self, programme: Programme) -> float:
        """The bound of a family of mixes at one batch; infinite if none is within limits. [s]"""
        with suppress(InfeasibleError):
            return self._solve(programme, whole=False).bound
        return np.inf

    def bound_of(self, prediction: Prediction) -> float | None:
        """Seconds in which no placement serves a prediction's batch; None where there is none.

        None too where a technique loses something or drafts: placements do not bound it.
        """
        if not prediction.technique.exact or prediction.technique.drafts:
            return None
        asked = (self, self.beside) if self.beside else (self,)
        least = min(x._bound_at(float(prediction.batch[0])) for x in asked)
        return least if np.isfinite(least) else None

    def _bound_at(self, batch: float) -> float:
        """The least bound of all families at a batch, infinite if no mix is within limits. [s]"""
        known = np.flatnonzero(self.coefficients.batches == batch)
        if known.size and self._bounds is not None:
            i = int(known[0])
            for family in np.flatnonzero(self._rough[:, i]):
                p = self._programme(i, self.q.limits, self.families[family])
                self._bounds[family, i] = self._relaxed(p)
            self._rough[:, i] = False
            if np.isfinite(self._bounds[:, i]).any():
                return self._least(i)
        q = replace(self.q, workload=replace(self.q.workload, batch=int(batch)))
        other = Placements(q, families=self._asked)
        other.bounds()
        return other._least(0)

    def _least(self, index: int) -> float:
        """The least bound of all families at a batch. [s]"""
        assert self._bounds is not None
        known = dict(zip(self.families, self._bounds[:, index].tolist(), strict=True))
        return self._tangents.least(index, known, self._first)

    def _first(self, index: int, family: frozenset[str]) -> Mix:
        """The programme's mix of whole layers at one batch."""
        p = self._programme(index, self.q.limits, family)
        return self._tangents.first(index, family, p, self._solve)

    def promise(self, value: float, bounded: BatchBounds) -> bool:
        """Whether the bound of some batch is better than an objective."""
        return min(self._goals(bounded), default=np.inf) < clearly_better(value)

    def _goals(self, bounded: BatchBounds) -> list[float]:
        """Objectives that no mix at each batch undercuts; infinite if none is within limits."""
        return [self.q.goal(s, b) if np.isfinite(s) else np.inf
                for s, b in zip(bounded.bounds, bounded.batches, strict=True)]  # fmt: skip

    def better_than(
        self, value: float, bounded: BatchBounds, most: int = TRIED
    ) -> Iterator[Improved]:
        """Mixes at the batches whose bound is better than an objective, the best bounds first."""
        goals = self._goals(bounded)
        for i in np.argsort(goals)[:most]:
            if not np.isfinite(goals[i]) or goals[i] >= clearly_better(value):
                return
            if (found := self.at(int(i))) is not None:
                yield found
                value = min(value, self.goal(found))

    def joined(self, others: "Iterable[Placements]") -> None:
        """Count the work of others as its own, and know what they found."""
        for other in others:
            self.solves += other.solves
            self._replays.count += other.replays
            keep_best(self.best_of, other.best_of.values(), self.goal)

    def contenders(self, value: float) -> list[Improved]:
        """The best mixes of families that are nearly as good as an objective, the best first."""
        near = [x for x in self.best_of.values() if self.goal(x) <= value + NEARLY * abs(value)]
        return sorted(near, key=self.goal)[:CONTENDERS]

    def goal(self, found: Improved) -> float:
        """The objective of a mix, to be small."""
        return self.q.goal(found.replay, float(found.prediction.batch[0]))

    def at(self, index: int) -> Improved | None:
        """The best mix at one batch, of any family; the bound is that of all of them."""
        first: list[tuple[Mix, frozenset[str]]] = []
        for family in self.families:
            with suppress(InfeasibleError):
                first.append((self._first(index, family), family))
        first.sort(key=lambda x: x[0].bound)
        best: Improved | None = None
        for mix, family in first:
            if best is None or mix.bound < best.replay:
                found = self._of_family(index, family, mix)
                if found is not None:
                    keep_best(self.best_of, [found], self.goal)
                    best = found if best is None or found.replay < best.replay else best
        if best is None:
            return None
        bound = first[0][0].bound
        if self._bounds is not None:  # whole layers prove more than the relaxation
            self._bounds[:, index] = np.maximum(self._bounds[:, index], bound)
            self._rough[:, index] = False
        return replace(best, bound=bound)

    def _of_family(self, index: int, family: frozenset[str], first: Mix) -> Improved | None:
        """The programme's mixes, in their best order, polished by replay."""
        start = self._start(index, family, lambda p: self._counts(p, first))
        if start is None:
            return None
        best = self._replays.polish(start, index, self.streams) if self.polishes else start
        if (exact := self._replays.of(best, index, 0)) is None:
            return None
        return Improved(exact, first.bound, turn(exact), first, family, best)

    def _start(
        self,
        index: int,
        family: frozenset[str],
        counts: Callable[[Programme], list[Array]],
        like: Arrangement | None = None,
    ) -> Arrangement | None:
        """The best order of mixes with some counts, with less memory where replay needs more."""
        limits = self.q.limits
        for _ in range(REPAIRS):
            p = self._programme(index, limits, family)
            mixes = self._with_shares(p, counts(p))
            start, over = self._replays.best_order(p, mixes, index, like)
            if start is not None or not np.isfinite(over).all():
                return start
            limits = lowered(limits, over)
        return None

    def near(self, known: Improved) -> Improved | None:
        """The best mix beside one that is known, of other batches or a question a little different.

        Its layers with new shares, at the batch where the programme says that this is best; no new
        counts are decided but by polishing, so that nothing is said of a bound.
        """
        first: list[tuple[float, int]] = []
        for i, batch in enumerate(self.coefficients.batches):
            p = self._programme(i, self.q.limits, known.family)
            with suppress(InfeasibleError):
                mix = self._solve(rounded(p), whole=False, counts=known.mix.counts)
                first.append((self.q.goal(mix.objective, float(batch)), i))
        starts: list[tuple[float, int, Arrangement]] = []
        for _, i in sorted(first)[:NEAR]:
            start = self._start(i, known.family, lambda _: [known.mix.counts], known.arrangement)
            found = None if start is None else self._replays.of(start, i)
            if start is not None and found is not None:
                goal = self.q.goal(turn(found), float(found.batch[0]))
                starts.append((goal, i, start))
        if not starts:
            return None
        _, i, start = min(starts, key=lambda x: x[0])
        best = self._replays.polish(start, i, self.streams, layers=False)
        if (exact := self._replays.of(best, i, 0)) is None:
            return None
        return replace(known, prediction=exact, bound=0.0, replay=turn(exact), arrangement=best)

    def _solve(self, p: Programme, **decided: Any) -> Mix:
        self.solves += 1
        return solve(p, **decided)

    def _counts(self, p: Programme, first: Mix) -> list[Array]:
        """Layers of the bound's mix, and of the one that is best in blocks."""
        every = [first.counts]
        with suppress(InfeasibleError):
            blocks = self._solve(rounded(p), apart=True, gap=ROUGH).counts
            every += [] if (blocks == first.counts).all() else [blocks]
        return every

    def _with_shares(self, p: Programme, every: list[Array]) -> Iterator[Mix]:
        """Mixes whose memory is exact, for layers that overlap and for layers in blocks."""
        for counts, apart in product(every, (False, True)):
            with suppress(InfeasibleError):
                yield self._solve(rounded(p), counts=counts, apart=apart)
