"""A simulated trace as a table, and every request's times as Parquet."""

from collections.abc import Callable

import numpy as np

from kvsim.evidence.leastsquares import Fit
from kvsim.graph import Array
from kvsim.machines.basis import basis
from kvsim.report.rows import Row, number
from kvsim.report.tables import console, print_basis, print_settings, short, short_names, table
from kvsim.serving.outcome import Outcome
from kvsim.serving.overtime import over_time

Cell = Callable[[Row], str]


def show(rows: list[Row], trace: str, checked: bool) -> None:
    """Each technique's times, then its throughput, use of the machine and price."""
    out = console()
    first = rows[0]
    out.print(f"{trace}: {first['requests']:,} requests, replicas: {first['replicas']}")
    names = short_names([row["technique"] for row in rows])
    for columns in (TIMES, USE):
        heads = {"technique": "left"} | dict.fromkeys(columns, "right")
        body = [
            [names[row["technique"]], *(value(row) for value in columns.values())] for row in rows
        ]
        out.print(table(heads, body))
        out.print()
    out.print("Shares are of the whole run; memory, arithmetic and links of their full rates.")
    print_settings(out, names)
    for row in rows:
        name = names[row["technique"]]
        if row["refused"] or row["unfinished"]:
            which = ", ".join(map(str, row["refused_rows"]))
            several = ", ..." if row["refused"] > len(row["refused_rows"]) else ""
            out.print(
                f"{name}: {row['refused']} refused, larger than the KV cache (in order of arrival "
                f"number {which}{several}); {row['unfinished']} unfinished"
            )
        worst = ", ".join(f"{kind} {100 * e:.2g} %" for kind, e in row["table_error"].items())
        out.print(f"{name}: tables against direct evaluation, at worst: {worst}")
    if checked:
        out.print("Checked: nothing lost, nothing served early, memory never exceeded.")
    print_basis(out, first["basis"])


def _times(title: str, key: str, unit: float, name: str) -> dict[str, Cell]:
    """Columns with the median and the 99th percentile of a time."""

    def cell(quantile: str) -> Cell:
        return lambda row: _in(row[key][quantile], unit)

    return {f"{title}\n{quantile} {name}": cell(quantile) for quantile in ("p50", "p99")}


def _in(value: float | None, unit: float) -> str:
    return "-" if value is None else short(value / unit)


def _percent(key: str) -> Cell:
    return lambda row: "-" if row[key] is None else short(100 * row[key], 3)


def _used(*resources: str) -> Cell:
    """Shares of some resources, one after another."""
    return lambda row: "/".join(short(100 * row["utilisation"][name], 3) for name in resources)


TIMES: dict[str, Cell] = {
    "done": lambda row: str(row["finished"]),
    **_times("TTFT", "ttft_s", 1e-3, "ms"),
    **_times("TPOT", "tpot_s", 1e-3, "ms"),
    **_times("gap", "gap_s", 1e-3, "ms"),
    **_times("queue", "queue_s", 1e-3, "ms"),
    **_times("e2e", "latency_s", 1.0, "s"),
}
USE: dict[str, Cell] = {
    "tok/s": lambda row: short(row["output_tok_s"]),
    "good\nreq/s": lambda row: short(row["goodput_per_s"]),
    "busy\n%": _percent("busy_share"),
    "memory\n%": _used("hbm"),
    "arith.\n%": _used("compute"),
    "H2D/D2H\n%": _used("h2d", "d2h"),
    "KV at\nmost %": _percent("kv_peak_share"),
    "pre-\nempted": lambda row: str(row["preemptions"]),
    "prefix\nhits %": _percent("prefix_hit_share"),
    "USD": lambda row: short(row["usd"], 3),
    "USD/\nMtok": lambda row: short(row["usd_per_million_tokens"], 3),
}
"""Columns of the two tables: heading to what it shows of a row."""


def result(outcome: Outcome) -> Row:
    """All that reports need of a run, as JSON knows it."""
    times = {"ttft_s": outcome.ttft_s, "tpot_s": outcome.tpot_s, "latency_s": outcome.latency_s}
    return {
        "row": outcome.summary() | {"basis": basis(outcome.run.costs.deployment)},
        "over_time": {k: _brief(v) for k, v in over_time(outcome.run).items()},
        "quantiles": {name: _brief(_quantiles(values)) for name, values in times.items()},
    }


def _quantiles(values: Array) -> Array:
    """Of the values that there are: the least, then every half percent, the largest."""
    known = values[np.isfinite(values)]
    return np.quantile(known, np.linspace(0, 1, 201)) if known.size else known


def _brief(values: Array) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def fit_row(
    fit: Fit, seen: dict[str, float], unseen: dict[str, float], first: int, count: int
) -> Row:
    """A fit to a run under its contract names."""
    return {
        "fitted_requests": first,
        "checked_requests": count - first,
        "numbers": {
            key: {"value": value, "error": number(fit.errors[key]), "known": key not in fit.unknown}
            for key, value in fit.values.items()
        },
        "confused": [list(pair) for pair in fit.confused],
        "error_fitted": seen,
        "error_not_seen": unseen,
    }


def show_fit(answer: Row, path: str) -> None:
    """Fitted numbers, what the run cannot tell, and the errors."""
    out = console()
    body = [
        [key, short(n["value"]), short(n["error"]), "" if n["known"] else "not determined"]
        for key, n in answer["numbers"].items()
    ]
    columns = {"number": "left", "fitted": "right", "+-": "right", "": "left"}
    out.print(table(columns, body))
    for pair in answer["confused"]:
        out.print(f"The run cannot tell {pair[0]} and {pair[1]} apart.")
    heads = {"predicted / measured - 1": "left", "fitted %": "right", "not seen %": "right"}
    body = [
        [name, f"{100 * value:+.1f}", f"{100 * answer['error_not_seen'][name]:+.1f}"]
        for name, value in answer["error_fitted"].items()
    ]
    out.print(table(heads, body))
    out.print(f"Written to {path}; use it with --stack {path}")
