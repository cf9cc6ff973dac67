"""When each op of a step runs: a max-plus timeline, element by element over a whole grid.

Streams are in-order queues. An op starts when its stream is free, the ops it waits for have
ended and, on the GPU, the host has issued it. A channel that several streams use at once is
shared: a layer takes no less time than the channel needs for everything the layer moves.

Layers are played one by one until a block of layers has shifted every clock by the same amount;
from there on max-plus systems repeat that shift, so the remaining repetitions are added at once.
"""

from collections.abc import Sequence

import numpy as np

from kvsim.engine.clocks import TOLERANCE, History, State
from kvsim.engine.prepared import PreparedStep
from kvsim.engine.roofline import COPIES, everywhere
from kvsim.engine.timed import Timed, distinct, latest
from kvsim.graph import Number

NOTHING: tuple[Number, ...] = ()


class Timeline(PreparedStep):
    """A step's ops, played one after another on their streams."""

    def play(self, steps: int, endless: bool = False) -> tuple[State, list[Number]]:
        """Clocks after a number of steps from idle, and the end of each step's head. [s]

        If ``endless``, the last step too issues the early ops of one that follows it.
        """
        state = State(dict.fromkeys(self.streams, 0.0))
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
        for block, runs in zip(self.blocks, self.runs, strict=True):
            self._play_blocks(state, block, runs, past, record, again and across)
        for timed in self.head:
            self._run(state, timed, state.ends[-1], NOTHING)
        return record

    def _play_blocks(
        self,
        state: State,
        blocks: tuple[int, int, int],
        runs: list[int],
        past: dict[str, History],
        record: dict[str, History],
        wrap: bool,
    ) -> None:
        """Play blocks of layers until each adds what the last one added, and the last of them.

        Parameters
        ----------
        blocks : first layer, layers of a block, repetitions.
        runs : how many layers of a block do the same one after another; a block of one layer each.
        """
        index, period, count = blocks
        stop = index + period * count
        before: list[Number] = []
        host_before: Number = 0.0
        while index < stop:
            for layers in runs if period > 1 else ():
                self._play_blocks(state, (index, 1, layers), [1], past, record, wrap)
                index += layers
            if period == 1:
                self._play_layer(state, index, past, wrap)
                for name, history in record.items():
                    if name in state.ends[-1]:
                        history.values[index] = state.ends[-1][name]
                index += 1
            repetitions = (stop - index) // period - 1
            if repetitions < 1:
                continue
            now, host_shift = state.clocks(self.lagged), state.host - host_before
            skipped = range(index, index + repetitions * period)
            if before and self._repeats(before, now, host_shift, past, skipped):
                shift = now[0] - before[0]
                for history in record.values():
                    history.jumps.append((skipped, period, shift))
                state.shift(repetitions * shift, repetitions * host_shift, self.lagged)
                index = skipped.stop
            before, host_before = now, state.host

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
        state.enter(arrived, self.lagged)
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
            state.host, state.late = done + self.d.stack.time.sync, True

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
        op, active, stack, streams = timed.op, timed.active, self.d.stack, state.streams
        idle = streams["gpu"]
        if active is False:
            ends[op.name] = idle
            return
        start = free = streams[op.stream]
        for wait in waits:
            start = np.maximum(start, wait)
        if self.hosted and op.stream == "gpu":
            if self.issuing:
                start = np.maximum(start, state.host + timed.lead)
                state.host = state.host + timed.host * active
            elif state.late:  # where it waited for the end of an op, until the GPU has caught up
                start = np.maximum(start, state.host)
                state.late = active is not True
        running = timed.duration
        if op.kernel == "relay" and stack.offload.overlap < 1:
            begin = np.maximum(start, idle)
            start = begin + (1 - stack.offload.overlap) * running
            streams["gpu"] = start if active is True else np.where(active, start, idle)
            running = stack.offload.overlap * running
        end = start + running
        if active is True:  # without an array pass where all elements agree
            ends[op.name] = streams[op.stream] = end
        else:
            ends[op.name] = np.where(active, end, idle)
            streams[op.stream] = np.where(active, end, free)
        if op.sync:
            known = np.maximum(state.host, end) + stack.time.sync
            state.host = known if active is True else np.where(active, known, state.host)
            state.late = True


def _as_far(now: Number, before: Number, shift: Number) -> bool:
    """Whether a clock moved by the shift at every point; the first one often tells that not."""
    first, was, by = (
        float(x.flat[0] if isinstance(x, np.ndarray) else x) for x in (now, before, shift)
    )
    if abs(first - was - by) > TOLERANCE * first:
        return False
    return everywhere(np.abs(now - before - shift) <= TOLERANCE * now)
