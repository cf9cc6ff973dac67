"""The engine's slow scalar twin: plain Python floats, every layer of every step, one op at a time.

Written from what the docstrings of kvsim's modules promise. Nothing is extrapolated and nothing
is vectorised. A run is one flat queue of ops in issue order, and every end is remembered under
the number of its layer, counted through all steps.
"""

from dataclasses import dataclass, field, replace
from math import ceil, isinf

import numpy as np

from kvsim.graph import Group, Number, Op, Step, Stream
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Kernel

Layer = tuple[Op, ...]
COPIES: tuple[Stream, ...] = ("h2d", "d2h")


def op_seconds(op: Op, d: Deployment) -> float:
    """An op's duration on an idle machine. [s]"""
    kernel = d.stack.kernel(op.kernel)
    flops, rows, fixed, size = (float(x) for x in (op.flops, op.rows, op.fixed, op.size))
    moved = {channel: float(n) for channel, n in op.bytes.items()}
    if not (flops or rows or fixed or any(moved.values())):
        return 0.0
    columns = max(float(op.columns), 1.0)
    wide = 1.0 if isinf(columns) else columns / (columns + kernel.half_columns)
    needs = []
    for channel, n in moved.items():
        rate = channel_rate(channel, d)
        if op.stream not in COPIES or channel in COPIES:
            rate *= kernel.memory
        needs.append(float(op.slower) * n / rate / wide)
    if flops:
        rates = d.hardware.flops
        peak = d.hardware.cpu_flops if op.stream == "cpu" else rates.get(op.dtype, rates["fp16"])
        filled = 1.0 if isinf(size) else max(size, 1.0) / (whole(size, kernel) + kernel.half_size)
        needs.append(float(op.slower) * flops / (peak * kernel.compute * filled * wide))
    operations = kernel.unpack_ops or d.stack.packed_cache.unpack_ops
    if operations and op.unpacked:
        rate = d.hardware.flops["fp32"] / 2
        needs.append(float(op.slower) * operations * float(op.unpacked) / rate / wide)
    each = d.hardware.links[op.stream].latency if op.stream in COPIES else 0.0
    each = d.stack.time.gap if op.stream == "gpu" else each
    launches = float(op.launches)
    floor = kernel.floor * min(1.0, launches)
    longest = max([0.0, *needs])
    longest += kernel.added * (sum(needs) - longest)
    longest = max(longest, float(op.chain))
    return longest + floor + launches * each + fixed + rows * d.stack.selection.gather_row


def whole(rows: float, kernel: Kernel) -> float:
    """Rows that a product computes: tiles, or the next power of two where that is less."""
    rows, tile = max(rows, 1.0), kernel.tile_rows
    if not tile:
        return rows
    power = 1.0
    while power < rows and power < tile:
        power *= 2.0
    power = min(power, tile)
    return power * ceil(rows / power)


def channel_rate(channel: str, d: Deployment) -> float:
    """Full rate of a channel as one of the replica's GPUs sees it. [B/s]"""
    rate = {name: link.bandwidth for name, link in d.hardware.links.items()}[channel]
    return rate / d.tp if channel == "dram" else rate


def shared_seconds(layer: Layer, d: Deployment) -> float:
    """Time that the busiest of the channels used by several streams needs for a layer. [s]"""
    longest = 0.0
    for channel in {c for op in layer for c in op.bytes}:
        users = [op for op in layer if channel in op.bytes]
        if len({op.stream for op in users}) > 1:
            size = sum(float(op.bytes[channel]) for op in users)
            longest = max(longest, size / channel_rate(channel, d))
    return longest


def layers_of(step: Step) -> list[Layer]:
    """Every layer of a step, repetitions written out."""
    return [layer for group in step.groups for _ in range(group.count) for layer in group.layers]


@dataclass
class Run:
    """Clocks of a run, moved forward op by op."""

    d: Deployment
    streams: dict[Stream, float]
    host: float = 0.0
    ends: dict[tuple[int, str], float] = field(default_factory=dict)  # layer since the start, op
    heads: list[float] = field(default_factory=list)  # when the head of each step ended

    def issue(
        self, op: Op, took: float, layer: int, layers: int, loads: list[int] | None = None
    ) -> None:
        """Run one op of a layer, counted since the run's start; a step has ``layers`` layers.

        ``loads`` are the layers that have had such an early op, this one last: its waits go back
        as many loads as they say.
        """
        stack = self.d.stack
        if not took:  # not launched: it ends when the GPU comes to it
            self.ends[layer, op.name] = self.streams["gpu"]
            return
        start = self.streams[op.stream]
        for wait in op.after:
            start = max(start, self.ends.get(_awaited(wait, layer, layers, loads), 0.0))
        if op.stream == "gpu":
            launches = float(op.launches)
            around = stack.kernel(op.kernel).host * (launches if launches < 1 else 1.0)
            self.host += launches * stack.time.launch + around
            start = max(start, self.host)
        if op.kernel == "relay" and stack.offload.overlap < 1:
            start = max(start, self.streams["gpu"]) + (1 - stack.offload.overlap) * took
            self.streams["gpu"] = start
            took = stack.offload.overlap * took
        self.streams[op.stream] = self.ends[layer, op.name] = start + took
        if op.sync:
            self.host = max(self.host, start + took) + stack.time.sync


def _awaited(wait: str, layer: int, layers: int, loads: list[int] | None = None) -> tuple[int, str]:
    name, _, back = wait.partition("@")
    if back == "step-1":
        return layer - layers, name
    if loads and back:
        return (loads[int(back) - 1] if len(loads) >= 1 - int(back) else -1), name
    return layer + int(back or 0), name


def play(step: Step, d: Deployment, steps: int, more: bool) -> Run:
    """Some steps in a row; ``more`` says whether the last one is followed by another."""
    layers = layers_of(step)
    count = len(layers)
    took = {id(op): op_seconds(op, d) for layer in [*layers, step.head] for op in layer}
    shares = {id(layer): shared_seconds(layer, d) for layer in layers}
    streams: dict[Stream, float] = {"gpu": 0.0}
    run = Run(d, streams | {op.stream: 0.0 for layer in layers for op in layer})

    loads: dict[str, list[int]] = {}

    def load(name: str, number: int) -> None:
        """Issue an early op in the next layer from ``number`` on that has it."""
        while name not in {op.name for op in layers[number % count] if op.prefetch}:
            number += 1
        op = next(op for op in layers[number % count] if op.prefetch and op.name == name)
        if number not in loads.setdefault(name, []):
            loads[name].append(number)
            run.issue(op, took[id(op)], number, count, loads[name])

    def load_after(number: int, last: int) -> None:
        """Each early op of a layer makes room for the next of its kind, up to a last layer."""
        for op in layers[number % count]:
            if op.prefetch:
                later = range(number + 1, last + 1)
                if any(op.name == x.name and x.prefetch for i in later for x in layers[i % count]):
                    load(op.name, number + 1)

    early = list(dict.fromkeys(op.name for layer in layers for op in layer if op.prefetch))

    for first in range(0, steps * count, count):
        if not d.stack.offload.across_steps:  # copies of this step follow the whole last step
            for copies in COPIES:
                if copies in run.streams:
                    run.streams[copies] = max(run.streams[copies], run.streams["gpu"])
        if first == 0 or not d.stack.offload.across_steps:
            for name in early:
                load(name, first)
        for number in range(first, first + count):
            begin = run.streams["gpu"]
            follows = more or first + count < steps * count
            ahead = count if d.stack.offload.across_steps and follows else 0
            load_after(number, first + count - 1 + ahead)
            for op in layers[number % count]:
                if not op.prefetch:
                    run.issue(op, took[id(op)], number, count)
            shared = shares[id(layers[number % count])]
            run.streams["gpu"] = max(run.streams["gpu"], begin + shared)
            if d.stack.offload.tile_sync:
                run.streams = dict.fromkeys(run.streams, max(run.streams.values()))
                run.host = run.streams["gpu"] + d.stack.time.sync
        for op in step.head:
            run.issue(replace(op, after=()), took[id(op)], first + count - 1, count)
        run.heads.append(run.streams["gpu"])
    return run


def makespan(step: Step, d: Deployment) -> float:
    """One step from idle until the last stream rests. [s]"""
    return max(play(step, d, 1, more=False).streams.values())


def steady(step: Step, d: Deployment) -> float:
    """Two steps less one, but at least the busiest stream. [s]"""
    first, second = play(step, d, 2, more=True).heads
    return max(second - first, *busy(step, d).values())


def busy(step: Step, d: Deployment) -> dict[str, float]:
    """Work of each stream in one step. [s]"""
    total: dict[str, float] = {}
    for layer in [*layers_of(step), step.head]:
        for op in layer:
            total[op.stream] = total.get(op.stream, 0.0) + op_seconds(op, d)
    return total


def serial(step: Step, d: Deployment) -> float:
    """Every op after every other, each issued and synchronised on its own. [s]"""
    total = 0.0
    for layer in [*layers_of(step), step.head]:
        for op in layer:
            took = op_seconds(op, d)
            launches = float(op.launches)
            around = d.stack.kernel(op.kernel).host * min(1.0, launches)
            launch = launches * d.stack.time.launch + around if op.stream == "gpu" else 0.0
            total += took + (launch + d.stack.time.sync * op.sync if took else 0.0)
        total += d.stack.time.sync if d.stack.offload.tile_sync else 0.0
    return total


def pick(step: Step, index: tuple[int, ...], shape: tuple[int, ...]) -> Step:
    """One element of a step whose numbers broadcast to ``shape``."""

    def number(n: Number) -> float:
        return float(np.broadcast_to(n, shape)[index])

    def op_at(op: Op) -> Op:
        return replace(
            op,
            flops=number(op.flops),
            bytes={channel: number(n) for channel, n in op.bytes.items()},
            unpacked=number(op.unpacked),
            rows=number(op.rows),
            size=number(op.size),
            columns=number(op.columns),
            chain=number(op.chain),
            fixed=number(op.fixed),
        )

    def layer_at(layer: Layer) -> Layer:
        return tuple(op_at(op) for op in layer)

    groups = [Group(tuple(layer_at(x) for x in g.layers), g.count) for g in step.groups]
    return Step(tuple(groups), layer_at(step.head))
