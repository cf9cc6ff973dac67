"""The ledger of errors on rows that nothing was fitted to, and the entry nearest to an answer.

``ledger.csv`` is made by the fits and by ``kvsim reproduce``: one line per engine, version, kind of
number, device and technique. An answer shows the nearest line, says how far that line is, and
widens its interval with the distance.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, fields, replace
from functools import cache
from importlib.resources import files
from math import erf, exp, hypot, log, sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvsim.files import TABLE, own_output, read_records, replace_text
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.inputs import format_plain
from kvsim.machines import gguf
from kvsim.machines.deployment import WEIGHT_FORMATS, Deployment
from kvsim.techniques import parse
from kvsim.techniques.released import FULL
from kvsim.techniques.technique import MIXED_LAYERS, Technique

ONE_DEVICE = "device "  # begins what was held out where rows of one device alone are meant
ANY = "any"  # device of an entry that was held out by device: the error on a card without rows
WITHIN_80 = 1.2816  # standard deviations on either side that hold 80 % of a normal distribution
WIDEST = 10.0  # an interval reaches at most this factor to either side
NUMBER_KINDS = {
    "decode": "time per output token",
    "prefill": "time to the first token",
    "request": "request latency",
    "memory": "peak memory",
}
"""Kinds of end-to-end numbers; entries of kernel classes have the class as their kind."""

RUN_WORDS = {
    "decode": ("TPOT", "TPOTs"),
    "prefill": ("TTFT", "TTFTs"),
    "wait": ("TTFT under load", "TTFTs under load"),
    "request": ("request latency", "request latencies"),
    "memory": ("peak memory", "peak memories"),
}
"""An entry's rows in words, one and several; kernels have runs."""

# How much wider a logarithmic interval is where no row at all is of the weights or version, none is
# of pipeline stages, or the stack is of no engine that was ever measured, as an idealised one is.
# These are set: an interval over all formats holds how much they differ, and one without
# measurements may differ more.
WIDER = {"engine": 1.4, "spread": 2.0, "version": 1.4, "weights": 1.4, "host": 1.8}
# What a technique adds of which no row is measured: 80 % of 43 speed-ups of drafts and of low-bit
# caches lie within the first factor, half of them within the second error, when those of their card
# and model, or their source, are left out (benchmarks/drafts.py, benchmarks/caches.py).
TECHNIQUE_SPREAD = 1.34
UNKNOWN = 0.16  # also where nothing like a number was measured
# The mechanisms that errors are shared by, and how much less an entry counts than the nearest one
# for each that only the nearest shares (logarithms); rows of one entry that count at most, as those
# of one run err alike; rows that an answer counts for itself, whose error may be any; and what is
# unknown of a model, card or engine without runs, and of other runs where there are some
# (logarithms). They are one set for all answers, chosen where rows were left out:
# benchmarks/truth_weights.py says how, and what they hold when chosen without the source, version
# or model that they are judged on. That of techniques is set, as measured runs are of full KV.
WEIGHTS = {"engine": 4.1, "technique": 2.0, "kind": 0.92, "prefill": 1.0, "device": 1.0}
WEIGHTS |= {"load": 6.6, "weights": 6.6, "experts": 2.5, "gpus": 1.4, "model": 10.5}
MECHANISMS = tuple(WEIGHTS)
WEIGHTS |= {"most rows": 32.0, "own": 0.028, "unseen": 0.117, "rerun": 0.0}
RUN_IDENTITY = ("engine", "device", "model")
"""An answer is like measured runs where one entry shares all of these."""
TAIL = 0.1  # share of the errors of like rows below and above an interval
NORMAL_QUANTILES = np.array(
    [-1.645, -1.036, -0.674, -0.385, -0.126, 0.126, 0.385, 0.674, 1.036, 1.645]
)
WAIT = "wait"  # kind of entry: time to the first token in a load test, the queue included
HELD_OUT_RUN = "run"  # what was held out where some rows of an entry were fitted to
LOADS = ("batch", "offline", "served")  # given together, all at once, or sent to a server
RELATED_KINDS = {kind: (kind, "request") for kind in ("decode", "prefill")}
RELATED_KINDS |= {"request": ("request", "decode")}
WEIGHT_CLASSES = dict.fromkeys(("fp8", "fp8-dynamic", "fp8-block"), "8 bit")
WEIGHT_CLASSES |= dict.fromkeys(("int4", "int4-g32", "awq", "mxfp4"), "4 bit")
WEIGHT_CLASSES |= {"fp16": "16 bit", "int8": "int8", "nvfp4": "fp4"}
"""Formats of weights whose errors are taken as alike."""
PRODUCT_CLASSES = {n: f"gemm-{n}" for n in ("fp8", "fp8-block", "int8", "int4", "awq", "nvfp4")}
PRODUCT_CLASSES |= {"fp16": "gemm", "fp8-dynamic": "gemm-fp8", "int4-g32": "gemm-int4"}
PRODUCT_CLASSES |= {"mxfp4": "experts-mxfp4"}
"""The class of kernels whose rows are of products with weights of a format; others have no rows."""
PRODUCT_CLASSES |= {name: WEIGHT_FORMATS[name].kernel for name in gguf.BASES}
SIMILAR_TECHNIQUES = {"full", "fp8"}  # techniques that run an engine's own attention kernels
WIDER_ALIKE = 1.3


@frozen
class LedgerEntry:
    """Errors of predictions on measured rows that nothing was fitted to.

    Attributes
    ----------
    engine
        Name of the stack, without its card.
    version
        Version of the engine.
    kind
        Predicted quantity, such as ``ttft`` or ``tpot``.
    device
        GPU profile; "any" if whole devices were held out of the fit.
    technique
        KV-cache technique.
    rows
        Number of measured rows.
    median, p90
        Median and 90th percentile of ``|predicted / measured - 1|``.
    low, high
        Factors on a prediction between which 80 % of measured values lie.
    held_out
        What was held out of the fit: shape, device, model or row.
    source
        Where the measurements come from.
    middle
        Factor on a prediction that half of the measured values exceed.
    load
        How requests came, one of ``LOADS``; empty for any.
    weights
        Class of weight formats, a value of ``WEIGHT_CLASSES``; empty for any.
    experts
        "dense" or "experts" (mixture of experts); empty for any.
    gpus
        "one" or "several"; empty for any.
    model
        Model that the rows are of; empty for several.
    """

    engine: str
    version: str
    kind: str
    device: str
    technique: str
    rows: int
    median: float
    p90: float
    low: float
    high: float
    held_out: str
    source: str
    middle: float = 1.0
    load: str = ""
    weights: str = ""
    experts: str = ""
    gpus: str = ""
    model: str = ""


@frozen
class KnownError:
    """The measured evidence for the error of a predicted number.

    Attributes
    ----------
    entry
        Nearest entry of the ledger; None if nothing comparable was ever measured.
    words
        The entry, and how it differs from the prediction, as a sentence.
    low, high
        Factors on a predicted time between which the true one lies with 80 % probability.
    exact
        Whether the entry is of the same engine, card and technique.
    gap
        Which property of the prediction (such as its card) no measurement has, in words.
    """

    entry: LedgerEntry | None
    words: str
    low: float
    high: float
    exact: bool
    gap: str = ""


def evidence_for(
    deployment: Deployment,
    technique: str,
    kind: str = "decode",
    entries: Sequence[LedgerEntry] | None = None,
    load: str = "",
) -> KnownError:
    """Find the ledger's entry nearest to an answer, and an 80 % interval.

    The interval is weighted conformal [1]_: a range of quantiles over the errors of all entries,
    each of which counts the more mechanisms it shares with the answer, and over the answer's own,
    which may be any. It reaches further out where few rows share them, and where no row is of the
    answer's model on its card with its engine.

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
    load
        One of ``LOADS``; empty for any.

    Returns
    -------
    KnownError
        The entry, its distance from the answer in words, and the factors of the interval.

    References
    ----------
    .. [1] R. J. Tibshirani, R. F. Barber, E. Candes and A. Ramdas, "Conformal prediction under
       covariate shift", NeurIPS 2019. https://arxiv.org/abs/1904.06019
    """
    name = technique.partition(":")[0]
    mixed = technique == MIXED_LAYERS or ";" in technique
    if kind == "prefill" and not mixed and _drafts_after_prompt(name):
        name = "full"  # which it is until the prompt is read
    if (kind, load) == ("prefill", "served"):
        kind = WAIT
    kinds = RELATED_KINDS.get(kind, (kind,))
    told = shipped() if entries is None else entries
    own = _own_entry(deployment, kind)
    told = (*own, *told)
    known = [e for e in told if e.kind in kinds and not e.held_out.startswith(ONE_DEVICE)]
    engine, device = deployment.stack.family, deployment.hardware.name
    if not known:
        return _guess(f"no measured {NUMBER_KINDS.get(kind, kind)} of any engine")

    asked_of = _mechanisms(deployment, name, kind, load)
    away = [_rank(e, asked_of) for e in known]
    least = min(away)
    nearest = merge([e for e, far in zip(known, away, strict=True) if far == least])
    plain = deployment.pp == 1 or deployment.stack.time.stage > 0  # rows of stages, too
    formats = _measured_weights(deployment, told)
    same = (
        nearest.technique == name,
        nearest.engine == engine,
        nearest.device == device,
        plain,
        formats,
    )
    measured = {e.technique for e in known}
    alike = not measured.isdisjoint(SIMILAR_TECHNIQUES) and name in SIMILAR_TECHNIQUES
    wider = WIDER_ALIKE if alike and name not in measured else 1.0
    unmeasured = 0.0 if alike or name in measured else log(TECHNIQUE_SPREAD)
    wider *= 1.0 if plain else WIDER["spread"]
    wider *= WIDER["version"] if deployment.stack.unmeasured else 1.0
    wider *= 1.0 if formats else WIDER["weights"]
    wider *= WIDER["host"] if _assumes_host(deployment, kind) else 1.0
    wider *= 1.0 if engine in {e.engine for e in shipped()} else WIDER["engine"]
    # without rows of a technique, its error is that of full KV and its own gain's
    like = _mechanisms(deployment, "full", kind, load) if unmeasured else asked_of
    counted = own or known
    ends = error_range(
        sorted_errors(counted), differences(counted, like), np.array([e.rows for e in counted])
    )
    below, above = (hypot(wider * x, unmeasured) for x in ends)
    low, high = _clip_factor(exp(-below)), _clip_factor(exp(above))
    asked = (
        f"with {name}",
        f"of {engine}",
        f"on {device}",
        f"with {deployment.parallelism.words()}",
        f"with {deployment.weights} weights",
    )
    gap = _gap(same, asked, deployment.stack.unmeasured)
    words = ". ".join(filter(None, [_words(nearest, all(same), asked), gap]))
    return KnownError(nearest, words, low, high, all(same), gap)


def _assumes_host(deployment: Deployment, kind: str) -> bool:
    """Whether weights are in the memory of a host whose speed is assumed.

    Its memory's speed may be known; that of its arithmetic, which prompts take if the CPU computes
    them, is known of no host.
    """
    source = deployment.hardware.sources.get("dram.bandwidth_Bps", "")
    way, streams = deployment.host.way, deployment.stack.offload.stream > 0
    computed = kind == "prefill" and (way == "cpu" or (way == "auto" and not streams))
    return bool(deployment.host) and (computed or "assumed" in source)


@cache
def _drafts_after_prompt(name: str) -> bool:
    """Whether a technique reads prompts as full KV does, and drafts once they are read."""
    technique = parse(name)
    return technique.exact and technique.drafts > 0


def _own_entry(deployment: Deployment, kind: str) -> tuple[LedgerEntry, ...]:
    """What a run of this card and model said of the stack, as a line of the ledger."""
    stack, run = deployment.stack, deployment.stack.checked
    of = {"prefill": "ttft", "decode": "tpot", "request": "latency"}.get(kind)
    if run is None or of is None:
        return ()
    figures = run.off.get(of) or run.off.get("latency")
    if figures is None or (run.device, run.model) != (
        deployment.hardware.name,
        deployment.model.name,
    ):
        return ()
    return (
        LedgerEntry(
            stack.family,
            stack.version,
            kind,
            run.device,
            run.technique,
            run.rows,
            *figures,
            "requests",
            stack.name,
        ),
    )


def merge(entries: Sequence[LedgerEntry]) -> LedgerEntry:
    """Merge ledger entries into one that has all their rows.

    Parameters
    ----------
    entries
        Entries that agree in what they describe, such as engine, technique and card.

    Returns
    -------
    LedgerEntry
        The entry with the most rows, with the total number of rows and with errors averaged over
        them.
    """
    rows = [e.rows for e in entries]
    median, p90 = (
        _round(float(np.average([getattr(e, name) for e in entries], weights=rows)))
        for name in ("median", "p90")
    )
    most = max(entries, key=lambda e: e.rows)
    return replace(most, rows=sum(rows), median=median, p90=p90)


def share_below(factor: float, sigma: float) -> float:
    """Compute the probability that a lognormally distributed factor with median 1 is below a limit.

    Parameters
    ----------
    factor
        The limit.
    sigma
        Standard deviation of the factor's natural logarithm.

    Returns
    -------
    float
        Probability, from 0 to 1.
    """
    return 0.5 * (1 + erf(log(factor) / (sigma * sqrt(2))))


def typical_error(deployment: Deployment, technique: str, kind: str = "decode") -> float:
    """Estimate the relative error of an answer from the nearest measured rows.

    The error is larger where those rows are of another technique. Errors due to the engine or the
    card are left out, as techniques on one machine share them.

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
    name = technique.partition(":")[0]
    if name == entry.technique:
        return entry.median
    alike = {name, entry.technique} <= SIMILAR_TECHNIQUES
    return entry.median * WIDER_ALIKE if alike else hypot(entry.median, UNKNOWN)


def _measured_weights(deployment: Deployment, told: Sequence[LedgerEntry]) -> bool:
    """Whether rows stand behind an engine's products with such weights.

    An engine without rows of any kernels has those of whole runs, which state their weights. Of a
    model with experts, theirs are most of the products.
    """
    engine, device = deployment.stack.family, deployment.hardware.name
    if deployment.weights not in PRODUCT_CLASSES:
        return False
    rows = [e for e in told if e.engine == engine and e.kind.startswith(("gemm", "experts"))]
    products = {(e.kind, e.device) for e in rows}
    kind = PRODUCT_CLASSES[deployment.weights]
    kinds = {kind, kind.replace("gemm", "experts")} if deployment.model.experts else {kind}
    measured = {card for of, card in products if of in kinds}
    elsewhere = device not in {card for _, card in products} and ANY in measured
    return not products or device in measured or elsewhere


@frozen
class Mechanisms:
    """Properties of a prediction, by which similar measurements are found in the ledger.

    Attributes
    ----------
    engine, kind, device, technique, load, weights, experts, gpus, model
        Values of the attributes of :class:`LedgerEntry` with these names.
    """

    engine: str
    kind: str
    device: str
    technique: str
    load: str
    weights: str
    experts: str
    gpus: str
    model: str


def _mechanisms(deployment: Deployment, technique: str, kind: str, load: str) -> Mechanisms:
    d = deployment
    return Mechanisms(
        d.stack.family,
        kind,
        d.hardware.name,
        technique,
        load,
        WEIGHT_CLASSES.get(d.weights, d.weights),
        "experts" if d.model.experts else "dense",
        "several" if d.gpus > 1 else "one",
        d.model.name,
    )


def error_range(
    errors: tuple[Array, NDArray[np.int64]],
    apart: Array,
    rows: Array,
    weights: Mapping[str, float] = WEIGHTS,
) -> tuple[float, float]:
    """Find the range that holds 80 % of the errors like an answer's.

    It is a range of quantiles over errors, each of which counts the more, the more mechanisms its
    entry shares with the answer, compared with the nearest entry. Unknown influences add an
    independent error on both sides: of a model, card or engine where no entry shares all three with
    the answer, and else of runs by another source or at another version.

    Parameters
    ----------
    errors
        Errors of the entries, as ``sorted_errors`` returns them.
    apart
        In which mechanisms the entries differ from the answer, as ``differences`` returns it.
    rows
        Rows of each entry.
    weights
        Weight of each mechanism, as in ``WEIGHTS``.

    Returns
    -------
    tuple[float, float]
        Lower and upper end, as logarithms of factors on a predicted time.
    """
    far = apart @ np.array([weights[name] for name in MECHANISMS])
    weight = np.exp(far.min() - far) * np.minimum(rows, weights["most rows"])
    low, high = weighted_range(*errors, weight, weights["own"])
    alike = apart[:, [MECHANISMS.index(name) for name in RUN_IDENTITY]].sum(axis=1) == 0
    unseen = weights["rerun" if alike.any() else "unseen"]
    return -hypot(min(low, 0.0), unseen), hypot(max(high, 0.0), unseen)


def sorted_errors(entries: Sequence[LedgerEntry]) -> tuple[Array, NDArray[np.int64]]:
    """Represent the distribution of errors of each ledger entry by ten equally likely values.

    Parameters
    ----------
    entries
        Lines of the ledger. (n,)

    Returns
    -------
    tuple[array, array]
        Natural logarithms of measured over predicted values, ascending, and the index of the
        entry that each belongs to. (10 n,) each
    """
    low, middle, high = (
        np.log([getattr(e, name) for e in entries])[:, None] for name in ("low", "middle", "high")
    )
    middle = np.clip(middle, low, high)
    spread = np.where(NORMAL_QUANTILES < 0, middle - low, high - middle) / WITHIN_80
    points = (middle + spread * NORMAL_QUANTILES).ravel()
    order = np.argsort(points)
    return points[order], order // NORMAL_QUANTILES.size


def weighted_range(
    points: Array, whose: NDArray[np.int64], weight: Array, own: float
) -> tuple[float, float]:
    """Find the range that holds 80 % of weighted errors and of one that may be any.

    Parameters
    ----------
    points, whose
        Errors, ascending, and the entry of each, as ``sorted_errors`` returns them.
    weight
        Of each entry, in rows.
    own
        Weight of the answer itself, half of it below all errors and half above. [rows]

    Returns
    -------
    tuple[float, float]
        Lower and upper end, as logarithms of factors on a predicted time.
    """
    share = (weight / weight.sum() / NORMAL_QUANTILES.size)[whose]
    place = np.cumsum(share) - 0.5 * share
    tail = max(TAIL - (0.5 - TAIL) * own / weight.sum(), 0.0)
    # an interval that ends at the prediction leaves that side's rest to the other one
    below = float(np.interp(0.0, points, place, left=0.0, right=1.0))
    start = min(tail, below)
    end = min(2 * tail - start, 1 - below)
    start = 2 * tail - end
    found = np.interp((start, 1 - end), place, points)
    return float(found[0]), float(found[1])


def _rank(e: LedgerEntry, asked: Mechanisms) -> tuple[bool, bool, float, bool, bool, int]:
    """What an entry does not share with an answer; the least is the one that is quoted.

    Another engine says less of an answer than another card, and that less than another number.
    """
    others = ((getattr(e, n), getattr(asked, n)) for n in ("load", "weights", "experts", "gpus"))
    return (
        asked.technique != e.technique and not {asked.technique, e.technique} <= SIMILAR_TECHNIQUES,
        e.engine != asked.engine,
        0 if e.device == asked.device else 0.5 if e.device == ANY else 1,
        asked.technique != e.technique,
        e.kind != asked.kind,
        sum(bool(own and wanted and own != wanted) for own, wanted in others),
    )


def differences(entries: Sequence[LedgerEntry], asked: Mechanisms) -> Array:
    """Compare ledger entries with a prediction, mechanism by mechanism.

    Parameters
    ----------
    entries
        Lines of the ledger.
    asked
        The prediction's mechanisms, such as its engine, model and card.

    Returns
    -------
    array
        1 where an entry differs from the prediction in a mechanism, else 0; columns are in the
        order of ``MECHANISMS``. (entries, mechanisms)
    """
    return np.array(
        [[_differs(e, asked, name) for name in MECHANISMS] for e in entries], dtype=float
    )


def _differs(e: LedgerEntry, asked: Mechanisms, name: str) -> bool:
    if name == "technique":
        alike = {asked.technique, e.technique} <= SIMILAR_TECHNIQUES
        return not (alike or asked.technique == e.technique)
    if name in ("kind", "prefill"):  # a prompt's time tells of others what they tell of it
        return e.kind != asked.kind and (name == "prefill") == ("prefill" in (e.kind, asked.kind))
    own, wanted = getattr(e, name), getattr(asked, name)
    return bool(own and wanted and own not in (wanted, ANY))


def _words(e: LedgerEntry, exact: bool, asked: tuple[str, ...]) -> str:
    counted = RUN_WORDS.get(e.kind, ("run", "runs"))[e.rows != 1]
    rows = f"{e.rows:,} held-out {counted}"
    where = "other GPUs" if e.device == ANY else e.device
    error = f"median error {format_plain(100 * e.median, 2)} %"
    if exact:
        return f"validated on {rows} {asked[1]} {asked[0]} on this GPU ({error})"
    return f"validated on {rows} of {e.engine} with {e.technique} on {where} ({error})"


def _gap(same: tuple[bool, ...], asked: tuple[str, ...], unmeasured: str) -> str:
    none = [words for words, known in zip(asked, same, strict=True) if not known]
    told = [f"none was measured {' or '.join(none)}"] if none else []
    told += [unmeasured] if unmeasured else []
    if not told:
        return ""
    gap = "; ".join(told)
    return f"{gap[0].upper()}{gap[1:]}, so the prediction interval is wider"


def _guess(why: str) -> KnownError:
    return KnownError(None, f"{why}; the interval is a guess", 1 / 2, 2.0, False)


def _clip_factor(factor: float) -> float:
    return float(min(WIDEST, max(1 / WIDEST, factor)))


def _round(value: float) -> float:
    return float(f"{value:.4g}")


@cache
def shipped() -> tuple[LedgerEntry, ...]:
    """Return the ledger that comes with kvsim."""
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
    agree, and for whole runs also the source.

    Parameters
    ----------
    path
        The ledger; it is created if there is none.
    entries
        The entries to add.
    """

    def key(e: LedgerEntry) -> tuple[str, ...]:
        told = (e.engine, e.version, e.kind, e.device, e.technique, e.held_out)
        whose = e.source if e.held_out == HELD_OUT_RUN else ""  # runs of several share the rest
        return (*told, e.load, e.weights, e.experts, e.gpus, e.model, whose)

    kept = {}
    if path.exists():
        with own_output():
            rows = [row for _, row in read_records(path, TABLE)]
        kept = {key(e): e for e in map(_entry, rows)}
    kept |= {key(e): e for e in entries}
    replace_text(path, format_ledger(kept.values()))


PLACEMENT_TECHNIQUES = {"full", "offload", "kvpr", "flexgen", "fastdecode", "place"}
"""Techniques that move the same ops to other places: only full KV's error is between them."""


def known_difference(deployment: Deployment, one: Technique, other: Technique) -> float:
    """Return the known relative error of a comparison between two techniques.

    Techniques that differ from full KV only in the memory of the cache are taken to err as full KV
    does, unless they are compared with full KV itself.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    one, other
        The techniques.

    Returns
    -------
    float
        The larger typical error of the two on rows that no fit saw; 0.1 is 10 %.
    """
    plain = FULL in {one.name, other.name}
    names = {FULL if _only_places(t) and not plain else t.name for t in (one, other)}
    return max(typical_error(deployment, name) for name in names)


def _only_places(technique: Technique) -> bool:
    """Whether a technique, or each of its layers, only moves caches and weights."""
    return technique.exact and {term.name for term in technique.terms} <= PLACEMENT_TECHNIQUES
