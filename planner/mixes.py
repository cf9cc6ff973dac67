"""From a programme's counts to a technique that runs, and a local search by replay from there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, permutations, product
from typing import Any

import numpy as np

from kvsim.machines.deployment import Deployment
from kvsim.planner.placement import Coefficients
from kvsim.planner.programme import Programme
from kvsim.planner.shares import ROUNDING, Option, Shares
from kvsim.planner.solving import Mix
from kvsim.techniques.base import Technique
from kvsim.techniques.fastdecode import Fastdecode
from kvsim.techniques.full import Full
from kvsim.techniques.kvpr import Kvpr
from kvsim.techniques.offload import Offload
from kvsim.techniques.place import Place
from kvsim.techniques.ranges import Layers
from kvsim.techniques.terms import Term

MOVES = (8, 2, 1)  # layers that move from one use to another
FINER = (0.1, 0.02, 0.005)  # by which shares change
LEAST = 1e-6  # a share below this is none


@dataclass(frozen=True)
class Use:
    """What some layers do."""

    shares: Shares
    parts: int
    layers: int
    streamed: float = 0.0  # share of their weights

    @property
    def alternates(self) -> bool:
        """Whether all of the attention is the CPU's, for one half of the batch after the other."""
        return self.parts > 1 and self.shares.cpu == 1

    @property
    def shared(self) -> bool:
        """Whether GPU and CPU share the attention."""
        return 0 < self.shares.cpu < 1


@dataclass(frozen=True)
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
        kinds = [[(u.parts, u.shares.host > 0, u.shares.cpu > 0) for u in uses]
                 for uses in self.uses]  # fmt: skip
        return self.spread, *map(tuple, kinds)

    def technique(self, deployment: Deployment, prompt: int) -> Technique:
        """As layers of a model."""
        places = [self._term(u, prompt) for u in self.sequence(deployment)]
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
        host, split = _rounded(u.shares.host), float(np.floor(u.shares.split * prompt + ROUNDING))
        cpu, weights = _rounded(u.shares.cpu), _rounded(u.streamed)
        if not weights and u.parts == 1 and not cpu:
            if not host:
                return Full()
            if not split:
                return Offload(host_share=host, parts=1)
            if host == 1:
                return Kvpr(split=split, parts=1)
        if not weights and cpu == 1 and u.parts == 2:
            return Fastdecode()
        return Place(
            host_share=host, split=split if host else 0.0, cpu_share=cpu, weights_host=weights,
            parts=u.parts,
        )  # fmt: skip

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


def arranged(coefficients: Coefficients, programme: Programme, mix: Mix) -> Arrangement:
    """Each option's layers with the mean of its corners' shares."""
    found: list[tuple[Use, ...]] = []
    for k in range(programme.layers.size):
        uses: list[Use] = []
        for o in range(len(programme.names)):
            count = round(float(mix.counts[o, k]))
            rows = np.flatnonzero(programme.option_of == o)
            weight = mix.corners[rows, k]
            if not count or weight.sum() <= 0:
                continue
            some: list[tuple[Option, Shares]] = [
                coefficients.corner(programme, int(v), k) for v in rows
            ]
            keys = vars(some[0][1])
            mean = {
                key: float(sum(w * getattr(s, key) for w, (_, s) in zip(weight, some, strict=True)))
                / float(weight.sum())
                for key in keys
            }
            streamed = min(float(mix.streamed[o, k]) / count, 1.0)
            uses.append(Use(Shares(**mean), some[0][0].parts, count, streamed))
        found.append(tuple(uses))
    return Arrangement(tuple(found))


def levelled(arrangement: Arrangement) -> Arrangement | None:
    """All layers that pass the batch in as many parts alike, with mean shares; None if so.

    Layers where the CPU alternates between halves of a batch stay as they are.
    """
    found = []
    for uses in arrangement.uses:
        alike = {parts: [u for u in uses if u.parts == parts and not u.alternates]
                 for parts in (1, 2)}  # fmt: skip
        if all(len(some) < 2 for some in alike.values()):
            found.append(uses)
            continue
        left = tuple(u for u in uses if u.alternates)
        found.append((*(_mean(some) for some in alike.values() if some), *left))
    levelled = replace(arrangement, uses=tuple(found))
    return None if levelled == arrangement else levelled


def _mean(uses: Sequence[Use]) -> Use:
    """All layers of some uses with the mean of their shares."""
    count = sum(u.layers for u in uses)
    keys = vars(uses[0].shares)
    shares = {k: sum(u.layers * getattr(u.shares, k) for u in uses) / count for k in keys}
    streamed = sum(u.layers * u.streamed for u in uses) / count
    return Use(Shares(**shares), uses[0].parts, count, streamed)


def orders(arrangement: Arrangement) -> Iterator[Arrangement]:
    """The same uses in other orders: every sequence of blocks, and spread evenly."""
    if all(len(uses) < 2 for uses in arrangement.uses):
        yield arrangement
        return
    widest = max(len(uses) for uses in arrangement.uses)
    for turn in permutations(range(widest)) if widest <= 3 else [tuple(range(widest))]:
        uses = tuple(tuple(some[i] for i in turn if i < len(some)) for some in arrangement.uses)
        for spread in (False, True):
            yield replace(arrangement, uses=uses, spread=spread)


def neighbours(
    arrangement: Arrangement, step: int, heavier: Sequence[float] = ()
) -> Iterator[Arrangement]:
    """Arrangements that differ a little: layers moved between uses, shares, streamed weights.

    Parameters
    ----------
    heavier : a layer's weights over its cache, by shape; what one of them makes room for, the other
        may take.
    """
    fine = FINER[step]
    for k, uses in enumerate(arrangement.uses):
        for i, j in permutations(range(len(uses)), 2):
            moved = min(MOVES[step], uses[i].layers - 1)
            if moved > 0:
                yield _with(arrangement, k, {
                    i: replace(uses[i], layers=uses[i].layers - moved),
                    j: replace(uses[j], layers=uses[j].layers + moved),
                })  # fmt: skip
        for i, use in enumerate(uses):
            room = {"host": 1.0 - use.shares.cpu, "split": use.shares.host,
                    "cpu": 1.0 - use.shares.host}  # fmt: skip
            for key, low in (("host", 1e-3), ("split", 0.0), ("cpu", 1e-3)):
                value, most = getattr(use.shares, key), room[key]
                if value <= 0 or use.alternates:
                    continue
                for other in (value - fine, value + fine):
                    changed: dict[str, Any] = {key: min(max(other, low), most)}
                    shares = replace(use.shares, **changed)
                    shares = replace(shares, split=min(shares.split, shares.host))
                    if shares != use.shares:
                        yield _with(arrangement, k, {i: replace(use, shares=shares)})
            if use.streamed > 0:
                for other in (use.streamed - fine, use.streamed + fine):
                    yield _with(
                        arrangement, k, {i: replace(use, streamed=min(max(other, 0.0), 1.0))}
                    )
        yield from _exchanged(arrangement, k, fine)
        if k < len(heavier):
            yield from _traded(arrangement, k, fine, heavier[k])


def _traded(a: Arrangement, k: int, fine: float, heavier: float) -> Iterator[Arrangement]:
    """More of the cache away for more of the weights on the GPU, and the reverse, byte for byte."""
    for (i, use), key in product(enumerate(a.uses[k]), ("cpu", "host")):
        away, room = getattr(use.shares, key), 1.0 - use.shares.cpu - use.shares.host
        if not away or use.alternates:
            continue
        most = min(fine, room, use.streamed * heavier)
        least = min(fine, away, (1.0 - use.streamed) * heavier)
        for moved in (most, -least):
            if moved:
                shares = replace(use.shares, **{key: away + moved})
                shares = replace(shares, split=min(shares.split, shares.host))
                streamed = min(max(use.streamed - moved / heavier, 0.0), 1.0)
                yield _with(a, k, {i: replace(use, shares=shares, streamed=streamed)})


def _exchanged(a: Arrangement, k: int, fine: float) -> Iterator[Arrangement]:
    """Weights streamed by other layers of a shape, as many in all."""
    uses = a.uses[k]
    for i, j in permutations(range(len(uses)), 2):
        moved = min(fine * uses[i].layers, uses[i].streamed * uses[i].layers,
                    (1 - uses[j].streamed) * uses[j].layers)  # fmt: skip
        if moved > 0:
            yield _with(a, k, {
                i: replace(uses[i], streamed=uses[i].streamed - moved / uses[i].layers),
                j: replace(uses[j], streamed=uses[j].streamed + moved / uses[j].layers),
            })  # fmt: skip


def _with(a: Arrangement, count: int, changed: dict[int, Use]) -> Arrangement:
    uses = tuple(changed.get(i, use) for i, use in enumerate(a.uses[count]))
    return replace(a, uses=(*a.uses[:count], uses, *a.uses[count + 1 :]))


def _rounded(share: float) -> float:
    return 0.0 if share < LEAST else round(min(share, 1.0), 6)
