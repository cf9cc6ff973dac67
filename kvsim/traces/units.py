"""Where arrivals change their unit, as logs that were put together from two do."""

import numpy as np

from kvsim.traces.requests import Floats


def unit_changes(raw: Floats, origin: float) -> int | None:
    """The row from which arrivals seem to be in another unit than before; None if there is none.

    Epochs of the years 2001 to 2128 in s, ms, us and ns lie a factor 1000 apart, so their size
    tells the unit. Times from 0 are taken for another unit where they jump to about 1000, 10^6 or
    10^9 times the time before and the gaps that follow grow by about as much.
    """
    if origin >= 1e9:
        other = np.flatnonzero(np.abs(np.log10(np.maximum(raw, 1e-9) / origin)) > 2)
        return int(other[0]) if len(other) else None
    behind, ahead = raw[3:-4], raw[4:-3]  # three gaps on either side to judge by
    with np.errstate(divide="ignore", invalid="ignore"):
        candidates = np.flatnonzero((behind > 0) & (ahead > 500 * behind)) + 4
    for row in candidates.tolist():
        gap_before = (raw[row - 1] - raw[0]) / (row - 1)
        gap_after = (raw[-1] - raw[row]) / (len(raw) - 1 - row)
        for factor in (1e3, 1e6, 1e9):
            lands = raw[row] / (factor * (raw[row - 1] + gap_before))
            if 0.8 < lands < 1.25 and factor / 3 < gap_after / max(gap_before, 1e-12) < factor * 3:
                return int(row)
    return None
