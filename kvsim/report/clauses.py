"""Parts of sentences about a prediction: its times, its memory, and how it compares."""

from kvsim.prediction.generate import Prediction
from kvsim.report import units
from kvsim.report.json import Row
from kvsim.report.quantities import QUANTITIES, compared_by

SAME = 0.02  # relative difference below which two techniques are called equal


def brief(prediction: Prediction) -> str:
    """TPOT and TTFT without their ranges."""
    ttft = f"TTFT {units.seconds(float(prediction.ttft_s[0]))}"
    if prediction.generate == 1:
        return ttft
    return f"TPOT {units.seconds(float(prediction.tpot_s[0]))}, {ttft}"


def times_of(row: Row) -> str:
    """TTFT, TPOT and throughput of a row, as a clause."""
    parts = [f"TTFT {within(row, 'ttft_s')}"]
    if row["tpot_s"]:
        parts.append(f"TPOT {within(row, 'tpot_s')}")
    rate = compared_by(row)
    parts.append(f"{units.rate(row[rate])} {QUANTITIES[rate].heading}")
    return ", ".join(parts)


def within(row: Row, name: str) -> str:
    """A time, with its range where one is known."""
    told = units.seconds(row[name])
    known = row["ranges"].get(name)
    if known is None:
        return told
    return f"{told} ({units.between(known['low'], known['high'])})"


def memory_of(row: Row) -> str:
    """Memory of the GPU, and of the host if any is used."""
    if not row["host_bytes"]:
        return f"{units.size(row['gpu_bytes'])} of GPU memory"
    return (
        f"{units.size(row['gpu_bytes'])} of GPU and {units.size(row['host_bytes'])} of host memory"
    )


def rate_of(row: Row) -> float:
    """The rate that rows are compared by. [tokens/s]"""
    return float(row[compared_by(row)])


def ratio(row: Row, full: Row) -> float:
    """Speed relative to full KV."""
    return rate_of(row) / rate_of(full)


def against(row: Row, full: Row, named: str = "") -> str:
    """How a technique compares with full KV, as the rest of a sentence.

    Parameters
    ----------
    named : what it is compared with, where the sentence does not say it already.
    """
    relative = ratio(row, full)
    as_it, than_it = (f" {word} {named}" if named else "" for word in ("as", "than"))
    if not row["fits"]:
        return "does not fit"
    if abs(relative - 1) < SAME:
        return f"is as fast{as_it}"
    if relative > 1:
        return f"is {units.times(relative)} as fast{as_it}"
    slower = units.times(1 / relative) if relative < 1 / 1.5 else units.percent(1 - relative)
    return f"is {slower} slower{than_it}"


def saves(row: Row, full: Row, of: str = " of GPU memory") -> str:
    """How much less GPU memory a technique takes than full KV, from one per cent on.

    Parameters
    ----------
    of : of what, where the sentence does not say it already.
    """
    saved = full["gpu_bytes"] - row["gpu_bytes"]
    if not row["fits"] or saved <= 0.01 * full["gpu_bytes"]:
        return ""
    return f" and saves {units.size(saved)}{of}"
