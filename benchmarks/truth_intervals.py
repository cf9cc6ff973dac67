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


def correlation(groups: Sequence[Sequence[float]]) -> float:
    """How much runs of one group are inside or outside together: the intraclass correlation [1]_.

    References
    ----------
    .. [1] A. Donner, "A review of inference procedures for the intraclass correlation coefficient
       in the one-way random effects model", International Statistical Review 54(1), 1986.
    """
    sizes = np.array([len(g) for g in groups], dtype=float)
    means = np.array([np.mean(g) for g in groups])
    total = sizes.sum()
    between = np.sum(sizes * (means - sizes @ means / total) ** 2) / (len(groups) - 1)
    within = sum(float(np.sum((np.array(g) - np.mean(g)) ** 2)) for g in groups)
    within /= total - len(groups)
    typical = (total - sizes @ sizes / total) / (len(groups) - 1)
    return max(0.0, float((between - within) / (between + (typical - 1) * within)))


def beyond(groups: Sequence[Sequence[float]], alike: float = 0.0) -> int:
    """Count groups further from 80 % than two standard errors.

    Runs that err alike are worth fewer: their errors have the design effect of cluster samples.

    Parameters
    ----------
    alike
        Correlation of a group's runs.
    """
    worth = [len(g) / (1 + (len(g) - 1) * alike) for g in groups]
    return sum(
        bool(abs(np.mean(g) - SHARE) > 2 * sqrt(SHARE * (1 - SHARE) / n) + ROUNDING)
        for g, n in zip(groups, worth, strict=True)
    )


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
