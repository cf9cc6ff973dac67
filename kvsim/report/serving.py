"""A simulated trace as a table, and every request's times as Parquet."""

from collections.abc import Callable
from pathlib import Path

from kvsim.calibrate import Fit
from kvsim.report.rows import Row, number
from kvsim.report.tables import console, print_basis, print_settings, short, short_names, table
from kvsim.serving.simulate import Run

Cell = Callable[[Row], str]


def show(rows: list[Row], trace: str, checked: bool) -> None:
    """Each technique's times, then its throughput, use of the machine and price."""
    out = console()
    first = rows[0]
    out.print(f"{trace}: {first['requests']} requests on {first['replicas']} replicas")
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
            out.print(
                f"{name}: {row['refused']} refused (larger than the KV cache), "
                f"{row['unfinished']} unfinished"
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


def write_requests(path: Path, run: Run) -> None:
    """Every request's times and fate; the file is whole or not there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from kvsim.files import replacing
    from kvsim.serving.state import FINISHED, REFUSED

    p, requests = run.progress, run.requests
    fate = {int(FINISHED): "finished", int(REFUSED): "refused"}
    columns = {
        "arrival_s": requests.arrival,
        "prompt_tokens": requests.prompt,
        "generate_tokens": requests.generate,
        "replica": p.replica,
        "started_s": p.started,
        "first_token_s": p.first,
        "last_token_s": p.last,
        "prefix_hit_tokens": p.hits,
        "preemptions": p.preempted,
        "status": [fate.get(int(s), "unfinished") for s in p.status],
    }
    with replacing(path) as draft:
        pq.write_table(pa.table(columns), draft)


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
