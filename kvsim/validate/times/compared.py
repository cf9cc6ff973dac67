"""What a technique took at a point of the grid, beside its prediction."""

from collections.abc import Sequence

import numpy as np

from kvsim.engine.timeline import OpSpan, copy_overlap
from kvsim.frozen import frozen
from kvsim.techniques.technique import Technique

ISSUED = "they were issued kernel by kernel"


@frozen
class Measured:
    """One quantity of one technique at one point, beside its prediction."""

    name: str  # "ttft_s", "tpot_s", "computing_s" (TPOT without waits, by a CPU's own clock),
    # "resident_B", "peak_B", "h2d_B", "d2h_B", or "prefill attn_s" and alike for an op
    predicted: float
    measured: float  # median over the runs
    noise: float  # half the distance of the runs' quartiles over the median

    @classmethod
    def over(cls, name: str, predicted: float, runs: Sequence[float]) -> "Measured":
        """The median of some runs and their spread, beside a prediction."""
        low, middle, high = np.quantile(runs, (0.25, 0.5, 0.75))
        return cls(name, float(predicted), float(middle), float((high - low) / 2 / middle))

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


@frozen
class Round:
    """Ops and copies of one decoding round."""

    spans: tuple[OpSpan, ...]

    @property
    def overlap(self) -> float:
        """Share of copies' time that runs beside compute; NaN without copies."""
        return copy_overlap(self.spans)


@frozen
class Compared:
    """One technique at one point."""

    model: str
    layers: int
    batch: int
    prompt: int
    technique: Technique
    whole: tuple[Measured, ...]  # end to end
    ops: tuple[Measured, ...]
    rounds: tuple[Round, ...] = ()  # predicted and measured, if a round is one pass
    eager: str | None = ISSUED  # why rounds were not replayed as CUDA graphs; none if they were

    @property
    def point(self) -> tuple[str, int, int, int]:
        """What techniques are compared at."""
        return self.model, self.layers, self.batch, self.prompt

    def get(self, name: str) -> Measured | None:
        """One of the quantities end to end."""
        return next((m for m in self.whole if m.name == name), None)


@frozen
class SkippedPoint:
    """A technique that could not run at a point: its settings, the device's memory or kernels."""

    model: str
    layers: int
    batch: int
    prompt: int
    technique: Technique
    reason: str  # one line
