"""Arrangements of layers replayed by the engine: the best order, and steps to better neighbours."""

from collections.abc import Iterable

import numpy as np

from kvsim.errors import InputError
from kvsim.planner.descent import polished
from kvsim.planner.improved import turn
from kvsim.planner.mixes import MOVES, Arrangement, arranged, levelled, orders
from kvsim.planner.options import CONTEXTS
from kvsim.planner.placement import Coefficients
from kvsim.planner.programme import Programme
from kvsim.planner.question import Question
from kvsim.planner.solving import Mix
from kvsim.planner.trials import Together
from kvsim.prediction.generate import Prediction

ALTERNATING = 1.005  # times a time: what every further block of layers must gain


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
        self, arrangement: Arrangement, index: int, contexts: int = CONTEXTS
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
            first = arranged(self.coefficients, programme, mix)
            level = levelled(first)
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
            took = turn(found) * ALTERNATING ** (a.blocks - 1)
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
        together = Together(self.q, streams)
        batch = float(self.coefficients.batches[index])
        found = polished(together, arrangement, batch, MOVES if layers else ())
        self.count += together.count
        return found
