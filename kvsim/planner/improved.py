"""What the search for mixes of placements finds: bounds by batch, and the best mix at one."""

from collections.abc import Callable, Iterable

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.mixes import Arrangement
from kvsim.planner.solving import Mix
from kvsim.prediction.generate import Prediction


@frozen
class Improved:
    """The best mix that was found at one batch."""

    prediction: Prediction
    bound: float  # seconds that no mix at this batch undercuts [s]
    replay: float  # seconds of this one [s]
    mix: Mix
    family: frozenset[str]  # options that may stand together
    arrangement: Arrangement  # as replayed


@frozen
class BatchBounds:
    """What the programme says of every batch."""

    batches: Array  # (b,)
    bounds: Array  # (b,) [s], infinite where no mix is within the limits
    seconds: float


def turn(prediction: Prediction) -> float:
    """Seconds in which every sequence of the batch is served once. [s]"""
    return float(prediction.batch[0]) * prediction.generate / float(prediction.output_tok_s[0])


def clearly_better(value: float) -> float:
    """What an objective must undercut; anything where there is none yet."""
    return value if np.isinf(value) else value - 1e-3 * abs(value)


def keep_best(
    known: dict[frozenset[str], Improved],
    found: Iterable[Improved],
    goal: Callable[[Improved], float],
) -> None:
    """Keep the best mix of every family."""
    for mix in found:
        before = known.get(mix.family)
        if before is None or goal(mix) < goal(before):
            known[mix.family] = mix
