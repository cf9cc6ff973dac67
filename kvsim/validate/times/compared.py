"""Comparison of measured and predicted times at points of a grid."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.engine.timeline import OpSpan, copy_overlap
from kvsim.frozen import frozen
from kvsim.journal import Journal
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from kvsim.validate.counts.expected import RandomPrompts, Replay

ISSUED = "they were issued kernel by kernel"


@frozen
class Measured:
    """One quantity of one technique at one point, beside its prediction."""

    name: str  # "ttft_s", "tpot_s", "computing_s" (TPOT without waits, by a CPU's own clock),
    # "resident_B", "peak_B", "h2d_B", "d2h_B", or "prefill attn_s" and alike for an op
    predicted: float
    measured: float  # median over the runs
    noise: float  # half the interquartile range of the runs, relative to the median

    @classmethod
    def from_runs(cls, name: str, predicted: float, runs: Sequence[float]) -> "Measured":
        """Summarise the measurements of several runs, with their prediction.

        Parameters
        ----------
        runs
            Measured value of each run, in the unit of the prediction.
        """
        low, middle, high = np.quantile(runs, (0.25, 0.5, 0.75))
        return cls(name, float(predicted), float(middle), float((high - low) / 2 / middle))

    @property
    def error(self) -> float:
        """Relative error: predicted over measured, minus 1."""
        return self.predicted / self.measured - 1


@frozen
class Round:
    """Begin and end of the ops and copies of one decoding round."""

    spans: tuple[OpSpan, ...]

    @property
    def overlap(self) -> float:
        """Share of the copies' time that overlaps with compute; NaN without copies."""
        return copy_overlap(self.spans)


@frozen
class Compared:
    """Predicted and measured times of one technique at one point.

    Attributes
    ----------
    model, layers
        Model, and the number of layers that it is cut to.
    batch, prompt
        Number of sequences, and length of their prompts. [tokens]
    technique
        The technique.
    whole
        End-to-end quantities.
    ops
        Times of ops.
    rounds
        Predicted and measured round, if rounds have a single pass.
    eager
        Why rounds were not replayed as CUDA graphs; None if they were.
    replays
        Work of the replayed rounds.
    """

    model: str
    layers: int
    batch: int
    prompt: int
    technique: Technique
    whole: tuple[Measured, ...]
    ops: tuple[Measured, ...]
    rounds: tuple[Round, ...] = ()
    eager: str | None = ISSUED
    replays: tuple[Replay, ...] = ()

    @property
    def point(self) -> tuple[str, int, int, int]:
        """Model, layers, batch and prompt."""
        return self.model, self.layers, self.batch, self.prompt

    def get(self, name: str) -> Measured | None:
        """Look up an end-to-end quantity.

        Returns
        -------
        Measured or None
            The quantity; None if it was not measured.
        """
        return next((m for m in self.whole if m.name == name), None)


@frozen
class SkippedPoint:
    """A technique that could not run at a point.

    Attributes
    ----------
    model, layers, batch, prompt, technique
        The point, as in :class:`Compared`.
    reason
        Why it could not run, in one line.
    """

    model: str
    layers: int
    batch: int
    prompt: int
    technique: Technique
    reason: str


TIMES = ("ttft_s", "tpot_s")
OWN_CLOCK = "computing_s"


@frozen
class Summary:
    """Errors of predicted times against measured ones."""

    points: int
    clock: str  # "wall", or "thread": a CPU thread's own, which other processes do not move
    median: float  # median of the absolute errors, by that clock
    nine_in_ten: float  # 90th percentile of the absolute errors
    noise: float  # median of the noise over the points
    same_order: float  # share of pairs, differing by more than the noise, that are ordered alike
    same_winner: float  # share of points, clearly won by one technique, with the same winner
    wall_median: float  # median of the absolute errors by the wall clock
    machine_share: float  # share of a core that the thread had; NaN by the wall clock


def summarise(found: Sequence[Compared]) -> Summary:
    """Summarise the error of predictions, and whether they rank techniques correctly.

    If every run has a CPU time of its own compute thread, errors are taken from it, because other
    users of the machine lengthen the wall clock and not that time.

    Parameters
    ----------
    found
        Comparisons of predicted and measured times, one per run.
    """
    wall = [m for c in found for m in c.whole if m.name in TIMES]
    own = [m for c in found if (m := c.get(OWN_CLOCK))]
    fair = len(own) == len(found)
    values = own if fair else wall
    errors = np.abs([m.error for m in values])
    pairs, winners = _orders(found, OWN_CLOCK if fair else "tpot_s")
    both = [(c.get(OWN_CLOCK), c.get("tpot_s")) for c in found]
    given = [one.measured / all_.measured for one, all_ in both if one and all_]
    return Summary(
        len(values),
        "thread" if fair else "wall",
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        float(np.median([m.noise for m in values])),
        float(np.mean(pairs)) if pairs else np.nan,
        float(np.mean(winners)) if winners else np.nan,
        float(np.median(np.abs([m.error for m in wall]))),
        min(1.0, max(given)) if fair else np.nan,
    )


def _orders(found: Sequence[Compared], name: str) -> tuple[list[bool], list[bool]]:
    """Return the pairs of techniques at one point, and each point's winner by time per token."""
    pairs, winners = [], []
    for point in dict.fromkeys(c.point for c in found):
        here = [m for c in found if c.point == point and (m := c.get(name))]
        here.sort(key=lambda m: m.measured)
        for i, a in enumerate(here):
            for b in here[i + 1 :]:
                if _differ(a, b):
                    pairs.append(a.predicted < b.predicted)
        if len(here) > 1 and _differ(here[0], here[1]):
            winners.append(min(here, key=lambda m: m.predicted) is here[0])
    return pairs, winners


def _differ(a: Measured, b: Measured) -> bool:
    """Whether two measured times differ by more than their noise."""
    return b.measured - a.measured > 2 * (a.noise * a.measured + b.noise * b.measured)


def keep_points(path: Path, about: Mapping[str, object]) -> Journal[Compared]:
    """Return the journal that keeps comparisons, each under its ``point_name``.

    Parameters
    ----------
    about
        What is timed and with which profile; a journal of another measurement is discarded.
    """
    return Journal(path, {"points": 2, **about}, _row, _parse, replaces=True)


def point_name(model: str, work: RandomPrompts, asked: Technique) -> str:
    """Name a technique, as it was requested, at a point."""
    return f"{model}, batch {work.batch}, prompt {work.prompt}, {asked}"


def _row(one: Compared) -> dict[str, object]:
    return {**asdict(one), "technique": str(one.technique)}


def _parse(row: dict[str, Any]) -> Compared:
    row["technique"] = parse(row["technique"])
    for name in ("whole", "ops"):
        row[name] = tuple(Measured(**m) for m in row[name])
    row["rounds"] = tuple(Round(tuple(OpSpan(**s) for s in r["spans"])) for r in row["rounds"])
    row["replays"] = tuple(Replay(**replay) for replay in row["replays"])
    return Compared(**row)
