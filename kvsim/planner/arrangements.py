"""Layers in an order with their shares: as techniques that run, and many replayed together.

A programme's counts become uses of layers, which stand in blocks or alternate. Arrangements that
differ in shares and batch alone are evaluated at once: settings are arrays, and of every trial no
more of the weights is streamed than the GPU's memory asks for, since streaming is never quicker
than not streaming.
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.planner.question import Question
from kvsim.planner.table import LIMIT_SLACK, SAMPLED_CONTEXTS, measures
from kvsim.prediction.generate import Prediction
from kvsim.techniques.axes.base import Term
from kvsim.techniques.axes.placement import positive
from kvsim.techniques.papers.fastdecode import Fastdecode
from kvsim.techniques.papers.full import Full
from kvsim.techniques.papers.kvpr import Kvpr, Place
from kvsim.techniques.papers.offload import Offload
from kvsim.techniques.technique import Layers, Technique

# arrangements

TOKEN_ROUNDING = 1e-6  # of a token
NO_SHARE = 1e-6  # a share below this is none


@frozen
class Shares:
    """Where a layer's cached tokens are, as shares; the rest is on the GPU."""

    host: float = 0.0  # copied in every step, or recomputed
    split: float = 0.0  # of those, recomputed; a share of the prompt
    cpu: float = 0.0  # attended to by the CPU


@frozen
class Use:
    """What some layers do."""

    shares: Shares
    parts: int
    layers: int
    streamed: float = 0.0  # share of their weights
    disk: float = 0.0  # share of what the host would have of both

    @property
    def alternates(self) -> bool:
        """Whether all of the attention is the CPU's, for one half of the batch after the other."""
        return self.parts > 1 and self.shares.cpu == 1

    @property
    def shared(self) -> bool:
        """Whether GPU and CPU share the attention."""
        return 0 < self.shares.cpu < 1


@frozen
class Arrangement:
    """Uses of layers of each shape, and the order.

    Attributes
    ----------
    uses
        By shape of layer, the first use in the first layers.
    spread
        Whether uses alternate as evenly as they can, or stand in blocks.
    """

    uses: tuple[tuple[Use, ...], ...]
    spread: bool = False

    @property
    def blocks(self) -> int:
        """How involved it is: uses in turn, and many times where they alternate."""
        most = max(len(uses) for uses in self.uses)
        return most if most < 2 or not self.spread else 2 * most

    @property
    def shared(self) -> bool:
        """Whether GPU and CPU share the attention of every layer, so that layers are levelled."""
        return all(u.shared for uses in self.uses for u in uses)

    @property
    def order(self) -> tuple[object, ...]:
        """What stands where, but for how much of it."""
        kinds = [
            [(u.parts, u.shares.host > 0, u.shares.cpu > 0) for u in uses] for uses in self.uses
        ]
        return self.spread, *map(tuple, kinds)

    def technique(self, deployment: Deployment, prompt: int) -> Technique:
        """As layers of a model."""
        sequence = self.sequence(deployment)
        terms = {u: self._term(u, prompt) for u in dict.fromkeys(sequence)}
        places = [terms[u] for u in sequence]  # the same object, so that it is evaluated once
        layers, first = [], 0
        for place, some in groupby(places):
            count = len(list(some))
            layers.append(Layers((place,), first, first + count - 1))
            first += count
        if len(layers) == 1:
            return Technique((Layers(layers[0].terms),))
        return Technique(tuple(layers))

    def _term(self, u: Use, prompt: int) -> Term:
        """A use by its technique's name where it has one."""
        host, split = (
            _round_share(u.shares.host),
            float(np.floor(u.shares.split * prompt + TOKEN_ROUNDING)),
        )
        cpu, weights = _round_share(u.shares.cpu), _round_share(u.streamed)
        disk = _round_share(u.disk)
        if not weights and u.parts == 1 and not cpu and not disk:
            if not host:
                return Full()
            if not split:
                return Offload(host_share=host, parts=1)
            if host == 1:
                return Kvpr(split=split, parts=1)
        if not weights and cpu == 1 and u.parts == 2:
            return Fastdecode()
        return Place(
            host_share=host,
            split=split if host else 0.0,
            cpu_share=cpu,
            weights_host=weights,
            cache_disk=disk if host else 0.0,
            weights_disk=disk if weights else 0.0,
            parts=u.parts,
        )

    def sequence(self, deployment: Deployment) -> list[Use]:
        """The use of every layer."""
        order = [s for block, count in deployment.shard.layout for s in block * count]
        shapes = list(dict.fromkeys(order))
        queues = [iter(self._ordered(self.uses[k])) for k in range(len(shapes))]
        return [next(queues[shapes.index(shape)]) for shape in order]

    def _ordered(self, uses: tuple[Use, ...]) -> list[Use]:
        if not self.spread:
            return [u for u in uses for _ in range(u.layers)]
        places = [((i + 0.5) / u.layers, j, u) for j, u in enumerate(uses) for i in range(u.layers)]
        return [u for *_, u in sorted(places, key=lambda x: x[:2])]


def _round_share(share: float) -> float:
    return 0.0 if share < NO_SHARE else round(min(share, 1.0), 6)


# trials

HOST, SPLIT, CPU, STREAMED, DISK = range(5)  # columns of a use's shares
SHARE_DIGITS = 6  # of a share
LATE_MERIT = 1e15  # above every objective
NO_MEMORY = 1e18  # bytes that no memory has [B]
MEMORY_RESOLUTION = 1e-5  # of the memory: as much left is none
CHORD_STEPS = 3  # steps to the least share of weights; memory is nearly affine in it


@frozen
class Trials:
    """Arrangements that differ in shares and batch alone.

    Attributes
    ----------
    kind
        One of them.
    batch
        Of each. (n,) [sequences]
    shares
        Of each use in the order of ``kind``: on the host, recomputed, for the CPU, streamed
        weights, and on the disk of what the host would have. (n, u, 5)
    """

    kind: Arrangement
    batch: Array
    shares: Array

    def __len__(self) -> int:
        return self.batch.size

    @classmethod
    def of(cls, arrangement: Arrangement, batch: float) -> "Trials":
        """A single arrangement at a batch."""
        rows = [
            (u.shares.host, u.shares.split, u.shares.cpu, u.streamed, u.disk)
            for uses in arrangement.uses
            for u in uses
        ]
        return cls(arrangement, np.array([batch]), np.array([rows]))

    def rows(self, chosen: NDArray[np.bool] | NDArray[np.intp]) -> "Trials":
        """Those that are chosen, in that order."""
        return replace(self, batch=self.batch[chosen], shares=self.shares[chosen])

    def streaming(self, share: Array | float) -> "Trials":
        """The same with a share of what they stream at most. (n,)"""
        shares = self.shares.copy()
        most = shares[..., STREAMED].max(axis=1, keepdims=True)
        pattern = np.where(most > 0, shares[..., STREAMED] / np.where(most > 0, most, 1.0), 1.0)
        shares[..., STREAMED] = np.round(pattern * np.reshape(share, (-1, 1)), SHARE_DIGITS)
        return replace(self, shares=shares)

    def on_disk(self, share: Array | float) -> "Trials":
        """The same with a share of what the host would have on the disk. (n,)"""
        shares = self.shares.copy()
        shares[..., DISK] = np.reshape(share, (-1, 1))
        return replace(self, shares=shares)

    @cached_property
    def uses(self) -> list[Use]:
        """Of the kind, all shapes of layers in turn. (u,)"""
        return [u for uses in self.kind.uses for u in uses]

    @property
    def does(self) -> Hashable:
        """What uses do, whatever their shares and the batch."""
        return self.kind.spread, tuple(
            (u.parts, *(x > 0 for x in row))
            for u, row in zip(self.uses, self.shares[0, :, :STREAMED].tolist(), strict=True)
        )

    def arrangement(self, row: int) -> Arrangement:
        """The arrangement of one of the trials."""
        found = iter(
            replace(u, shares=Shares(*s[:STREAMED]), streamed=s[STREAMED], disk=s[DISK])
            for u, s in zip(self.uses, self.shares[row].tolist(), strict=True)
        )
        return replace(
            self.kind, uses=tuple(tuple(next(found) for _ in some) for some in self.kind.uses)
        )

    def technique(self, deployment: Deployment, prompt: int) -> Technique:
        """All of them, with settings along the axis of batches."""
        places: list[Place] = []
        known: dict[bytes, Place] = {}
        for u, use in enumerate(self.uses):
            key = self.shares[:, u].tobytes() + bytes([use.parts])
            if key not in known:
                known[key] = self._place(u, prompt)
            places.append(known[key])
        sequence = [places[i] for i in self._order(deployment)]
        layers, first = [], 0
        for place, some in groupby(sequence, key=id):
            count = len(list(some))
            layers.append(Layers((sequence[first],), first, first + count - 1))
            assert id(sequence[first]) == place
            first += count
        return Technique((Layers(layers[0].terms),) if len(layers) == 1 else tuple(layers))

    def _order(self, deployment: Deployment) -> list[int]:
        """The use of every layer, by its number."""
        numbered = iter(range(len(self.uses)))
        marked = tuple(
            tuple(replace(u, streamed=float(next(numbered))) for u in uses)
            for uses in self.kind.uses
        )
        return [int(u.streamed) for u in replace(self.kind, uses=marked).sequence(deployment)]

    def _place(self, use: int, prompt: int) -> Place:
        host, split, cpu, streamed, disk = (_as_setting(x) for x in self.shares[:, use].T)
        tokens = np.floor(np.asarray(split) * prompt + TOKEN_ROUNDING)
        return Place(
            host_share=host,
            split=tokens if np.any(tokens) else 0.0,
            cpu_share=cpu,
            weights_host=streamed,
            cache_disk=disk if positive(host) else 0.0,
            weights_disk=disk if positive(streamed) else 0.0,
            parts=self.uses[use].parts,
        )


def _as_setting(share: Array) -> Array | float:
    """An array of settings, or the number that they all are."""
    return float(share[0]) if (share == share[0]).all() else share[None, :, None]


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
    """The engine's word on trials of one question.

    Parameters
    ----------
    streams : whether weights may be streamed.
    apart : whether uses may stream different shares of their weights, in the proportions of a
        trial's; otherwise all stream the same.
    """

    def __init__(self, q: Question, streams: bool, apart: bool = False) -> None:
        self.q, self.streams, self.apart, self.count = q, streams, apart, 0

    def played(self, trials: Trials, contexts: int = SAMPLED_CONTEXTS) -> "Scored":
        """All of them with the least share of weights that each must stream."""
        share = np.zeros(len(trials))
        if not self.apart:
            trials = trials.streaming(share)
        over = self._beyond(trials.streaming(share))
        if self.streams and (some := np.flatnonzero(over > 0)).size:
            share[some] = self._least(trials.rows(some), over[some])
            over = np.where(share > 0, 0.0, over)
        trials = trials.streaming(np.nan_to_num(share))
        if self.q.deployment.hardware.disk_memory:
            trials = self._spilled(trials)
        goals, fit = np.full((2, len(trials)), np.inf), np.flatnonzero(over <= 0)
        goals[:, fit] = self._goals(trials.rows(fit), contexts)
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
        none, all_ = (self._predicted(trials.on_disk(x), SAMPLED_CONTEXTS) for x in (0.0, 1.0))
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
        found = self._predicted(trials, SAMPLED_CONTEXTS)
        if found is None:
            return np.full(len(trials), NO_MEMORY)
        spread = np.broadcast_to(found.given_bytes, (1, len(trials))).ravel()
        over: Array = spread - self.q.limits.gpu_memory * (1 + LIMIT_SLACK)
        return np.minimum(over, NO_MEMORY)

    def _goals(self, trials: Trials, contexts: int) -> Array:
        """The objective of each, and how late it is. (2, n)"""
        found = np.full((2, len(trials)), np.inf)
        limits = self.q.limits
        streaming = trials.shares[..., STREAMED].any(axis=1)
        for rows in (np.flatnonzero(streaming), np.flatnonzero(~streaming)):
            predicted = self._predicted(trials.rows(rows), contexts) if rows.size else None
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

    def _predicted(self, trials: Trials, contexts: int) -> Prediction | None:
        """All of them in one evaluation; nothing where the engine refuses."""
        w, d = self.q.workload, self.q.deployment
        self.count += 1
        try:
            t = trials.technique(d, w.prompt)
            return None if t.refuses(d) else w.predict(t, d, trials.batch, contexts)
        except InputError:
            return None
