"""``kvsim simulate``: techniques on a trace as rows and tables."""

from collections.abc import Callable

import numpy as np

from kvsim.graph import Array
from kvsim.machines.basis import basis
from kvsim.report import simulate_cases, units
from kvsim.report.answer import show_rest, show_verdict
from kvsim.report.grounds import grounds
from kvsim.report.json import Row, number
from kvsim.report.names import settings_of, short_names
from kvsim.report.screen import Screen
from kvsim.report.simulate_answer import Simulations
from kvsim.report.table import Column, Table, of, words
from kvsim.serving.outcome import Outcome, make_timeline

MEANS = ("ttft_s",)  # quantities whose mean decides between runs that differ in one option


def times_table(rows: list[Row]) -> Table:
    """Each technique's times: the median and the 99th percentile."""
    varied = simulate_cases.axis(rows)
    spreads = {"ttft_s": 0, "tpot_s": 0, "gap_s": 3, "queue_s": 2, "latency_s": 1}
    columns = [
        _technique(rows),
        *simulate_cases.columns(rows),
        Column("done", lambda row: units.whole(row["finished"]), rank=4),
        *(
            of(key, rank, part=part)
            for key, rank in spreads.items()
            for part in (("mean",) if key in MEANS and varied else ()) + ("p50", "p99")
        ),
    ]
    return Table(columns, rows)


def use_table(rows: list[Row]) -> Table:
    """Each technique's throughput, use of the machine and price."""
    columns = [
        _technique(rows),
        *simulate_cases.columns(rows),
        of("output_tok_s"),
        of("goodput_per_s" if any(rows[0]["targets"].values()) else "request_per_s"),
        _share("busy %", lambda row: row["busy_share"], 3),
        _share("memory %", lambda row: row["utilisation"]["hbm"], 4),
        _share("compute %", lambda row: row["utilisation"]["compute"], 5),
        _share("H2D %", lambda row: row["utilisation"]["h2d"], 6),
        _share("D2H %", lambda row: row["utilisation"]["d2h"], 7),
        _share("KV peak %", lambda row: row["kv_peak_share"], 0),
        Column(
            "KV peak GiB",
            lambda row: units.gib(row["kv_peak_bytes"]),
            lambda row: row["kv_peak_bytes"],
            rank=2,
        ),
        Column("pre- empted", lambda row: units.whole(row["preemptions"]), rank=2),
        _share("prefix hits %", lambda row: row["prefix_hit_share"], 1),
        Column("USD", lambda row: units.usd(row["usd"]), lambda row: row["usd"], rank=8),
        of("usd_per_million_tokens", 1),
    ]
    return Table(columns, rows, note=SHARES)


def _technique(rows: list[Row]) -> Column:
    names = short_names([row["technique"] for row in rows])
    return words("technique", lambda row: names[row["technique"]])


def _share(heading: str, share: Callable[[Row], float | None], rank: int) -> Column:
    def value(row: Row) -> float | None:
        found = share(row)
        return None if found is None else 100 * found

    return Column(heading, lambda row: units.short(value(row), 3), value, rank=rank)


def heading(trace: str, rows: list[Row]) -> str:
    """What was simulated: how many requests, on how many replicas."""
    requests, replicas = (
        " or ".join(f"{n:,}" for n in dict.fromkeys(row[key] for row in rows))
        for key in ("requests", "replicas")
    )
    return f"{trace}: {requests} requests, replicas: {replicas}"


def show(result: Simulations) -> None:
    """The verdict, then each technique's times, throughput, use of the machine and price."""
    out, rows = Screen(), list(result.rows)
    first = rows[0]
    out.title(heading(result.trace, rows))
    show_verdict(out, result.answer)
    for table in result.tables:
        out.table(table)
        out.blank()
    show_rest(out, result.answer)
    for line in settings_of(short_names([row["technique"] for row in rows])):
        out.say(line)
    for name, row in zip(simulate_cases.run_names(rows), rows, strict=True):
        if row["refused"] or row["unfinished"]:
            which = ", ".join(map(str, row["refused_rows"]))
            several = ", ..." if row["refused"] > len(row["refused_rows"]) else ""
            out.say(
                f"{name}: {row['refused']} refused, larger than the KV cache (in order of arrival "
                f"number {which}{several}); {row['unfinished']} unfinished"
            )
        if row["aborted"]:
            out.say(
                f"{name}: {row['aborted']} aborted, with the turns that would have followed them."
            )
    worst = max(error for row in rows for error in [1e-4, *row["table_error"].values()])
    out.say(f"Times of passes are interpolated, with errors below {units.percent(worst)}.")
    if result.checked:
        out.say("Checked: no request is lost or starts too early, and memory is never exceeded.")
    out.say(grounds(first["basis"]))


SHARES = (
    "Percentages are averages over the run; memory, compute and link use are relative to the "
    "hardware's peak."
)


def result(outcome: Outcome) -> Row:
    """All that reports need of a run, as JSON knows it."""
    times = {"ttft_s": outcome.ttft_s, "tpot_s": outcome.tpot_s, "latency_s": outcome.latency_s}
    return {
        "row": outcome.summary()
        | {
            "targets": {f"{k}_s": number(v) for k, v in vars(outcome.targets).items()},
            "basis": basis(outcome.run.costs.deployment),
        },
        "over_time": {k: _brief(v) for k, v in make_timeline(outcome.run).items()},
        "quantiles": {name: _brief(_quantiles(values)) for name, values in times.items()},
    }


def _quantiles(values: Array) -> Array:
    """Of the values that there are: the least, then every half percent, the largest."""
    known = values[np.isfinite(values)]
    return np.quantile(known, np.linspace(0, 1, 201)) if known.size else known


def _brief(values: Array) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
