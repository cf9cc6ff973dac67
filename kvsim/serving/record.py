"""What a run leaves behind besides its requests: a timeline and the times between tokens."""

import numpy as np

from kvsim.serving.compiled import compiled
from kvsim.serving.state import (
    BINS,
    CACHED,
    FINEST_GAP,
    GAP_RATIO,
    GAPS,
    PINNED,
    PRIVATE,
    WAITERS,
    Fleet,
)
from kvsim.serving.tables import COSTS


@compiled
def note_gaps(f: Fleet, r: int, first: float, last: float, tokens: int) -> None:
    """Tokens by the time since the one before, which moved evenly from first to last. [s]"""
    if tokens == 0:
        return
    low = _gap_bin(min(first, last))
    high = low if first == last else _gap_bin(max(first, last))
    share = tokens / (high - low + 1)
    for i in range(low, high + 1):
        f.gaps[r, i] += share


@compiled
def _gap_bin(gap: float) -> int:
    i = int(np.log(max(gap, FINEST_GAP) / FINEST_GAP) / np.log(GAP_RATIO))
    return min(max(i, 0), GAPS - 1)


@compiled
def note_span(
    f: Fleet,
    r: int,
    took: float,
    batch: int,
    context: float,
    rounds: int,
    decoded: int,
    prompt: int,
) -> None:
    """Spread a stretch of time that begins now over the bins of the timeline it covers."""
    begin = f.clock[r]
    end = begin + took
    while end > BINS * f.width[r]:
        widen(f, r)
    width = f.width[r]
    cache = f.tally[r, PRIVATE] + f.tally[r, PINNED] + f.tally[r, CACHED]
    first, last = int(begin / width), min(int(end / width), BINS - 1)
    for i in range(first, last + 1):
        here = took
        if first < last:
            here = min(end, (i + 1) * width) - max(begin, i * width)
        share = here / took if took > 0 else 1.0
        f.series[r, i, 0] += here
        f.series[r, i, 1] += here * batch
        f.series[r, i, 2] += here * f.tally[r, WAITERS]
        f.series[r, i, 3] += here * cache
        f.series[r, i, 4] += here * context
        f.series[r, i, 5] += share * decoded
        f.series[r, i, 6] += share * prompt
        f.series[r, i, 7] += share * rounds
        for k in range(1, len(COSTS)):
            f.series[r, i, 7 + k] += share * f.spent[r, k]
    for k in range(len(COSTS)):
        f.spent[r, k] = 0.0


@compiled
def widen(f: Fleet, r: int) -> None:
    """Bins twice as wide, two into one."""
    half = BINS // 2
    for i in range(half):
        for k in range(f.series.shape[2]):
            f.series[r, i, k] = f.series[r, 2 * i, k] + f.series[r, 2 * i + 1, k]
    for i in range(half, BINS):
        for k in range(f.series.shape[2]):
            f.series[r, i, k] = 0.0
    f.width[r] *= 2
