"""Sentences about measured errors, published timings and assumptions behind a result."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from math import log

import numpy as np

from kvsim.evidence import published
from kvsim.evidence.ledger import (
    ANY,
    NUMBER_KINDS,
    LedgerEntry,
    evidence_for,
    merge,
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
SEVERAL_GAPS = "They are of another engine, technique or GPU, so the prediction interval is wider"
ASSUMED_PREFIX = re.compile("^assumed( host)?: ")
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
    """Return the date of the newest measurement in the hardware profiles and stacks used.

    Parameters
    ----------
    deployments
        The deployments that were predicted.

    Returns
    -------
    str or None
        ISO date; None if all numbers come from data sheets. Dates of prices are ignored.
    """
    dates: list[str] = []
    for machine, stack in {id(d): (d.hardware, d.stack) for d in deployments}.values():
        dates += [machine.date, stack.date, *ISO_DATE.findall(f"{stack.source} {stack.fit}")]
        for key, source in machine.sources.items():
            dates += [] if key.startswith("price") else ISO_DATE.findall(source)
    return max(filter(None, dates), default=None)


@cache
def _rows() -> tuple[tuple[str, str, str], ...]:
    """GPU, technique and stack of every published timing."""
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
    """Return 80 % prediction intervals from the measured errors of similar predictions.

    Parameters
    ----------
    deployment
        Model, hardware and stack.
    technique
        Name of the technique.
    ttft
        Predicted time to the first token. [s]
    tpot
        Predicted time per output token. [s]
    load
        ``"batch"`` for a single batch, or ``"served"`` for a server under load.

    Returns
    -------
    Row
        ``low`` and ``high`` under ``ttft_s`` and ``tpot_s`` [s]; empty if there is no measurement
        of that kind.
    """
    found: Row = {}
    for name, kind, value in (("ttft_s", "prefill", ttft), ("tpot_s", "decode", tpot)):
        known = evidence_for(deployment, technique, kind, load=load)
        if known.entry is not None and value:
            found[name] = {"low": value * known.low, "high": value * known.high}
    return found


def memory_range(prediction: Prediction) -> Row:
    """Return the 80 % prediction interval of peak GPU memory.

    Parameters
    ----------
    prediction
        A prediction for one batch.

    Returns
    -------
    Row
        ``low`` and ``high`` under ``gpu_bytes`` [B]; empty if memory was not measured with this
        engine, GPU and technique.
    """
    known = evidence_for(prediction.deployment, prediction.technique.name, "memory")
    if not known.exact:
        return {}
    context = float(np.ravel(prediction.buffers["gpu"].get("context", 0.0))[0])
    peak = float(prediction.gpu_bytes[0]) - context
    return {"gpu_bytes": {"low": peak * known.low + context, "high": peak * known.high + context}}


def list_measurements(deployment: Deployment, technique: str, load: str = "") -> list[str]:
    """Write the prediction intervals, and the held-out measurements that they come from.

    Parameters
    ----------
    deployment
        Model, hardware and stack.
    technique
        Name of the technique.
    load
        ``"batch"`` for a single batch, or ``"served"`` for a server under load.

    Returns
    -------
    list of str
        Sentences with numbers of runs and errors.
    """
    both = {
        name: evidence_for(deployment, technique, kind, load=load)
        for name, kind in (("TTFT", "prefill"), ("TPOT", "decode"))
    }
    known = {name: found for name, found in both.items() if found.entry is not None}
    if not known:
        return []
    ranges = ", ".join(f"{name} {x.low:.2f} to {x.high:.2f}" for name, x in known.items())
    about: dict[str, list[str]] = {}
    stack = deployment.stack
    if stack.basis == "calibrated" and stack.family not in {e.engine for e in shipped()}:
        own = f"Held-out error of stack {stack.name}: {stack.error or 'not measured'}."
        return [f"{INTERVAL}: {ranges} times the prediction.", own]
    for name, found in known.items():
        if (e := found.entry) is not None:
            error = f"{'' if about else 'median error '}{units.format_number(100 * e.median, 2)} %"
            where = "other GPUs" if e.device == ANY else e.device
            kind = f"of {e.engine} with {e.technique} on {where}"
            about.setdefault(kind, []).append(f"{e.rows:,} {name}s ({error})")
    told = "; ".join(f"{' and '.join(counts)} {kind}" for kind, counts in about.items())
    gaps = {found.gap for found in known.values() if found.gap}
    closest = "Closest held-out measurements" if gaps else "Held-out measurements"
    wider = f" {gaps.pop()}." if len(gaps) == 1 else f" {SEVERAL_GAPS}." if gaps else ""
    return [f"{INTERVAL}: {ranges} times the prediction.", f"{closest}: {told}.{wider}"]


def describe_accuracy(machine: Hardware) -> str:
    """Describe the accuracy of predictions on a GPU, for all techniques.

    Parameters
    ----------
    machine
        The hardware profile.

    Returns
    -------
    str
        Sentences with errors on held-out runs.
    """
    here = _held_out(machine.name)
    fit = "`kvsim calibrate --from-run` fits a stack to a log of your server."
    if here:
        there = "Other engines and techniques were not measured there"
        return f"Errors on {machine.name}, on held-out measurements: {here}. {there}; {fit}"
    return (
        f"Nothing was measured on {machine.name}. Errors on other GPUs, on held-out measurements: "
        f"{_held_out(ANY)}. The closest GPU with published timings is "
        f"{_called(_find_nearest_card(machine))}. `kvsim calibrate` measures this GPU; {fit}"
    )


def _held_out(device: str) -> str:
    """End-to-end errors of a card on held-out runs, the most rows first."""
    found: dict[tuple[str, str], list[LedgerEntry]] = {}
    for e in shipped():
        if e.device == device and e.kind in TIME_KINDS:
            found.setdefault((e.engine, e.technique), []).append(e)
    told = [
        f"{e.engine} with {e.technique}: median {units.percent(e.median)}, 90th percentile "
        f"{units.percent(e.p90)} of {e.rows:,} measurements"
        for e in sorted(map(merge, found.values()), key=lambda e: -e.rows)[:MAX_LISTED]
    ]
    return "; ".join(told)


def describe_technique_rows(technique: str) -> str:
    """Describe on which GPUs published timings of a technique are compared with predictions.

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
        return f"No timing of {technique} is published."
    told = ", ".join(f"{count} on {card}" for card, count in cards.most_common())
    return f"Published timings (`kvsim reproduce` compares them with predictions): {told}."


def _find_nearest_card(hardware: Hardware) -> str:
    """Find the GPU with published timings nearest in bandwidth and arithmetic rate."""

    def distance(name: str) -> float:
        other = load_hardware(name)
        bandwidth = log(other.links["hbm"].bandwidth / hardware.links["hbm"].bandwidth)
        return abs(bandwidth) + abs(log(other.flops["fp16"] / hardware.flops["fp16"]))

    return min({name for name, *_ in _rows()}, key=distance)


def _called(card: str) -> str:
    """Return the name of a GPU, or whose GPU it is where a paper does not name it."""
    title = load_hardware(card).title
    return f"the {title}" if "paper" in title else card


def list_assumptions_of_techniques(
    deployment: Deployment, techniques: Iterable[Technique], caches: bool = False
) -> list[str]:
    """List assumed properties of the host that matter to techniques which use host memory.

    Parameters
    ----------
    deployment
        Model, hardware and stack.
    techniques
        The techniques.
    caches
        Whether prefix caches are kept in host memory as well.

    Returns
    -------
    list of str
        Clauses without duplicates.
    """
    kept = [
        Prediction(t, deployment, np.ones(1), PROBE_TOKENS, PROBE_TOKENS).host_bytes
        for t in techniques
    ]
    most = max((float(np.max(size)) for size in kept), default=0.0)
    return list_assumptions(deployment.hardware, most + caches, "") if kept else []


def list_assumptions(hardware: Hardware, host_bytes: float, bound_by: str) -> list[str]:
    """List properties of the host that the result depends on and that were not measured.

    Parameters
    ----------
    hardware
        The hardware profile.
    host_bytes
        Host memory that is needed. [B]
    bound_by
        The bottleneck.

    Returns
    -------
    list of str
        Clauses.
    """
    rests = {
        "memory.host_capacity_B": host_bytes > 0,
        "dram.bandwidth_Bps": bound_by == "host memory bandwidth",
        "compute.cpu_fp32_FLOPps": bound_by == "host arithmetic",
        "disk.read_Bps": bound_by == "reads from the disk",
        "disk.write_Bps": bound_by == "writes to the disk",
    }
    return [
        f"{HOST[key]} of {hardware.name}: "
        f"{ASSUMED_PREFIX.sub('', hardware.sources.get(key, 'a guess'))}"
        for key, needed in rests.items()
        if needed and ASSUMED in hardware.sources.get(key, ASSUMED).lower()
    ]


ONLY_STACK = (
    " from the machines on which the stack was calibrated, as this hardware profile was not "
    "measured on any of them"
)
OTHER_MACHINES = " from other cards, or read from the engine's code"


def describe_basis(basis: Row) -> str:
    """Describe the hardware profile and the stack that a result is based on.

    Parameters
    ----------
    basis
        The field ``basis`` of the JSON output.

    Returns
    -------
    str
        One sentence, with the held-out error of the stack.
    """
    kind = " ".join(filter(None, (basis["kind"], basis["calibrated"])))
    if kind == "carried over":
        only_stack = basis["stack"].endswith("(calibrated)")
        kind += ONLY_STACK if only_stack else OTHER_MACHINES
    why = f": {basis['chosen']}" if basis["chosen"] else ""
    return (
        f"Basis: {kind}; hardware {basis['hardware']}, stack {basis['stack']}{why}. "
        f"Error of this stack: {basis['error'] or 'not measured yet'}"
    )


def merge_notes(rows: Sequence[tuple[str, Row]]) -> list[str]:
    """Merge equal notes of several rows.

    Parameters
    ----------
    rows
        Pairs of a label and a row with ``notes``.

    Returns
    -------
    list of str
        Each note after a colon, preceded by the labels in brackets if it concerns only some rows.
    """
    about: dict[str, list[str]] = {}
    for label, row in rows:
        for note in row["notes"]:
            about.setdefault(note, []).append(label)
    lines = []
    for note, labels in sorted(about.items(), key=lambda item: -len(item[1])):
        names = list(dict.fromkeys(label.partition(", ")[0] for label in labels))
        if labels == [label for label, _ in rows if label.partition(", ")[0] in names]:
            several = ", ".join(names)  # at all their points
        else:
            several = f"{labels[0]}, and {len(labels) - 1} more" if labels[1:] else labels[0]
        which = "" if len(labels) == len(rows) else f" ({several})"
        lines.append(f"{which}: {note}.")
    return lines
