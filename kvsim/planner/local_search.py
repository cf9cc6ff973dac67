"""Local search over shares and batches, and the placements whose layers are all uniform.

Shares stand on a grid that does not depend on how much memory, bandwidth or time there is, and at
one batch the time is nearly convex in the shares: more of them makes what is found no worse. From
every start the best of all neighbours, far and near, is taken until none is better. A few of the
generated tokens stand for all: with every token counted, and further searches at the batches around
what is found, the best of 24 questions was at most 0.03 % better.

Uniform placements are searched as a whole: every kind at batches and shares that depend on nothing
but the model, then steps from the best few of each.

Placements of one kind, which differ in shares and batch alone, are evaluated at once: settings are
arrays, and of every trial no more of the weights is streamed than the GPU's memory asks for, since
streaming is never quicker than not streaming.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.question import Question
from kvsim.planner.table import LIMIT_SLACK, SAMPLED_CONTEXTS, measures
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import MOST_SEQUENCES
from kvsim.techniques import parse
from kvsim.techniques.axes.base import Term
from kvsim.techniques.axes.placement import positive
from kvsim.techniques.papers.fastdecode import Fastdecode
from kvsim.techniques.papers.full import Full
from kvsim.techniques.papers.kvpr import Kvpr, Place
from kvsim.techniques.papers.offload import Offload
from kvsim.techniques.technique import Layers, Technique

# trials

Kind = tuple[str, int]  # what layers do, and in how many parts of the batch
Grid = list[tuple[float, float, float]]  # on the host, recomputed, for the CPU
TOKEN_ROUNDING = 1e-6  # of a token
NO_SHARE = 1e-6  # a share below this is none
SLIVER = 5e-3  # a share that is printed as 0 %
SLIVER_DECIDES = 5e-4  # of the objective, from which such a share is kept
HOST, SPLIT, CPU, STREAMED, DISK = range(5)  # columns of shares
SHARE_DIGITS = 6  # of a share
LATE_MERIT = 1e15  # above every objective
NO_MEMORY = 1e18  # bytes that no memory has [B]
MEMORY_RESOLUTION = 1e-5  # of the memory: as much left is none
CHORD_STEPS = 3  # steps to the least share of weights; memory is nearly affine in it


@frozen
class Trials:
    """Placements of one kind, which differ in shares and batch alone.

    Attributes
    ----------
    kind
        What layers do, and in how many parts of the batch.
    batch
        Of each. (n,) [sequences]
    shares
        Of every layer: on the host, recomputed, for the CPU, streamed weights, and on the disk of
        what the host would have. (n, 5)
    """

    kind: Kind
    batch: Array
    shares: Array

    def __len__(self) -> int:
        return self.batch.size

    def rows(self, chosen: NDArray[np.bool] | NDArray[np.intp]) -> "Trials":
        """Return the chosen trials in the given order.

        Parameters
        ----------
        chosen
            A mask (n,), or indices.
        """
        return replace(self, batch=self.batch[chosen], shares=self.shares[chosen])

    def streaming(self, share: Array | float) -> "Trials":
        """The same with a share of their weights streamed. (n,)"""
        shares = self.shares.copy()
        shares[:, STREAMED] = np.round(share, SHARE_DIGITS)
        return replace(self, shares=shares)

    def on_disk(self, share: Array | float) -> "Trials":
        """The same with a share of what the host would have on the disk. (n,)"""
        shares = self.shares.copy()
        shares[:, DISK] = share
        return replace(self, shares=shares)

    @property
    def parts(self) -> int:
        """Number of parts of the batch that pass through a layer one after another."""
        return self.kind[1]

    def technique(self, prompt: int) -> Technique:
        """All of them, with settings along the axis of batches."""
        host, split, cpu, streamed, disk = map(_as_setting, self.shares.T)
        tokens = np.floor(np.asarray(split) * prompt + TOKEN_ROUNDING)
        place = Place(
            host_share=host,
            split=tokens if np.any(tokens) else 0.0,
            cpu_share=cpu,
            weights_host=streamed,
            cache_disk=disk if positive(host) else 0.0,
            weights_disk=disk if positive(streamed) else 0.0,
            parts=self.parts,
        )
        return Technique((Layers((place,)),))

    def named(self, row: int, prompt: int) -> Technique:
        """One of them, by the name of the simplest technique that does it."""
        term = _name_place(prompt, self.parts, *self.shares[row].tolist())
        return Technique((Layers((term,)),))


def _as_setting(share: Array) -> Array | float:
    """An array of settings, or the number that they all are."""
    return float(share[0]) if (share == share[0]).all() else share[None, :, None]


def _name_place(
    prompt: int, parts: int, host: float, split: float, cpu: float, weights: float, disk: float
) -> Term:
    """A placement by its technique's name where it has one."""
    host, cpu, weights, disk = map(_round_share, (host, cpu, weights, disk))
    tokens = float(np.floor(split * prompt + TOKEN_ROUNDING))
    if not weights and parts == 1 and not cpu and not disk:
        if not host:
            return Full()
        if not tokens:
            return Offload(host_share=host, parts=1)
        if host == 1:
            return Kvpr(split=tokens, parts=1)
    if not weights and cpu == 1 and parts == 2:
        return Fastdecode()
    return Place(
        host_share=host,
        split=tokens if host else 0.0,
        cpu_share=cpu,
        weights_host=weights,
        cache_disk=disk if host else 0.0,
        weights_disk=disk if weights else 0.0,
        parts=parts,
    )


def _round_share(share: float) -> float:
    return 0.0 if share < NO_SHARE else round(min(share, 1.0), 6)


@frozen
class Scored:
    """What the engine says of trials.

    Attributes
    ----------
    goals
        The objective of each, to be small; infinite where it does not fit. (n,)
    late
        How far the worse of TTFT and TPOT is beyond its limit, relative; 0 within both. (n,)
    """

    trials: Trials
    goals: Array
    late: Array

    @property
    def merits(self) -> Array:
        """To be small: the objective, and of what is late first how late it is. (n,)"""
        return np.where(self.late > 0, LATE_MERIT * (1 + self.late), self.goals)

    def rows(self, chosen: NDArray[np.bool] | NDArray[np.intp]) -> "Scored":
        """Those that are chosen, in that order."""
        return Scored(self.trials.rows(chosen), self.goals[chosen], self.late[chosen])

    def replaced(self, taken: Mapping[int, int], by: "Scored") -> "Scored":
        """With rows of another in place of some of its own."""
        mine, other = list(taken), list(taken.values())
        batch, shares = self.trials.batch.copy(), self.trials.shares.copy()
        goals, late = self.goals.copy(), self.late.copy()
        batch[mine], shares[mine] = by.trials.batch[other], by.trials.shares[other]
        goals[mine], late[mine] = by.goals[other], by.late[other]
        return Scored(Trials(self.trials.kind, batch, shares), goals, late)

    def with_rows(self, other: "Scored") -> "Scored":
        """Trials of the same kind too."""
        batch = np.concatenate([self.trials.batch, other.trials.batch])
        shares = np.concatenate([self.trials.shares, other.trials.shares])
        goals = np.concatenate([self.goals, other.goals])
        late = np.concatenate([self.late, other.late])
        return Scored(Trials(self.trials.kind, batch, shares), goals, late)

    def best(self, most: int) -> "Scored":
        """The best of those within the limits."""
        rows = np.argsort(self.merits, kind="stable")[:most]
        return self.rows(rows[self.late[rows] == 0])


class BatchEvaluator:
    """The engine's word on trials of one question."""

    def __init__(self, q: Question) -> None:
        self.q, self.streams = q, streams_weights(q)

    def played(self, trials: Trials) -> "Scored":
        """All of them with the least share of weights that each must stream."""
        share = np.zeros(len(trials))
        over = self._beyond(trials.streaming(share))
        if self.streams and (some := np.flatnonzero(over > 0)).size:
            share[some] = self._least(trials.rows(some), over[some])
            over = np.where(share > 0, 0.0, over)
        trials = trials.streaming(np.nan_to_num(share))
        if self.q.deployment.hardware.disk_memory:
            trials = self._spilled(trials)
        goals, fit = np.full((2, len(trials)), np.inf), np.flatnonzero(over <= 0)
        goals[:, fit] = self._goals(trials.rows(fit))
        return Scored(trials, *goals)

    def _least(self, trials: Trials, over: Array) -> Array:
        """The least share that fits; none where even streaming all does not.

        What is missing is convex in the share, so that a chord meets 0 where it fits already.
        """
        low, high = np.zeros(len(trials)), np.ones(len(trials))
        below = self._beyond(trials.streaming(high))
        possible = below <= 0
        before, under = high, below
        for step in range(CHORD_STEPS):
            if step == 1:  # along the line of what fits, which meets 0 where it does not, or just
                rise = np.where(
                    before > high, (below - under) / np.maximum(before - high, LIMIT_SLACK), 0
                )
                middle = high + np.where(rise > 0, below / np.where(rise > 0, rise, 1.0), 0.0)
            else:
                middle = low + (high - low) * over / np.where(possible, over - below, np.inf)
            middle = (
                np.ceil(np.clip(middle, low, high) * 10**SHARE_DIGITS - TOKEN_ROUNDING)
                / 10**SHARE_DIGITS
            )
            found = self._beyond(trials.streaming(middle))
            fits = possible & (found <= 0)
            before, under = np.where(fits, high, before), np.where(fits, below, under)
            high, below = np.where(fits, middle, high), np.where(fits, found, below)
            low, over = np.where(fits, low, middle), np.where(fits, over, np.maximum(found, 0.0))
            if (below >= -self.q.limits.gpu_memory * MEMORY_RESOLUTION)[possible].all():
                break
        return np.where(possible, high, np.nan)

    def _spilled(self, trials: Trials) -> Trials:
        """The least on the disk that lets the rest fit in host memory, which is affine in it."""
        room = self.q.limits.host_memory
        none, all_ = (self._predicted(trials.on_disk(x)) for x in (0.0, 1.0))
        if none is None or all_ is None:  # recomputation needs the host
            return trials
        whole, least = (
            np.broadcast_to(x.host_bytes, (1, len(trials))).ravel() for x in (none, all_)
        )
        share = (whole - room) / np.maximum(whole - least, 1.0)
        return trials.on_disk(
            np.ceil(np.clip(share, 0.0, 1.0) * 10**SHARE_DIGITS - TOKEN_ROUNDING) / 10**SHARE_DIGITS
        )

    def _beyond(self, trials: Trials) -> Array:
        """GPU memory that is missing; negative where there is some left. (n,) [B]"""
        found = self._predicted(trials)
        if found is None:
            return np.full(len(trials), NO_MEMORY)
        spread = np.broadcast_to(found.given_bytes, (1, len(trials))).ravel()
        over: Array = spread - self.q.limits.gpu_memory * (1 + LIMIT_SLACK)
        return np.minimum(over, NO_MEMORY)

    def _goals(self, trials: Trials) -> Array:
        """The objective of each, and how late it is. (2, n)"""
        found = np.full((2, len(trials)), np.inf)
        limits = self.q.limits
        streaming = trials.shares[:, STREAMED] > 0
        for rows in (np.flatnonzero(streaming), np.flatnonzero(~streaming)):
            predicted = self._predicted(trials.rows(rows)) if rows.size else None
            if predicted is None:
                continue
            columns = {
                name: np.broadcast_to(x, (1, rows.size)).ravel()
                for name, x in measures(predicted).items()
            }
            times = [columns[k] / getattr(limits, k) - 1 for k in ("ttft", "tpot")]
            late = np.maximum(np.max(times, axis=0) - LIMIT_SLACK, 0.0)
            room = columns["host_memory"] <= limits.host_memory * (1 + LIMIT_SLACK)
            room &= columns["gpu_memory"] <= limits.gpu_memory * (1 + LIMIT_SLACK)
            room &= columns["disk"] <= limits.disk
            found[1, rows] = np.where(room, late, np.inf)
            found[0, rows] = np.where(room, columns[self.q.objective], np.inf)
        return found

    def without_slivers(self, one: Scored) -> Trials:
        """A trial with shares of nearly nothing as none, and of nearly all as all, if as good."""
        shares = np.where(one.trials.shares < SLIVER, 0.0, one.trials.shares)
        plain = replace(one.trials, shares=np.where(shares > 1 - SLIVER, 1.0, shares))
        goals, late = self._goals(plain)
        as_good = (goals <= one.goals + SLIVER_DECIDES * np.abs(one.goals)) & (late <= one.late)
        return plain if as_good.all() else one.trials

    def _predicted(self, trials: Trials) -> Prediction | None:
        """All of them in one evaluation; nothing where the engine refuses."""
        w, d = self.q.workload, self.q.deployment
        try:
            t = trials.technique(w.prompt)
            return None if t.refuses(d) else w.predict(t, d, trials.batch, SAMPLED_CONTEXTS)
        except InputError:
            return None


# steps to better neighbours

SHARE_GRID = 1e-4  # of a share
STRIDES = (1250, 625, 250, 125, 50, 25, 10, 5, 2, 1)  # of the grid, by which shares change
PRICE_STRIDES = (625, 125, 25, 5, 1)  # where the question changes by a tenth at most
MAX_STEPS = 16  # of neighbours at most
BATCH_STEPS = (1, 2, 3, 4, 8, 16, 32)  # sequences by which batches change
TILE_SIZES = (8, 16, 32, 64)  # rows of a product: batches that fill some
KEPT_AT_FIRST = 0.25  # behind the best, or too late: what is left of the starts
KEPT_AT_LAST = 0.004  # and at last
MERIT_ROUNDING = 1e-9  # relative
SHARE_CHANGES = ({HOST: 1}, {SPLIT: 1}, {CPU: 1}, {HOST: 1, CPU: -1}, {HOST: 1, SPLIT: 1})
"""Of shares, up or down."""
Rows = NDArray[np.intp]


def _walk(
    together: BatchEvaluator, now: list[Scored], strides: tuple[int, ...]
) -> tuple[list[Scored], list[Scored]]:
    """Steps of every kind in turn until none gets better, and the best that was seen of each.

    What falls behind the best is left on the way: at first far behind, then less and less.
    """
    free = together.q.workload.batch is None
    behind, done, seen = KEPT_AT_FIRST, list[Scored](), now
    for _ in range(MAX_STEPS):
        now = _keep_near_best(now, behind, done)
        if not now:
            break
        stepped = [_step(together, x, strides, free) for x in now]
        seen = _best_of_kinds([*(x for x, _ in stepped), *seen])
        done += [x.rows(~moved) for x, moved in stepped]
        now = [x.rows(moved) for x, moved in stepped]
        behind = max(behind / 2, KEPT_AT_LAST)
    found = _keep_near_best([*done, *now], KEPT_AT_LAST)
    return found, _best_of_kinds([*found, *seen])


def _best_of_kinds(found: Iterable[Scored]) -> list[Scored]:
    """The best of every kind, even if it is late."""
    best: dict[Kind, Scored] = {}
    for x in found:
        if not len(x.trials):
            continue
        row = int(np.argmin(x.merits))
        known = best.get(x.trials.kind)
        if known is None or x.merits[row] < known.merits[0]:
            best[x.trials.kind] = x.rows(np.array([row]))
    return list(best.values())


def _keep_near_best(
    found: Iterable[Scored], far: float, others: Sequence[Scored] = ()
) -> list[Scored]:
    """What is not much worse than the best nor much too late; each place once, by kind."""
    kinds: dict[Kind, Scored] = {}
    for x in found:
        known = kinds.get(x.trials.kind)
        kinds[x.trials.kind] = x if known is None else known.with_rows(x)
    every = (*kinds.values(), *others)
    top = min((float(x.merits.min(initial=np.inf)) for x in every), default=np.inf)
    kept = []
    for x in kinds.values():
        if not len(x.trials):
            continue
        places = np.column_stack([x.trials.batch, x.trials.shares])
        first = np.sort(np.unique(places, axis=0, return_index=True)[1])
        merits = x.merits[first]
        good = (merits <= top + far * abs(top)) | (merits >= LATE_MERIT) & (x.late[first] <= far)
        kept += [x.rows(first[good])] if good.any() else []
    return kept


def _step(
    together: BatchEvaluator, found: Scored, strides: tuple[int, ...], free: bool
) -> tuple[Scored, NDArray[np.bool]]:
    """Every trial at its best neighbour, and which have moved."""
    moved = np.zeros(len(found.trials), dtype=bool)
    around, of = _neighbours(found.trials, strides, free)
    if not of.size:
        return found, moved
    tried = together.played(around)
    known, merits, taken = found.merits, tried.merits, {}
    for row in range(moved.size):
        mine = np.flatnonzero(of == row)
        if mine.size:
            best = int(mine[np.argmin(merits[mine])])
            possible = np.isfinite(known[row])  # a trial that cannot run has no neighbours worth it
            if possible and merits[best] < known[row] - MERIT_ROUNDING * abs(known[row]):
                taken[row] = best
                moved[row] = True
    return found.replaced(taken, tried), moved


def _neighbours(trials: Trials, strides: tuple[int, ...], free: bool) -> tuple[Trials, Rows]:
    """Trials around some, with other shares or at other batches, and which each is of."""
    moves = _share_moves(trials, strides)
    shares = np.repeat(trials.shares[:, None], len(moves), axis=1)
    shares = np.where(moves, np.round((shares + moves) / SHARE_GRID) * SHARE_GRID, shares)
    of = np.repeat(np.arange(len(trials)), len(moves))
    batch = trials.batch[of]
    shares = shares.reshape(of.size, DISK + 1)
    if free:
        others, whose = _near_batches(trials)
        before = trials.shares[whose]
        batch = np.concatenate([batch, others, others])
        of = np.concatenate([of, whose, whose])
        kept = _keep_bytes(before, trials.batch[whose] / others)
        shares = np.concatenate([shares, before, kept])
    inside = _clip_shares(shares, trials.shares[of])
    return Trials(trials.kind, batch[inside], shares[inside]), of[inside]


def _clip_shares(shares: Array, before: Array) -> NDArray[np.bool]:
    """Which shares are possible, and do the same things as those before; splits are cut. (n,)"""
    shares[:, SPLIT] = np.minimum(shares[:, SPLIT], shares[:, HOST])
    whole = shares[:, HOST] + shares[:, CPU]
    same = (shares[:, :3] > 0) == (before[:, :3] > 0)
    possible: NDArray[np.bool] = same.all(axis=1) & (whole <= 1 + SHARE_GRID / 2)
    return possible


def _keep_bytes(shares: Array, ratio: Array) -> Array:
    """Shares at another batch that keep as many bytes of caches on the GPU. (n, 5)"""
    found = shares.copy()
    here = 1 - shares[:, HOST] - shares[:, CPU]
    key = np.where(shares[:, CPU] > 0, CPU, HOST)[:, None]
    away = np.take_along_axis(shares, key, axis=1)
    moved = away + (here * (1 - ratio))[:, None]
    moved = np.where((away > 0) & (away < 1), np.ceil(moved / SHARE_GRID) * SHARE_GRID, away)
    np.put_along_axis(found, key, moved, axis=1)
    return found


def _share_moves(trials: Trials, strides: tuple[int, ...]) -> Array:
    """Changes of shares: one, or two against each other. (m, 5)"""
    steps = SHARE_GRID * np.array([*strides, *(-s for s in strides)])
    found = [np.zeros((0, DISK + 1))]
    for changed in SHARE_CHANGES:
        mine = trials.shares[:, list(changed)]
        if not (mine > 0).any(axis=0).all() or (CPU in changed and (mine == 1).any()):
            continue
        moves = np.zeros((steps.size, DISK + 1))
        for key, sign in changed.items():
            moves[:, key] = sign * steps
        found.append(moves)
    return np.concatenate(found)


def _near_batches(trials: Trials) -> tuple[Array, Rows]:
    """Batches near those of some trials, and whose they are."""
    parts = trials.parts
    found, whose = [], []
    for i, batch in enumerate(trials.batch.tolist()):
        near = {batch + sign * parts * n for n in BATCH_STEPS for sign in (-1, 1)}
        for size in TILE_SIZES:
            near |= {size * (batch // size + n) for n in (-1, 0, 1)}
        some = [b for b in sorted(near - {batch}) if parts <= b <= MOST_SEQUENCES and not b % parts]
        found += some
        whose += [i] * len(some)
    return np.array(found), np.array(whose, dtype=np.intp)


# uniform placements

BATCHES_PER_DOUBLING = 8  # batches
STARTS_PER_KIND = 5  # of each kind from which steps are taken
SHOWN_PER_KIND = 2  # of each kind in the end
# Behind the best, or too late: kinds that a change by a tenth may make the best.
NEAR_BEST_KIND = 0.12
SIXTEENTHS = np.arange(1, 16) / 16
TRIED_SHARES = (0.01, 0.03, *SIXTEENTHS.tolist())  # shares that are tried
PARTIAL_SHARES = (0.25, 0.5, 1.0)  # of what is left, where there are several


def placement_kinds(question: Question) -> dict[Kind, Grid]:
    """What layers may do there, by the techniques that the user considers.

    Parameters
    ----------
    question
        The question; on several ranks or stages nothing is placed anywhere else.

    Returns
    -------
    dict
        By what is done and in how many parts of the batch, the shares that are tried.
    """
    names = {t.name for t in question.admission.candidates()}
    shard = question.deployment.shard
    if not question.deployment.single_pass:
        return {}
    found: dict[Kind, Grid] = {}
    if "full" in names:
        found["full", 1] = [(0.0, 0.0, 0.0)]
    if "offload" in names:
        found["copied", 1] = [(h, 0.0, 0.0) for h in (*TRIED_SHARES, 1.0)]
    # else a layer's input is no smaller than its KV
    recomputes = "kvpr" in names and shard.hidden < shard.kv_width
    if recomputes:
        found["recomputed", 1] = [
            (h, r * h, 0.0) for h in (*TRIED_SHARES[::2], 1.0) for r in TRIED_SHARES[2::2]
        ]
    if "fastdecode" not in names or shard.latent:
        return found
    found["cpu", 2] = [(0.0, 0.0, 1.0)]
    for parts in (1, 2):
        found["shared", parts] = [(0.0, 0.0, c) for c in TRIED_SHARES]
    for parts in (1, 2) if recomputes else ():
        found["joined", parts] = [
            (h * (1 - c), r * h * (1 - c), c)
            for c in TRIED_SHARES[1::2]
            for h in PARTIAL_SHARES
            for r in PARTIAL_SHARES
        ]
        found["joined copies", parts] = [
            (h * (1 - c), 0.0, c) for c in TRIED_SHARES[1:] for h in (0.1, *PARTIAL_SHARES)
        ]
    return found


def streams_weights(question: Question) -> bool:
    """Whether weights may be streamed: where the user considers what does that.

    Parameters
    ----------
    question
        The question.
    """
    names = {t.name for t in question.admission.candidates()}
    return bool(names & {"offload", "flexgen", "kvpr"}) and question.deployment.single_pass


def can_fill_drive(question: Question) -> bool:
    """Whether a plan may keep weights or caches on a drive behind the host.

    Parameters
    ----------
    question
        The question.
    """
    names = {t.name for t in question.admission.candidates()}
    placed = not question.admission.engine and bool(placement_kinds(question))
    return "flexgen" in names or placed


def largest_placed(question: Question) -> float:
    """The largest batch that fits with caches, and weights, wherever they may be. [sequences]

    Parameters
    ----------
    question
        The question.
    """
    w, d, limits = question.workload, question.deployment, question.limits
    most = 1.0
    for share in (0, 1):
        for streamed in (0, 1) if streams_weights(question) else (0,):
            t = parse(f"place:host_share={share},weights_host={streamed}")
            for some in (t, t.changed(cache_disk=1.0, weights_disk=1.0)):  # refused without a drive
                if not some.refuses(d):
                    found = w.largest(some, d, limits.gpu_memory, limits.host_memory)
                    most = max(most, float(np.max(found)))
    return most


def grid_of_batches(most: float, parts: int) -> Array:
    """Batches up to the largest: every one at first, then so many per doubling."""
    found, size = [], 1.0
    while size <= most:
        found += [size * (BATCHES_PER_DOUBLING + i) for i in range(BATCHES_PER_DOUBLING)]
        size *= 2
    batches = np.array([*range(1, BATCHES_PER_DOUBLING), *found], dtype=float)
    kept: Array = batches[(batches <= most) & (batches % parts == 0)]
    return kept


@frozen
class UniformPlacements:
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


def search_uniform(question: Question) -> UniformPlacements:
    """The best of all kinds at every batch up to the largest."""
    w, together, most = question.workload, BatchEvaluator(question), largest_placed(question)
    starts = []
    for kind, grid in placement_kinds(question).items():
        parts = kind[1]
        batches = grid_of_batches(most, parts) if w.batch is None else np.array([float(w.batch)])
        if not batches.size or (w.batch is not None and w.batch % parts):
            continue
        shares = np.zeros((batches.size * len(grid), DISK + 1))
        shares[:, :3] = np.tile(grid, (batches.size, 1))
        trials = Trials(kind, np.repeat(batches, len(grid)), shares)
        starts.append(_best_by_doubling(together.played(trials)))
    found, seen = _walk(together, starts, STRIDES)
    tops = [x.best(SHOWN_PER_KIND) for x in found]
    if found:  # smaller batches of the best kind, whose first token comes earlier
        kind = min(found, key=lambda x: float(x.merits.min(initial=np.inf))).trials.kind
        tops += [x.best(STARTS_PER_KIND) for x in starts if x.trials.kind == kind]
    least = min((float(x.merits[0]) for x in seen), default=np.inf)
    near = [
        x
        for x in seen
        if x.late[0] <= NEAR_BEST_KIND
        and (x.late[0] > 0 or x.goals[0] <= least + NEAR_BEST_KIND * abs(least))
    ]
    return UniformPlacements(_predict_best(together, tops), near)


def search_from(
    question: Question, starts: Iterable[Scored], strides: tuple[int, ...] = STRIDES
) -> list[Prediction]:
    """The best of every kind, beside what is known of another question."""
    together = BatchEvaluator(question)
    found, _ = _walk(together, [together.played(x.trials) for x in starts], strides)
    return _predict_best(together, [x.best(1) for x in found])


def _predict_best(together: BatchEvaluator, tops: list[Scored]) -> list[Prediction]:
    """Some trials at every generated token, each under the name of the simplest technique."""
    w, d, best = together.q.workload, together.q.deployment, []
    for top in tops:
        for row, batch in enumerate(top.trials.batch):
            trial = together.without_slivers(top.rows(np.array([row])))
            best.append(w.predict(trial.named(0, w.prompt), d, np.array([batch])))
    return best


def _best_by_doubling(played: Scored) -> Scored:
    """The best few, each of batches within another doubling."""
    merits, doubling = played.merits, np.floor(np.log2(played.trials.batch))
    rows: list[int] = []
    for row in np.argsort(merits, kind="stable").tolist():
        if len(rows) == STARTS_PER_KIND or not np.isfinite(merits[row]):
            break
        if doubling[row] not in doubling[rows]:
            rows.append(row)
    return played.rows(np.array(rows, dtype=np.intp))
