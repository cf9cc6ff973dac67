"""``kvsim simulate``: what came of runs on a trace, as rows, tables and pictures."""

from collections.abc import Sequence

import numpy as np

from kvsim.graph import Array
from kvsim.machines.basis import basis
from kvsim.machines.deployment import Deployment
from kvsim.report import evidence, names, simulate_answer, units
from kvsim.report.answer import BRIEF
from kvsim.report.caveats import PlayedRun
from kvsim.report.colours import Marker, mark, mark_at
from kvsim.report.json import Row, number
from kvsim.report.names import NAME_END, list_settings, short_names
from kvsim.report.pictures import GREY, Chart, draw_distribution
from kvsim.report.result import Result
from kvsim.report.simulate_answer import case_columns, name_runs, varied_option
from kvsim.report.table import Column, Table, quantity_column, quantity_columns, text_column
from kvsim.report.terminal import BLANK, Heading
from kvsim.serving.outcome import Outcome, make_timeline
from kvsim.serving.servable import describe_refusals

MEANS = ("ttft_s",)  # quantities whose mean decides between runs that differ in one option
UTILISATION_NOTE = (
    "Percentages are averages over the run; memory, compute and link use are relative to the "
    "hardware's peak."
)
OVER_TIME = {
    "finished_per_s": ("Finished requests per second", 1.0),
    "waiting": ("Waiting requests", 1.0),
    "running": ("Decoding sequences", 1.0),
    "kv_share": ("KV cache in use [%]", 100.0),
    "busy_share": ("Busy [% of time]", 100.0),
    "hbm": ("Memory bandwidth in use [%]", 100.0),
    "compute": ("Arithmetic in use [%]", 100.0),
    "h2d": ("Host-to-GPU link in use [%]", 100.0),
    "d2h": ("GPU-to-host link in use [%]", 100.0),
}
"""What is drawn over time, one panel each: its title and the factor to the unit there."""

COPY_STREAMS = ("h2d", "d2h")  # drawn only where used
REQUESTS = {
    "ttft_s": "Time to first token (TTFT)",
    "tpot_s": "Time per token (TPOT)",
    "latency_s": "From arrival to the last token",
}


def make_result(
    runs: Sequence[Row],
    deployment: Deployment,
    trace: str,
    targets: str,
    *,
    command: str = "",
    left_out: Sequence[str] = (),
    played: Sequence[PlayedRun] = (),
    sought: bool = False,
    listed: bool = False,
    checked: bool = False,
    notes: Sequence[str] = (),
) -> Result[Sequence[Row]]:
    """Make the answer of ``kvsim simulate``.

    Parameters
    ----------
    runs
        Of each run its ``row``, its ``over_time`` and its ``quantiles``.
    trace
        The trace as it was named.
    targets
        The TTFT and TPOT targets in words, empty without any.
    left_out
        Techniques that cannot run there, with the reason.
    played
        What the rows are of, one by one.
    sought
        Whether the value of the option in which runs differ was looked for.
    listed
        Whether several techniques were asked for, so that ``--json`` lists what came of each.
    checked
        Whether every run was checked for faults.
    notes
        What was noted while the trace was read.
    """
    rows = [run["row"] for run in runs]
    answer = simulate_answer.write_answer(
        rows, deployment, trace, targets, left_out, played, sought
    )
    own: Row = {"runs": rows} if rows[0].get("case") else {"rows": rows}
    fields = (own if listed or rows[0].get("case") else rows[0]) | {"answer": answer.row()}
    requests, replicas = (
        " or ".join(f"{n:,}" for n in dict.fromkeys(row[key] for row in rows))
        for key in ("requests", "replicas")
    )
    heading = f"{trace}: {requests} requests, replicas: {replicas}"
    tables = [_times_table(rows), _use_table(rows)]
    settings = list_settings(short_names([row["technique"] for row in rows]))
    worst = max(error for row in rows for error in [1e-4, *row["table_error"].values()])
    right = "Checked: no request is lost or starts too early, and memory is never exceeded."
    ground = evidence.describe_basis(rows[0]["basis"])
    return Result(
        command,
        f"{heading}; {names.describe_deployment(deployment)}",
        answer,
        fields,
        runs,
        rows,
        tables=tables,
        blocks=[
            *(Heading(heading), *answer.head(), tables[0], BLANK, tables[1], BLANK),
            *(*answer.body(BRIEF), *settings, *_list_unserved(rows, deployment)),
            *([right] if checked else []),
        ],
        more=[
            *answer.rest(BRIEF),
            f"Times of passes are interpolated, with errors below {units.percent(worst)}.",
            ground,
        ],
        draw=lambda: _draw_runs(runs),
        remarks=settings,
        notes=notes,
        data=evidence.newest_measurement([deployment]),
        foot=[ground],
    )


def _list_unserved(rows: Sequence[Row], deployment: Deployment) -> list[str]:
    """Which runs refused, aborted or did not finish requests; what is said of several, once."""
    found: dict[str, list[str]] = {}
    for name, row in zip(name_runs(rows), rows, strict=True):
        if row["refused"] or row["unfinished"]:
            which = ", ".join(map(str, row["refused_rows"]))
            several = ", ..." if row["refused"] > len(row["refused_rows"]) else ""
            model, context = deployment.model.name, row["max_model_len"]
            said = describe_refusals(row["refused_by"], model, context)
            where = f" (in order of arrival number {which}{several})" if said else ""
            line = f"{said or '0 refused'}{where}; {row['unfinished']} unfinished"
            found.setdefault(line, []).append(name)
        if row["aborted"]:
            line = f"{row['aborted']} aborted, with the turns that would have followed them."
            found.setdefault(line, []).append(name)
    return [f"{', '.join(names)}: {line}" for line, names in found.items()]


def _times_table(rows: Sequence[Row]) -> Table:
    """Make the table of each technique's times: the median and the 99th percentile."""
    varied = varied_option(rows)
    columns = [
        _technique(rows),
        *case_columns(rows),
        Column("done", "finished", units.integer, 4),
    ]
    for key, rank in (("ttft_s", 0), ("tpot_s", 0), ("gap_s", 3), ("queue_s", 2), ("latency_s", 1)):
        parts = ("mean", "p50", "p99") if key in MEANS and varied else ("p50", "p99")
        columns += [quantity_column(key, rank, part) for part in parts]
    return Table(columns, rows)


def _use_table(rows: Sequence[Row]) -> Table:
    """Make the table of each technique's throughput, use of the machine and price."""
    rate = "goodput_per_s" if any(rows[0]["targets"].values()) else "request_per_s"
    columns = [
        _technique(rows),
        *case_columns(rows),
        *quantity_columns(**{"output_tok_s": 0, rate: 0}),
        _share("busy %", "busy_share", 3),
        _share("memory %", "utilisation.hbm", 4),
        _share("compute %", "utilisation.compute", 5),
        _share("H2D %", "utilisation.h2d", 6),
        _share("D2H %", "utilisation.d2h", 7),
        _share("KV peak %", "kv_peak_share", 0),
        Column("KV peak GiB", "kv_peak_bytes", units.gib, 2),
        Column("pre- empted", "preemptions", units.integer, 2),
        _share("prefix hits %", "prefix_hit_share", 1),
        Column("USD", "usd", units.usd, 8),
        quantity_column("usd_per_million_tokens", 1),
    ]
    return Table(columns, rows, note=UTILISATION_NOTE)


def _technique(rows: Sequence[Row]) -> Column:
    labels = short_names([row["technique"] for row in rows])
    return text_column("technique", lambda row: labels[row["technique"]])


def _share(heading: str, key: str, rank: int) -> Column:
    """A share, in per cent."""
    share = Column(heading, key)

    def value(row: Row) -> float | None:
        found = share.value(row)
        return 100 * found if isinstance(found, int | float) else None

    return Column(heading, value, lambda x: units.format_number(x, 3), rank)


def run_fields(outcome: Outcome) -> Row:
    """Collect all that reports need of a run.

    Parameters
    ----------
    outcome
        Outcome of the simulation.

    Returns
    -------
    Row
        Its row and its course over time, as JSON has them.
    """
    times = {"ttft_s": outcome.ttft_s, "tpot_s": outcome.tpot_s, "latency_s": outcome.latency_s}
    return {
        "row": outcome.summary()
        | {
            "targets": {f"{k}_s": number(v) for k, v in vars(outcome.targets).items()},
            "basis": basis(outcome.run.costs.deployment),
        },
        "over_time": {k: _round(v) for k, v in make_timeline(outcome.run).items()},
        "quantiles": {name: _round(_quantiles(values)) for name, values in times.items()},
    }


def _quantiles(values: Array) -> Array:
    """Of the values that there are: the least, then every half percent, the largest."""
    known = values[np.isfinite(values)]
    return np.quantile(known, np.linspace(0, 1, 201)) if known.size else known


def _round(values: Array) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _draw_runs(results: Sequence[Row]) -> list[Chart]:
    """Draw how requests fared, then one picture per quantity over time."""
    rows, looks = [result["row"] for result in results], _looks(results)
    labels, targets = name_runs(rows), rows[0]["targets"]
    drawn = []
    for key, title in REQUESTS.items():
        lines = {n: r["quantiles"][key] for n, r in zip(labels, results, strict=True)}
        drawn.append(draw_distribution(title, lines, looks, targets.get(key)))
    courses = [result["over_time"] for result in results]
    for key, (title, factor) in OVER_TIME.items():
        if key in COPY_STREAMS and not any(max(course[key]) > 0 for course in courses):
            continue
        chart = Chart(title, "time [s]", height=260, yaxis={"rangemode": "tozero"})
        if key == "finished_per_s":
            step = {"width": 1, "color": GREY, "shape": "hv"}
            chart.line("arrivals", courses[0]["start_s"], courses[0]["arrivals_per_s"], line=step)
        for name, look, course in zip(labels, looks, courses, strict=True):
            values = [factor * value for value in course[key]]
            chart.line(name, course["start_s"], values, look, line_shape="hv")
        drawn.append(chart)
    return drawn


def _looks(results: Sequence[Row]) -> list[Marker]:
    """The mark of each run's technique; where runs of one technique differ, one per run."""
    rows = [result["row"] for result in results]
    if rows[0].get("case"):
        return [mark_at(i) for i in range(len(rows))]
    return [mark(NAME_END.split(row["technique"])[0]) for row in rows]
