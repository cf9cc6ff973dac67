"""Placements that no single technique offers: the programme's mixes, replayed and polished."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from time import perf_counter

import numpy as np

from kvsim.errors import InfeasibleError, InputError
from kvsim.graph import Array
from kvsim.planner.mixes import FINER, Arrangement, arranged, levelled, neighbours, orders
from kvsim.planner.options import CONTEXTS, GROWTH
from kvsim.planner.placement import Coefficients
from kvsim.planner.programme import Programme
from kvsim.planner.question import Question
from kvsim.planner.shares import FAMILIES, Shares, options_for, placed
from kvsim.planner.solving import Mix, solve
from kvsim.planner.workload import PlanLimits
from kvsim.prediction.generate import Prediction

BATCHES = 8  # of the relaxation
TRIED = 3  # batches whose mixes are replayed
TRIES = 80  # replays of the local search, per batch
TIGHTER = 1e-4  # of a memory: shares are written with six digits
REPAIRS = 3  # times that the memory is lowered by what a replay exceeds it
WORTH = 1.002  # times a time: a move that gains less is none
ALTERNATING = 1.005  # times a time: what every further block of layers must gain


@dataclass(frozen=True)
class Improved:
    """The best mix that was found at one batch."""

    prediction: Prediction
    bound: float  # seconds that no mix at this batch undercuts [s]
    replay: float  # seconds of this one [s]
    mix: Mix


@dataclass(frozen=True)
class BatchBounds:
    """What the programme says of every batch."""

    batches: Array  # (b,)
    bounds: Array  # (b,) [s], infinite where no mix is within the limits
    seconds: float


class Placements:
    """The programme for one question, at all batches.

    Parameters
    ----------
    also : batches to look at besides a geometric grid.
    """

    def __init__(self, q: Question, also: tuple[float, ...] = ()) -> None:
        self.q = q
        w, d = q.workload, q.deployment
        options = [o for o in options_for(d, halves=not w.service) if self._admitted(o.name)]
        self.coefficients = Coefficients(d, w, np.union1d(self._batches(), also), options)
        kinds = {o.kind for o in options}
        moving = [f & kinds for f in FAMILIES if f & kinds - {"full"}]
        self.families = moving or ([frozenset(kinds)] if kinds else [])
        self._bounds: Array | None = None
        self._proved: dict[tuple[int, frozenset[str]], float] = {}
        self.solves = 0
        self.replays = 0

    def _admitted(self, name: str) -> bool:
        """By the techniques that the user considers."""
        needed = {"full": "full", "copied": "offload", "recomputed": "kvpr", "cpu": "fastdecode"}
        return needed[name.rstrip("0123456789")] in self._names

    @cached_property
    def _names(self) -> set[str]:
        return {t.name for t in self.q.admission.candidates()}

    @property
    def _streams(self) -> bool:
        """Whether weights may be streamed: where the user considers what does that."""
        return bool(self._names & {"offload", "flexgen", "kvpr"})

    def _programme(self, index: int, limits: PlanLimits, family: frozenset[str]) -> Programme:
        p = self.coefficients.programme(index, limits, family)
        return p if self._streams else replace(p, most_streamed=0.0)

    def _batches(self) -> Array:
        w, d, limits = self.q.workload, self.q.deployment, self.q.limits
        if w.batch is not None:
            return np.array([float(w.batch)])
        most = 1.0
        for s in (Shares(), Shares(host=1.0)):
            room = limits.gpu_memory, limits.host_memory
            for streamed in (0.0, 1.0) if self._streams else (0.0,):
                found = w.largest(placed(s, w.prompt, streamed), d, *room)
                most = max(most, float(np.max(found)))
        count = min(BATCHES, int(np.log(most) / np.log(GROWTH)) + 2)
        grid = np.round(np.geomspace(1.0, most, count))
        return np.unique(np.concatenate([grid, 2 * np.ceil(grid[grid > 1] / 2)]))

    def objective(self, seconds: float, batch: float) -> float:
        """Of the question, from the seconds of one turn of a batch; to be small."""
        d, w = self.q.deployment, self.q.workload
        if self.q.objective == "throughput":
            return -batch * w.generate / seconds / d.tp
        if self.q.objective == "cost" and d.hardware.price is not None:
            return d.hardware.price * d.tp / 3600 * seconds / (batch * w.generate) * 1e6
        return seconds

    def bounds(self) -> BatchBounds:
        """The relaxation at every batch."""
        started = perf_counter()
        found = np.full(self.coefficients.batches.size, np.inf)
        for i, family in product(range(found.size), self.families):
            try:
                p = self._programme(i, self.q.limits, family)
                found[i] = min(found[i], solve(p, whole=False).bound)
                self.solves += 1
            except InfeasibleError:
                continue
        self._bounds = found
        return BatchBounds(self.coefficients.batches, found, perf_counter() - started)

    def bound_of(self, prediction: Prediction) -> float | None:
        """Seconds in which no placement serves a prediction's batch; None where there is none."""
        known = np.flatnonzero(self.coefficients.batches == prediction.batch[0])
        if known.size and self._bounds is not None and np.isfinite(self._bounds[known[0]]):
            return float(self._bounds[known[0]])
        w = replace(self.q.workload, batch=int(prediction.batch[0]))
        found = Placements(replace(self.q, workload=w)).bounds().bounds[0]
        return float(found) if np.isfinite(found) else None

    def better_than(self, value: float, bounded: BatchBounds) -> Iterator[Improved]:
        """Mixes at the batches whose bound is better than an objective, the best bounds first."""
        goals = [self.objective(s, b) if np.isfinite(s) else np.inf
                 for s, b in zip(bounded.bounds, bounded.batches, strict=True)]  # fmt: skip
        for i in np.argsort(goals)[:TRIED]:
            if not np.isfinite(goals[i]) or goals[i] >= _clearly_better(value):
                return
            found = self.at(int(i))
            if found is not None:
                yield found
                value = min(value, self.objective(found.replay, float(found.prediction.batch[0])))

    def at(self, index: int) -> Improved | None:
        """The best mix at one batch, of any family; the bound is that of all of them."""
        found = [self._of_family(index, family) for family in self.families]
        known = [x for x in found if x is not None]
        if not known:
            return None
        bound = min(self._proved.get((index, family), np.inf) for family in self.families)
        if self._bounds is not None:  # whole layers prove more than the relaxation
            self._bounds[index] = max(self._bounds[index], bound)
        return replace(min(known, key=lambda x: x.replay), bound=bound)

    def _of_family(self, index: int, family: frozenset[str]) -> Improved | None:
        """The programme's mix, in its best order, polished by replay."""
        limits, start = self.q.limits, None
        mix: Mix | None = None
        first: Mix | None = None
        for _ in range(REPAIRS):
            p = self._programme(index, limits, family)
            try:
                mix = solve(p)
            except InfeasibleError:
                break
            self.solves += 1
            if first is None:
                first = mix
                self._proved[index, family] = mix.bound
            start, over = self._best_order(p, mix, index)
            if start is not None:
                break
            limits = _lower(limits, over)
        if start is None or first is None:
            return None
        best = self._polish(start, index)
        exact = self._replay(best, index, 0)
        if exact is None:
            return None
        return Improved(exact, first.bound, turn(exact), first)

    def _replay(self, a: Arrangement, index: int, contexts: int = CONTEXTS) -> Prediction | None:
        """What the engine says; nothing where it refuses."""
        w, d = self.q.workload, self.q.deployment
        batch = self.coefficients.batches[index : index + 1]
        self.replays += 1
        try:
            t = a.technique(d, w.prompt)
            return None if t.refuses(d) else w.predict(t, d, batch, contexts)
        except InputError:
            return None

    def _within(self, prediction: Prediction) -> tuple[float, float]:
        """Bytes beyond the two memories; infinite where a time is missed."""
        limits = self.q.limits
        late = (
            float(prediction.ttft_s[0]) > limits.ttft
            or float(np.nan_to_num(prediction.tpot_s)[0]) > limits.tpot
        )
        if late:
            return np.inf, np.inf
        return (
            max(0.0, float(prediction.gpu_bytes[0]) - limits.gpu_memory),
            max(0.0, float(prediction.host_bytes[0]) - limits.host_memory),
        )

    def _best_order(
        self, p: Programme, mix: Mix, index: int
    ) -> tuple[Arrangement | None, tuple[float, float]]:
        """The order of layers that is fastest; blocks unless alternating gains clearly."""
        best: tuple[float, Arrangement] | None = None
        over = (0.0, 0.0)
        first = arranged(self.coefficients, p, mix)
        even = levelled(first)
        for a in [*orders(first), *(orders(even) if even else ())]:
            found = self._replay(a, index)
            if found is None:
                continue
            beyond = self._within(found)
            if max(beyond) > 0:
                over = beyond
                continue
            took = turn(found) * ALTERNATING ** (a.blocks - 1)
            if best is None or took < best[0]:
                best = took, a
        return (None if best is None else best[1]), over

    def _polish(self, a: Arrangement, index: int) -> Arrangement:
        """Steps to better neighbours, coarse ones first."""
        found = self._replay(a, index)
        assert found is not None
        best, left = turn(found), TRIES
        for step in range(len(FINER)):
            moved = True
            while moved and left > 0:
                moved = False
                for other in neighbours(a, step):
                    left -= 1
                    tried = self._replay(other, index)
                    if tried is None or max(self._within(tried)) > 0:
                        continue
                    if turn(tried) * WORTH < best:
                        best, a, moved = turn(tried), other, True
                        break
                    if left <= 0:
                        break
        return a


def turn(prediction: Prediction) -> float:
    """Seconds in which every sequence of the batch is served once. [s]"""
    return float(prediction.batch[0]) * prediction.generate / float(prediction.output_tok_s[0])


def _clearly_better(value: float) -> float:
    """What an objective must undercut; anything where there is none yet."""
    return value if np.isinf(value) else value - 1e-3 * abs(value)


def _lower(limits: PlanLimits, over: tuple[float, float]) -> PlanLimits:
    """Less memory than there is, so that what replay needs besides fits."""
    gpu, host = (x if np.isfinite(x) else 0.0 for x in over)
    return replace(
        limits,
        gpu_memory=(limits.gpu_memory - 1.1 * gpu) * (1 - TIGHTER),
        host_memory=(limits.host_memory - 1.1 * host) * (1 - TIGHTER),
    )
