"""From a programme's counts to a technique that runs, and its layers in other orders and uses."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, permutations

import numpy as np

from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.planner.placement import Coefficients
from kvsim.planner.programme import Programme
from kvsim.planner.shares import ROUNDING, Option, Shares
from kvsim.planner.solving import Mix
from kvsim.techniques.axes.base import Term
from kvsim.techniques.papers.fastdecode import Fastdecode
from kvsim.techniques.papers.full import Full
from kvsim.techniques.papers.kvpr import Kvpr, Place
from kvsim.techniques.papers.offload import Offload
from kvsim.techniques.technique import Layers, Technique

MOVES = (8, 2, 1)  # layers that move from one use to another
LEAST = 1e-6  # a share below this is none


@frozen
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
        kinds = [[(u.parts, u.shares.host > 0, u.shares.cpu > 0) for u in uses]
                 for uses in self.uses]  # fmt: skip
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


def shifted(arrangement: Arrangement, count: int) -> Iterator[Arrangement]:
    """With so many layers moved from one use to another; a use keeps its last one."""
    for k, uses in enumerate(arrangement.uses):
        for i, j in permutations(range(len(uses)), 2):
            moved = min(count, uses[i].layers - 1)
            if moved > 0:
                yield _with(arrangement, k, {
                    i: replace(uses[i], layers=uses[i].layers - moved),
                    j: replace(uses[j], layers=uses[j].layers + moved),
                })  # fmt: skip


def _with(a: Arrangement, count: int, changed: dict[int, Use]) -> Arrangement:
    uses = tuple(changed.get(i, use) for i, use in enumerate(a.uses[count]))
    return replace(a, uses=(*a.uses[:count], uses, *a.uses[count + 1 :]))


def _rounded(share: float) -> float:
    return 0.0 if share < LEAST else round(min(share, 1.0), 6)
