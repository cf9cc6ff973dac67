"""The clocks of a run: when streams are free, when ops ended, now and in the step before."""

from dataclasses import dataclass, field

import numpy as np

from kvsim.graph import Number

TOLERANCE = 2e-14  # rounding of clock differences, relative to the clock


@dataclass
class State:
    """All clocks of a run."""

    streams: dict[str, Number]
    host: Number = 0.0
    ends: list[dict[str, Number]] = field(default_factory=lambda: [{}, {}, {}])  # newest last
    issued: dict[str, Number] = field(default_factory=dict)  # ends of the next layer's early ops

    def clocks(self, lagged: set[str]) -> list[Number]:
        """Everything that ops of later layers can depend on, the GPU's clock first."""
        recent = [v for ends in self.ends for k, v in ends.items() if k in lagged]
        return [self.streams["gpu"], *self.streams.values(), *recent, *self.issued.values()]

    def shift(self, by: Number, host: Number) -> None:
        """Move every clock into the future."""
        for clocks in (self.streams, self.issued, *self.ends):
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
