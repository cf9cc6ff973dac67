"""The clocks of a run: when streams are free, when ops ended, now and in the step before."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvsim.graph import Number

TOLERANCE = 2e-14  # rounding of clock differences, relative to the clock


@dataclass
class State:
    """All clocks of a run."""

    streams: dict[str, Number]
    host: Number = 0.0
    late: bool = False  # whether the host may be behind the GPU's clock
    ends: list[dict[str, Number]] = field(default_factory=lambda: [{}, {}, {}])  # newest last
    issued: dict[str, Number] = field(default_factory=dict)  # ends of early ops not yet used
    loads: dict[str, list[dict[str, Number]]] = field(default_factory=dict)
    """By early op, ends in the latest layers that have it, newest last."""

    def clocks(self, lagged: set[str]) -> list[Number]:
        """Everything that ops of later layers can depend on, the GPU's clock first."""
        recent = [v for ends in self.recent(lagged) for v in ends.values()]
        loads = [v for found in self.loads.values() for ends in found for v in ends.values()]
        return [
            self.streams["gpu"], *self.streams.values(), *recent, *self.issued.values(), *loads
        ]  # fmt: skip

    def recent(self, lagged: set[str]) -> list[dict[str, Number]]:
        """Ends in the latest layers that ops of later layers wait for."""
        return [{k: v for k, v in ends.items() if k in lagged} for ends in self.ends]

    def enter(self, arrived: dict[str, Number], lagged: set[str]) -> None:
        """A layer begins, with the ends of its early ops; of the last one what others wait for."""
        newest = {k: v for k, v in self.ends[-1].items() if k in lagged}
        self.ends = [self.ends[-2], newest, arrived]

    def loaded(self, names: Iterable[str], lagged: set[str]) -> None:
        """A layer with these early ops has been played."""
        for name in names:
            ends = {k: v for k, v in self.ends[-1].items() if k in lagged}
            self.loads[name] = [*self.loads.get(name, [])[-1:], ends]

    def shift(self, by: Number, host: Number, lagged: set[str]) -> None:
        """Move every clock that a later layer may ask for into the future."""
        self.ends = self.recent(lagged)
        loads = [ends for found in self.loads.values() for ends in found]
        for clocks in (self.streams, self.issued, *self.ends, *loads):
            for name in clocks:
                clocks[name] = clocks[name] + by
        self.host = self.host + host


class History:
    """Ends of one op in every layer of a step, those of skipped layers implied."""

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
        """Whether over these layers the ends grow by no more than ``most`` per block."""
        for skipped, _, own in self.jumps:
            if layers.start in skipped and layers.stop - 1 in skipped:
                return bool(np.all(own <= most))
        return False
