"""Placements whose layers are all alike, searched as a whole: a fixed grid, then steps from there.

Every kind of placement is tried at batches and shares that depend on nothing but the model; the
best few places of each are then improved in steps. Where weights are streamed and layers of several
shapes stand in blocks, the best gets shares for each place in the block.
"""

from collections.abc import Iterable
from dataclasses import field, replace

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.models.model import LayerShape
from kvsim.planner.descent import descended, streaming_apart
from kvsim.planner.mixes import Arrangement, Use
from kvsim.planner.question import Question
from kvsim.planner.shares import Shares
from kvsim.planner.trials import STREAMED, Scored, Together, Trials
from kvsim.prediction.generate import Prediction

PER_DOUBLING = 8  # batches
STARTS = 5  # of each kind from which steps are taken
SHOWN = 2  # of each kind in the end
NEARLY = 0.12  # behind the best, or too late: kinds that a change by a tenth may make the best
SIXTEENTHS = np.arange(1, 16) / 16
EVERY = (0.01, 0.03, *SIXTEENTHS.tolist())  # shares that are tried
HALF = (0.25, 0.5, 1.0)  # of what is left, where there are several
MORE = 3.0  # times the weights of others that a layer behind another shape streams at first
Layout = tuple[tuple[tuple[LayerShape, ...], int], ...]
Grid = list[tuple[float, float, float]]  # on the host, recomputed, for the CPU


def kinds(names: Iterable[str], halves: bool) -> dict[tuple[str, int], Grid]:
    """What may be done, in how many parts, and the shares that are tried."""
    grids: dict[str, Grid] = {
        "full": [(0.0, 0.0, 0.0)],
        "copied": [(h, 0.0, 0.0) for h in (*EVERY, 1.0)],
        "recomputed": [(h, r * h, 0.0) for h in (*EVERY[::2], 1.0) for r in EVERY[2::2]],
        "cpu": [(0.0, 0.0, 1.0)],
        "shared": [(0.0, 0.0, c) for c in EVERY],
        "joined": [(h * (1 - c), r * h * (1 - c), c)
                   for c in EVERY[1::2] for h in HALF for r in HALF],
        "joined copies": [(h * (1 - c), 0.0, c) for c in EVERY[1:] for h in (0.1, *HALF)],
    }  # fmt: skip
    several = {"halved": "shared", "halved_joined": "joined"}
    found = {}
    for name in dict.fromkeys(names):
        parts, kind = (
            2 if name in several or (name == "cpu" and halves) else 1,
            several.get(name, name),
        )
        for some in (kind, f"{kind} copies"):
            if some in grids:
                found[some, parts] = grids[some]
    return found


def grid_of_batches(most: float, parts: int) -> Array:
    """Batches up to the largest: every one at first, then so many per doubling."""
    found, size = [], 1.0
    while size <= most:
        found += [size * (PER_DOUBLING + i) for i in range(PER_DOUBLING)]
        size *= 2
    batches = np.array([*range(1, PER_DOUBLING), *found], dtype=float)
    kept: Array = batches[(batches <= most) & (batches % parts == 0)]
    return kept


@frozen
class Alike:
    """Placements whose layers are alike.

    Attributes
    ----------
    best
        The best few, by the engine.
    starts
        Of every kind the best that was seen, from where a question a little different is answered.
    """

    best: list[Prediction] = field(default_factory=list)
    starts: list[Scored] = field(default_factory=list)


def alike(question: Question, names: Iterable[str], streams: bool, most: float) -> Alike:
    """The best of all kinds at every batch up to the largest.

    Parameters
    ----------
    names : kinds of options that may be used.
    streams : whether weights may be streamed.
    """
    w, together = question.workload, Together(question, streams)
    shapes: dict[LayerShape, int] = {}
    for block, count in question.deployment.shard.layout:
        for shape in block:
            shapes[shape] = shapes.get(shape, 0) + count
    starts = []
    for (_, parts), grid in kinds(names, not w.service).items():
        batches = grid_of_batches(most, parts) if w.batch is None else np.array([float(w.batch)])
        if not batches.size or (w.batch is not None and w.batch % parts):
            continue
        kind = Arrangement(tuple((Use(Shares(*grid[0]), parts, n),) for n in shapes.values()))
        shares = np.zeros((batches.size, len(grid), len(shapes), 4))
        shares[..., :3] = np.array(grid)[None, :, None]
        trials = Trials(kind, np.repeat(batches, len(grid)), shares.reshape(-1, len(shapes), 4))
        starts.append(_apart(together.played(trials)))
    return _found(together, starts, places=True)


def again(question: Question, starts: Iterable[Scored], streams: bool) -> Alike:
    """The best beside what is known of another question."""
    together = Together(question, streams)
    played = (x if x.trials.kind.spread else together.played(x.trials) for x in starts)
    return _found(together, list(played), exact=False)


def _found(
    together: Together, starts: list[Scored], exact: bool = True, places: bool = False
) -> Alike:
    """Where the steps lead.

    Parameters
    ----------
    places : whether places in a block of layers get shares of their own, where that may help.
    """
    q, wide = together.q, [x for x in starts if not x.trials.kind.spread]
    w, d = q.workload, q.deployment
    found, seen = descended(together, wide, exact)
    finer = [x.trials for x in starts if x.trials.kind.spread]
    if places:
        finer += by_place(d.shard.layout, found)
    for trials in finer:
        own = streaming_apart(q, trials)
        found, seen = [*found, own], [*seen, own]
    best = []
    tops = [x.best(SHOWN) for x in found]
    if exact and found:  # smaller batches of the best kind, whose first token comes earlier
        kind = _first(found).trials.kind
        tops += [x.best(STARTS) for x in wide if x.trials.kind == kind]
    for top in tops:
        for row, batch in enumerate(top.trials.batch):
            t = top.trials.arrangement(row).technique(d, w.prompt)
            best.append(w.predict(t, d, np.array([batch])))
    least = min((float(x.merits[0]) for x in seen), default=np.inf)
    near = [x for x in seen if x.late[0] <= NEARLY and
            (x.late[0] > 0 or x.goals[0] <= least + NEARLY * abs(least))]  # fmt: skip
    return Alike(best, near)


def by_place(layout: Layout, found: list[Scored]) -> list[Trials]:
    """The best with uses for every place in a block of layers; none if they could not differ.

    They can where weights are streamed and a shape of layers has several places. A copy for a layer
    runs beside the work of the one before, so the layers behind another shape start with more.
    """
    if not found or not (best := _first(found).best(1)).late.size or len(layout) > 1:
        return []
    top, ((block, count),) = best.trials, layout
    shapes = list(dict.fromkeys(block))
    alternates = any(u.parts > 1 for u in top.uses)  # bounds are of equal shares there
    if alternates or not top.shares[..., STREAMED].any() or len(shapes) in (1, len(block)):
        return []
    order = [i for shape in shapes for i, other in enumerate(block) if other == shape]
    shares = top.shares[0][[shapes.index(block[i]) for i in order]]
    behind = [u for u, i in enumerate(order) if block[i] != block[i - 1]]
    starts = np.repeat(shares[None], len(behind), axis=0)
    starts[:, :, STREAMED] /= MORE
    starts[range(len(behind)), behind, STREAMED] *= MORE
    uses = tuple(
        tuple(replace(use, layers=count) for other in block if other == shape)
        for shape, (use,) in zip(shapes, top.kind.uses, strict=True)
    )
    kind = Arrangement(uses, spread=True)
    return [Trials(kind, np.repeat(top.batch, len(behind)), starts)]


def _first(found: list[Scored]) -> Scored:
    """The kind that has the best of all."""
    return min(found, key=lambda x: float(x.merits.min(initial=np.inf)))


def _apart(played: Scored) -> Scored:
    """The best few, each of batches within another doubling."""
    merits, doubling = played.merits, np.floor(np.log2(played.trials.batch))
    rows: list[int] = []
    for row in np.argsort(merits, kind="stable").tolist():
        if len(rows) == STARTS or not np.isfinite(merits[row]):
            break
        if doubling[row] not in doubling[rows]:
            rows.append(row)
    return played.rows(np.array(rows, dtype=np.intp))
