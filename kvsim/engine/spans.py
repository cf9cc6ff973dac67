"""When each op of a step runs, as intervals for pictures and for comparison with real runs."""

from collections.abc import Iterable, Sequence

import numpy as np

from kvsim.engine.clocks import State
from kvsim.engine.playing import Timeline
from kvsim.engine.roofline import COPIES
from kvsim.engine.timed import Timed
from kvsim.frozen import frozen
from kvsim.graph import Number, Step
from kvsim.machines.deployment import Deployment


@frozen
class OpSpan:
    """When one op runs."""

    stream: str
    name: str
    begin: float  # [s]
    end: float  # [s]


def spans(step: Step, deployment: Deployment) -> list[OpSpan]:
    """When ops of one of many equal steps run, in scalars; what began earlier begins below 0.

    Every layer is played, so that each op is seen.
    """
    timeline = Recorded(step, deployment)
    _, ends = timeline.play(2, endless=True)
    begin, end = (float(np.ravel(clock)[0]) for clock in ends)
    return [
        OpSpan(s.stream, s.name, s.begin - begin, min(s.end, end) - begin)
        for s in timeline.found
        if s.begin < end and s.end > begin
    ]


def beside(found: Iterable[OpSpan], stream: str = "gpu") -> float:
    """Share of all copies' time that runs while a stream works; NaN without copies."""
    every = list(found)
    busy = [s for s in every if s.stream == stream]
    copies = [s for s in every if s.stream in COPIES]
    total = sum(s.end - s.begin for s in copies)
    both = sum(max(0.0, min(c.end, b.end) - max(c.begin, b.begin)) for c in copies for b in busy)
    return both / total if total > 0 else np.nan


class Recorded(Timeline):
    """A timeline that notes when every op of every layer runs."""

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
