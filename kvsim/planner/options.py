"""Every setting of every technique at every sensible batch, as one table of plain arrays."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvsim.machines.deployment import Deployment
from kvsim.planner.admit import Admission
from kvsim.planner.choose import Column, Rows, distinct
from kvsim.planner.workload import Workload
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import MOST_SEQUENCES
from kvsim.quality.evidence import Evidence
from kvsim.techniques.technique import Technique

CONTEXTS = 4  # points of the sum over the generated tokens; the choice is replayed with all
GROWTH = 1.35  # ratio of neighbouring batches before refinement


@dataclass
class Options:
    """A table: one row per technique, settings and batch."""

    technique: list[Technique] = field(default_factory=list)
    name: NDArray[np.str_] = field(default_factory=lambda: np.zeros(0, dtype=np.str_))
    evidence: list[Evidence] = field(default_factory=list)
    batch: Column = field(default_factory=lambda: np.zeros(0))
    columns: dict[str, Column] = field(default_factory=dict)
    evaluated: list[tuple[Technique, Column]] = field(default_factory=list)  # with which batches

    def __len__(self) -> int:
        return len(self.technique)

    def copy(self) -> "Options":
        """A table that grows and is replayed by itself."""
        columns = {name: values.copy() for name, values in self.columns.items()}
        return replace(
            self,
            technique=list(self.technique),
            evidence=list(self.evidence),
            evaluated=list(self.evaluated),
            columns=columns,
        )

    def add(self, other: "Options") -> None:
        """Append the rows of another table."""
        self.technique += other.technique
        self.name = np.concatenate([self.name, other.name])
        self.evidence += other.evidence
        self.evaluated += other.evaluated
        self.batch = np.concatenate([self.batch, other.batch])
        self.columns = {
            name: np.concatenate([self.columns.get(name, np.zeros(0)), values])
            for name, values in other.columns.items()
        }

    def rows_of(self, name: str) -> Rows:
        """Rows of one technique."""
        return np.flatnonzero(self.name == name)

    @property
    def names(self) -> list[str]:
        """The names of all techniques, each once."""
        return list(dict.fromkeys(self.name.tolist()))


def evaluate(
    technique: Technique,
    deployment: Deployment,
    workload: Workload,
    batch: Column,
    admission: Admission,
) -> Options:
    """All settings of an array-valued technique at all batches, in one vectorised evaluation."""
    prediction = workload.predict(technique, deployment, batch, CONTEXTS)
    settings = technique.rows()
    shape = (len(settings), batch.size)
    measured = {
        name: (np.zeros(shape) + values).ravel() for name, values in measures(prediction).items()
    }
    known = [admission.evidence(s, deployment, workload.length) for s in settings]
    admitted = {
        "loss": np.repeat([admission.loss(e) for e in known], batch.size),
        "harm": np.repeat([admission.harm(e) for e in known], batch.size),
        "assumed": np.repeat([1.0 if s.assumes else 0.0 for s in settings], batch.size),
    }
    return Options(
        [s for s in settings for _ in range(batch.size)],
        np.full(len(settings) * batch.size, technique.name),
        [e for e in known for _ in range(batch.size)],
        np.tile(batch, len(settings)),
        measured | admitted,
        [(technique, batch)],
    )


def measures(prediction: Prediction) -> dict[str, Column]:
    """What limits and objectives are about, all to be small."""
    return {
        "gpu_memory": prediction.given_bytes,
        "host_memory": prediction.host_bytes,
        "ttft": prediction.ttft_s,
        "tpot": np.nan_to_num(prediction.tpot_s),
        "latency": prediction.request_s,
        "throughput": -prediction.output_tok_s / prediction.deployment.gpus,
        "cost": prediction.usd_per_million(),
    }


def batches(
    technique: Technique,
    deployment: Deployment,
    workload: Workload,
    gpu: Iterable[float],
    host: float,
) -> Column:
    """Batches worth evaluating: a geometric grid, and the largest that each GPU memory allows.

    The grid ends above the largest, so that what a larger memory would bring is known, but for the
    most that can be evaluated.
    """
    parts = technique.tiles()
    if workload.batch is not None:
        return np.array([float(workload.batch)]) if workload.batch % parts == 0 else np.zeros(0)
    largest = [workload.largest(technique, deployment, size, host) for size in gpu]
    top = max(float(np.max(b)) for b in largest)
    steps = np.arange(0, np.log(max(top / parts, 1)) / np.log(GROWTH) + 2)
    grid = np.ceil(parts * GROWTH**steps / parts) * parts
    every = np.concatenate([grid, *(np.ravel(b) for b in largest)])
    return distinct(every[(every > 0) & (every <= MOST_SEQUENCES)])


def tabulate(
    deployment: Deployment,
    workload: Workload,
    gpu: Iterable[float],
    host: float,
    admission: Admission,
    techniques: Iterable[Technique] | None = None,
) -> Options:
    """The table of all settings of all techniques that can run there."""
    table, sizes = Options(), tuple(gpu)
    for technique in admission.candidates() if techniques is None else techniques:
        if technique.refuses(deployment):
            continue
        for t in admission.settings(technique, deployment, workload.prompt, workload.generate):
            candidates = batches(t, deployment, workload, sizes, host)
            if candidates.size:
                table.add(evaluate(t, deployment, workload, candidates, admission))
    return table


def settled(
    techniques: Iterable[Technique],
    deployment: Deployment,
    workload: Workload,
    gpu: Iterable[float],
    host: float,
    admission: Admission,
) -> Options:
    """The table of some techniques with their settings as they are."""
    table, sizes = Options(), tuple(gpu)
    for t in techniques:
        candidates = batches(t, deployment, workload, sizes, host)
        if candidates.size and not t.refuses(deployment):
            table.add(evaluate(t, deployment, workload, candidates, admission))
    return table


def batches_between(
    table: Options, row: int, deployment: Deployment, workload: Workload, admission: Admission
) -> Options:
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
    finer = distinct(np.round(finer / parts) * parts)
    finer = finer[~(finer[:, None] == known).any(axis=1)]
    if workload.batch is not None or not finer.size:
        return Options()
    refined = evaluate(t, deployment, workload, finer, admission)
    return replace(refined, technique=[t] * finer.size)
