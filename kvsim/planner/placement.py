"""What layers may do with their cache, as coefficients of the placement programme.

An option is one way to place a layer's cache within a box of shares: all on the GPU, a share copied
from the host, part of that recomputed, all attended to by the CPU. Its coefficients come from the
ops that the engine itself plays, evaluated for every batch at once.
"""

from functools import cached_property
from itertools import product

import numpy as np

from kvsim.engine.buffers import layer_weights
from kvsim.engine.ops import copy, output_ops
from kvsim.engine.roofline import resource_seconds, seconds
from kvsim.frozen import frozen
from kvsim.graph import Array, Buffers, Point, Tier
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.planner.halves import HalfTimes, Halves, all_half_times
from kvsim.planner.layertimes import RESOURCES, STREAMS, LayersOfPass
from kvsim.planner.planes import Stretches, planes, stretches
from kvsim.planner.programme import Programme, Streaming
from kvsim.planner.shares import Option, Shares, held_shares, placed
from kvsim.planner.tighter import kept_outside, time_limits
from kvsim.planner.workload import PlanLimits, Workload
from kvsim.prediction.memory import (
    TIERS,
    decode_point,
    held_beside,
    phases,
    prefill_point,
    served_buffers,
    tier_bytes,
)
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.memory import layer_buffers
from kvsim.techniques.steps import part_of

EDGE = 1e-4  # of the way to a box's middle, where buffers are those inside it
JUMP = 1e-3  # of a buffer, which no slope reaches on that way


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
        return stretches(self.workload.generate - 1, full)

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
        found = planes(self.options, self.layers, self.workload.prompt, self.held)
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
        t, d = placed(shares, self.workload.prompt, parts=parts), self.deployment
        (read, rounds), (reading, decoding) = self._points(), self._passes
        points = 1 + self._stretches.tokens.size
        found = np.zeros((points, len(RESOURCES), len(among), self.batches.size))
        shapes = list(self.shapes)
        for k, shape in enumerate(shapes[i] for i in among):
            layer = LayerPass(d, part_of(read, t.parts[0]), shape, t.parts[0])
            found[:1, :, k] = np.moveaxis(reading.resources(layer), 2, 0)
            if rounds is not None:
                layer = LayerPass(d, part_of(rounds, t.parts[0]), shape, t.parts[0])
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
                own = placed(s, self.workload.prompt, parts=parts).parts[0]
                passes = [LayerPass(d, p, shape, own, part_of(p, own)) for shape in self.shapes]
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
        inside = [s.towards(o.middle, EDGE) for o in self.options for s in o.corners]
        for v, (s, parts) in enumerate(self._corners):
            here, near = (self._shared(v, x, parts) for x in (s, inside[v]))
            for key in here.keys() & near.keys():
                gone = near[key] < here[key] * (1 - JUMP)
                sizes.setdefault(key, np.zeros(shape))[:, v] = np.where(gone, near[key], here[key])
        gpu, host = (
            np.stack([np.zeros(shape), *(x for (t, _), x in sorted(sizes.items()) if t == tier)])
            for tier in TIERS
        )
        return np.moveaxis(gpu, 0, 1), self.deployment.tp * np.moveaxis(host, 0, 1)

    def _shared(self, v: int, shares: Shares, parts: int) -> dict[tuple[Tier, str], Array]:
        w, d = self.workload, self.deployment
        args = placed(shares, w.prompt, parts=parts), d, self.batches, w.prompt, w.generate
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
                limits.gpu_memory + kept_outside(self.deployment, limits.gpu_memory, *held),
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
        args = placed(Shares(), w.prompt), d, self.batches, w.prompt, w.generate
        tables = [served_buffers(*args)] if w.service else phases(*args)
        found = [np.broadcast_arrays(*held_beside(table), self.batches)[:2] for table in tables]
        weights, beside = (np.stack(some) for some in zip(*found, strict=True))
        return weights, beside

    def _halves(self, usable: list[int], index: int) -> Halves | None:
        """Where the CPU attends for both halves, and every layer has a cache of its own."""
        some = [
            i for i, o in enumerate(usable)
            if self.options[o].kind == "cpu" and self.options[o].parts > 1
        ]  # fmt: skip
        if not some or not all(s.attends and s.keeps for s in self.shapes):
            return None
        head = self.head[:, RESOURCES.index("gpu"), index]
        return self._half_times.halves(some[0], head, index) if self._half_times else None

    @cached_property
    def _half_times(self) -> HalfTimes | None:
        _, rounds = self._points()
        args = self._stretches, self.workload.prompt, list(self.shapes)
        return None if rounds is None else all_half_times(self.deployment, rounds, *args)

    @cached_property
    def _option_of(self) -> list[int]:
        return [o for o, option in enumerate(self.options) for _ in option.corners]

    def corner(self, programme: Programme, index: int, shape: int) -> tuple[Option, Shares]:
        """The option and the shares of a corner of a programme made here, in a shape of layers."""
        name = programme.names[int(programme.option_of[index])]
        option = next(o for o in self.options if o.name == name)
        first = int(np.flatnonzero(programme.option_of == programme.option_of[index])[0])
        return option, option.held(float(self.held[shape])).corners[index - first]
