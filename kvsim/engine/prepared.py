"""A step made ready to be played: its ops with their durations, and which layers do the same."""

from collections import Counter
from collections.abc import Callable
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.roofline import everywhere, host_seconds, seconds
from kvsim.engine.timed import Timed, distinct, following_loads, shared, together, wait_of
from kvsim.graph import Number, Op, Step
from kvsim.machines.deployment import Deployment


class PreparedStep:
    """A step's ops with their durations, ready to be played.

    Ops that follow one another on the GPU and that nothing else waits for are played as one.
    """

    joins = True  # a timeline that shows every op does not

    def __init__(
        self,
        step: Step,
        deployment: Deployment,
        duration: Callable[[Op, Deployment], Number] = seconds,
    ) -> None:
        self.d = deployment
        self.step = step
        self._duration = duration
        made = {id(layer): layer for group in step.groups for layer in group.layers}
        every = [op for layer in (*made.values(), step.head) for op in layer]
        self.streams = tuple(dict.fromkeys(["gpu", *(op.stream for op in every)]))
        self.synced = any(op.sync for op in every)
        self.issuing = deployment.stack.time.launch > 0 or deployment.stack.eager
        self.hosted = self.issuing or deployment.stack.offload.tile_sync or self.synced
        self._awaited = {wait_of(text)[0] for op in every for text in op.after}
        self._times: dict[int, Timed] = {}  # by the op's identity: layers share ops
        self.head = self._timed(step.head)
        self.layers: list[list[Timed]] = []
        self.sharing: list[Number] = []  # time each layer's busiest shared channel needs
        self.blocks: list[tuple[int, int, int]] = []  # first layer, period, repetitions
        played = {i: (self._timed(x), shared(x, deployment)) for i, x in made.items()}
        for group in step.groups:
            timed = [played[id(layer)] for layer in group.layers]
            self.blocks.append((len(self.layers), len(timed), group.count))
            self.layers += [ops for ops, _ in timed] * group.count
            self.sharing += [busy for _, busy in timed] * group.count
        once = distinct(self.layers)  # layers that repeat are one list
        early = {id(layer): tuple(t.op.name for t in layer if t.op.ahead) for layer in once}
        self.early = [early[id(layer)] for layer in self.layers]
        self.following = following_loads(self.early)
        waits = [wait for layer in once for t in layer for wait in t.waits]
        self._moved = 0  # the clock that was the last one to move by another amount
        self.lagged = {name for name, lag, _ in waits if lag}
        self.recalled = {name for name, _, past in waits if past}
        self.runs = [self._runs(first, period) for first, period, _ in self.blocks]

    def _runs(self, first: int, period: int) -> list[int]:
        """How many layers of a block do the same one after another, in order."""
        if self.recalled:  # what a layer of the step before did is looked up block by block
            return [1] * period
        block = self.layers[first : first + period]
        return [len([*same]) for _, same in groupby(block, key=id)]

    def _timed(self, layer: tuple[Op, ...]) -> list[Timed]:
        """A layer's ops in order, those together that run one right after another."""
        found: list[Timed] = []
        for op in layer:
            if id(op) not in self._times:
                self._times[id(op)] = self._time(op)
            timed = self._times[id(op)]
            if found and self._follows(found[-1], timed):
                timed = together(found.pop(), timed)
            found.append(timed)
        return found

    def _follows(self, first: Timed, then: Timed) -> bool:
        """Whether nothing can come between two ops of a layer, whatever the streams do."""
        return (
            self.joins
            and (not self.issuing or (first.active is True and then.active is True))
            and first.op.stream == then.op.stream == "gpu"
            and not (first.op.ahead or then.op.ahead or then.waits or first.op.sync)
            and (then.active is True or not then.op.sync)
            and first.op.name not in self._awaited
            and (first.active is True or not first.waits)
        )

    def _time(self, op: Op) -> Timed:
        duration = self._duration(op, self.d)
        active: NDArray[np.bool] | bool
        if isinstance(duration, np.ndarray):
            active = everywhere(duration) or (bool(np.any(duration)) and duration > 0)
        else:
            active = bool(duration > 0)
        host = host_seconds(op, self.d)
        return Timed(op, duration, active, tuple(map(wait_of, op.after)), host, host)

    def busy(self) -> dict[str, Number]:
        """Time each stream works in one step. [s]"""
        total: dict[str, Number] = {}
        for first, period, count in self.blocks:
            block = self.layers[first : first + period]
            times = Counter(map(id, block))
            for layer in distinct(block):
                for timed in layer:
                    stream, repeated = timed.op.stream, count * times[id(layer)]
                    total[stream] = total.get(stream, 0.0) + repeated * timed.duration
        for timed in self.head:
            total[timed.op.stream] = total.get(timed.op.stream, 0.0) + timed.duration
        return total
