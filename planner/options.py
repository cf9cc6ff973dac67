"""Every setting of every technique at every sensible batch, as one table of plain arrays."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from kvsim.machines.deployment import Deployment
from kvsim.planner.choose import Column
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import MOST_SEQUENCES, largest_batch
from kvsim.techniques.base import Technique

CONTEXTS = 4  # points of the sum over the generated tokens; the choice is replayed with all
GIB = 2.0**30
GROWTH = 1.35  # ratio of neighbouring batches before refinement


@dataclass(frozen=True)
class Workload:
    """Equal requests: prompt and generated tokens, and the batch if it is given."""

    prompt: int
    generate: int
    batch: int | None = None


@dataclass
class Options:
    """A table: one row per technique, settings and batch."""

    technique: list[Technique] = field(default_factory=list)
    batch: Column = field(default_factory=lambda: np.zeros(0))
    columns: dict[str, Column] = field(default_factory=dict)
    evaluated: list[tuple[Technique, Column]] = field(default_factory=list)  # with which batches

    def add(self, other: "Options") -> None:
        """Append the rows of another table."""
        self.technique += other.technique
        self.evaluated += other.evaluated
        self.batch = np.concatenate([self.batch, other.batch])
        self.columns = {
            name: np.concatenate([self.columns.get(name, np.zeros(0)), values])
            for name, values in other.columns.items()
        }

    def rows_of(self, name: str) -> np.ndarray:
        """Rows of one technique."""
        return np.flatnonzero([t.name == name for t in self.technique])


def evaluate(t: Technique, d: Deployment, w: Workload, batch: Column) -> Options:
    """All settings of an array-valued technique at all batches, in one vectorised evaluation."""
    prediction = Prediction(t, d, batch, w.prompt, w.generate, contexts=CONTEXTS)
    settings = t.rows()
    shape = (len(settings), batch.size)
    measured = {
        name: np.array(np.broadcast_to(values, shape)).ravel()
        for name, values in measures(prediction).items()
    }
    admitted = {
        "loss": np.repeat([0.0 if s.exact else 1.0 for s in settings], batch.size),
        "assumed": np.repeat([1.0 if s.assumes else 0.0 for s in settings], batch.size),
    }
    return Options(
        [s for s in settings for _ in range(batch.size)],
        np.tile(batch, len(settings)),
        measured | admitted,
        [(t, batch)],
    )


def measures(p: Prediction) -> dict[str, Column]:
    """What limits and objectives are about, all to be small."""
    return {
        "gpu_memory": p.gpu_bytes,
        "host_memory": p.host_bytes,
        "ttft": p.ttft_s,
        "tpot": np.nan_to_num(p.tpot_s),
        "latency": p.request_s,
        "throughput": -p.output_tok_s,
        "cost": p.usd_per_million(),
    }


def batches(t: Technique, d: Deployment, w: Workload, gpu: Iterable[float], host: float) -> Column:
    """Batches worth evaluating: a geometric grid, and the largest that each GPU memory allows.

    The grid ends above the largest, so that what a larger memory would bring is known, but for the
    most that can be evaluated.
    """
    parts = t.tiles()
    if w.batch is not None:
        return np.array([float(w.batch)]) if w.batch % parts == 0 else np.zeros(0)
    largest = [largest_batch(t, d, w.prompt, w.generate, size, host) for size in gpu]
    top = max(float(np.max(b)) for b in largest)
    steps = np.arange(0, np.log(max(top / parts, 1)) / np.log(GROWTH) + 2)
    grid = np.ceil(parts * GROWTH**steps / parts) * parts
    every = np.concatenate([grid, *(np.ravel(b) for b in largest)])
    return np.unique(every[(every > 0) & (every <= MOST_SEQUENCES)])


def tabulate(
    techniques: Iterable[Technique], d: Deployment, w: Workload, gpu: Iterable[float], host: float
) -> Options:
    """The table of all settings of all techniques that can run there."""
    table = Options()
    for technique in techniques:
        if technique.refuses(d):
            continue
        for t in technique.options(d, w.prompt, w.generate):
            candidates = batches(t, d, w, gpu, host)
            if candidates.size:
                table.add(evaluate(t, d, w, candidates))
    return table


def elsewhere(table: Options, d: Deployment, w: Workload) -> Options:
    """The same settings and batches on other hardware."""
    other = Options()
    for t, batch in table.evaluated:
        other.add(evaluate(t, d, w, batch))
    return other


def between(table: Options, row: int, d: Deployment, w: Workload) -> Options:
    """The batches between a row's neighbours, for the same settings."""
    t, batch = table.technique[row], table.batch[row]
    same = [i for i, other in enumerate(table.technique) if other is t]
    known = np.sort(table.batch[same])
    lower = known[known < batch][-1:]
    upper = known[known > batch][:1]
    edges = np.concatenate([lower, [batch], upper])
    parts = t.tiles()
    finer = np.concatenate(
        [np.linspace(a, b, 10)[1:-1] for a, b in pairwise(edges)] or [np.zeros(0)]
    )
    finer = np.setdiff1d(np.round(finer / parts) * parts, known)
    if w.batch is not None or not finer.size:
        return Options()
    refined = evaluate(t, d, w, finer)
    return replace(refined, technique=[t] * finer.size)
