"""When each op of a step runs: a max-plus timeline, element by element over a whole grid.

Streams are in-order queues. An op starts when its stream is free, the ops it waits for have ended
and, on the GPU, the host has issued it. A channel that several streams use at once is shared: a
layer takes no less time than the channel needs for everything the layer moves.

Layers are played one by one until a block of layers has shifted every clock by the same amount;
from there on max-plus systems repeat that shift, so the remaining repetitions are added at once.

``makespan`` is the time of a step from idle and ``steady_seconds`` that of each of many;
``op_spans`` shows when every op runs.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.roofline import (
    COPY_STREAMS,
    all_nonzero,
    all_ops,
    channel_seconds,
    host_seconds,
    power_limit_seconds,
    seconds,
)
from kvsim.frozen import frozen
from kvsim.graph import Group, Number, Op, Step
from kvsim.machines.deployment import Deployment

CLOCK_TOLERANCE = 2e-14  # rounding of clock differences, relative to the clock


@dataclass
class State:
    """Clocks and pending dependencies of a timeline while it is played.

    Attributes
    ----------
    streams
        Time at which each stream becomes idle, by name. [s]
    host
        Time at which the host becomes idle. [s]
    late
        Whether the host may have to catch up with the GPU.
    ends
        Ends of ops in each of the latest three layers, by name of the op; newest layer last. [s]
    issued
        Ends of ops that were issued one layer early and that no op has waited for yet. [s]
    loads
        For each op that is issued early, the ends of the ops in the latest layers that have it;
        newest layer last. [s]
    """

    streams: dict[str, Number]
    host: Number = 0.0
    late: bool = False  # whether the host may be behind the GPU's clock
    ends: list[dict[str, Number]] = field(default_factory=lambda: [{}, {}, {}])
    issued: dict[str, Number] = field(default_factory=dict)
    loads: dict[str, list[dict[str, Number]]] = field(default_factory=dict)

    def clocks(self, lagged: set[str], busy: Collection[str]) -> list[Number]:
        """Return every clock on which ops of later layers can depend, the GPU's first.

        Parameters
        ----------
        lagged
            Names of ops for which later layers wait.
        busy
            Streams that the later layers use; the clocks of other streams stand still.

        Returns
        -------
        list of Number
            Times from the start. [s]
        """
        recent = [v for ends in self.recent(lagged) for v in ends.values()]
        loads = [v for found in self.loads.values() for ends in found for v in ends.values()]
        streams = [clock for name, clock in self.streams.items() if name in busy]
        return [self.streams["gpu"], *streams, *recent, *self.issued.values(), *loads]

    def recent(self, lagged: set[str]) -> list[dict[str, Number]]:
        """Return those ends of ops in the latest layers for which later layers wait.

        Parameters
        ----------
        lagged
            Names of ops for which later layers wait.

        Returns
        -------
        list of dict
            Ends by op, one mapping per layer, newest last. [s]
        """
        return [{k: v for k, v in ends.items() if k in lagged} for ends in self.ends]

    def enter(self, arrived: dict[str, Number], lagged: set[str]) -> None:
        """Begin a layer, and drop ends of the previous layer for which no later layer waits.

        Parameters
        ----------
        arrived
            Ends of those ops of the layer that were issued early, by name. [s]
        lagged
            Names of ops for which later layers wait.
        """
        newest = {k: v for k, v in self.ends[-1].items() if k in lagged}
        self.ends = [self.ends[-2], newest, arrived]

    def loaded(self, names: Iterable[str], lagged: set[str]) -> None:
        """Record the ends of the layer just played, for its ops that were issued early.

        Parameters
        ----------
        names
            Names of the ops issued early.
        lagged
            Names of ops for which later layers wait.
        """
        for name in names:
            ends = {k: v for k, v in self.ends[-1].items() if k in lagged}
            self.loads[name] = [*self.loads.get(name, [])[-1:], ends]

    def shift(self, by: Number, host: Number, lagged: set[str], busy: Collection[str]) -> None:
        """Advance all clocks past layers that repeat and are therefore not played.

        Parameters
        ----------
        by
            Time added to the streams and to the ends of ops. [s]
        host
            Time added to the host's clock. [s]
        lagged
            Names of ops for which later layers wait; the ends of other ops are dropped.
        busy
            Streams that the skipped layers use.
        """
        self.ends = self.recent(lagged)
        loads = [ends for found in self.loads.values() for ends in found]
        for name in busy:
            self.streams[name] = self.streams[name] + by
        for clocks in (self.issued, *self.ends, *loads):
            for name in clocks:
                clocks[name] = clocks[name] + by
        self.host = self.host + host


class History:
    """Ends of one op in every layer of a step; those in skipped layers are extrapolated.

    Attributes
    ----------
    values
        End of the op by index of the layer, for layers that were played. [s]
    jumps
        Layers that were skipped, the number of layers that repeat, and the time of one repetition.
        [s]
    """

    def __init__(self) -> None:
        self.values: dict[int, Number] = {}
        self.jumps: list[tuple[range, int, Number]] = []  # layers skipped, period, shift

    def __getitem__(self, index: int) -> Number:
        for skipped, period, shift in self.jumps:
            if index in skipped:
                repetitions, offset = divmod(index - skipped.start, period)
                return self.values[skipped.start - period + offset] + (repetitions + 1) * shift
        return self.values[index]

    def keeps_up(self, layers: range, most: Number) -> bool:
        """Tell whether the ends grow by no more than a given time from block to block of layers.

        Parameters
        ----------
        layers
            The layers in question, counted from 0.
        most
            Largest growth per block. [s]

        Returns
        -------
        bool
            True only if all these layers were skipped as one repetition and grow that slowly.
        """
        for skipped, _, own in self.jumps:
            if layers.start in skipped and layers.stop - 1 in skipped:
                return bool(np.all(own <= most))
        return False


@frozen
class Timed:
    """An op with its durations, which are computed once per step.

    Attributes
    ----------
    op
        The op.
    duration
        Time on its stream. [s]
    active
        Whether the op has work, by operating point.
    waits
        For each op that it waits for: the name, the number of layers back, and whether it is an op
        of the previous step.
    host
        Time that the host takes to issue it. [s]
    lead
        Time from when the host begins to issue it until it can start on an idle stream. [s]
    """

    op: Op
    duration: Number
    active: NDArray[np.bool] | bool
    waits: tuple[tuple[str, int, bool], ...]
    host: Number
    lead: Number  # from the host's turn to it until it starts, if nothing else holds it up [s]


def unique_layers(layers: list[list[Timed]]) -> list[list[Timed]]:
    """Return each distinct layer once; layers are the same if they are one list object.

    Parameters
    ----------
    layers
        Timed ops of every layer, in order.

    Returns
    -------
    list of list of Timed
        The distinct layers in the order of their first occurrence.
    """
    return list({id(layer): layer for layer in layers}.values())


def following_loads(early: list[tuple[str, ...]]) -> list[dict[str, int]]:
    """Find, for each layer, the next layer that has each of the ops that are issued early.

    After the last layer the search goes on at the first one, which belongs to the next step.

    Parameters
    ----------
    early
        Names of the ops issued early, by layer.

    Returns
    -------
    list of dict
        For each layer, the index of the next such layer by name of the op.
    """
    found: list[dict[str, int]] = [{} for _ in early]
    if not any(early):
        return found
    nearest: dict[str, int] = {}
    for index in (*range(len(early) - 1, -1, -1), *range(len(early) - 1, -1, -1)):
        found[index] = dict(nearest)
        nearest |= dict.fromkeys(early[index], index)
    return found


def join_ops(first: Timed, then: Timed) -> Timed:
    """Join two ops that run one right after the other into a single op.

    No op may wait for the first one. If the first one ends before the host has issued the second
    one, the pause is moved in front of both, which leaves the end of the second one unchanged.

    Parameters
    ----------
    first
        The op that runs first.
    then
        The op that follows it.

    Returns
    -------
    Timed
        The second op with the durations of both.
    """
    active = first.active is True or then.active is True or np.logical_or(first.active, then.active)
    took, host, lead = first.duration + then.duration, first.host + then.host, first.lead
    gap = host - first.duration
    if not all_nonzero(gap <= lead):
        lead = np.maximum(lead, gap)
    return Timed(then.op, took, active, first.waits, host, lead)


def parse_wait(text: str) -> tuple[str, int, bool]:
    """Parse a dependency: "attn", "attn@-2" (two layers back) or "topk@step-1" (previous step).

    Parameters
    ----------
    text
        Name of the awaited op, with a lag.

    Returns
    -------
    tuple of str, int and bool
        Name of the op, number of layers back, and whether it is an op of the previous step.
    """
    name, _, lag = text.partition("@")
    return name, -int(lag or 0) if not lag.startswith("step") else 0, lag.startswith("step")


def shared_channel_seconds(layer: tuple[Op, ...], deployment: Deployment) -> Number:
    """Compute the time that the busiest shared channel needs for one layer.

    Parameters
    ----------
    layer
        Ops of the layer.
    deployment
        Model, machine and software stack.

    Returns
    -------
    Number
        Zero where no channel is used by several streams. [s]
    """
    if len({op.stream for op in layer}) < 2:
        return 0.0
    streams: dict[str, set[str]] = {}
    busy: dict[str, Number] = {}
    for op in layer:
        for channel, needs in channel_seconds(op, deployment).items():
            streams.setdefault(channel, set()).add(op.stream)
            busy[channel] = busy.get(channel, 0.0) + needs
    return latest_end([0.0, *(busy[c] for c, users in streams.items() if len(users) > 1)])


def latest_end(clocks: Iterable[Number]) -> Number:
    """Return the latest of some clocks, element by element.

    Parameters
    ----------
    clocks
        At least one. [s]

    Returns
    -------
    Number
        The latest. [s]
    """
    found, *rest = clocks
    for clock in rest:
        found = np.maximum(found, clock)
    return found


class PreparedStep:
    """A step's ops with their durations, ready to be played.

    Ops that follow one another on the GPU are joined into one unless another op waits in between.
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
        self._awaited = {parse_wait(text)[0] for op in every for text in op.after}
        self._times: dict[int, Timed] = {}  # by the op's identity: layers share ops
        self.head = self._timed(step.head)
        self.layers: list[list[Timed]] = []
        self.sharing: list[Number] = []  # time each layer's busiest shared channel needs
        self.blocks: list[tuple[int, int, int]] = []  # first layer, period, repetitions
        played = {
            i: (self._timed(x), shared_channel_seconds(x, deployment)) for i, x in made.items()
        }
        for group in step.groups:
            timed = [played[id(layer)] for layer in group.layers]
            self.blocks.append((len(self.layers), len(timed), group.count))
            self.layers += [ops for ops, _ in timed] * group.count
            self.sharing += [busy for _, busy in timed] * group.count
        once = unique_layers(self.layers)  # layers that repeat are one list
        early = {id(layer): tuple(t.op.name for t in layer if t.op.prefetch) for layer in once}
        self.early = [early[id(layer)] for layer in self.layers]
        self.following = following_loads(self.early)
        waits = [wait for layer in once for t in layer for wait in t.waits]
        self._moved = 0  # the clock that was the last one to move by another amount
        self.lagged = {name for name, lag, _ in waits if lag}
        self.recalled = {name for name, _, past in waits if past}
        self.runs = [self._runs(first, period) for first, period, _ in self.blocks]

    def _runs(self, first: int, period: int) -> list[int]:
        """Return the lengths of runs of equal layers in a block, in order."""
        if self.recalled:  # what a layer of the step before did is looked up block by block
            return [1] * period
        block = self.layers[first : first + period]
        return [len([*same]) for _, same in groupby(block, key=id)]

    def _timed(self, layer: tuple[Op, ...]) -> list[Timed]:
        """Return a layer's ops in order, those joined between which nothing else can run."""
        found: list[Timed] = []
        for op in layer:
            if id(op) not in self._times:
                self._times[id(op)] = self._time(op)
            timed = self._times[id(op)]
            if found and self._follows(found[-1], timed):
                timed = join_ops(found.pop(), timed)
            found.append(timed)
        return found

    def _follows(self, first: Timed, then: Timed) -> bool:
        """Return whether nothing can run between two ops of a layer."""
        return (
            self.joins
            and (not self.issuing or (first.active is True and then.active is True))
            and first.op.stream == then.op.stream == "gpu"
            and not (first.op.prefetch or then.op.prefetch or then.waits or first.op.sync)
            and (then.active is True or not then.op.sync)
            and first.op.name not in self._awaited
            and (first.active is True or not first.waits)
        )

    def _time(self, op: Op) -> Timed:
        duration = self._duration(op, self.d)
        work = duration + op.host
        active: NDArray[np.bool] | bool
        if isinstance(work, np.ndarray):
            active = all_nonzero(work) or (bool(np.any(work)) and work > 0)
        else:
            active = bool(work > 0)
        host = host_seconds(op, self.d)
        return Timed(op, duration, active, tuple(map(parse_wait, op.after)), host, host)

    def busy(self) -> dict[str, Number]:
        """Return how long each stream works in one step.

        Returns
        -------
        dict
            Time by the name of the stream. [s]
        """
        total: dict[str, Number] = {}
        for first, period, count in self.blocks:
            block = self.layers[first : first + period]
            times = Counter(map(id, block))
            for layer in unique_layers(block):
                for timed in layer:
                    stream, repeated = timed.op.stream, count * times[id(layer)]
                    total[stream] = total.get(stream, 0.0) + repeated * timed.duration
        for timed in self.head:
            total[timed.op.stream] = total.get(timed.op.stream, 0.0) + timed.duration
        return total


NOTHING: tuple[Number, ...] = ()


class Timeline(PreparedStep):
    """Plays the ops of a step on their streams."""

    def play(self, steps: int, endless: bool = False) -> tuple[State, list[Number]]:
        """Play consecutive steps, beginning with an idle machine.

        Parameters
        ----------
        steps
            Number of steps.
        endless
            Whether another step follows the last one, so that the last one issues that step's first
            loads.

        Returns
        -------
        state : State
            Clocks after the last step.
        ends : list of Number
            Time from the start at which each step ends on the GPU. [s]
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
            for copies in set(COPY_STREAMS) & state.streams.keys():
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
        """Simulate blocks of layers until each adds the same time, then skip to the last one.

        Parameters
        ----------
        blocks
            First layer, layers of a block, repetitions.
        runs
            How many layers of a block do the same one after another; a block of one layer each.
        """
        index, period, count = blocks
        stop = index + period * count
        busy = self._busy_streams(index, period)
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
            now, host_shift = state.clocks(self.lagged, busy), state.host - host_before
            skipped = range(index, index + repetitions * period)
            if before and self._repeats(before, now, host_shift, past, skipped):
                shift = now[0] - before[0]
                for history in record.values():
                    history.jumps.append((skipped, period, shift))
                state.shift(repetitions * shift, repetitions * host_shift, self.lagged, busy)
                index = skipped.stop
            before, host_before = now, state.host

    def _busy_streams(self, first: int, period: int) -> set[str]:
        """Return the streams whose clocks advance in a block of layers."""
        if self.d.stack.offload.tile_sync:  # all of them, with every layer
            return set(self.streams)
        block = unique_layers(self.layers[first : first + period])
        return {"gpu", *(timed.op.stream for layer in block for timed in layer)}

    def _repeats(
        self,
        before: list[Number],
        now: list[Number],
        host_shift: Number,
        past: dict[str, History],
        layers: range,
    ) -> bool:
        """Return whether each further block of these layers will add the same time."""
        if self.d.stack.offload.tile_sync and not past:  # every layer starts with all streams free
            return True
        if len(before) != len(now):
            return False
        shift = now[0] - before[0]
        pairs = zip(now, before, strict=True)  # many clocks are one and the same
        others = {(id(one), id(was)): i for i, (one, was) in enumerate(pairs) if one is not now[0]}
        for i in sorted(others.values(), key=self._moved.__ne__):
            if not _shifted_alike(now[i], before[i], shift):
                self._moved = i  # it may be the one again
                return False
        slack = CLOCK_TOLERANCE * np.abs(now[0])
        most = shift + slack
        if not all_nonzero(host_shift <= most):
            return False
        behind = host_shift < shift - slack  # until a synchronisation sets the host's clock
        ops = (t for layer in unique_layers(self.layers[layers.start : layers.stop]) for t in layer)
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
            if not timed.op.prefetch:
                waits = self._waits(timed, state.ends, index, past) if timed.waits else NOTHING
                self._run(state, timed, state.ends[-1], waits)
        state.loaded(self.early[index], self.lagged)
        state.streams["gpu"] = np.maximum(state.streams["gpu"], begin + self.sharing[index])
        if self.d.stack.offload.tile_sync:
            done = latest_end(state.streams.values()) + self.d.stack.offload.tile
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
        timed = next(t for t in self.layers[target] if t.op.prefetch and t.op.name == name)
        own = {other: end for other, end in state.issued.items() if following[other] == target}
        begun: list[dict[str, Number]] = [] if now is None else [{}]
        recent = [*([{}] * 3), *state.loads.get(name, []), *begun, own]
        self._run(state, timed, state.issued, self._waits(timed, recent, target, past))

    def _waits(
        self, timed: Timed, recent: list[dict[str, Number]], index: int, past: dict[str, History]
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
        """Simulate one op; an op without work is not launched and delays nothing."""
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


def _shifted_alike(now: Number, before: Number, shift: Number) -> bool:
    """Return whether a clock moved by the same time at every point."""
    first, was, by = (
        float(x.flat[0] if isinstance(x, np.ndarray) else x) for x in (now, before, shift)
    )
    if abs(first - was - by) > CLOCK_TOLERANCE * first:
        return False
    return all_nonzero(np.abs(now - before - shift) <= CLOCK_TOLERANCE * now)


def makespan(step: Step, deployment: Deployment) -> Number:
    """Compute the time of one step from an idle machine until its last copy has ended.

    Parameters
    ----------
    step
        The forward pass.
    deployment
        Model, machine and software stack.

    Returns
    -------
    Number
        Duration. [s]
    """
    slowed = power_limit_seconds(step, deployment)
    alone = _sequential_seconds(step, deployment, seconds)
    if alone is not None:
        return alone + slowed
    state, _ = Timeline(step, deployment).play(1)
    return latest_end(state.streams.values()) + slowed


def steady_seconds(
    step: Step, deployment: Deployment, duration: Callable[[Op, Deployment], Number] = seconds
) -> Number:
    """Compute the time per step when equal steps follow one another.

    It is the difference between two steps and one, but at least the work of the busiest stream: a
    copy stream that falls behind delays no op within two steps, but does so in the long run.

    Parameters
    ----------
    step
        The forward pass.
    deployment
        Model, machine and software stack.
    duration
        Function that returns the duration of an op. [s]

    Returns
    -------
    Number
        Time per step. [s]
    """
    alone = _sequential_seconds(step, deployment, duration)
    if alone is not None:
        last = step.head[-1] if step.head else None
        if last is None or not last.sync:
            return alone
        # the host issues the next step when it knows that this one has ended
        return alone + deployment.stack.time.sync * np.greater(duration(last, deployment), 0.0)
    timeline = Timeline(step, deployment, duration)
    _, ends = timeline.play(2, endless=True)
    return latest_end([ends[1] - ends[0], *timeline.busy().values()])


def stream_seconds(step: Step, deployment: Deployment) -> dict[str, Number]:
    """Compute the time that each stream works in one step, without waits.

    Parameters
    ----------
    step
        The forward pass.
    deployment
        Model, machine and software stack.

    Returns
    -------
    dict[str, Number]
        Time by stream. [s]
    """
    return Timeline(step, deployment).busy()


def minimum_layer_seconds(
    layer: tuple[Op, ...],
    deployment: Deployment,
    duration: Callable[[Op, Deployment], Number] = seconds,
) -> Number:
    """Compute a lower bound of the GPU time that a layer adds, whatever its neighbours are.

    Work that may run before the layer begins is not counted: prefetches, copies that wait for
    nothing in this layer, and launches, which the host may issue early.

    Parameters
    ----------
    layer
        Ops of the layer.
    deployment
        Model, machine and software stack.
    duration
        Function that returns the duration of an op. [s]

    Returns
    -------
    Number
        Lower bound. [s]
    """
    kept: dict[str, Op] = {}
    for op in layer:
        if not op.prefetch and (op.stream == "gpu" or any(name in kept for name in op.after)):
            kept[op.name] = op
    step = Step((Group((tuple(kept.values()),), 1),), ())
    at_once, moved = deployment.issued_at_once, shared_channel_seconds(layer, deployment)
    alone = _sequential_seconds(step, at_once, duration)
    if alone is not None:
        return np.maximum(alone, moved)
    state, _ = Timeline(step, at_once, duration).play(1)
    return np.maximum(state.streams["gpu"], moved)


def _sequential_seconds(
    step: Step, deployment: Deployment, duration: Callable[[Op, Deployment], Number]
) -> Number | None:
    """Return the total time of ops that run one after another on the GPU; None if others run. [s]

    They do where nothing is issued early, and where the host is never late but behind the last op.
    Work of the host for requests that waits for nothing runs beside them all.
    """
    stack = deployment.stack
    if stack.time.launch > 0 or stack.eager or stack.offload.tile_sync:
        return None
    every, last = list(all_ops(step)), step.head[-1] if step.head else None
    apart: Number = 0.0
    if last is not None and last.stream == "cpu" and not (last.after or last.sync):
        every = [(op, count) for op, count in every if op is not last]
        apart = duration(last, deployment)
        if any(op.sync for op, _ in every):  # which it is issued after
            return None
    if any(op.stream != "gpu" or op.prefetch or (op.sync and op is not last) for op, _ in every):
        return None
    total: Number = 0.0
    for op, count in every:
        total = total + count * duration(op, deployment)
    return np.maximum(total, apart) if last is not None and last.stream == "cpu" else total


@frozen
class OpSpan:
    """Begin and end of one op.

    Attributes
    ----------
    stream
        Name of the op's stream.
    name
        Name of the op.
    begin, end
        Times from the start of the step. [s]
    """

    stream: str
    name: str
    begin: float
    end: float


def op_spans(step: Step, deployment: Deployment) -> list[OpSpan]:
    """Compute when each op runs in one of many equal steps that follow one another.

    Parameters
    ----------
    step
        The forward pass, in scalars.
    deployment
        Model, machine and software stack.

    Returns
    -------
    list of OpSpan
        Begin and end of every op of every layer; an op that begins in the previous step has a
        negative begin. [s]
    """
    timeline = RecordedTimeline(step, deployment)
    _, ends = timeline.play(2, endless=True)
    begin, end = (float(np.ravel(clock)[0]) for clock in ends)
    return [
        OpSpan(s.stream, s.name, s.begin - begin, min(s.end, end) - begin)
        for s in timeline.found
        if s.begin < end and s.end > begin
    ]


def copy_overlap(found: Iterable[OpSpan], stream: str = "gpu") -> float:
    """Compute the share of the time of all copies during which a stream works.

    Parameters
    ----------
    found
        Ops of a step, as ``op_spans`` returns them.
    stream
        Name of the stream.

    Returns
    -------
    float
        Share from 0 to 1; NaN if there are no copies.
    """
    every = list(found)
    busy = [s for s in every if s.stream == stream]
    copies = [s for s in every if s.stream in COPY_STREAMS]
    total = sum(s.end - s.begin for s in copies)
    both = sum(max(0.0, min(c.end, b.end) - max(c.begin, b.begin)) for c in copies for b in busy)
    return both / total if total > 0 else np.nan


class RecordedTimeline(Timeline):
    """A timeline that records when every op of every layer runs, in ``found``.

    Equal layers are played one by one; :class:`Timeline` takes them together. Ops that take no time
    are left out.

    Parameters
    ----------
    step
        The forward pass, in scalars.
    deployment
        Model, machine and software stack.
    """

    joins = False

    def __init__(self, step: Step, deployment: Deployment) -> None:
        super().__init__(step, deployment)
        self.found: list[OpSpan] = []

    def _repeats(self, *_: object) -> bool:
        return False

    def _run(
        self, state: State, timed: Timed, ends: dict[str, Number], waits: Sequence[Number]
    ) -> None:
        super()._run(state, timed, ends, waits)
        took = float(np.ravel(timed.duration)[0])
        if took > 0:
            end = float(np.ravel(ends[timed.op.name])[0])
            self.found.append(OpSpan(timed.op.stream, timed.op.name, end - took, end))
