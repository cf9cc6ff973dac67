"""Placements that no single technique offers: the programme's mixes, replayed and polished.

The programme's relaxation bounds every batch of a geometric grid. Where a bound is better than the
table's best, the mix of whole layers is solved, its layers are put in the best order, and steps of
shares polish it. The best is then looked for at finer batches, and within layers that do several
things at once.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from kvsim.errors import InfeasibleError, InputError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.arrangements import (
    LAYER_MOVES,
    Arrangement,
    BatchEvaluator,
    Scored,
    Trials,
    arrange,
    level_shares,
    orders,
)
from kvsim.planner.costs import ALONE, JOINED, Shares, placement_options, placement_technique
from kvsim.planner.local_search import UniformPlacements, local_search, search_uniform
from kvsim.planner.milp import Mix, Programme, solve_programme
from kvsim.planner.placement import Coefficients, Tangents, leave_rounding_room, lower_limits
from kvsim.planner.question import SIMPLEST, PlanLimits, Question, simplicity_rank
from kvsim.planner.table import BATCH_GROWTH, SAMPLED_CONTEXTS, TableSearch, distinct
from kvsim.prediction.generate import Prediction

# what is found


@frozen
class FoundMix:
    """The best mix that was found at one batch."""

    prediction: Prediction
    bound: float  # seconds that no mix at this batch undercuts [s]
    replay: float  # seconds of this one [s]
    mix: Mix
    family: frozenset[str]  # options that may stand together
    arrangement: Arrangement  # as replayed


def batch_seconds(prediction: Prediction) -> float:
    """Seconds in which every sequence of the batch is served once. [s]"""
    return float(prediction.batch[0]) * prediction.generate / float(prediction.output_tok_s[0])


def improvement_bound(value: float) -> float:
    """What an objective must undercut; anything where there is none yet."""
    return value if np.isinf(value) else value - 1e-3 * abs(value)


def keep_best(
    known: dict[frozenset[str], FoundMix],
    found: Iterable[FoundMix],
    goal: Callable[[FoundMix], float],
) -> None:
    """Keep the best mix of every family."""
    for mix in found:
        before = known.get(mix.family)
        if before is None or goal(mix) < goal(before):
            known[mix.family] = mix


# arrangements replayed

BLOCK_GAIN = 1.005  # times a time: what every further block of layers must gain


class Replays:
    """The engine's word on arrangements of one question's layers, at its batches.

    Attributes
    ----------
    count
        Replays so far.
    """

    def __init__(self, q: Question, coefficients: Coefficients) -> None:
        self.q, self.coefficients, self.count = q, coefficients, 0

    def of(
        self, arrangement: Arrangement, index: int, contexts: int = SAMPLED_CONTEXTS
    ) -> Prediction | None:
        """What the engine says; nothing where it refuses."""
        w, d = self.q.workload, self.q.deployment
        batch = self.coefficients.batches[index : index + 1]
        self.count += 1
        try:
            t = arrangement.technique(d, w.prompt)
            return None if t.refuses(d) else w.predict(t, d, batch, contexts)
        except InputError:
            return None

    def beyond(self, prediction: Prediction) -> tuple[float, float]:
        """Bytes beyond the two memories; infinite where a time is missed."""
        limits = self.q.limits
        late = (
            float(prediction.ttft_s[0]) > limits.ttft
            or float(np.nan_to_num(prediction.tpot_s)[0]) > limits.tpot
        )
        if late:
            return np.inf, np.inf
        return (
            max(0.0, float(prediction.given_bytes[0]) - limits.gpu_memory),
            max(0.0, float(prediction.host_bytes[0]) - limits.host_memory),
        )

    def best_order(
        self,
        programme: Programme,
        mixes: Iterable[Mix],
        index: int,
        like: Arrangement | None = None,
    ) -> tuple[Arrangement | None, tuple[float, float]]:
        """The mix and order of layers that are fastest; blocks unless alternating gains clearly.

        Parameters
        ----------
        like : an order to keep, if the mixes can stand in it.
        """
        tried: dict[Arrangement, None] = {}
        for mix in mixes:
            first = arrange(self.coefficients, programme, mix)
            level = level_shares(first)
            some = [level] if level and first.shared else [first, *([level] if level else [])]
            tried |= dict.fromkeys(a for x in some for a in orders(x))
        if like is not None:
            tried = {a: None for a in tried if a.order == like.order} or tried
        best: tuple[float, Arrangement] | None = None
        over = (np.inf, np.inf)
        for a in tried:
            found = self.of(a, index)
            if found is None:
                continue
            beyond = self.beyond(found)
            if max(beyond) > 0:
                over = min(over, beyond, key=sum)
                continue
            took = batch_seconds(found) * BLOCK_GAIN ** (a.blocks - 1)
            if best is None or took < best[0]:
                best = took, a
        return (None if best is None else best[1]), over

    def polish(
        self, arrangement: Arrangement, index: int, streams: bool, layers: bool = True
    ) -> Arrangement:
        """The best that steps of shares lead to; weights may stream if the user says so.

        Parameters
        ----------
        layers : whether layers may move from one use to another, too.
        """
        together = BatchEvaluator(self.q, streams)
        batch = float(self.coefficients.batches[index])
        found = local_search(together, arrangement, batch, LAYER_MOVES if layers else ())
        self.count += together.count
        return found


# the programme at all batches

GRID_BATCHES = 8  # of the relaxation


def batch_grid(question: Question, streams: bool) -> Array:
    """The batch that is asked for, or a geometric grid up to the largest that fits somehow.

    Parameters
    ----------
    streams : whether weights may be streamed.
    """
    w, d, limits = question.workload, question.deployment, question.limits
    if w.batch is not None:
        return np.array([float(w.batch)])
    most = 1.0
    for s in (Shares(), Shares(host=1.0)):
        room = limits.gpu_memory, limits.host_memory
        for streamed in (0.0, 1.0) if streams else (0.0,):
            found = w.largest(placement_technique(s, w.prompt, streamed), d, *room)
            most = max(most, float(np.max(found)))
    count = min(GRID_BATCHES, int(np.log(most) / np.log(BATCH_GROWTH)) + 2)
    steps = np.round(np.geomspace(1.0, most, count))
    return distinct(np.concatenate([steps, 2 * np.ceil(steps[steps > 1] / 2)]))


TRIED_BATCHES = 3  # batches whose mixes are replayed
ROUGH_GAP = 5e-3  # gap of a mix that is only to be replayed
NEAR_BATCHES = 3  # batches beside a known mix's that are replayed
NEAR_BEST_MIX = 0.03  # behind the best mix: families that a change by a tenth may make the best
MAX_CONTENDERS = 2  # of them
MEMORY_REPAIRS = 3  # times that the memory is lowered by what a replay exceeds it


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
        ways = placement_options(d, halves=not w.service) if d.single_pass else []
        every, ways = frozenset[str]().union(*families), [o for o in ways if o.needs <= self._names]
        self.considered = dict.fromkeys(o.kind for o in ways)  # of every family
        options = [o for o in ways if o.kind in every]
        batches = np.array(only) if only else np.concatenate([batch_grid(q, self.streams), also])
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
        self.best_of: dict[frozenset[str], FoundMix] = {}  # of every family, at any batch
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

    def bounds(self, value: float = np.inf) -> Array:
        """Solve the relaxation wherever it might be better than an objective.

        For the others what no memory could make quicker is bound enough.

        Parameters
        ----------
        value : the objective; anything is better where it is infinite.

        Returns
        -------
        Seconds that no mix at each batch undercuts; infinite where none is within limits. (b,) [s]
        """
        batches, worth = self.coefficients.batches, improvement_bound(value)
        every = [
            [self._programme(i, self.q.limits, family) for i in range(batches.size)]
            for family in self.families
        ]
        shape = len(every), batches.size
        self._bounds = np.array([[p.least() for p in row] for row in every]).reshape(shape)
        goals = [
            [self.q.goal(*x) for x in zip(row, batches, strict=True)]
            for row in self._bounds.tolist()
        ]
        self._rough = np.array(goals).reshape(shape) >= worth
        for family, index in np.argwhere(~self._rough):
            self._bounds[family, index] = self._relaxed(every[family][index])
        return np.asarray(np.min(self._bounds, axis=0, initial=np.inf))

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

    def promise(self, value: float, bounds: Array) -> bool:
        """Whether the bound of some batch is better than an objective."""
        return min(self._goals(bounds), default=np.inf) < improvement_bound(value)

    def _goals(self, bounds: Array) -> list[float]:
        """Objectives that no mix at each batch undercuts; infinite if none is within limits."""
        return [
            self.q.goal(s, b) if np.isfinite(s) else np.inf
            for s, b in zip(bounds, self.coefficients.batches, strict=True)
        ]

    def better_than(
        self, value: float, bounds: Array, most: int = TRIED_BATCHES
    ) -> Iterator[FoundMix]:
        """Mixes at the batches whose bound is better than an objective, the best bounds first."""
        goals = self._goals(bounds)
        for i in np.argsort(goals)[:most]:
            if not np.isfinite(goals[i]) or goals[i] >= improvement_bound(value):
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

    def contenders(self, value: float) -> list[FoundMix]:
        """The best mixes of families that are nearly as good as an objective, the best first."""
        near = [
            x for x in self.best_of.values() if self.goal(x) <= value + NEAR_BEST_MIX * abs(value)
        ]
        return sorted(near, key=self.goal)[:MAX_CONTENDERS]

    def goal(self, found: FoundMix) -> float:
        """The objective of a mix, to be small."""
        return self.q.goal(found.replay, float(found.prediction.batch[0]))

    def at(self, index: int) -> FoundMix | None:
        """The best mix at one batch, of any family; the bound is that of all of them."""
        first: list[tuple[Mix, frozenset[str]]] = []
        for family in self.families:
            with suppress(InfeasibleError):
                first.append((self._first(index, family), family))
        first.sort(key=lambda x: x[0].bound)
        best: FoundMix | None = None
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

    def _of_family(self, index: int, family: frozenset[str], first: Mix) -> FoundMix | None:
        """The programme's mixes, in their best order, polished by replay."""
        start = self._start(index, family, lambda p: self._counts(p, first))
        if start is None:
            return None
        best = self._replays.polish(start, index, self.streams) if self.polishes else start
        if (exact := self._replays.of(best, index, 0)) is None:
            return None
        return FoundMix(exact, first.bound, batch_seconds(exact), first, family, best)

    def _start(
        self,
        index: int,
        family: frozenset[str],
        counts: Callable[[Programme], list[Array]],
        like: Arrangement | None = None,
    ) -> Arrangement | None:
        """The best order of mixes with some counts, with less memory where replay needs more."""
        limits = self.q.limits
        for _ in range(MEMORY_REPAIRS):
            p = self._programme(index, limits, family)
            mixes = self._with_shares(p, counts(p))
            start, over = self._replays.best_order(p, mixes, index, like)
            if start is not None or not np.isfinite(over).all():
                return start
            limits = lower_limits(limits, over)
        return None

    def near(self, known: FoundMix) -> FoundMix | None:
        """The best mix beside one that is known, of other batches or a question a little different.

        Its layers with new shares, at the batch where the programme says that this is best; no new
        counts are decided but by polishing, so that nothing is said of a bound.
        """
        first: list[tuple[float, int]] = []
        for i, batch in enumerate(self.coefficients.batches):
            p = self._programme(i, self.q.limits, known.family)
            with suppress(InfeasibleError):
                mix = self._solve(leave_rounding_room(p), whole=False, counts=known.mix.counts)
                first.append((self.q.goal(mix.objective, float(batch)), i))
        starts: list[tuple[float, int, Arrangement]] = []
        for _, i in sorted(first)[:NEAR_BATCHES]:
            start = self._start(i, known.family, lambda _: [known.mix.counts], known.arrangement)
            found = None if start is None else self._replays.of(start, i)
            if start is not None and found is not None:
                goal = self.q.goal(batch_seconds(found), float(found.batch[0]))
                starts.append((goal, i, start))
        if not starts:
            return None
        _, i, start = min(starts, key=lambda x: x[0])
        best = self._replays.polish(start, i, self.streams, layers=False)
        if (exact := self._replays.of(best, i, 0)) is None:
            return None
        return replace(
            known, prediction=exact, bound=0.0, replay=batch_seconds(exact), arrangement=best
        )

    def _solve(self, p: Programme, **decided: Any) -> Mix:
        self.solves += 1
        return solve_programme(p, **decided)

    def _counts(self, p: Programme, first: Mix) -> list[Array]:
        """Layers of the bound's mix, and of the one that is best in blocks."""
        every = [first.counts]
        with suppress(InfeasibleError):
            blocks = self._solve(leave_rounding_room(p), apart=True, gap=ROUGH_GAP).counts
            every += [] if (blocks == first.counts).all() else [blocks]
        return every

    def _with_shares(self, p: Programme, every: list[Array]) -> Iterator[Mix]:
        """Mixes whose memory is exact, for layers that overlap and for layers in blocks."""
        for counts, apart in product(every, (False, True)):
            with suppress(InfeasibleError):
                yield self._solve(leave_rounding_room(p), counts=counts, apart=apart)


# finer batches

FINER_STEPS = 9  # from one batch to the next of the grid
BATCH_MOVES = 3  # times that a mix moves on to a better batch around its own, at most
BATCH_RANGE = (0.75, 1.33)  # times a batch: where others are looked at
NEXT_BATCHES = 3  # neighbouring batches that are, too
PRODUCT_TILES = (64, 32, 16, 8, 4)  # rows of a product: the largest that some of them fill
MIN_TILED = 2


def refine_batches(
    placements: Placements, best: FoundMix | None, batch: float, value: float
) -> Iterator[FoundMix]:
    """Mixes at batches between a batch's neighbours, then beside the best, and from there again.

    First new mixes, where their bound is better than an objective; then the best mix's layers with
    new shares, as long as it moves on to a better batch.

    Parameters
    ----------
    best : the mix that is the best so far, or nearly, if any is.
    batch, value : of the best that is known, whether it is a mix or not.
    """
    q, grid = placements.q, placements.coefficients.batches
    here = int(np.searchsorted(grid, batch))
    low, high = grid[max(here - 1, 0)], grid[min(here + 1, grid.size - 1)]
    asked = [Placements(q, only=_batches_between(low, high) if best else _batches_near(batch))]
    for found in asked[0].better_than(value, asked[0].bounds(value), most=1):
        yield found
        if best is None or placements.goal(found) < placements.goal(best):
            best = found
    placements.joined(asked)
    if best is not None:
        yield from _follow_batches(placements, best)


def search_within_layers(placements: Placements, batch: float, value: float) -> Iterator[FoundMix]:
    """Mixes that do several things within a layer: at a batch, and at the even ones next to it.

    Parameters
    ----------
    batch, value : of the best that is known without them.
    """
    q, best = placements.q, None
    even = (2 * np.floor(batch / 2), batch, 2 * np.ceil(batch / 2))
    some = even if q.workload.batch is None else (batch,)
    found = Placements(q, only=tuple(x for x in some if x), families=JOINED)
    for best in found.better_than(value, found.bounds(value)):
        yield best
        value = placements.q.goal(best.replay, float(best.prediction.batch[0]))
    placements.joined([found])
    placements.beside = found
    if best is not None and q.workload.batch is None:
        yield from _follow_batches(placements, best)


def _follow_batches(placements: Placements, best: FoundMix) -> Iterator[FoundMix]:
    """A mix's layers with new shares, as long as it moves on to a better batch."""
    asked: list[Placements] = []
    for _ in range(BATCH_MOVES):
        some = _batches_near(float(best.prediction.batch[0]))
        asked.append(Placements(placements.q, only=some, families=(best.family,)))
        last = asked[-1].near(best)
        if last is None:
            break
        yield last
        if placements.goal(last) >= placements.goal(best):
            break
        best = last
    placements.joined(asked)


def _batches_between(low: float, high: float) -> tuple[float, ...]:
    """Batches from one to another, ``STEPS`` steps apart."""
    found = np.ceil(np.geomspace(max(low, 1.0), high, FINER_STEPS + 1))
    return tuple(distinct(found).tolist())


def _batches_near(batch: float) -> tuple[float, ...]:
    """Batches within a third of one, those that fill tiles of products, and the next ones."""
    low, high = (np.ceil(x * batch) for x in BATCH_RANGE)
    tiles = (size * np.arange(np.ceil(low / size), high / size) for size in PRODUCT_TILES)
    whole = next((x for x in tiles if x.size > MIN_TILED), np.zeros(0))
    next_ones = batch + np.arange(-NEXT_BATCHES, NEXT_BATCHES + 1)
    found = np.concatenate([whole, next_ones, np.ceil(np.geomspace(low, high, FINER_STEPS))])
    return tuple(distinct(found[found >= 1]).tolist())


# the table and its mixes


@frozen
class MixedPlacements:
    """What was added to a table of techniques.

    Attributes
    ----------
    placements
        The programme.
    rows
        Its mixes by their rows in the table.
    alike
        Placements whose layers are alike.
    """

    placements: Placements
    rows: dict[int, FoundMix] = field(default_factory=dict)
    alike: UniformPlacements = field(default_factory=UniformPlacements)

    def starts(self, value: float) -> list[Scored]:
        """From where a question a little different is answered: of every kind the best known.

        Layers of a mix may be alike too, though placements that are alike were not searched, or
        not as far.

        Parameters
        ----------
        value : of the best that is known; mixes are left out that are far behind.
        """
        found = list(self.alike.starts)
        for mix in self.placements.contenders(value):
            if mix.arrangement.blocks > 1:
                continue
            trials = Trials.of(mix.arrangement, float(mix.prediction.batch[0]))
            mine = Scored(trials, np.array([self.placements.goal(mix)]), np.zeros(1))
            found = [
                x
                for x in found
                if x.trials.does != trials.does or x.merits[0] < mine.goals[0] or x.late[0] > 0
            ]
            if all(x.late[0] > 0 or x.trials.does != trials.does for x in found):
                found.append(mine)
        return found


def add_mixes(
    question: Question, search: TableSearch, roughly: bool = False, known: Placements | None = None
) -> MixedPlacements:
    """Placements where the programme's bound is better than the table's best, as rows of it.

    Where full KV is as good as the best within the known error, a mix that is not better by more
    than that would not be chosen either: none is then looked for, and the bound says what is left.

    Parameters
    ----------
    roughly : one mix, as the programme gives it, is enough to see what would be chosen.
    known : the programme under other limits, whose batches are enough.
    """
    limits = question.limits.finite()
    best, chosen = search.best(limits), search.chosen(limits)
    rows = [row for row in (best, chosen) if row is not None]
    also = tuple(float(search.table.batch[row]) for row in rows)
    placements = known.under(question) if known else Placements(question, also)
    value = np.inf if best is None else search.value(best)
    if (
        chosen is not None
        and simplicity_rank(simplest := search.table.technique[chosen]) == SIMPLEST
    ):
        own = search.value(chosen)
        value = min(value, own - question.between(simplest, simplest) * abs(own))
    tried, placements.polishes = (1, False) if roughly else (TRIED_BATCHES, True)
    bounds, same = placements.bounds(value), UniformPlacements()
    if not roughly and placements.promise(value, bounds):
        most = float(placements.coefficients.batches[-1])
        same = search_uniform(question, placements.considered, placements.streams, most)
        for prediction in same.best:
            value = min(value, search.value(search.include(prediction)))
    better = placements.better_than(value, bounds, tried)
    mixes = {search.include(x.prediction): x for x in better}
    row = search.optimum(limits)
    top = np.inf if row is None else search.value(row)
    looked = row is not None and (row in mixes or value >= top)  # into what is no worse than it
    if row is not None and looked and not roughly and question.workload.batch is None:
        near = [mixes[row]] if row in mixes else placements.contenders(top)
        batch = float(search.table.batch[row])
        for found in refine_batches(placements, near[0] if near else None, batch, min(value, top)):
            mixes[search.include(found.prediction)] = found
    if looked and not roughly and not question.workload.service:
        row = search.optimum(limits)
        assert row is not None
        batch, least = float(search.table.batch[row]), min(value, search.value(row))
        for found in search_within_layers(placements, batch, least):
            mixes[search.include(found.prediction)] = found
    return MixedPlacements(placements, mixes, same)
