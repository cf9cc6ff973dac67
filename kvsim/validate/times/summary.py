"""How far predictions are from real runs, and whether they put techniques in the right order."""

from collections.abc import Sequence

import numpy as np

from kvsim.frozen import frozen
from kvsim.validate.times.compared import Compared, Measured


@frozen
class Summary:
    """How far predictions are from measurements, end to end."""

    points: int
    median: float  # of the errors without their signs
    nine_in_ten: float
    noise: float  # median over the points
    same_order: float  # share of pairs whose gap exceeds the noise that are ordered alike
    same_winner: float  # share of points whose best two differ by more than the noise


def summarise(found: Sequence[Compared], names: Sequence[str] = ("ttft_s", "tpot_s")) -> Summary:
    """Errors of the times of all points, and whether techniques are in the right order."""
    values = [m for c in found for m in c.whole if m.name in names]
    errors = np.abs([m.error for m in values])
    pairs, winners = _orders(found)
    return Summary(
        len(values),
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        float(np.median([m.noise for m in values])),
        float(np.mean(pairs)) if pairs else np.nan,
        float(np.mean(winners)) if winners else np.nan,
    )


def _orders(found: Sequence[Compared]) -> tuple[list[bool], list[bool]]:
    """Pairs of techniques at one point, and points' winners by time per token."""
    pairs, winners = [], []
    for point in dict.fromkeys(c.point for c in found):
        here = [m for c in found if c.point == point and (m := c.get("tpot_s"))]
        here.sort(key=lambda m: m.measured)
        for i, a in enumerate(here):
            for b in here[i + 1 :]:
                if _apart(a, b):
                    pairs.append(a.predicted < b.predicted)
        if len(here) > 1 and _apart(here[0], here[1]):
            winners.append(min(here, key=lambda m: m.predicted) is here[0])
    return pairs, winners


def _apart(a: Measured, b: Measured) -> bool:
    """Whether two measured times differ by more than their noise."""
    return b.measured - a.measured > 2 * (a.noise * a.measured + b.noise * b.measured)
