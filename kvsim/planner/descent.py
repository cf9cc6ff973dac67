"""Steps to better placements of one kind, many at once: shares on a grid, and batches.

The grid does not depend on how much memory, bandwidth or time there is, and at one batch the time
is nearly convex in the shares: more of them makes what is found no worse. From every start the
best of all neighbours, far and near, is taken until none is better; in the last steps every
generated token counts.
"""

from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from kvsim.graph import Array
from kvsim.planner.mixes import Arrangement, shifted
from kvsim.planner.options import CONTEXTS
from kvsim.planner.question import Question
from kvsim.planner.shares import ROUNDING
from kvsim.planner.trials import CPU, HOST, LATE, SPLIT, STREAMED, Scored, Together, Trials
from kvsim.prediction.memory import MOST_SEQUENCES

GRID = 1e-4  # of a share
FAR = (1250, 625, 250, 125, 50, 25, 10, 5)  # of the grid, by which shares change at first
NEAR = (250, 50, 10, 5, 2, 1)  # and at last
ROUNDS = 16  # of neighbours at most
NEXT = (1, 2, 3, 4, 8, 16, 32)  # sequences by which batches change
TILES = (8, 16, 32, 64)  # rows of a product: batches that fill some
WINDOW = 8  # batches on either side of the best that all have shares of their own
BETWEEN = (0.125, 0.25, 0.5, 1.0)  # of the way from the same shares to as many bytes
WIDE = 0.25  # behind the best, or too late: what is left of the starts
CLOSE = 0.004  # and at last
EQUAL = 0.0005  # where every generated token is counted
BETTER = 1e-9  # relative
WORTH = 1e-4  # relative: layers that gain less stay where they are
CHANGES = ({HOST: 1}, {SPLIT: 1}, {CPU: 1}, {HOST: 1, CPU: -1}, {HOST: 1, SPLIT: 1})
"""Of shares, up or down."""

Rows = NDArray[np.intp]


def descended(
    together: Together, starts: list[Scored], exact: bool = True
) -> tuple[list[Scored], list[Scored]]:
    """Where the steps from some starts end, and the best that was seen of every kind.

    Both by kind; of the first what falls behind is left on the way.

    Parameters
    ----------
    exact : whether every generated token counts in the last steps; otherwise a few stand for all.
    """
    free = together.q.workload.batch is None
    found, seen = _walked(together, starts, FAR, CONTEXTS, WIDE, free)
    if free:
        around = [_by_batch(together.played(_window(x.trials))) for x in _first(found)]
        found, _ = _walked(together, around, NEAR, CONTEXTS, CLOSE)
    elif not exact:
        found, _ = _walked(together, _left(found, EQUAL), NEAR, CONTEXTS, EQUAL)
    if exact:
        counted = [together.played(x.trials, 0) for x in _left(found, EQUAL)]
        found, _ = _walked(together, counted, NEAR, 0, EQUAL)
    return found, _first([*found, *seen])


def polished(
    together: Together, arrangement: Arrangement, batch: float, layers: tuple[int, ...]
) -> Arrangement:
    """The best that steps of shares lead to from an arrangement, at the same batch.

    Parameters
    ----------
    layers : numbers of layers that may move from one use to another, the largest first.
    """
    best = together.played(Trials.of(arrangement, batch))
    if not np.isfinite(best.goals[0]):
        return arrangement
    best = _settled(together, best, FAR)
    for count in layers:
        for _ in range(ROUNDS):
            some = (Trials.of(a, batch) for a in shifted(best.trials.arrangement(0), count))
            tried = [together.played(x) for x in some]
            top = min(tried, key=lambda x: float(x.merits[0]), default=best)
            if top.merits[0] >= best.merits[0] - WORTH * abs(best.merits[0]):
                break
            best = _settled(together, top, NEAR)
    return _settled(together, best, NEAR).trials.arrangement(0)


def streaming_apart(question: Question, starts: Trials) -> Scored:
    """The best of one kind at its batches, where each use streams a share of its own."""
    together = Together(question, streams=True, apart=True)
    found, _ = _walked(together, [start := together.played(starts)], FAR, CONTEXTS, CLOSE)
    return together.played(_first(found or [start])[0].trials, 0)


def _settled(together: Together, found: Scored, strides: tuple[int, ...]) -> Scored:
    """A single trial where steps of shares lead it."""
    walked, _ = _walked(together, [found], strides, CONTEXTS, CLOSE)
    return _first(walked or [found])[0]


def _walked(
    together: Together,
    now: list[Scored],
    strides: tuple[int, ...],
    contexts: int,
    behind: float,
    free: bool = False,
) -> tuple[list[Scored], list[Scored]]:
    """Steps of every kind in turn until none gets better, and the best that was seen of each.

    Parameters
    ----------
    behind : the best, or too late, by which starts may be; further steps may be by less and less.
    free : whether batches may change.
    """
    least, done, seen = min(behind, CLOSE), list[Scored](), now
    for _ in range(ROUNDS):
        now = _left(now, behind, done)
        if not now:
            break
        stepped = [_stepped(together, x, strides, contexts, free) for x in now]
        seen = _first([*(x for x, _ in stepped), *seen])
        done += [x.rows(~moved) for x, moved in stepped]
        now = [x.rows(moved) for x, moved in stepped]
        behind = max(behind / 2, least)
    return _left([*done, *now], least), seen


def _first(found: Iterable[Scored]) -> list[Scored]:
    """The best of every kind, even if it is late."""
    best: dict[Arrangement, Scored] = {}
    for x in found:
        if not len(x.trials):
            continue
        row = int(np.argmin(x.merits))
        known = best.get(x.trials.kind)
        if known is None or x.merits[row] < known.merits[0]:
            best[x.trials.kind] = x.rows(np.array([row]))
    return list(best.values())


def _left(found: Iterable[Scored], far: float, others: Sequence[Scored] = ()) -> list[Scored]:
    """What is not much worse than the best nor much too late; each place once, by kind."""
    kinds: dict[Arrangement, Scored] = {}
    for x in found:
        known = kinds.get(x.trials.kind)
        kinds[x.trials.kind] = x if known is None else known.with_rows(x)
    every = (*kinds.values(), *others)
    top = min((float(x.merits.min(initial=np.inf)) for x in every), default=np.inf)
    kept = []
    for x in kinds.values():
        if not len(x.trials):
            continue
        places = np.column_stack([x.trials.batch, x.trials.shares.reshape(len(x.trials), -1)])
        first = np.sort(np.unique(places, axis=0, return_index=True)[1])
        merits = x.merits[first]
        good = (merits <= top + far * abs(top)) | (merits >= LATE) & (x.late[first] <= far)
        kept += [x.rows(first[good])] if good.any() else []
    return kept


def _window(best: Trials) -> Trials:
    """One of the trials at every batch near its own: with its shares, as many bytes of caches on
    the GPU, or something between."""
    parts = max(u.parts for u in best.uses)
    batch = float(best.batch[0]) + parts * np.arange(-WINDOW, WINDOW + 1)
    batch = batch[(batch >= parts) & (batch <= MOST_SEQUENCES)]
    shares = np.repeat(best.shares, batch.size, axis=0)
    kept = _as_much_kept(shares, best.batch[0] / batch)
    every = [Trials(best.kind, batch, shares)]
    for part in BETWEEN:
        moved = np.ceil((shares + part * (kept - shares)) / GRID - ROUNDING) * GRID
        moved = np.where(kept == shares, shares, moved)
        every.append(Trials(best.kind, batch, moved).rows(_alike(moved, shares)))
    return Trials(
        best.kind,
        np.concatenate([x.batch for x in every]),
        np.concatenate([x.shares for x in every]),
    )


def _by_batch(found: Scored) -> Scored:
    """The best trial of every batch."""
    ranked = np.argsort(found.merits, kind="stable")
    _, first = np.unique(found.trials.batch[ranked], return_index=True)
    return found.rows(ranked[first])


def _stepped(
    together: Together, found: Scored, strides: tuple[int, ...], contexts: int, free: bool
) -> tuple[Scored, NDArray[np.bool]]:
    """Every trial at its best neighbour, and which have moved."""
    moved = np.zeros(len(found.trials), dtype=bool)
    around, of = _neighbours(found.trials, strides, free, together.apart)
    if not of.size:
        return found, moved
    tried = together.played(around, contexts)
    known, merits, taken = found.merits, tried.merits, {}
    for row in range(moved.size):
        mine = np.flatnonzero(of == row)
        if mine.size:
            best = int(mine[np.argmin(merits[mine])])
            if merits[best] < known[row] - BETTER * abs(known[row]):
                taken[row] = best
                moved[row] = True
    return found.replaced(taken, tried), moved


def _neighbours(
    trials: Trials, strides: tuple[int, ...], free: bool, apart: bool
) -> tuple[Trials, Rows]:
    """Trials around some, with other shares or at other batches, and which each is of."""
    moves = _moves(trials, strides, apart)  # (m, u, 4)
    shares = np.repeat(trials.shares[:, None], len(moves), axis=1)
    shares = np.where(moves, np.round((shares + moves) / GRID) * GRID, shares)
    of = np.repeat(np.arange(len(trials)), len(moves))
    batch = trials.batch[of]
    shares = shares.reshape(of.size, len(trials.uses), 4)
    if free:
        others, whose = _batches(trials)
        before = trials.shares[whose]
        batch = np.concatenate([batch, others, others])
        of = np.concatenate([of, whose, whose])
        kept = _as_much_kept(before, trials.batch[whose] / others)
        shares = np.concatenate([shares, before, kept])
    inside = _alike(shares, trials.shares[of])
    return Trials(trials.kind, batch[inside], shares[inside]), of[inside]


def _alike(shares: Array, before: Array) -> NDArray[np.bool]:
    """Which shares are possible, and do the same things as those before; splits are cut. (n,)"""
    shares[..., SPLIT] = np.minimum(shares[..., SPLIT], shares[..., HOST])
    shares[..., STREAMED] = np.clip(shares[..., STREAMED], 0.0, 1.0)
    whole = shares[..., HOST] + shares[..., CPU]
    same = (shares[..., :3] > 0) == (before[..., :3] > 0)
    possible: NDArray[np.bool] = same.all(axis=(1, 2)) & (whole <= 1 + GRID / 2).all(axis=1)
    return possible


def _as_much_kept(shares: Array, ratio: Array) -> Array:
    """Shares at another batch that keep as many bytes of caches on the GPU. (n, u, 4)"""
    found = shares.copy()
    here = 1 - shares[..., HOST] - shares[..., CPU]
    key = np.where(shares[..., CPU] > 0, CPU, HOST)[..., None]
    away = np.take_along_axis(shares, key, axis=2)
    moved = away + (here * (1 - ratio[:, None]))[..., None]
    moved = np.where((away > 0) & (away < 1), np.ceil(moved / GRID) * GRID, away)
    np.put_along_axis(found, key, moved, axis=2)
    return found


def _moves(trials: Trials, strides: tuple[int, ...], apart: bool) -> Array:
    """Changes of shares: one of one use or of all uses, or two against each other. (m, u, 4)"""
    count = len(trials.uses)
    same = (trials.shares == trials.shares[:, :1]).all()
    groups = [list(range(count))] + ([[u] for u in range(count)] if count > 1 else [])
    if same and strides == FAR:
        groups = groups[:1]
    steps = GRID * np.array([*strides, *(-s for s in strides)])
    found = [np.zeros((0, count, 4))]
    for group, changed in product(groups, (*CHANGES, {STREAMED: 1})):
        if STREAMED in changed and (not apart or len(group) == count):
            continue
        mine = trials.shares[:, group][:, :, list(changed)]
        if not (mine > 0).any(axis=(0, 1)).all() or (CPU in changed and (mine == 1).any()):
            continue
        moves = np.zeros((steps.size, count, 4))
        for key, sign in changed.items():
            moves[:, group, key] = sign * steps[:, None]
        found.append(moves)
    return np.concatenate(found)


def _batches(trials: Trials) -> tuple[Array, Rows]:
    """Batches near those of some trials, and whose they are."""
    parts = max(u.parts for u in trials.uses)
    found, whose = [], []
    for i, batch in enumerate(trials.batch.tolist()):
        near = {batch + sign * parts * n for n in NEXT for sign in (-1, 1)}
        for size in TILES:
            near |= {size * (batch // size + n) for n in (-1, 0, 1)}
        some = [b for b in sorted(near - {batch}) if parts <= b <= MOST_SEQUENCES and not b % parts]
        found += some
        whose += [i] * len(some)
    return np.array(found), np.array(whose, dtype=np.intp)
