"""How many rows of whole runs lie within their 80 % intervals, by group: for truth.py."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from benchmarks.truth_rows import Row
from benchmarks.truth_runs import KINDS, Said, deployment_of
from kvsim.evidence import ledger

SHARE = 0.8
ROUNDING = 1e-9  # of shares, which are sums of floats
SUSPECT = {("gpustack", "h100", 1), ("gpustack-quant", "h100", 1)}
"""Source, card and GPUs whose levels are doubtful: ratios alone count (see the rows' README)."""

Pair = tuple[Row, Said]


@dataclass(frozen=True)
class Coverage:
    """How many numbers of a group lie within their intervals, each run counting once."""

    rows: int
    runs: int
    share: float
    width: float  # upper end over lower end, at the median

    @property
    def spread(self) -> float:
        """Two binomial standard errors of the share."""
        return 2 * sqrt(SHARE * (1 - SHARE) / self.runs)

    @property
    def holds(self) -> bool:
        """Whether the share is within two standard errors of what was said."""
        return abs(self.share - SHARE) <= self.spread + ROUNDING


@dataclass(frozen=True)
class Mechanisms:
    """What the errors of rows are shared by."""

    engine: str
    kind: str
    load: str
    device: str
    weights: str
    experts: str
    gpus: str
    technique: str
    model: str
    source: str
    version: str


def mechanisms_of(row: Row) -> Mechanisms:
    """What the errors of a row are shared by."""
    d = deployment_of(row)
    kind = KINDS.get(row.metric, "request")
    kind = ledger.WAIT if (kind, row.load) == ("prefill", "served") else kind
    return Mechanisms(
        d.stack.family, kind, row.load, row.card,
        ledger.WEIGHT_CLASSES.get(d.weights, d.weights), "experts" if d.model.experts else "dense",
        "several" if d.gpus > 1 else "one", row.technique.partition(":")[0], d.model.name,
        row.source, row.version,
    )  # fmt: skip


def counts(row: Row) -> bool:
    """Whether the level of a row is evidence: no drafts, no doubtful card, not merely listed."""
    doubtful = (row.source, row.card, row.gpus) in SUSPECT
    return row.table == "speed" and not (row.drafts or row.listed or doubtful)


def of_group(pairs: Sequence[Pair]) -> Coverage:
    """Count the numbers of a group that lie within their intervals."""
    runs: dict[str, list[bool]] = {}
    for row, said in pairs:
        own = replace(row, metric="", of="", asked="").key(())
        runs.setdefault(own, []).append(said.low <= row.value <= said.high)
    width = float(np.median([said.high / said.low for _, said in pairs]))
    share = float(np.mean([np.mean(inside) for inside in runs.values()]))
    return Coverage(len(pairs), len(runs), share, width)


def by_group(pairs: Iterable[Pair], key: Callable[[Row], str] | None = None) -> dict[str, Coverage]:
    """Coverage by engine, version and source, or by another key of rows that count."""
    key = key or (lambda r: f"{r.engine} {r.version} {r.source}")
    found: dict[str, list[Pair]] = {}
    for row, said in pairs:
        if counts(row) and said.low:
            found.setdefault(key(row), []).append((row, said))
    return {name: of_group(some) for name, some in sorted(found.items())}


HOLD_OUTS: Mapping[str, tuple[str, ...]] = {
    "their model's runs of the source": ("model", "source"),
    "their source": ("source",),
    "the engine's runs on their card": ("engine", "device"),
    "the engine's runs at their version": ("engine", "version"),
}
"""Lines of the ledger that are left out for a row: those that share all of some mechanisms."""


def held_out(pairs: Sequence[Pair], shared: tuple[str, ...]) -> list[Pair]:
    """The rows that count, with intervals from a ledger without the lines that share mechanisms."""
    known: dict[Mechanisms, ledger.KnownError] = {}
    found = []
    for row, said in pairs:
        if not counts(row):
            continue
        own = mechanisms_of(row)
        if own not in known:
            others = [
                e
                for e in ledger.shipped()
                if any(getattr(e, name) != getattr(own, name) for name in shared)
            ]
            known[own] = ledger.evidence_for(
                deployment_of(row), row.technique, KINDS.get(row.metric, "request"), others,
                row.load,
            )  # fmt: skip
        low, high = known[own].low, known[own].high
        if row.metric.endswith("tok_s"):
            low, high = 1 / high, 1 / low
        found.append((row, Said(said.value, said.value * low, said.value * high)))
    return found
