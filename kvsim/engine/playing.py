"""When each op of a step runs: a max-plus timeline, element by element over a whole grid.

Streams are in-order queues. An op starts when its stream is free, the ops it waits for have
ended and, on the GPU, the host has issued it. A channel that several streams use at once is
shared: a layer takes no less time than the channel needs for everything the layer moves.

Layers are played one by one until a block of layers has shifted every clock by the same amount;
from there on max-plus systems repeat that shift, so the remaining repetitions are added at once.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.clocks import TOLERANCE, History, State
from kvsim.engine.roofline import COPIES, all_ops, everywhere, host_seconds, seconds
from kvsim.engine.timed import Timed, distinct, following_loads, latest, shared, together, wait_of
from kvsim.graph import Number, Op, Step
from kvsim.machines.deployment import Deployment

NOTHING: tuple[Number, ...] = ()


class Timeline:
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
        every = [op for op, _ in all_ops(step)]
        self.synced = any(op.sync for op in every)
        self.issuing = deployment.stack.time.launch > 0 or deployment.stack.eager
        self.hosted = self.issuing or deployment.stack.offload.tile_sync or self.synced
        self._awaited = {wait_of(text)[0] for op in every for text in op.after}
        self._times: dict[int, Timed] = {}  # by the op's identity: layers share ops
        self.head = self._timed(step.head)
        self.layers: list[list[Timed]] = []
        self.sharing: list[Number] = []  # time each layer's busiest shared channel needs
        self.blocks: list[tuple[int, int, int]] = []  # first layer, period, repetitions
        made = {id(layer): layer for group in step.groups for layer in group.layers}
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
            for timed in (t for layer in self.layers[first : first + period] for t in layer):
                stream = timed.op.stream
                total[stream] = total.get(stream, 0.0) + count * timed.duration
        for timed in self.head:
            total[timed.op.stream] = total.get(timed.op.stream, 0.0) + timed.duration
        return total

    def play(self, steps: int, endless: bool = False) -> tuple[State, list[Number]]:
        """Clocks after a number of steps from idle, and the end of each step's head. [s]

        If ``endless``, the last step too issues the early ops of one that follows it.
        """
        every = [op for op, _ in all_ops(self.step)]
        streams: dict[str, Number] = {"gpu": 0.0}
        state = State(streams | {op.stream: 0.0 for op in every})
        ends: list[Number] = []
        past: dict[str, History] = {}
        for number in range(steps):
            past = self._play_step(state, past, again=endless or number + 1 < steps)
            ends.append(state.streams["gpu"])
        return state, ends

    def _play_step(self, state: State, past: dict[str, History], again: bool) -> dict[str, History]:
        across = self.d.stack.offload.across_steps
        record = {name: History() for name in self.recalled}
        if not across:
            for copies in set(COPIES) & state.streams.keys():
                state.streams[copies] = np.maximum(state.streams[copies], state.streams["gpu"])
        for name in dict.fromkeys(name for names in self.early for name in names):
            if name not in state.issued:
                self._issue_early(state, name, None, past)
        for first, period, count in self.blocks:
            index, stop = first, first + period * count
            before: list[Number] = []
            host_before: Number = 0.0
            while index < stop:
                for i in range(index, index + period):
                    self._play_layer(state, i, past, again and across)
                    for name, history in record.items():
                        if name in state.ends[-1]:
                            history.values[i] = state.ends[-1][name]
                index += period
                now = state.clocks(self.lagged)
                host_shift = state.host - host_before
                repetitions = (stop - index) // period - 1
                skipped = range(index, index + repetitions * period)
                if before and skipped and self._repeats(before, now, host_shift, past, skipped):
                    shift = now[0] - before[0]
                    for history in record.values():
                        history.jumps.append((skipped, period, shift))
                    state.shift(repetitions * shift, repetitions * host_shift, self.lagged)
                    index = skipped.stop
                    now = []
                before, host_before = now, state.host
        for timed in self.head:
            self._run(state, timed, state.ends[-1], NOTHING)
        return record

    def _repeats(
        self,
        before: list[Number],
        now: list[Number],
        host_shift: Number,
        past: dict[str, History],
        layers: range,
    ) -> bool:
        """Whether in these layers each block will add what the last one added."""
        if self.d.stack.offload.tile_sync and not past:  # every layer starts with all streams free
            return True
        if len(before) != len(now):
            return False
        shift = now[0] - before[0]
        pairs = zip(now, before, strict=True)  # many clocks are one and the same
        others = {(id(one), id(was)): i for i, (one, was) in enumerate(pairs) if one is not now[0]}
        for i in sorted(others.values(), key=self._moved.__ne__):
            if not _as_far(now[i], before[i], shift):
                self._moved = i  # it may be the one again
                return False
        slack = TOLERANCE * np.abs(now[0])
        most = shift + slack
        if not everywhere(host_shift <= most):
            return False
        behind = host_shift < shift - slack  # until a synchronisation sets the host's clock
        ops = (t for layer in distinct(self.layers[layers.start : layers.stop]) for t in layer)
        if self.synced and any(np.any(behind & t.active) for t in ops if t.op.sync):
            return False
        return all(past[name].keeps_up(layers, most) for name in self.recalled if past)

    def _play_layer(self, state: State, index: int, past: dict[str, History], wrap: bool) -> None:
        begin = state.streams["gpu"]
        arrived = {name: state.issued.pop(name) for name in self.early[index]}
        state.ends = [*state.recent(self.lagged)[-2:], arrived]
        for name in self.early[index]:
            if self.following[index][name] > index:
                self._issue_early(state, name, index, past)
            elif wrap:
                self._issue_early(state, name, index, {})
        for timed in self.layers[index]:
            if not timed.op.ahead:
                waits = self._waits(timed, state.ends, index, past) if timed.waits else NOTHING
                self._run(state, timed, state.ends[-1], waits)
        state.loaded(self.early[index], self.lagged)
        state.streams["gpu"] = np.maximum(state.streams["gpu"], begin + self.sharing[index])
        if self.d.stack.offload.tile_sync:
            done = latest(state.streams.values()) + self.d.stack.offload.tile
            state.streams = dict.fromkeys(state.streams, done)
            state.host = done + self.d.stack.time.sync

    def _issue_early(
        self, state: State, name: str, now: int | None, past: dict[str, History]
    ) -> None:
        """Issue the next load of that name while a layer begins, or before the first one.

        Lags count the layers that have such a load. Of its own layer a load waits for what was
        issued before it; loads that are on their way for other layers are not its own.
        """
        following = self.following[-1 if now is None else now]
        target = following[name]
        timed = next(t for t in self.layers[target] if t.op.ahead and t.op.name == name)
        own = {other: end for other, end in state.issued.items() if following[other] == target}
        begun: list[dict[str, Number]] = [] if now is None else [{}]
        recent = [*([{}] * 3), *state.loads.get(name, []), *begun, own]
        self._run(state, timed, state.issued, self._waits(timed, recent, target, past))

    def _waits(
        self,
        timed: Timed,
        recent: list[dict[str, Number]],
        index: int,
        past: dict[str, History],
    ) -> list[Number]:
        found = []
        for name, lag, previous_step in timed.waits:
            if previous_step:
                if name in past:
                    found.append(past[name][index])
            elif name in recent[-1 - lag]:
                found.append(recent[-1 - lag][name])
        return found

    def _run(
        self, state: State, timed: Timed, ends: dict[str, Number], waits: Sequence[Number]
    ) -> None:
        """Play one op. Where it has no work it is not launched: it neither waits nor delays."""
        op, active, stack = timed.op, timed.active, self.d.stack
        ends[op.name] = state.streams["gpu"]
        if active is False:
            return
        start = free = state.streams[op.stream]
        for wait in waits:
            start = np.maximum(start, wait)
        if self.hosted and op.stream == "gpu":
            start = np.maximum(start, state.host + timed.lead)
            state.host = state.host + timed.host * active
        running = timed.duration
        if op.kernel == "relay" and stack.offload.overlap < 1:
            begin = np.maximum(start, state.streams["gpu"])
            start = begin + (1 - stack.offload.overlap) * running
            state.streams["gpu"] = _where(active, start, state.streams["gpu"])
            running = stack.offload.overlap * running
        end = start + running
        ends[op.name] = _where(active, end, ends[op.name])
        state.streams[op.stream] = _where(active, end, free)
        if op.sync:
            state.host = _where(active, np.maximum(state.host, end) + stack.time.sync, state.host)


def _where(active: NDArray[np.bool] | bool, yes: Number, no: Number) -> Number:
    """Choose by element, without an array pass where all elements agree."""
    return yes if active is True else np.where(active, yes, no)


def _as_far(now: Number, before: Number, shift: Number) -> bool:
    """Whether a clock moved by the shift at every point; the first one often tells that not."""
    first, was, by = (
        float(x.flat[0] if isinstance(x, np.ndarray) else x) for x in (now, before, shift)
    )
    if abs(first - was - by) > TOLERANCE * first:
        return False
    return everywhere(np.abs(now - before - shift) <= TOLERANCE * now)
