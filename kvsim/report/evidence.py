"""What was measured on a card, in words: which rows a result may lean on, and which it may not."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from math import log

import numpy as np

from kvsim.evidence import published
from kvsim.evidence.ledger import (
    ANY,
    GAP_END,
    NUMBER_KINDS,
    LedgerEntry,
    evidence_for,
    merge,
    name_holdout,
    shipped,
)
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware
from kvsim.machines.profiles import load_hardware
from kvsim.prediction.generate import Prediction
from kvsim.report import units
from kvsim.report.json import Row
from kvsim.techniques.technique import Technique

ASSUMED = "assumed"
INTERVAL = "80 % prediction interval"
ISO_DATE = re.compile(r"20\d\d-\d\d-\d\d")
TIME_KINDS = set(NUMBER_KINDS) - {"memory"}
MAX_LISTED = 3  # engines and techniques whose errors on a card are told
HOST = {
    "memory.host_capacity_B": "host memory size",
    "dram.bandwidth_Bps": "host memory bandwidth",
    "compute.cpu_fp32_FLOPps": "CPU arithmetic",
    "disk.read_Bps": "read rate of the drive",
    "disk.write_Bps": "write rate of the drive",
}
PROBE_TOKENS = 1024  # tokens of a request that shows whether a technique keeps anything on the host
TIME_SUFFIXES = ("_tok_s", "_s", "_ms", "speedup")
NOT_MODELLED_SERVING = (
    "the quality of lossy techniques",
    "power caps, thermal throttling, and other jobs on the GPU or its host",
    "memory fragmentation, and NUMA placement",
)
NOT_MODELLED = ("arrivals over time, and unequal lengths within a batch", *NOT_MODELLED_SERVING)


def newest_measurement(deployments: Iterable[Deployment]) -> str | None:
    """Find the date of the newest measurement of hardware profiles and stacks.

    Parameters
    ----------
    deployments
        Deployments whose profiles and stacks count.

    Returns
    -------
    As 2026-11-22; None where all of their numbers are data sheets'. Dates of prices do not count.
    """
    dates: list[str] = []
    for machine, stack in {id(d): (d.hardware, d.stack) for d in deployments}.values():
        dates += [machine.date, stack.date, *ISO_DATE.findall(f"{stack.source} {stack.fit}")]
        for key, source in machine.sources.items():
            dates += [] if key.startswith("price") else ISO_DATE.findall(source)
    return max(filter(None, dates), default=None)


@cache
def _rows() -> tuple[tuple[str, str, str], ...]:
    """Card, technique and stack of every published row about time."""
    return tuple(
        (row["hardware"], row["technique"], row["stack"])
        for name in published.papers()
        for row in published.read_cells(name)
        if row["metric"].endswith(TIME_SUFFIXES) and row["use"] != "anomaly"
    )


def time_ranges(
    deployment: Deployment,
    technique: str,
    ttft: float | None,
    tpot: float | None,
    load: str = "batch",
) -> Row:
    """Find where times lie with 80 % probability, by the ledger's nearest entry.

    Empty where nothing of the kind was ever measured: a guess is no range.

    Parameters
    ----------
    deployment
        Model, hardware and stack.
    technique
        Name of the technique.
    ttft
        Predicted time to the first token. [s]
    tpot
        Predicted time per token. [s]
    load
        How requests come, as the ledger calls it.

    Returns
    -------
    Row
        ``low`` and ``high`` by contract name. [s]
    """
    found: Row = {}
    for name, kind, value in (("ttft_s", "prefill", ttft), ("tpot_s", "decode", tpot)):
        known = evidence_for(deployment, technique, kind, load=load)
        if known.entry is not None and value:
            found[name] = {"low": value * known.low, "high": value * known.high}
    return found


def memory_range(prediction: Prediction) -> Row:
    """Find where peak memory lies with 80 % probability, where such runs were measured.

    The driver's context is not in what was measured: it is added on either side.

    Parameters
    ----------
    prediction
        Prediction of one batch.

    Returns
    -------
    Row
        ``low`` and ``high`` of ``gpu_bytes``; empty without rows of that engine, card and
        technique. [B]
    """
    known = evidence_for(prediction.deployment, prediction.technique.name, "memory")
    if not known.exact:
        return {}
    context = float(np.ravel(prediction.buffers["gpu"].get("context", 0.0))[0])
    peak = float(prediction.gpu_bytes[0]) - context
    return {"gpu_bytes": {"low": peak * known.low + context, "high": peak * known.high + context}}


def list_measurements(deployment: Deployment, technique: str, load: str = "") -> list[str]:
    """List what was measured of a technique on a card, or where the nearest rows are.

    Parameters
    ----------
    deployment
        Model, hardware and stack.
    technique
        Name of the technique.
    load
        How requests come, as the ledger calls it.

    Returns
    -------
    list of str
        Sentences.
    """
    return [*_ledger(deployment, technique, load), *_published(deployment, technique)]


def describe_parallelism(deployment: Deployment) -> list[str]:
    """Say what answers for several ranks, stages or expert groups assume.

    Parameters
    ----------
    deployment
        Deployment with its degrees of parallelism.

    Returns
    -------
    list of str
        One sentence; empty on a single GPU.
    """
    notes = list(deployment.parallelism.notes(deployment.domain, deployment.stack.sums.skew))
    return [f"Assumed: {'; '.join(notes)}."] if notes else []


def _ledger(deployment: Deployment, technique: str, load: str) -> list[str]:
    """Two lines: the intervals of both times, and the nearest held-out runs with their errors."""
    both = {
        name: evidence_for(deployment, technique, kind, load=load)
        for name, kind in (("TTFT", "prefill"), ("TPOT", "decode"))
    }
    known = {name: found for name, found in both.items() if found.entry is not None}
    if not known:
        return []
    ranges = ", ".join(f"{name} {x.low:.2f} to {x.high:.2f}" for name, x in known.items())
    about: dict[str, dict[str, list[str]]] = {}
    gaps = {name: found.gap.removesuffix(GAP_END) for name, found in known.items()}
    alike = len({gap for gap in gaps.values() if gap}) < 2
    for name, found in known.items():
        e = found.entry
        if e is not None:
            where = "other GPUs" if e.device == ANY else e.device
            error = "" if about else "median error "
            error += f"{units.format_number(100 * e.median, 2)} %"
            where += "" if alike or not gaps[name] else f" ({gaps[name]})"
            cards = about.setdefault(
                f"{name_holdout(e)} runs of {e.engine} with {e.technique}: ", {}
            )
            cards.setdefault(where, []).append(f"{e.rows:,} {name}s ({error})")
    told = "; ".join(
        which + ", ".join(f"{' and '.join(runs)} on {where}" for where, runs in cards.items())
        for which, cards in about.items()
    )
    lacking = next(filter(None, gaps.values()), "")
    if lacking and alike:
        told += f"; {lacking}{GAP_END}"
    elif lacking:
        told += "; prediction intervals are wider where runs of the same kind are missing"
    return [
        f"{INTERVAL}: {ranges} times the prediction.",
        f"{told[0].upper()}{told[1:]}.",
    ]


def _published(deployment: Deployment, technique: str) -> list[str]:
    card = deployment.hardware.name
    here = [name for hardware, name, _ in _rows() if hardware == card]
    own = Counter(stack for *what, stack in _rows() if what == [card, technique])
    if own:
        told = ", ".join(f"{count} with {stack}" for stack, count in own.most_common())
        other = "" if deployment.stack.name in own else f"; none with {deployment.stack.name}"
        return [f"Published timings of {technique} on {card} (`kvsim reproduce`): {told}{other}."]
    if here:
        others = ", ".join(f"{n} of {name}" for name, n in Counter(here).most_common(3))
        return [f"No published timing of {technique} on {card}; others there: {others}."]
    if _held_out(card):
        return []  # the ledger's lines say what
    near = _find_nearest_card(deployment.hardware)
    count = sum(hardware == near for hardware, *_ in _rows())
    kernels = ", only kernels" if deployment.stack.name.endswith(f"@{card}") else ""
    return [
        f"No time per token was measured on {card}{kernels}; the closest GPU with any is "
        f"{_called(near)} ({count} published timings). `kvsim calibrate` measures yours."
    ]


def describe_accuracy(machine: Hardware) -> str:
    """Say how accurate predictions are known to be on a card.

    Parameters
    ----------
    machine
        Hardware profile.

    Returns
    -------
    str
        Sentences on errors of held-out runs, whatever the technique.
    """
    here = _held_out(machine.name)
    if here:
        return (
            f"On {machine.name}, on held-out runs: {_errors(here)}. Other engines and "
            f"techniques were not measured there; `calibrate --from-run` fits to a log of your "
            f"server."
        )
    return (
        f"Nothing was measured on {machine.name}. Held-out errors on "
        f"other cards: {_errors(_held_out(ANY))}. The closest card with published times is "
        f"{_called(_find_nearest_card(machine))}. `kvsim calibrate` measures this one, "
        f"`calibrate --from-run` fits to a log of your server."
    )


def _held_out(device: str) -> list[LedgerEntry]:
    """End-to-end errors of a card on held-out runs, the most rows first."""
    found: dict[tuple[str, str], list[LedgerEntry]] = {}
    for e in shipped():
        if e.device == device and e.kind in TIME_KINDS:
            found.setdefault((e.engine, e.technique), []).append(e)
    return sorted(map(merge, found.values()), key=lambda e: -e.rows)


def _errors(entries: Sequence[LedgerEntry]) -> str:
    """Errors as a list in a sentence."""
    told = [
        f"{e.engine} with {e.technique} is off by {units.percent(e.median)} (median) and "
        f"{units.percent(e.p90)} (90th percentile) on {e.rows:,} numbers"
        for e in entries[:MAX_LISTED]
    ]
    return "; ".join(told)


def describe_technique_rows(technique: str) -> str:
    """Say which cards have published times of a technique.

    Parameters
    ----------
    technique
        Name of the technique.

    Returns
    -------
    str
        One sentence.
    """
    cards = Counter(hardware for hardware, name, _ in _rows() if name == technique)
    if not cards:
        return f"No published time of {technique} is compared with predictions."
    told = ", ".join(f"{count} on {card}" for card, count in cards.most_common())
    return f"Published times compared with predictions by `kvsim reproduce`: {told}."


def _find_nearest_card(hardware: Hardware) -> str:
    """Find the card with measured rows nearest in bandwidth and arithmetic."""

    def distance(name: str) -> float:
        other = load_hardware(name)
        bandwidth = log(other.links["hbm"].bandwidth / hardware.links["hbm"].bandwidth)
        return abs(bandwidth) + abs(log(other.flops["fp16"] / hardware.flops["fp16"]))

    return min({name for name, *_ in _rows()}, key=distance)


def _called(card: str) -> str:
    """A card's name, or whose it is where its paper does not name it."""
    title = load_hardware(card).title
    return f"the {title}" if "paper" in title else card


def list_assumptions_of_techniques(
    deployment: Deployment, techniques: Iterable[Technique], caches: bool = False
) -> list[str]:
    """List what is assumed of a host where something is kept on it.

    Parameters
    ----------
    deployment
        Model, hardware and stack.
    techniques
        Techniques, each of which may keep a part of the cache on the host.
    caches
        Whether prefixes are kept there too.

    Returns
    -------
    list of str
        Clauses, each once.
    """
    lines: dict[str, None] = {}
    for technique in techniques:
        kept = Prediction(technique, deployment, np.ones(1), PROBE_TOKENS, PROBE_TOKENS).host_bytes
        rests = float(np.max(kept)) + caches
        lines |= dict.fromkeys(list_assumptions(deployment.hardware, rests, ""))
    return list(lines)


def list_assumptions(hardware: Hardware, host_bytes: float, bound_by: str) -> list[str]:
    """Numbers of the host that a result rests on and that are assumed, not known.

    Parameters
    ----------
    host_bytes : host memory that the result needs. [B]
    bound_by : what its busiest stream spends most of its time on.
    """
    rests = {
        "memory.host_capacity_B": host_bytes > 0,
        "dram.bandwidth_Bps": bound_by == "host memory bandwidth",
        "compute.cpu_fp32_FLOPps": bound_by == "host arithmetic",
        "disk.read_Bps": bound_by == "reads from the disk",
        "disk.write_Bps": bound_by == "writes to the disk",
    }
    return [
        f"{HOST[key]}, of {hardware.name}'s host: "
        f"{hardware.sources.get(key, 'a guess').removeprefix('assumed: ')}"
        for key, needed in rests.items()
        if needed and ASSUMED in hardware.sources.get(key, ASSUMED).lower()
    ]


def describe_basis(basis: Row) -> str:
    """Say what the numbers rest on, in one sentence.

    Parameters
    ----------
    basis
        Basis of an answer, as ``--json`` has it.

    Returns
    -------
    str
        Kind, hardware, stack and the error known for it.
    """
    kind = " ".join(filter(None, (basis["kind"], basis["calibrated"])))
    why = f": {basis['chosen']}" if basis["chosen"] else ""
    return (
        f"Basis: {kind}; hardware {basis['hardware']}, stack {basis['stack']}{why}. "
        f"Held-out error of this stack: {basis['error'] or 'not measured yet'}"
    )


def merge_notes(rows: Sequence[tuple[str, Row]]) -> list[str]:
    """Merge the notes of rows, so that each is said once.

    A note comes after the rows that it is about, unless it is about all of them.

    Parameters
    ----------
    rows
        Labels of rows, and rows with ``notes``.

    Returns
    -------
    Texts that follow the word Note: a colon and the note, or rows in brackets before that.
    """
    about: dict[str, list[str]] = {}
    for label, row in rows:
        for note in row["notes"]:
            about.setdefault(note, []).append(label)
    lines = []
    for note, labels in sorted(about.items(), key=lambda item: -len(item[1])):
        name = labels[0].partition(", ")[0]
        if labels == [label for label, _ in rows if label.partition(", ")[0] == name]:
            several = name  # at all its points
        else:
            several = f"{labels[0]} and {len(labels) - 1} more" if labels[1:] else labels[0]
        which = "" if len(labels) == len(rows) else f" ({several})"
        lines.append(f"{which}: {note}.")
    return lines
