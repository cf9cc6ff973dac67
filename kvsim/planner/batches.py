"""Better batches for a mix of placements: finer ones, those that fill tiles, and the next ones."""

from collections.abc import Iterator

import numpy as np

from kvsim.planner.choose import distinct
from kvsim.planner.improve import Placements
from kvsim.planner.improved import Improved
from kvsim.planner.shares import JOINED

STEPS = 9  # from one batch to the next of the grid
AGAIN = 3  # times that a mix moves on to a better batch around its own, at most
BESIDE = (0.75, 1.33)  # times a batch: where others are looked at
CLOSE = 3  # neighbouring batches that are, too
TILES = (64, 32, 16, 8, 4)  # rows of a product: the largest that some of them fill
SEVERAL = 2


def refined(
    placements: Placements, best: Improved | None, batch: float, value: float
) -> Iterator[Improved]:
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
    asked = [Placements(q, only=_between(low, high) if best else _beside(batch))]
    for found in asked[0].better_than(value, asked[0].bounds(value), most=1):
        yield found
        if best is None or placements.goal(found) < placements.goal(best):
            best = found
    placements.joined(asked)
    if best is not None:
        yield from _from_there(placements, best)


def within_layers(placements: Placements, batch: float, value: float) -> Iterator[Improved]:
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
        yield from _from_there(placements, best)


def _from_there(placements: Placements, best: Improved) -> Iterator[Improved]:
    """A mix's layers with new shares, as long as it moves on to a better batch."""
    asked: list[Placements] = []
    for _ in range(AGAIN):
        some = _beside(float(best.prediction.batch[0]))
        asked.append(Placements(placements.q, only=some, families=(best.family,)))
        last = asked[-1].near(best)
        if last is None:
            break
        yield last
        if placements.goal(last) >= placements.goal(best):
            break
        best = last
    placements.joined(asked)


def _between(low: float, high: float) -> tuple[float, ...]:
    """Batches from one to another, ``STEPS`` steps apart."""
    found = np.ceil(np.geomspace(max(low, 1.0), high, STEPS + 1))
    return tuple(distinct(found).tolist())


def _beside(batch: float) -> tuple[float, ...]:
    """Batches within a third of one, those that fill tiles of products, and the next ones."""
    low, high = (np.ceil(x * batch) for x in BESIDE)
    tiles = (size * np.arange(np.ceil(low / size), high / size) for size in TILES)
    whole = next((x for x in tiles if x.size > SEVERAL), np.zeros(0))
    next_ones = batch + np.arange(-CLOSE, CLOSE + 1)
    found = np.concatenate([whole, next_ones, np.ceil(np.geomspace(low, high, STEPS))])
    return tuple(distinct(found[found >= 1]).tolist())
