"""How likely a plan keeps its targets, and what would keep them nearly surely.

A prediction comes with an 80 % interval of measured over predicted times; each half of it is taken
for that of a normal distribution of their logarithm.
"""

from math import isfinite, log

import numpy as np
from numpy.typing import NDArray

from kvsim.evidence.ledger import WITHIN_80, KnownError, evidence_for, share_below
from kvsim.frozen import frozen
from kvsim.planner.choose import distinct
from kvsim.planner.options import CONTEXTS
from kvsim.planner.question import Question
from kvsim.prediction.generate import Prediction

SURE = 0.9  # what the upper end of an 80 % interval stays below
TRIED = 15  # batches at once
KINDS = {"ttft": "prefill", "tpot": "decode"}


@frozen
class Likely:
    """The chance that a plan keeps its targets.

    Attributes
    ----------
    kept
        Probability that each target is kept, by limit; those of which something is known.
    safer
        The most of the objective that the same technique gives while every target is kept with
        ``SURE``; None where the choice does, or where no batch does.
    """

    kept: dict[str, float]
    safer: Prediction | None

    @property
    def sure(self) -> bool:
        """Whether the choice itself keeps every target with ``SURE``."""
        return all(share >= SURE for share in self.kept.values())


def likely(question: Question, choice: Prediction) -> Likely:
    """The chance that a choice keeps its targets, and the largest batch that is safe."""
    name = choice.technique.name
    known: dict[str, KnownError] = {}
    for target, kind in KINDS.items():
        error = evidence_for(question.deployment, name, kind)
        if isfinite(getattr(question.limits, target)) and error.entry is not None:
            known[target] = error
    times = {"ttft": float(choice.ttft_s[0]), "tpot": float(np.nan_to_num(choice.tpot_s)[0])}
    kept = {
        target: below(error, getattr(question.limits, target) / max(times[target], 1e-12))
        for target, error in known.items()
    }
    found = Likely(kept, None)
    return found if found.sure else Likely(kept, _safer(question, choice, known))


def below(error: KnownError, factor: float) -> float:
    """Probability that measured times are less than a factor of the predicted ones."""
    reach = log(error.high) if factor >= 1 else -log(error.low)
    if reach == 0.0:
        return 1.0 if factor >= 1 else 0.0
    return share_below(factor, reach / WITHIN_80)


def _safer(
    question: Question, choice: Prediction, known: dict[str, KnownError]
) -> Prediction | None:
    """The largest batch below the choice's at which the upper ends of the intervals are within."""
    t, w = choice.technique, question.workload
    if w.batch is not None:
        return None
    parts = t.tiles()
    least, most = 0, int(choice.batch[0]) // parts  # in parts: none known to be safe, known not
    while most - least > 1:
        tried = distinct(np.round(np.linspace(least, most, TRIED + 2)[1:-1]))
        tried = tried[(tried > least) & (tried < most)]
        found = w.predict(t, question.deployment, parts * tried, CONTEXTS)
        unsafe = np.flatnonzero(_late(question, found, known))
        stop = int(unsafe[0]) if unsafe.size else tried.size
        most = int(tried[stop]) if unsafe.size else most
        least = int(tried[stop - 1]) if stop else least
    while least > 0:  # the sum over all contexts may differ a little from that over a few
        found = w.predict(t, question.deployment, np.array([float(parts * least)]))
        if not _late(question, found, known)[0]:
            return found
        least -= 1
    return None


def _late(question: Question, found: Prediction, known: dict[str, KnownError]) -> NDArray[np.bool]:
    """Where the upper end of some interval is beyond its target, by batch."""
    late = np.zeros(found.batch.size, dtype=bool)
    for target, error in known.items():
        times = np.nan_to_num(getattr(found, f"{target}_s"))
        late |= times * error.high > getattr(question.limits, target)
    return late
