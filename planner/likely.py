"""How likely a plan keeps its targets, and what would keep them nearly surely.

A prediction comes with an 80 % interval of measured over predicted times; each half of it is taken
for that of a normal distribution of their logarithm.
"""

from dataclasses import dataclass
from math import erf, isfinite, log, sqrt

import numpy as np

from kvsim.evidence.ledger import WITHIN_80, KnownError, evidence_for
from kvsim.planner.question import Question, Search
from kvsim.prediction.generate import Prediction

SURE = 0.9  # what the upper end of an 80 % interval stays below
KINDS = {"ttft": "prefill", "tpot": "decode"}


@dataclass(frozen=True)
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


def likely(question: Question, search: Search, choice: Prediction) -> Likely:
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
    return found if found.sure else Likely(kept, _safer(question, search, choice, known))


def below(error: KnownError, factor: float) -> float:
    """Probability that measured times are less than a factor of the predicted ones."""
    reach = log(error.high) if factor >= 1 else -log(error.low)
    if reach == 0.0:
        return 1.0 if factor >= 1 else 0.0
    return 0.5 * (1 + erf(WITHIN_80 * log(factor) / reach / sqrt(2)))


def _safer(
    question: Question, search: Search, choice: Prediction, known: dict[str, KnownError]
) -> Prediction | None:
    """The largest batch below the choice's at which the upper ends of both intervals are within."""
    table, t, w = search.table, choice.technique, question.workload
    if w.batch is not None:
        return None
    same = [i for i, other in enumerate(table.technique) if other is t]
    same.sort(key=lambda i: float(table.batch[i]))
    largest = float(choice.batch[0])
    for target, error in known.items():
        limit = getattr(question.limits, target) / error.high
        largest = min(largest, float(np.interp(
            limit, table.columns[target][same], table.batch[same], left=0.0
        )))  # fmt: skip
    parts = t.tiles()
    batch = parts * int(largest / parts)
    for size in (batch + parts, batch, batch - parts):
        if not 0 < size < float(choice.batch[0]):
            continue
        found = w.predict(t, question.deployment, np.array([float(size)]))
        late = (
            float(np.nan_to_num(getattr(found, f"{target}_s"))[0]) * error.high
            > getattr(question.limits, target)
            for target, error in known.items()
        )
        if not any(late):
            return found
    return None
