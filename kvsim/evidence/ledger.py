"""The ledger of errors on rows that nothing was fitted to, and the entry nearest to an answer.

``ledger.csv`` is made by the fits and by ``kvsim reproduce``: one line per engine, version, kind of
number, device and technique. An answer shows the nearest line, says how far that line is, and
widens its interval with the distance.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from functools import cache
from importlib.resources import files
from math import erf, exp, log, sqrt
from pathlib import Path

import numpy as np

from kvsim.files import TABLE, own_output, read_records, replace_text
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment

ONE_DEVICE = "device "  # begins what was held out where rows of one device alone are meant
ANY = "any"  # device of an entry that was held out by device: the error on a card without rows
MIN_SPREAD_ROWS = 3  # rows below which a spread says little
WITHIN_80 = 1.2816  # standard deviations on either side that hold 80 % of a normal distribution
WIDEST = 4.0  # an interval reaches at most this factor to either side
NUMBER_KINDS = {
    "decode": "time per output token",
    "prefill": "time to the first token",
    "request": "request latency",
    "memory": "peak memory",
}
"""Kinds of end-to-end numbers; entries of kernel classes have the class as their kind."""

# How much wider a logarithmic interval is per step of distance. Measured: rows of paper tables that
# no fit saw are 3 to 6 times worse on another technique, about twice on another engine or card. No
# row is of expert, data or pipeline parallelism; twice is assumed for it. Weights in a format of
# which the engine has no rows are as far as another engine, those of which nothing has any rows as
# far as another technique.
WIDER = {"technique": 3.0, "engine": 2.0, "device": 2.0, "spread": 2.0}
PRODUCT_CLASSES = {
    "fp16": "gemm", "fp8": "gemm-fp8", "fp8-dynamic": "gemm-fp8", "fp8-block": "gemm-fp8-block",
    "int8": "gemm-int8", "int4": "gemm-int4", "int4-g32": "gemm-int4",
}  # fmt: skip
"""The class of kernels whose rows are of products with weights of a format; others have no rows."""
UNKNOWN = 0.1  # typical error where nothing like a number was ever measured
SIMILAR_TECHNIQUES = {"full", "fp8"}  # techniques that run an engine's own attention kernels
WIDER_ALIKE = 1.3


@frozen
class LedgerEntry:
    """Errors of predictions on rows that nothing was fitted to."""

    engine: str  # the stack's name, without its card
    version: str
    kind: str
    device: str  # GPU profile; "any": held out by device
    technique: str
    rows: int
    median: float  # of |predicted / measured - 1|
    p90: float
    low: float  # factors on a prediction that hold 80 % of what is measured elsewhere
    high: float
    held_out: str  # what was held out: shape, device, model, row
    source: str


@frozen
class KnownError:
    """The evidence of a predicted number's error."""

    entry: LedgerEntry | None  # the nearest entry; None where nothing like it was ever measured
    words: str  # the entry and its distance, as a sentence
    low: float  # factors on a predicted time between which it lies with 80 % probability
    high: float
    exact: bool  # measured for this engine, on this card, with this technique


def evidence_for(
    deployment: Deployment,
    technique: str,
    kind: str = "decode",
    entries: Sequence[LedgerEntry] | None = None,
) -> KnownError:
    """Find the ledger's entry nearest to an answer, with an 80 % interval.

    Parameters
    ----------
    deployment
        The model, card and engine of the answer.
    technique
        Name, with or without settings.
    kind
        One of ``NUMBER_KINDS``, or a kernel class.
    entries
        The ledger; the shipped one if left out.

    Returns
    -------
    KnownError
        The entry, its distance from the answer in words, and the factors of the interval, which
        widens with that distance.
    """
    kinds = (kind, "request") if kind in ("decode", "prefill") else (kind,)
    told = shipped() if entries is None else entries
    known = [e for e in told if e.kind in kinds and not e.held_out.startswith(ONE_DEVICE)]
    engine, device = deployment.stack.name.partition("@")[0], deployment.hardware.name
    name = technique.partition(":")[0]
    if not known:
        return _guess(f"no measured {NUMBER_KINDS.get(kind, kind)} of any engine")

    def distance(e: LedgerEntry) -> tuple[float, int]:
        total = log(_widening(name, e.technique)) + (
            log(WIDER["engine"]) if e.engine != engine else 0
        )
        total += 0.0 if e.device == device else 0.1 if e.device == ANY else log(WIDER["device"])
        return total + (0.0 if e.kind == kind else 0.05), -e.rows

    nearest = min(known, key=distance)
    plain = deployment.single_pass and deployment.ep == 1
    formats = _wider_by_weights(deployment, told)
    same = (nearest.technique == name, nearest.engine == engine, nearest.device == device, plain,
            formats == 1.0)  # fmt: skip
    wider = _widening(name, nearest.technique)
    wider *= 1.0 if same[1] else WIDER["engine"]
    wider *= 1.0 if same[2] or nearest.device == ANY else WIDER["device"]
    wider *= (1.0 if plain else WIDER["spread"]) * formats
    low, high = (_clip_factor(exp(wider * log(x))) for x in (nearest.low, nearest.high))
    asked = (
        f"with {name}",
        f"of {engine}",
        f"on {device}",
        f"with {deployment.parallelism.words()}",
        f"with {deployment.weights} weights",
    )
    words = _words(nearest, same, asked)
    return KnownError(nearest, words, min(low, 1.0), max(high, 1.0), all(same))


def share_below(factor: float, sigma: float) -> float:
    """Compute the probability that a factor is below another.

    Its logarithm is taken as normally distributed around 0.

    Parameters
    ----------
    factor
        The factor to stay below.
    sigma
        Standard deviation of the logarithm.

    Returns
    -------
    float
        Probability, from 0 to 1.
    """
    return 0.5 * (1 + erf(log(factor) / (sigma * sqrt(2))))


def typical_error(deployment: Deployment, technique: str, kind: str = "decode") -> float:
    """Estimate the relative error of an answer from the nearest measured rows.

    The error is larger where those rows are of another technique. What the engine or the card adds
    is left out: techniques on one machine share it.

    Parameters
    ----------
    deployment
        The model, card and engine of the answer.
    technique
        Name, with or without settings.
    kind
        One of ``NUMBER_KINDS``, or a kernel class.

    Returns
    -------
    float
        Median of the absolute relative error.
    """
    entry = evidence_for(deployment, technique, kind).entry
    if entry is None:
        return UNKNOWN
    return entry.median * _widening(technique.partition(":")[0], entry.technique)


def _widening(wanted: str, got: str) -> float:
    """How much wider an interval is where rows are of another technique."""
    if wanted == got:
        return 1.0
    return WIDER_ALIKE if {wanted, got} <= SIMILAR_TECHNIQUES else WIDER["technique"]


def _wider_by_weights(deployment: Deployment, told: Sequence[LedgerEntry]) -> float:
    """How much wider an interval is where an engine's products with such weights have no rows.

    An engine without rows of any kernels has those of whole runs, which state their weights. Of a
    model with experts, theirs are most of the products.
    """
    engine, device = deployment.stack.name.partition("@")[0], deployment.hardware.name
    if deployment.weights not in PRODUCT_CLASSES:
        return WIDER["technique"]
    products = {(e.kind, e.device) for e in told
                if e.engine == engine and e.kind.startswith(("gemm", "experts"))}  # fmt: skip
    kind = PRODUCT_CLASSES[deployment.weights]
    kinds = {kind, kind.replace("gemm", "experts")} if deployment.model.experts else {kind}
    measured = {card for of, card in products if of in kinds}
    elsewhere = device not in {card for _, card in products} and ANY in measured
    return 1.0 if not products or device in measured or elsewhere else WIDER["engine"]


def _words(e: LedgerEntry, same: tuple[bool, ...], asked: tuple[str, ...]) -> str:
    rows = f"{e.rows:,} row" + ("s" if e.rows != 1 else "")
    where = "other cards" if e.device == ANY else e.device
    error = f"± {100 * e.median:.2g} % at the median"
    if all(same):
        return f"{rows} {asked[1]} {asked[0]} on this card that no fit saw: {error}"
    none = [words for words, known in zip(asked, same, strict=True) if not known]
    return (
        f"the nearest evidence is {rows} of {e.engine} with {e.technique} on {where} that no fit "
        f"saw ({error}); none is {' or '.join(none)}, so the interval is widened"
    )


def _guess(why: str) -> KnownError:
    return KnownError(None, f"{why}; the interval is a guess", 1 / 2, 2.0, False)


def _clip_factor(factor: float) -> float:
    return float(min(WIDEST, max(1 / WIDEST, factor)))


def entry_of(
    predicted: Array, measured: Array, *, engine: str, version: str, kind: str, device: str,
    technique: str, held_out: str, source: str, tail: float = 0.1,
) -> LedgerEntry:  # fmt: skip
    """Summarise rows that no fit saw as one line of the ledger.

    Parameters
    ----------
    predicted, measured
        One value per row, both in the same unit.
    engine, version, kind, device, technique, held_out, source
        Fields of the entry, as in ``LedgerEntry``.
    tail
        Share of the rows below and above the interval.

    Returns
    -------
    LedgerEntry
        The entry, its figures rounded to four digits.
    """
    off, ratio = np.abs(predicted / measured - 1), measured / predicted
    median, p90 = (_round(x) for x in np.quantile(off, (0.5, 0.9)))
    low, high = (_round(x) for x in np.quantile(ratio, (tail, 1 - tail)))
    rows = int(off.size)
    return LedgerEntry(
        engine, version, kind, device, technique, rows, median, p90, low, high, held_out, source
    )


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def coverage(predicted: Array, measured: Array, low: float, high: float) -> float:
    """Compute how often an interval around predictions holds what was measured.

    Parameters
    ----------
    predicted, measured
        One value per row, both in the same unit.
    low, high
        Factors on a prediction that bound the interval.

    Returns
    -------
    float
        Share of the measured values within the interval, from 0 to 1.
    """
    ratio = measured / predicted
    return float(np.mean((ratio >= low) & (ratio <= high)))


@cache
def shipped() -> tuple[LedgerEntry, ...]:
    """The ledger that comes with kvsim."""
    table = files("kvsim") / "evidence" / "ledger.csv"
    return tuple(_entry(row) for _, row in read_records(str(table), TABLE))


def _entry(row: dict[str, str]) -> LedgerEntry:
    kinds = {f.name: f.type for f in fields(LedgerEntry)}
    return LedgerEntry(**{k: kinds[k](v) for k, v in row.items()})  # type: ignore[operator]


def format_ledger(entries: Iterable[LedgerEntry]) -> str:
    """Format a ledger as CSV.

    Parameters
    ----------
    entries
        Entries in any order.

    Returns
    -------
    str
        A header and one line per entry, ordered by engine, kind, device and technique.
    """
    lines = [",".join(f.name for f in fields(LedgerEntry))]
    ordered = sorted(entries, key=lambda e: (e.engine, e.kind, e.device, e.technique, e.version))
    for e in ordered:
        cells = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in astuple(e)]
        lines.append(",".join(f'"{c}"' if "," in c else c for c in cells))
    return "\n".join(lines) + "\n"


def update(path: Path, entries: Iterable[LedgerEntry]) -> None:
    """Add entries to a ledger on disk, replacing those of the same case.

    Entries are of the same case if engine, version, kind, device, technique and what was held out
    agree.

    Parameters
    ----------
    path
        The ledger; it is created if there is none.
    entries
        The entries to add.
    """

    def key(e: LedgerEntry) -> tuple[str, ...]:
        return (e.engine, e.version, e.kind, e.device, e.technique, e.held_out)

    kept = {}
    if path.exists():
        with own_output():
            rows = [row for _, row in read_records(path, TABLE)]
        kept = {key(e): e for e in map(_entry, rows)}
    kept |= {key(e): e for e in entries}
    replace_text(path, format_ledger(kept.values()))
