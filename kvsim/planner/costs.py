"""What a layer's cache costs where it is placed, as numbers that are never above it.

A layer's cache is placed within a box of shares: on the GPU, copied from the host, recomputed,
attended to by the CPU. Durations are maxima of affine functions of the shares, and what a layer
adds is made of sums and maxima of durations, so every cost is convex in the shares: a plane with
the slope of one point is nowhere above it. Over the context a cost is convex where a memory limits
it, and concave where a window or a saturating floor does.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.roofline import seconds
from kvsim.engine.timeline import minimum_layer_seconds
from kvsim.frozen import frozen
from kvsim.graph import Array, Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.planner.table import distinct
from kvsim.techniques import compose
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.papers.kvpr import Place
from kvsim.techniques.steps import Known, layer_ops, tile_point
from kvsim.techniques.technique import Technique

# boxes of shares

SHARE_EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the boxes that a share is within
CPU_SHARE_EDGES = (0.0, 0.25, 0.5, 1.0)  # of the boxes of a share that the CPU attends to
TOKEN_ROUNDING = 1e-6  # of a token
ALONE = (
    frozenset({"full", "cpu"}),
    frozenset({"full", "copied", "recomputed"}),
    frozenset({"full", "shared"}),
)
JOINED = (
    frozenset({"full", "shared", "beside", "joined"}),
    frozenset({"full", "halved", "halved_beside", "halved_joined"}),
)
FAMILIES = (*ALONE, *JOINED)
"""What layers of one model may do beside each other.

Copies of caches and the CPU's answers would wait for each other on the link, whose queue is in
order: layers of both kinds are slower together than either alone. Within a layer they may stand
together: where GPU and CPU share the attention, each over its own tokens at the same time, the GPU
may have copied some of its own (``beside``) or recomputed them (``joined``), and the batch may pass
in halves (``halved``).
These are many options, and their bounds say less: they are for the batch that is best without.
"""


@frozen
class Shares:
    """Where a layer's cached tokens are, as shares; the rest is on the GPU."""

    host: float = 0.0  # copied in every step, or recomputed
    split: float = 0.0  # of those, recomputed; a share of the prompt
    cpu: float = 0.0  # attended to by the CPU

    def towards(self, other: "Shares", share: float) -> "Shares":
        """A share of the way to others."""
        here, there = vars(self), vars(other)
        return Shares(**{k: x + share * (there[k] - x) for k, x in here.items()})


@frozen
class Option:
    """A way to place a layer's cache: the corners of a box of shares."""

    name: str
    corners: tuple[Shares, ...]
    parts: int = 1

    @property
    def kind(self) -> str:
        """What is done, whatever the shares."""
        return self.name.rstrip("0123456789")

    @property
    def needs(self) -> frozenset[str]:
        """The techniques that do what it does; a user may leave some of them out."""
        some = {"fastdecode"} if any(c.cpu for c in self.corners) else set()
        if any(c.split for c in self.corners):
            some.add("kvpr")
        elif any(c.host for c in self.corners):
            some.add("offload")
        return frozenset(some or {"full"})

    @property
    def middle(self) -> Shares:
        """The middle of the box."""
        count = len(self.corners)
        keys = vars(self.corners[0])
        return Shares(**{k: sum(getattr(c, k) for c in self.corners) / count for k in keys})

    def held(self, share: float) -> "Option":
        """The same where a layer holds only a share of the prompt: splits are shares of that."""
        corners = tuple(replace(c, split=c.split * share) for c in self.corners)
        return replace(self, corners=corners)


def placement_options(deployment: Deployment, halves: bool) -> list[Option]:
    """Every way to place a cache there.

    Parameters
    ----------
    halves : whether a batch may pass in two halves, so that GPU and CPU alternate; layers may then
        also recompute some tokens while the CPU attends to others.
    """
    found = [Option("full", (Shares(),))]
    boxes = list(pairwise(SHARE_EDGES))
    for i, (low, high) in enumerate(boxes):
        found.append(Option(f"copied{i}", (Shares(low), Shares(high))))
    # else a layer input is no smaller than what it replaces
    smaller = deployment.shard.hidden < deployment.shard.kv_width
    if smaller:
        for i, (low, high) in enumerate(boxes):
            found.append(Option(f"recomputed{i}", (*_recomputed(low), *_recomputed(high))))
    if deployment.shard.latent:
        return found
    found.append(Option("cpu", (Shares(cpu=1.0),), 2 if halves else 1))
    for i, edges in enumerate(pairwise(CPU_SHARE_EDGES)):
        alone = tuple(Shares(cpu=cpu) for cpu in edges)
        found.append(Option(f"shared{i}", alone))
        joined = tuple(dict.fromkeys(s for cpu in edges for s in _joined(cpu))) if smaller else ()
        if halves:
            found.append(Option(f"halved{i}", alone, 2))
        beside = tuple(s for s in joined if not s.split)  # no kernel starts to recompute
        if halves and joined:
            found.append(Option(f"beside{i}", beside))
            found.append(Option(f"halved_beside{i}", beside, 2))
            found.append(Option(f"joined{i}", joined))
            found.append(Option(f"halved_joined{i}", joined, 2))
    return found


def _recomputed(host: float) -> tuple[Shares, Shares]:
    """A share on the host that is copied, and that is recomputed."""
    return Shares(host), Shares(host, host)


def _joined(cpu: float) -> tuple[Shares, ...]:
    """A share for the CPU; the rest stays, is copied, or is recomputed."""
    return Shares(cpu=cpu), Shares(1 - cpu, 0.0, cpu), Shares(1 - cpu, 1 - cpu, cpu)


def held_shares(deployment: Deployment, shapes: Iterable[LayerShape], prompt: int) -> Array:
    """The share of a prompt that a layer has cached, by shape: less where its window ends. (k,)"""
    # the new token has taken a place in a full window, unless places are reserved
    new = 0 if deployment.stack.cache.static else 1
    windows = (shape.window for shape in shapes)
    return np.array([(w - new) / prompt if w and w < prompt else 1.0 for w in windows])


def placement_technique(
    shares: Shares, prompt: int, streamed: float = 0.0, parts: int = 1
) -> Technique:
    """The technique of all layers that places them so."""
    return compose(_place(shares, prompt, streamed, parts))


def _place(s: Shares, prompt: int, streamed: float, parts: int) -> Place:
    return Place(
        host_share=s.host,
        split=float(np.floor(s.split * prompt + TOKEN_ROUNDING)),
        cpu_share=s.cpu,
        weights_host=streamed,
        parts=parts,
    )


# planes and means below a cost

SLOPE_STEP = 1e-5  # of a share, by which a slope is taken
BEND_ROUNDING = 1e-13  # of a cost: differences below this are rounding
CONTEXT_STRETCHES = 3  # stretches of the growing context


@frozen
class Stretches:
    """The rounds of a generation in a few stretches of neighbouring contexts.

    Attributes
    ----------
    first, last
        Decoded tokens before the first and before the last round of each. (c,) [tokens]
    """

    first: Array
    last: Array

    @property
    def rounds(self) -> Array:
        """How many each has. (c,)"""
        return self.last - self.first + 1

    @property
    def tokens(self) -> Array:
        """Decoded tokens at which a cost is evaluated: middles, then both ends. (3c,) [tokens]"""
        return np.concatenate([(self.first + self.last) / 2, self.first, self.last])

    def below(self, cost: Array) -> Array:
        """At most the mean of each stretch, of a cost at ``tokens``. (3c, ...) to (c, ...)

        The mean of a convex cost is at least its middle, that of a concave one at least the mean
        of its ends.
        """
        middle, first, last = np.split(cost, 3)
        found: Array = np.minimum(middle, (first + last) / 2)
        return found


def make_stretches(rounds: int, kinks: Iterable[float] = ()) -> Stretches:
    """A few stretches of equal length, ended too where costs have a concave kink.

    Parameters
    ----------
    kinks : decoded tokens at which a window is full. [tokens]
    """
    edges: Array = np.round(np.linspace(0, rounds, min(rounds, CONTEXT_STRETCHES) + 1))
    inside = [np.ceil(k) for k in kinks if 0 < k < rounds]
    edges = distinct(np.concatenate([edges, inside]))
    return Stretches(edges[:-1], edges[1:] - 1)


def option_planes(
    options: Iterable[Option],
    cost: Callable[[Shares, int, list[int]], Array],
    prompt: int,
    held: Array,
) -> Array:
    """Planes below costs of all options. (q, r, k, b, corners)

    Where the CPU attends beside a recomputation, a chain bends where the GPU takes over. Its first
    plane is below the one part; the last resource, a chain too, has that of nothing recomputed,
    which is below the other.

    Parameters
    ----------
    cost : of shares and parts of the batch in some shapes of layers, by phase, resource, shape and
        batch. (q, r, k, b)
    held : the share of the prompt's tokens that is there to be recomputed, by shape. (k,)
    """
    found = []
    for option in options:
        splits = any(corner.split for corner in option.corners)
        shares = held if splits else np.ones_like(held)
        some: dict[int, Array] = {}
        for share in distinct(shares).tolist():
            shapes = np.flatnonzero(shares == share).tolist()

            def mine(at: Shares, parts: int = option.parts, among: list[int] = shapes) -> Array:
                return cost(at, parts, among)

            values = option_plane(own := option.held(share), mine, prompt)
            if any(corner.split and corner.cpu for corner in own.corners):
                alone = tuple(Shares(cpu=corner.cpu) for corner in own.corners)
                values[:, -1] = option_plane(replace(own, corners=alone), mine, prompt)[:, -1]
            some |= {k: values[:, :, i] for i, k in enumerate(shapes)}
        found.append(np.stack([some[k] for k in range(held.size)], axis=2))
    return np.concatenate(found, axis=-1)


def option_plane(
    option: Option, cost: Callable[[Shares], Array], prompt: int, touching: Shares | None = None
) -> Array:
    """A plane below a cost in the option's box, at its corners. (..., corners)

    Where the cost bends beside the point, the plane is lowered by what its slope may be off.

    Parameters
    ----------
    prompt : tokens, as a split is a whole number of them.
    touching : the point, inside the box; its middle if None.
    """
    middle = touching or option.middle
    if middle.split:  # where some tokens are recomputed: with none, no kernel starts
        middle = replace(middle, split=max(np.floor(middle.split * prompt), 2.0) / prompt)
    at = cost(middle)
    slopes: dict[str, tuple[Array, Array]] = {}
    for key, value in vars(middle).items():
        if all(getattr(c, key) == value for c in option.corners):
            continue
        step = 1 / prompt if key == "split" else SLOPE_STEP
        below, above = (cost(replace(middle, **{key: value + x})) for x in (-step, step))
        bend = np.abs(above + below - 2 * at)
        bend[bend < BEND_ROUNDING * np.abs(at)] = 0.0
        slopes[key] = (above - below) / (2 * step), bend / (2 * step)
    corners = []
    for corner in option.corners:
        value = at
        for key, (slope, bend) in slopes.items():
            away = getattr(corner, key) - getattr(middle, key)
            value = value + slope * away - bend * abs(away)
        corners.append(value)
    return np.stack(corners, axis=-1)


# layers of a pass

STREAMS = ("gpu", "h2d", "d2h", "cpu")
RESOURCES = (*STREAMS, "chain", "turn")
"""What layers occupy: streams, the GPU if nothing delays it, the CPU where it answers for it."""


class LayersOfPass:
    """Layers of one pass, whatever their options: ops that they share are made and timed once."""

    def __init__(self) -> None:
        self._known: Known = {}
        self._took: dict[int, tuple[Op, Number]] = {}  # by identity, with the op itself

    def resources(self, layer: LayerPass) -> Array:
        """Time of each stream, and of the chain, in one layer with all parts of the batch.

        (r, b, c) [s]
        """
        issued, tiles, point = layer_ops(layer, self._known), layer.placement.tiles, layer.p
        grid = np.broadcast_shapes(np.shape(point.batch), np.shape(point.context), (1, 1))
        found = np.zeros((len(RESOURCES), *grid))
        for op in issued:
            found[STREAMS.index(op.stream)] += tiles * np.asarray(self._seconds(op, layer.d))
        chain, turn = RESOURCES.index("chain"), RESOURCES.index("turn")
        found[chain] = found[turn] = tiles * np.asarray(
            minimum_layer_seconds(issued, layer.d, self._seconds)
        )
        if tiles > 1:  # the CPU's halves follow one another, and other layers wait for both
            found[turn] = np.maximum(found[chain], found[STREAMS.index("cpu")])
        return found

    def _seconds(self, op: Op, deployment: Deployment) -> Number:
        if id(op) not in self._took:
            self._took[id(op)] = op, seconds(op, deployment)
        return self._took[id(op)][1]


# half a batch in one layer


@frozen
class Halves:
    """Times of half a batch in one layer, by phase and shape of layer; nothing where no CPU works.

    Attributes
    ----------
    option
        The option whose layers the CPU answers for.
    attention, longest
        Of the CPU, nowhere above its mean over a phase, and nowhere below. (q, k) [s]
    around
        From a copy's end to the CPU's attention, and from that to the next copy. (q, k) [s]
    before
        From the beginning of a run to its first attention, and the answer's way back. (q, k) [s]
    spared
        What the end of a step may spare. (q,) [s]
    others
        Layers of other shapes between two neighbouring ones of a shape, at least. (k,)
    """

    option: int
    attention: Array
    longest: Array
    around: Array
    before: Array
    spared: Array
    others: NDArray[np.int64]


def layers_between(shapes: Sequence[Hashable]) -> NDArray[np.int64]:
    """By shape, the least number of layers between two that have it, the last before the first."""
    found = []
    for shape in dict.fromkeys(shapes):
        places = np.flatnonzero([s == shape for s in shapes])
        found.append(np.diff(places, append=places[0] + len(shapes)).min() - 1)
    return np.array(found)


def half_times(deployment: Deployment, point: Point, shape: LayerShape, prompt: int) -> Array:
    """Of half a batch in one layer, at all points: attention, around, before, behind. (4, b, c) [s]

    ``behind`` is the GPU's work once the CPU's answer has come.
    """
    parts = placement_technique(Shares(cpu=1.0), prompt, streamed=1.0, parts=2).parts[0]
    layer = [
        op
        for op in layer_ops(LayerPass(deployment, tile_point(point, parts), shape, parts))
        if not op.prefetch
    ]
    grid = np.broadcast_shapes(np.shape(point.batch), np.shape(point.context), (1, 1))
    took = {op.name: np.broadcast_to(np.asarray(seconds(op, deployment)), grid) for op in layer}
    names = list(took)
    sent, answered = names.index("send_qkv"), names.index("return_out")
    copied = next(i for i, op in enumerate(layer) if "load_weights" in op.after)
    none = np.zeros(grid)
    products, first, behind = (
        sum((took[name] for name in some), none)
        for some in (names[copied:sent], names[:sent], names[answered + 1 :])
    )
    copies = took["send_qkv"] + took["return_out"]
    return np.stack([took["attn"], products + copies, first + copies, behind])


@frozen
class HalfTimes:
    """Nowhere above the mean of each phase, and nowhere below. (q, 4, k, b) [s]"""

    low: Array
    high: Array
    others: NDArray[np.int64]

    def halves(self, option: int, head: Array, index: int) -> Halves:
        """Of one batch; ``head`` is the GPU's work after all layers. (q,) [s]"""
        low, high = self.low[..., index], self.high[..., index]
        spared = high[:, 0].max(axis=-1) - low[:, 3].min(axis=-1) - head
        return Halves(
            option=option,
            attention=low[:, 0],
            longest=high[:, 0],
            around=low[:, 1],
            before=low[:, 2],
            spared=np.maximum(spared, 0.0),
            others=self.others,
        )


def half_times_of_shapes(
    deployment: Deployment,
    rounds: Point,
    over: Stretches,
    prompt: int,
    shapes: Sequence[LayerShape],
) -> HalfTimes:
    """Of every shape of layer, in the phases of a generation; the first reads the prompts."""
    found = np.stack([half_times(deployment, rounds, shape, prompt) for shape in shapes])
    cost = np.moveaxis(found, 3, 0).swapaxes(1, 2)
    low, high = over.below(cost), -over.below(-cost)
    none = np.zeros_like(low[:1])
    order = [s for block, count in deployment.shard.layout for s in block * count]
    return HalfTimes(
        np.concatenate([none, low]), np.concatenate([none, high]), layers_between(order)
    )
