"""A simulated trace as a table, and every request's times as Parquet."""

from pathlib import Path
from typing import Any

from kvsim.calibrate import Fit
from kvsim.report.rows import Row, number
from kvsim.report.tables import console, print_basis, short, table
from kvsim.serving.simulate import Run


def show(rows: list[Row], trace: str, checked: bool) -> None:
    """One row per technique, then what the figures stand on."""
    out = console()
    first = rows[0]
    out.print(f"{trace}: {first['requests']} requests on {first['replicas']} replicas")
    names = ("technique", "done", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "tok/s", "good/s")
    cells = [
        [
            row["technique"].partition(":")[0],
            str(row["finished"]),
            *(_ms(row[key], q) for key in ("ttft_s", "tpot_s") for q in ("p50", "p99")),
            short(row["output_tok_s"]),
            short(row["goodput_per_s"]),
            short(100 * row["busy_share"], 3),
            short(100 * row["kv_peak_share"], 3),
            str(row["preemptions"]),
        ]
        for row in rows
    ]
    heads = [*names, "busy %", "KV %", "preempted"]
    columns = {head: "left" if head == "technique" else "right" for head in _unique(heads)}
    out.print(table(columns, cells))
    for row in rows:
        if row["refused"] or row["unfinished"]:
            out.print(
                f"{row['technique']}: {row['refused']} refused (larger than the KV cache), "
                f"{row['unfinished']} unfinished"
            )
        worst = ", ".join(f"{kind} {100 * e:.2g} %" for kind, e in row["table_error"].items())
        out.print(f"{row['technique']}: tables against direct evaluation, at worst: {worst}")
    if checked:
        out.print("Checked: nothing lost, nothing served early, memory never exceeded.")
    print_basis(out, first["basis"])


def _unique(heads: list[str]) -> list[str]:
    """Column titles; a repeated one gets the spaces that keep it apart."""
    seen: dict[str, int] = {}
    unique = []
    for head in heads:
        seen[head] = seen.get(head, 0) + 1
        unique.append(head + " " * (seen[head] - 1))
    return unique


def _ms(spread: Any, quantile: str) -> str:
    value = spread[quantile]
    return "-" if value is None else short(1e3 * value)


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
