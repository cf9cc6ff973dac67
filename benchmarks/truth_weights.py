"""How much each mechanism counts in an interval, chosen where it was left out: for truth.py.

Runs are judged by ledgers that lack what they have: half of the runs of their own mechanisms and
source, as if those were new rows of a known page, or all lines of their model and source, of their
source, of their engine on their card, or of their engine's version. The weights are those of the
least interval score [1]_, a proper score of ranges that should hold 80 %, half of it from runs
whose other half is known and half from the others; it is relative to the errors of a run's group,
so that engines known well count like those known badly. What is unknown of a model, card or engine
without runs is then raised until 80 % of the runs without such neighbours are held, and one more
source in n would be [2]_.

Those weights ship. What is printed beside them is what they hold when they are chosen without a
part of the sources, of the engines' versions or of the models, neither as runs nor as lines of the
ledger, and judged on that part alone.

.. [1] T. Gneiting and A. E. Raftery, "Strictly proper scoring rules", JASA 102 (2007).
.. [2] Split conformal prediction asks for the quantile 0.8 (1 + 1/n) of n exchangeable errors; runs
   of one source err alike, so n counts sources.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from zlib import crc32

import numpy as np

from benchmarks.entries import MIN_SPREAD_ROWS, entry_of
from benchmarks.truth_intervals import (
    HOLD_OUTS,
    SHARE,
    Mechanisms,
    Pair,
    beyond,
    correlation,
    counts,
    mechanisms_of,
)
from kvsim.evidence import ledger
from kvsim.graph import Array

PARTS, ROUNDS = 4, 3
STEPS = (0.6, 1.6)  # times a weight, in turn
BISECTIONS = 12
LEAST = 0.02  # error of a group below which its ranges count no more [relative]
HALF = "half of their own runs"
"""Runs judged by a ledger that has the other half of those of the same mechanisms and source."""
FOLDS: Mapping[str, tuple[str, Callable[[Mechanisms], str]]] = {
    "source": ("their source", lambda m: m.source),
    "version": ("the engine's runs at their version", lambda m: f"{m.engine} {m.version}"),
    "model": ("their model's runs of the source", lambda m: m.model),
}
"""What is left out of the choice of weights in parts, and the ledger that judges it."""
TECHNIQUE = {"technique": ledger.WEIGHTS["technique"]}  # which runs do not tell: set, not chosen
NEUTRAL = {**dict.fromkeys(ledger.MECHANISMS, 1.0), **TECHNIQUE,
           "most rows": 20.0, "own": 1.0, "unseen": 0.1, "rerun": 0.02}  # fmt: skip
Weights = dict[str, float]


@dataclass(frozen=True)
class Judged:
    """Runs that share all mechanisms, and the ledger that they are judged by."""

    own: Mechanisms
    hold_out: str
    names: Sequence[str]  # of runs, several of whose numbers may be here
    errors: Array  # logarithms of measured over predicted times
    counted: Array  # what each counts: runs count alike
    known: tuple[Array, np.ndarray]
    apart: Array
    rows: Array

    def range(self, weights: Weights) -> tuple[float, float]:
        """The interval that weights give, in logarithms."""
        return ledger.error_range(self.known, self.apart, self.rows, weights)

    def inside(self, weights: Weights) -> np.ndarray:
        """Which errors the interval holds."""
        low, high = self.range(weights)
        return (self.errors >= low) & (self.errors <= high)

    @property
    def alone(self) -> bool:
        """Whether no line of the ledger shares engine, card and model with them."""
        neighbours = [ledger.MECHANISMS.index(name) for name in ledger.RUN_IDENTITY]
        return bool((self.apart[:, neighbours].sum(axis=1) > 0).all())


def part_of(own: Mechanisms | ledger.LedgerEntry, fold: str) -> int:
    """The part of a fold that runs, or a line of the ledger, are in."""
    return crc32(FOLDS[fold][1](own).encode()) % PARTS  # type: ignore[arg-type]


def _within(own: Mechanisms | ledger.LedgerEntry, left_out: tuple[str, int] | None) -> bool:
    return left_out is not None and part_of(own, left_out[0]) == left_out[1]


def judged_runs(pairs: Sequence[Pair], left_out: tuple[str, int] | None = None) -> Iterator[Judged]:
    """Every group of runs with every ledger that lacks some of its mechanisms.

    Parameters
    ----------
    pairs
        Rows with what kvsim says of them.
    left_out
        Fold and part of the groups, and of the ledger's lines of whole runs, that are not there.
    """
    groups: dict[Mechanisms, list[Pair]] = {}
    for row, said in pairs:
        if counts(row):
            groups.setdefault(mechanisms_of(row), []).append((row, said))
    lines = [e for e in ledger.shipped() if not e.held_out.startswith(ledger.ONE_DEVICE)
             and not (e.held_out == ledger.HELD_OUT_RUN and _within(e, left_out))]  # fmt: skip
    whole = tuple(f.name for f in fields(Mechanisms))
    for own, some in groups.items():
        if _within(own, left_out):
            continue
        asked = ledger.Mechanisms(own.engine, own.kind, own.device, own.technique, own.load,
                                  own.weights, own.experts, own.gpus, own.model)  # fmt: skip
        ratio = np.array([s.value / r.value for r, s in some])
        faster = np.array([r.metric.endswith("tok_s") for r, _ in some])
        errors = np.log(np.where(faster, ratio, 1 / ratio))
        runs = [replace(r, metric="", of="", asked="").key(()) for r, _ in some]
        counted = np.array([1 / runs.count(run) for run in runs])
        kinds = ledger.RELATED_KINDS.get(own.kind, (own.kind,))
        known = [e for e in lines if e.kind in kinds]
        for name, shared in ((HALF, whole), *HOLD_OUTS.items()):
            others = [e for e in known if any(getattr(e, n) != getattr(own, n) for n in shared)]
            seen = np.zeros(errors.size, dtype=bool)
            if name == HALF:
                seen = np.array([crc32(run.encode()) % 2 == 0 for run in runs])
                if min(seen.sum(), (~seen).sum()) < MIN_SPREAD_ROWS:
                    continue
                others.append(
                    entry_of(
                        np.exp(-errors[seen]),
                        np.ones(seen.sum()),
                        held_out=ledger.HELD_OUT_RUN,
                        **asdict(own),
                    )
                )
            yield Judged(
                own,
                name,
                [run for run, known in zip(runs, seen, strict=True) if not known],
                errors[~seen],
                counted[~seen],
                ledger.sorted_errors(others),
                ledger.differences(others, asked),
                np.array([e.rows for e in others], dtype=float),
            )


def _importance(groups: Sequence[Judged]) -> list[float]:
    """What the score of each group counts: relative to its errors, hold-outs in fixed shares."""
    errors: dict[tuple[str, str, str, str], list[Array]] = {}
    runs: dict[str, float] = {}
    for g in groups:
        alike = g.own.engine, g.own.version, g.own.source, g.own.kind
        errors.setdefault(alike, []).append(np.abs(g.errors))
        runs[g.hold_out] = runs.get(g.hold_out, 0.0) + float(g.counted.sum())
    scale = {k: float(np.mean(np.concatenate(v))) + LEAST for k, v in errors.items()}
    share = {name: 0.5 if name == HALF else 0.5 / len(HOLD_OUTS) for name in runs}
    return [
        share[g.hold_out] / runs[g.hold_out]
        / scale[g.own.engine, g.own.version, g.own.source, g.own.kind]
        for g in groups
    ]  # fmt: skip


def _score(groups: Sequence[Judged], importance: Sequence[float], weights: Weights) -> float:
    total = 0.0
    for g, counts_for in zip(groups, importance, strict=True):
        low, high = g.range(weights)
        missed = np.maximum(low - g.errors, 0.0) + np.maximum(g.errors - high, 0.0)
        total += counts_for * float(np.sum(g.counted * (high - low + 2 / (1 - SHARE) * missed)))
    return total


def choose(groups: Sequence[Judged]) -> Weights:
    """The weights of the least score, one after another, then what is unknown without runs."""
    importance = _importance(groups)
    weights = dict(NEUTRAL)
    best = _score(groups, importance, weights)
    for _ in range(ROUNDS):
        for name in [n for n in NEUTRAL if n not in TECHNIQUE]:
            for step in STEPS:
                while True:
                    tried = {**weights, name: weights[name] * step}
                    score = _score(groups, importance, tried)
                    if score >= best * (1 - 1e-4):
                        break
                    weights, best = tried, score
    for name, alone in (("unseen", True), ("rerun", False)):
        some = [g for g in groups if g.hold_out != HALF and g.alone is alone]
        sources = len({g.own.source for g in some})  # runs of a source err alike
        share = SHARE * (1 + 1 / sources) if alone else SHARE
        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            holds = _held(some, {**weights, name: middle}) >= share
            low, high = (low, middle) if holds else (middle, high)
        weights[name] = high
    return weights


def _held(groups: Sequence[Judged], weights: Weights) -> float:
    """Share of runs within their ranges, whatever was left out."""
    inside = sum(float(np.sum(g.counted * g.inside(weights))) for g in groups)
    return inside / sum(float(g.counted.sum()) for g in groups)


@dataclass(frozen=True)
class Held:
    """What ranges hold of runs whose own lines the ledger lacks, by fold and hold-out."""

    fold: str  # left out of the choice of weights
    without: str  # what the ledger lacks
    share: float  # of runs
    width: float  # upper end over lower end, at the median
    outside: int  # groups of engine, version and source beyond two binomial standard errors
    groups: int
    alike: float  # correlation of a group's runs
    outside_alike: int  # groups beyond two standard errors of runs that err so much alike


def held(fold: str, without: str, judged: Sequence[tuple[Judged, Weights]]) -> Held:
    """Count what ranges hold, each group with weights of its own."""
    found: dict[tuple[str, str, str], dict[str, list[bool]]] = {}
    widths: list[float] = []
    for g, weights in judged:
        low, high = g.range(weights)
        widths += [high - low] * g.errors.size
        runs = found.setdefault((g.own.engine, g.own.version, g.own.source), {})
        for name, inside in zip(g.names, g.inside(weights), strict=True):
            runs.setdefault(name, []).append(bool(inside))
    shares = [[float(np.mean(v)) for v in runs.values()] for runs in found.values()]
    alike = correlation(shares)
    every = [x for each in shares for x in each]
    return Held(
        fold, without, float(np.mean(every)), float(np.exp(np.median(widths))), beyond(shares),
        len(shares), alike, beyond(shares, alike),
    )  # fmt: skip


def judge(pairs: Sequence[Pair], chosen: Mapping[str, Weights]) -> list[tuple[Held, Held]]:
    """What ranges hold with the weights that ship, and with those that never saw the runs.

    Parameters
    ----------
    pairs
        Rows with what kvsim says of them.
    chosen
        Weights by "FOLD PART", chosen without that part.

    Returns
    -------
    list of tuple[Held, Held]
        By what was left out of the choice, and what the ledger lacks.
    """
    groups = list(judged_runs(pairs))
    found = []
    for fold, (hold_out, _) in FOLDS.items():
        for name in (HALF, hold_out):
            some = [g for g in groups if g.hold_out == name]
            shipped = held(fold, name, [(g, ledger.WEIGHTS) for g in some])
            own = [(g, chosen[f"{fold} {part_of(g.own, fold)}"]) for g in some]
            found.append((shipped, held(fold, name, own)))
    return found


def choose_all(pairs: Sequence[Pair]) -> dict[str, Weights]:
    """Weights chosen on all runs, under "all", and without each part of each fold."""
    found = {"all": choose(list(judged_runs(pairs)))}
    for fold in FOLDS:
        for part in range(PARTS):
            found[f"{fold} {part}"] = choose(list(judged_runs(pairs, (fold, part))))
    return {
        which: {name: round(value, 3) for name, value in weights.items()}
        for which, weights in found.items()
    }


def print_judged(found: Sequence[tuple[Held, Held]]) -> None:
    """Print both figures for everything that was left out."""
    title = "weights chosen without"
    print(f"\n{title:24s}{'ledger without':38s} inside   width  outside | chosen on all")
    for shipped, own in found:
        print(
            f"  its {own.fold:18s}{own.without:38s}{100 * own.share:7.1f}%{own.width:8.2f}"
            f"{own.outside:4d} of {own.groups:2d}, {own.outside_alike:2d} with correlation "
            f"{own.alike:.2f} | {100 * shipped.share:5.1f}%{shipped.width:6.2f}"
            f"{shipped.outside:4d}"
        )
