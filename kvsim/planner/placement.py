"""Coefficients of the placement programme, from the ops that the engine itself plays.

An option is one way to place a layer's cache within a box of shares; its coefficients are evaluated
for every batch at once. Costs are convex in the shares, so that Kelley's method applies: where a
solution's shares cost more than the planes say, the plane that touches the cost there is added.

References
----------
.. [1] J. E. Kelley, "The cutting-plane method for solving convex programs", Journal of the Society
   for Industrial and Applied Mathematics 8, 1960. https://doi.org/10.1137/0108053
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import product

import numpy as np

from kvsim.engine.buffers import layer_weights
from kvsim.engine.ops import copy, output_ops
from kvsim.engine.roofline import resource_seconds, seconds
from kvsim.errors import InfeasibleError
from kvsim.frozen import frozen
from kvsim.graph import Array, Buffers, Point, Tier
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.planner.costs import (
    RESOURCES,
    STREAMS,
    HalfTimes,
    Halves,
    LayersOfPass,
    Option,
    Shares,
    Stretches,
    half_times_of_shapes,
    held_shares,
    make_stretches,
    option_plane,
    option_planes,
    placement_technique,
)
from kvsim.planner.milp import Mix, Programme, Streaming, Tangent, resource_work
from kvsim.planner.question import PlanLimits, Workload
from kvsim.prediction.memory import (
    TIERS,
    decode_point,
    held_beside,
    left_for_caches,
    phases,
    prefill_point,
    served_buffers,
    tier_bytes,
)
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.memory import layer_buffers
from kvsim.techniques.steps import tile_point

# limits as the programme has them

MEMORY_MARGIN = 2e-5  # of a memory: shares are written with six digits


def lower_limits(limits: PlanLimits, over: tuple[float, float]) -> PlanLimits:
    """Less memory than there is, so that what replay needs besides fits."""
    gpu, host = (x if np.isfinite(x) else 0.0 for x in over)
    return replace(
        limits,
        gpu_memory=(limits.gpu_memory - 1.1 * gpu) * (1 - MEMORY_MARGIN),
        host_memory=(limits.host_memory - 1.1 * host) * (1 - MEMORY_MARGIN),
    )


def leave_rounding_room(programme: Programme) -> Programme:
    """With the room in memory that rounding of shares needs."""
    gpu, host = programme.memory
    return replace(programme, memory=(gpu * (1 - MEMORY_MARGIN), host * (1 - MEMORY_MARGIN)))


def engine_reserve(deployment: Deployment, given: float, weights: Array, beside: Array) -> float:
    """What an engine keeps outside its share of memory, of all that is held, at most. [B]

    Parameters
    ----------
    given : the memory that the limit is about. [B]
    weights, beside : weights, and these with workspace and context, at each peak. (m,) [B]
    """
    kept = [
        left_for_caches(deployment, given, b, w) + b
        for w, b in zip(weights.tolist(), beside.tolist(), strict=True)
    ]
    return float(max(kept)) - given


def time_limits(
    workload: Workload, limits: PlanLimits, reads: float, rounds: Array
) -> dict[str, tuple[Array, float]]:
    """TTFT and TPOT as sums of passes: by limit the weight of each phase, and the bound. [s]

    Parameters
    ----------
    reads : passes that read prompts, in one turn of the batch.
    rounds : of decoding, in each phase after that. (c,)
    """
    found = {}
    count = max(workload.generate - 1, 1)
    mean = rounds / count
    if np.isfinite(limits.ttft):
        waits = mean if workload.service else np.zeros_like(rounds)
        found["ttft"] = (np.concatenate([[1.0], waits]), limits.ttft)
    if np.isfinite(limits.tpot) and rounds.size:
        others = (reads - 1) / count if workload.service else 0.0
        found["tpot"] = (np.concatenate([[others], mean]), limits.tpot)
    return found


# coefficients

BUFFER_EDGE = 1e-4  # of the way to a box's middle, where buffers are those inside it
BUFFER_JUMP = 1e-3  # of a buffer, which no slope reaches on that way


@frozen
class Coefficients:
    """Those of all options at all batches; ``programme`` picks one batch."""

    deployment: Deployment
    workload: Workload
    batches: Array  # (b,)
    options: list[Option]

    @cached_property
    def shapes(self) -> dict[LayerShape, int]:
        """Layers of each shape."""
        found: dict[LayerShape, int] = {}
        for block, count in self.deployment.shard.layout:
            for shape in block:
                found[shape] = found.get(shape, 0) + count
        return found

    @cached_property
    def _stretches(self) -> Stretches:
        """Of the rounds; windows that fill on the way end one."""
        windows = {shape.window for shape in self.shapes} - {None}
        full = [w - self.workload.prompt for w in windows if w is not None]
        return make_stretches(self.workload.generate - 1, full)

    @property
    def group(self) -> int:
        """Prompts that a service reads together."""
        return max(o.parts for o in self.options)

    def _points(self) -> tuple[Point, Point | None]:
        """Reading the prompts (b, 1), and the rounds (b, c)."""
        w, column = self.workload, self.batches[:, None]
        read = np.full_like(column, float(self.group)) if w.service else column
        decoded = self._stretches.tokens
        rounds = decode_point(column, w.prompt, w.generate, decoded[None]) if decoded.size else None
        return prefill_point(read, w.prompt, w.generate), rounds

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """The names of the passes: the prompts, then points of the decoding."""
        return ("prefill", *(f"round{i}" for i in range(self._stretches.rounds.size)))

    @cached_property
    def seconds(self) -> Array:
        """Of one layer by phase, resource, corner, shape and batch. (q, r, v, k, b) [s]"""
        found = option_planes(self.options, self.layers, self.workload.prompt, self.held)
        return self.by_phase(np.moveaxis(found, -1, 2))

    def by_phase(self, cost: Array) -> Array:
        """A cost of reading the prompts and at all points of the context, as phases have it."""
        return np.concatenate([cost[:1], self._stretches.below(cost[1:])])

    @cached_property
    def held(self) -> Array:
        """The share of the prompt that a layer has cached, by shape. (k,)"""
        return held_shares(self.deployment, self.shapes, self.workload.prompt)

    def layers(self, shares: Shares, parts: int, among: list[int]) -> Array:
        """One layer of some shapes, at all points. (1 + 3c, r, k, b) [s]"""
        t, d = placement_technique(shares, self.workload.prompt, parts=parts), self.deployment
        (read, rounds), (reading, decoding) = self._points(), self._passes
        points = 1 + self._stretches.tokens.size
        found = np.zeros((points, len(RESOURCES), len(among), self.batches.size))
        shapes = list(self.shapes)
        for k, shape in enumerate(shapes[i] for i in among):
            layer = LayerPass(d, tile_point(read, t.parts[0]), shape, t.parts[0])
            found[:1, :, k] = np.moveaxis(reading.resources(layer), 2, 0)
            if rounds is not None:
                layer = LayerPass(d, tile_point(rounds, t.parts[0]), shape, t.parts[0])
                found[1:, :, k] = np.moveaxis(decoding.resources(layer), 2, 0)
        return found

    @cached_property
    def _passes(self) -> tuple[LayersOfPass, LayersOfPass]:
        """Layers while the prompts are read, and while tokens are decoded."""
        return LayersOfPass(), LayersOfPass()

    @cached_property
    def head(self) -> Array:
        """What a pass takes besides layers. (q, r, b) [s]"""
        points = 1 + self._stretches.tokens.size
        found = np.zeros((points, len(RESOURCES), self.batches.size))
        read, rounds = self._points()
        for place, p in ((slice(0, 1), read), (slice(1, None), rounds)):
            if p is not None:
                shape = (self.batches.size, 1 if p is read else points - 1)
                for op in output_ops(self.deployment, p):
                    took = np.broadcast_to(seconds(op, self.deployment), shape).T
                    found[place, STREAMS.index(op.stream)] += took
                    if op.stream == "gpu":
                        found[place, RESOURCES.index("chain")] += took
        total = self.by_phase(found)
        # the head does not wait for the CPU's last part of a batch
        halves = [v for v, o in enumerate(self._option_of) if self.options[o].parts > 1]
        if halves:
            last = self.seconds[:, STREAMS.index("cpu"), halves].max(axis=(1, 2))
            total[:, RESOURCES.index("turn")] -= last / 2
        return total

    @property
    def _peaks(self) -> list[Point]:
        """When memory may be fullest: the prompts read, the last token; of a service the latter."""
        w, b = self.workload, self.batches
        last = decode_point(b, w.prompt, w.generate, w.generate - 1.0)
        return [last] if w.service else [prefill_point(b, w.prompt, w.generate), last]

    @cached_property
    def _corners(self) -> list[tuple[Shares, int]]:
        """Shares and parts of every corner. (v,)"""
        return [(s, o.parts) for o in self.options for s in o.corners]

    @cached_property
    def _layer_tables(self) -> list[list[list[Buffers]]]:
        """What one layer of each shape keeps, at each peak at every corner. (m, v, k)"""
        d, found = self.deployment, []
        for p in self._peaks:
            row = []
            for s, parts in self._corners:
                own = placement_technique(s, self.workload.prompt, parts=parts).parts[0]
                passes = [LayerPass(d, p, shape, own, tile_point(p, own)) for shape in self.shapes]
                row.append([layer_buffers(at, layer_weights(d, at.shape)) for at in passes])
            found.append(row)
        return found

    @cached_property
    def bytes(self) -> tuple[Array, Array]:
        """Memory of one layer, of a GPU and of all shards on the host. (m, v, k, b) [B]"""
        sizes = [
            [[(tier_bytes(t, "gpu"), tier_bytes(t, "host")) for t in shapes] for shapes in row]
            for row in self._layer_tables
        ]
        shape = (len(self._peaks), len(self._corners), len(self.shapes), self.batches.size)
        found = np.zeros((2, *shape))
        for (m, row), v, k in product(enumerate(sizes), range(shape[1]), range(shape[2])):
            found[0, m, v, k], found[1, m, v, k] = row[v][k]
        return found[0], self.deployment.tp * found[1]

    @cached_property
    def once(self) -> tuple[Array, Array]:
        """Buffers that layers share, at an edge where one comes the smaller. (m, s, v, b) [B]"""
        sizes: dict[tuple[Tier, str], Array] = {}
        shape = len(self._peaks), len(self._corners), self.batches.size
        inside = [s.towards(o.middle, BUFFER_EDGE) for o in self.options for s in o.corners]
        for v, (s, parts) in enumerate(self._corners):
            here, near = (self._shared(v, x, parts) for x in (s, inside[v]))
            for key in here.keys() & near.keys():
                gone = near[key] < here[key] * (1 - BUFFER_JUMP)
                sizes.setdefault(key, np.zeros(shape))[:, v] = np.where(gone, near[key], here[key])
        gpu, host = (
            np.stack([np.zeros(shape), *(x for (t, _), x in sorted(sizes.items()) if t == tier)])
            for tier in TIERS
        )
        return np.moveaxis(gpu, 0, 1), self.deployment.tp * np.moveaxis(host, 0, 1)

    def _shared(self, v: int, shares: Shares, parts: int) -> dict[tuple[Tier, str], Array]:
        w, d = self.workload, self.deployment
        args = (
            placement_technique(shares, w.prompt, parts=parts),
            d,
            self.batches,
            w.prompt,
            w.generate,
        )
        found: dict[tuple[Tier, str], Array] = {}
        for m, table in enumerate([served_buffers(*args)] if w.service else phases(*args)):
            for tier in TIERS:
                own = {name for some in self._layer_tables[m][v] for name in some.get(tier, {})}
                for name in table.get(tier, {}).keys() - own:
                    sizes = np.zeros((len(self._peaks), self.batches.size))
                    found.setdefault((tier, name), sizes)[m] = table[tier][name]
        return found

    @cached_property
    def streaming(self) -> Streaming:
        """What streaming weights takes."""
        d = self.deployment
        sizes = np.array([layer_weights(d, shape) for shape in self.shapes])
        found = np.zeros((len(self.phases), len(RESOURCES), sizes.size))
        for k, size in enumerate(sizes):
            op = copy("load_weights", "h2d", size, kernel="copy")
            found[:, RESOURCES.index("h2d"), k] = max(map(float, resource_seconds(op, d).values()))
        kept = d.stack.weights.copies * sizes
        return Streaming(found, kept, d.tp * kept, 2 * float(sizes.max()))

    def programme(self, index: int, limits: PlanLimits, family: frozenset[str]) -> Programme:
        """The programme at one of the batches, for the options of a family."""
        w, batch = self.workload, float(self.batches[index])
        usable = [
            o
            for o, option in enumerate(self.options)
            if batch % option.parts == 0 and option.kind in family
        ]
        corners = [(o, v) for v, o in enumerate(self._option_of) if o in usable]
        rows = [v for _, v in corners]
        each = self._stretches.rounds
        reads = batch / self.group if w.service else 1.0
        gpu, host = self.bytes
        once_gpu, once_host = self.once
        held = [x[:, index] for x in self._held_beside]
        return Programme(
            names=tuple(self.options[o].name for o in usable),
            option_of=np.array([usable.index(o) for o, _ in corners]),
            layers=np.array(list(self.shapes.values())),
            resources=RESOURCES,
            phases=self.phases,
            seconds=self.seconds[..., index][:, :, rows],
            head=self.head[:, :, index],
            weight=np.concatenate([[reads], each]),
            gpu=gpu[..., index][:, rows],
            host=host[..., index][:, rows],
            once_gpu=once_gpu[:, :, rows, index],
            once_host=once_host[:, :, rows, index],
            streaming=self.streaming,
            memory=(
                limits.gpu_memory + engine_reserve(self.deployment, limits.gpu_memory, *held),
                limits.host_memory,
            ),
            times=time_limits(w, limits, reads, each),
            halves=self._halves(usable, index),
            buffered=self.held == 1,
        )

    @cached_property
    def _held_beside(self) -> tuple[Array, Array]:
        """Weights, and these with workspace and context, with all on the GPU. (m, b) [B]"""
        w, d = self.workload, self.deployment
        args = placement_technique(Shares(), w.prompt), d, self.batches, w.prompt, w.generate
        tables = [served_buffers(*args)] if w.service else phases(*args)
        found = [np.broadcast_arrays(*held_beside(table), self.batches)[:2] for table in tables]
        weights, beside = (np.stack(some) for some in zip(*found, strict=True))
        return weights, beside

    def _halves(self, usable: list[int], index: int) -> Halves | None:
        """Where the CPU attends for both halves, and every layer has a cache of its own."""
        some = [
            i
            for i, o in enumerate(usable)
            if self.options[o].kind == "cpu" and self.options[o].parts > 1
        ]
        if not some or not all(s.attends and s.keeps for s in self.shapes):
            return None
        head = self.head[:, RESOURCES.index("gpu"), index]
        return self._half_times.halves(some[0], head, index) if self._half_times else None

    @cached_property
    def _half_times(self) -> HalfTimes | None:
        _, rounds = self._points()
        args = self._stretches, self.workload.prompt, list(self.shapes)
        return None if rounds is None else half_times_of_shapes(self.deployment, rounds, *args)

    @cached_property
    def _option_of(self) -> list[int]:
        return [o for o, option in enumerate(self.options) for _ in option.corners]

    def corner(self, programme: Programme, index: int, shape: int) -> tuple[Option, Shares]:
        """The option and the shares of a corner of a programme made here, in a shape of layers."""
        name = programme.names[int(programme.option_of[index])]
        option = next(o for o in self.options if o.name == name)
        first = int(np.flatnonzero(programme.option_of == programme.option_of[index])[0])
        return option, option.held(float(self.held[shape])).corners[index - first]


# tangents

Family = frozenset[str]
TOUCH_INSIDE = 0.01  # of the way to a box's middle, where a cost is touched
TANGENT_GAIN = 1e-4  # of the objective, by which a solution must be too cheap
TANGENT_ROUNDS = 12


def tangent_at(
    coefficients: Coefficients, programme: Programme, option: int, shape: int, at: Shares
) -> Tangent:
    """The plane that touches the cost of an option's layers near some shares.

    Parameters
    ----------
    coefficients : at the programme's batch alone.
    """
    c = coefficients
    own = next(o for o in c.options if o.name == programme.names[option])
    box = own.held(float(c.held[shape]))

    def cost(shares: Shares) -> Array:
        return c.layers(shares, own.parts, [shape])

    values = option_plane(box, cost, c.workload.prompt, at.towards(box.middle, TOUCH_INSIDE))
    return Tangent(option, shape, c.by_phase(values[:, :, 0, 0]))


def mix_tangents(coefficients: Coefficients, programme: Programme, mix: Mix) -> tuple[Tangent, ...]:
    """Planes at a mix's shares, for its options with several corners."""
    c, p = coefficients, programme
    found = []
    for o, k in np.argwhere(mix.counts > 1e-6).tolist():
        rows = np.flatnonzero(p.option_of == o)
        weight = mix.corners[rows, k]
        if rows.size < 2 or weight.sum() <= 0:
            continue
        some = [c.corner(p, int(v), k)[1] for v in rows]
        at = Shares(
            **{
                key: float(weight @ [getattr(s, key) for s in some]) / float(weight.sum())
                for key in vars(some[0])
            }
        )
        found.append(tangent_at(c, p, o, k, at))
    return tuple(found)


class Tangents:
    """Planes that were needed at the batches of some coefficients, and what they prove.

    Parameters
    ----------
    wanted : whether planes are worth their time; without, programmes stay as they are.
    """

    def __init__(self, coefficients: Coefficients, wanted: bool) -> None:
        self.coefficients, self.wanted = coefficients, wanted
        self._known: dict[tuple[int, Family], tuple[Tangent, ...]] = {}  # by batch and family
        self._whole: dict[tuple[int, Family], float] = {}  # bounds with whole layers [s]

    def of(self, index: int, family: Family, programme: Programme) -> Programme:
        """A programme with the planes that are known."""
        known = self._known.get((index, family), ())
        return replace(programme, tangents=known) if known else programme

    def first(
        self, index: int, family: Family, programme: Programme, solve: Callable[..., Mix]
    ) -> Mix:
        """The programme's mix of whole layers, with all planes that its relaxation needs."""
        if self.wanted and (index, family) not in self._known:
            batch = self.coefficients.batches[index : index + 1]
            alone = replace(self.coefficients, batches=batch)
            found = add_tangents(alone, programme, lambda x: solve(x, whole=False))
            self._known[index, family] = found.tangents
        mix = solve(self.of(index, family, programme))
        self._whole[index, family] = mix.bound
        return mix

    def least(
        self, index: int, relaxed: dict[Family, float], first: Callable[[int, Family], Mix]
    ) -> float:
        """The least bound of all families, with whole layers where that decides. [s]

        Parameters
        ----------
        relaxed : bounds that are known already. [s]
        """
        bounds = dict(relaxed)
        for _ in relaxed if self.wanted else ():
            family = min(bounds, key=lambda f: bounds[f])
            before = bounds[family]
            if np.isfinite(before) and (index, family) not in self._whole:
                self._whole[index, family] = np.inf
                with suppress(InfeasibleError):
                    first(index, family)
            bounds[family] = max(before, self._whole.get((index, family), before))
            if bounds[family] == before:
                break
        return min(bounds.values(), default=np.inf)


def add_tangents(
    coefficients: Coefficients, programme: Programme, solve: Callable[[Programme], Mix]
) -> Programme:
    """The programme with the planes that its relaxation's solutions need."""
    c, p = coefficients, programme
    for _ in range(TANGENT_ROUNDS):
        mix = solve(p)
        more = replace(p, tangents=(*p.tangents, *mix_tangents(c, p, mix)))
        took = [
            resource_work(x, mix.corners) + x.streaming.seconds @ mix.streamed.sum(axis=0)
            for x in (p, more)
        ]
        before, after = (float(p.weight @ x.max(axis=1)) for x in took)
        if after <= before + TANGENT_GAIN * mix.objective:
            return p
        p = more
    return p
