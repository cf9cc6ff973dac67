"""How much each mechanism counts in an interval, chosen where it was left out: for truth.py.

The weights are those with the least interval score [1]_, a proper score of ranges that should hold
80 %, over measured runs each of which is judged by a ledger that lacks half of the runs of its own
mechanisms, or the lines that share its model and source, its source, its card, or its version; an
answer's own weight is then raised until they hold 80 % of those runs. Coverage is that of runs
whose sources no choice saw: sources are left out a quarter at a time.

.. [1] T. Gneiting and A. E. Raftery, "Strictly proper scoring rules", JASA 102 (2007).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from zlib import crc32

import numpy as np

from benchmarks.truth_intervals import HOLD_OUTS, SHARE, Mechanisms, Pair, counts, mechanisms_of
from kvsim.evidence import ledger
from kvsim.graph import Array

PARTS, ROUNDS = 4, 2
STEPS = (0.6, 1.6)  # times a weight, in turn
HALF = ("half of their own runs", tuple(f.name for f in fields(Mechanisms)))
"""Runs judged by a ledger that has the other half of those of the same mechanisms and source."""
WIDEN = 1.1  # times an answer's own weight, until ranges hold what they should
Weights = dict[str, float]


@dataclass(frozen=True)
class Judged:
    """Runs that share all mechanisms, and the ledger that they are judged by."""

    part: int  # of the sources
    hold_out: str
    errors: Array  # logarithms of measured over predicted times
    counted: Array  # what each counts: runs count alike, and so do models
    points: Array
    whose: np.ndarray
    apart: Array
    rows: Array

    def range(self, weights: Weights) -> tuple[float, float]:
        """The interval that weights give, in logarithms."""
        apart = self.apart @ np.array([weights[name] for name in ledger.DISTANCES])
        weight = np.exp(-apart) * np.minimum(self.rows, weights["most rows"])
        return ledger.weighted_range(self.points, self.whose, weight, weights["own"])


def shipped() -> Weights:
    """The weights that kvsim has."""
    return {**ledger.DISTANCES, "own": ledger.SELF, "most rows": float(ledger.MOST_ROWS)}


def judged_runs(pairs: Sequence[Pair]) -> Iterator[Judged]:
    """Every group of runs with every ledger that lacks some of its mechanisms."""
    groups: dict[Mechanisms, list[Pair]] = {}
    for row, said in pairs:
        if counts(row):
            groups.setdefault(mechanisms_of(row), []).append((row, said))
    for own, some in groups.items():
        asked = ledger.Mechanisms(own.engine, own.kind, own.device, own.technique, own.load,
                                  own.weights, own.experts, own.gpus, own.model)  # fmt: skip
        ratio = np.array([s.value / r.value for r, s in some])
        faster = np.array([r.metric.endswith("tok_s") for r, _ in some])
        errors = np.log(np.where(faster, ratio, 1 / ratio))
        runs = [replace(r, metric="", of="", asked="").key(()) for r, _ in some]
        counted = np.array([1 / runs.count(run) for run in runs])
        kinds = ledger.RELATED_KINDS.get(own.kind, (own.kind,))
        known = [
            e
            for e in ledger.shipped()
            if e.kind in kinds and not e.held_out.startswith(ledger.ONE_DEVICE)
        ]
        for name, shared in (HALF, *HOLD_OUTS.items()):
            others = [e for e in known if any(getattr(e, n) != getattr(own, n) for n in shared)]
            seen = np.zeros(errors.size, dtype=bool)
            if name == HALF[0]:
                seen = np.array([crc32(run.encode()) % 2 == 0 for run in runs])
                if min(seen.sum(), (~seen).sum()) < ledger.MIN_SPREAD_ROWS:
                    continue
                others.append(
                    ledger.entry_of(
                        np.exp(-errors[seen]),
                        np.ones(seen.sum()),
                        held_out=ledger.HELD_OUT_RUN,
                        **asdict(own),
                    )
                )
            yield Judged(
                crc32(own.source.encode()) % PARTS,
                name,
                errors[~seen],
                counted[~seen],
                *ledger.sorted_errors(others),
                ledger.differences(others, asked),
                np.array([e.rows for e in others], dtype=float),
            )


def _score(groups: Sequence[Judged], weights: Weights) -> float:
    total = count = 0.0
    for g in groups:
        low, high = g.range(weights)
        missed = np.maximum(low - g.errors, 0.0) + np.maximum(g.errors - high, 0.0)
        total += float(np.sum(g.counted * (high - low + 2 / (1 - SHARE) * missed)))
        count += float(g.counted.sum())
    return total / count


def choose(groups: Sequence[Judged]) -> Weights:
    """The weights of the least score, one after another, then widened until 80 % are held."""
    weights = shipped()
    best = _score(groups, weights)
    for _ in range(ROUNDS):
        for name in weights:
            for step in STEPS:
                while True:
                    tried = {**weights, name: weights[name] * step}
                    score = _score(groups, tried)
                    if score >= best * (1 - 1e-4):
                        break
                    weights, best = tried, score
    while _held(groups, weights) < SHARE:
        weights = {**weights, "own": weights["own"] * WIDEN}
    return weights


def _held(groups: Sequence[Judged], weights: Weights) -> float:
    """Share of runs within their ranges, whatever was left out."""
    inside = total = 0.0
    for g in groups:
        low, high = g.range(weights)
        inside += float(np.sum(g.counted * ((g.errors >= low) & (g.errors <= high))))
        total += float(g.counted.sum())
    return inside / total


def _covered(groups: Sequence[Judged], weights: Weights) -> dict[str, tuple[float, float, float]]:
    """Runs within their ranges, all runs, and the median width, by what was left out."""
    found = {}
    for name in (HALF[0], *HOLD_OUTS):
        some = [g for g in groups if g.hold_out == name]
        runs = sum(float(g.counted.sum()) for g in some)
        ranges = [g.range(weights) for g in some]
        widths = np.repeat([np.exp(high - low) for low, high in ranges],
                           [g.errors.size for g in some])  # fmt: skip
        found[name] = _held(some, weights) * runs, runs, float(np.median(widths))
    return found


def print_weights(pairs: Sequence[Pair]) -> None:
    """Print the weights chosen on all runs, and what they hold where chosen without the sources."""
    groups = list(judged_runs(pairs))
    sums: dict[str, list[tuple[float, float, float]]] = {}
    for part in range(PARTS):
        weights = choose([g for g in groups if g.part != part])
        for name, found in _covered([g for g in groups if g.part == part], weights).items():
            sums.setdefault(name, []).append(found)
    for name, each in sums.items():
        inside, total, _ = np.sum(each, axis=0)
        print(f"chosen on other sources, without {name:38s} {100 * inside / total:5.1f} % inside"
              f"   widths {', '.join(f'{w:.2f}' for *_, w in each)}")  # fmt: skip
    print("chosen on all:", {name: round(value, 2) for name, value in choose(groups).items()})
