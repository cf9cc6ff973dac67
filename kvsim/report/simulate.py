"""The result of ``kvsim simulate``: latencies and utilisation of simulated runs."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from math import ceil
from pathlib import Path

import numpy as np

from kvsim.errors import InputError
from kvsim.files import RESULT, check_input, own_output, replacing
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment, basis
from kvsim.quality.evidence import evidence as quality
from kvsim.report import evidence, names, units
from kvsim.report.answer import BRIEF, Answer, verdict
from kvsim.report.colours import Marker, mark, mark_at
from kvsim.report.evidence import PROBE_TOKENS
from kvsim.report.json import Row, number
from kvsim.report.names import NAME_END, join_words, label, list_settings, short_names
from kvsim.report.pictures import GREY, Chart, draw_distribution
from kvsim.report.result import Result
from kvsim.report.suitability import describe_loss
from kvsim.report.table import (
    Column,
    Table,
    percent_column,
    quantity_column,
    quantity_columns,
    text_column,
)
from kvsim.report.terminal import BLANK, Block, Heading
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome, make_timeline
from kvsim.serving.records import FINISHED
from kvsim.serving.servable import describe_refusals
from kvsim.serving.simulate import Run
from kvsim.techniques import parse
from kvsim.techniques.axes.settings import simplify
from kvsim.techniques.released import engines_running
from kvsim.traces.requests import CONDUCT, Requests
from kvsim.version import __version__

FIGURES_OF_BEST = (
    *("technique", "ttft_s", "tpot_s", "output_tok_s", "goodput_per_s"),
    *("good_share", "kv_peak_share", "usd_per_million_tokens"),
)
"""Fields of the best run that an answer repeats."""
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
SIZES = ("max_seqs", "max_tokens")
TIE = 0.03  # relative difference of goodput, latency or TTFT that decides nothing
OFTEN = 0.05  # preemptions per request from which they are worth a word
HEADINGS = {
    "req_s": "offered req/s",
    "rate": "rate",
    "replicas": "replicas",
    "max_tokens": "tokens per pass",
    "host_cache": "host cache GiB",
    "nvme_cache": "NVMe cache GiB",
    "prefix_load": "prefix load",
    "max_seqs": "sequences per pass",
    "hit_rate": "share in the cache",
    "prefill_replicas": "replicas for prefill",
}
OVERLOADED = 0.97  # of the requests that arrive; where fewer are served the queue only grows
FULL = 0.99  # share of KV memory from which it counts as full
WAITING = 1.0  # median queue, or its growth, beyond which the load is more than is served [s]
MANY = 3  # runs from which a terminal shows one table of the main figures
MAX_STORED = 3  # runs of which each is told where prompt tokens were found
TIERS = {"gpu": "GPU memory", "host": "host memory", "nvme": "NVMe", "remote": "remote memory"}
SUFFICIENT_GAIN = 0.9  # share of the gain that makes a size enough
PARTIAL_GAIN = 0.5  # share of that from which a smaller size is worth a word
FASTER = 0.05  # relative difference of mean TTFT that is worth a word


def make_result(
    runs: Sequence[Row],
    deployment: Deployment,
    trace: str,
    *,
    left_out: Sequence[str] = (),
    played: Sequence[Requests] = (),
    sought: bool = False,
    listed: bool = False,
    checked: bool = False,
    notes: Sequence[str] = (),
    fleet: str = "",
) -> Result[Sequence[Row]]:
    """Make the result of ``kvsim simulate``.

    Parameters
    ----------
    runs
        For each run, what :func:`run_fields` returns.
    deployment
        The deployment.
    trace
        Name of the trace.
    left_out
        Techniques that cannot run, with the reason.
    played
        The requests of each run.
    sought
        Whether the runs are those of a search with ``--find``.
    listed
        Whether several techniques were requested, so that the JSON output has a list.
    checked
        Whether the runs were checked for faults.
    notes
        Remarks on reading the trace.
    fleet
        The ``kvsim capacity`` command line for the same requests.
    """
    rows = [run["row"] for run in runs]
    answer = _write_answer(rows, deployment, trace, left_out, played, sought, fleet)
    own: Row = {"runs": rows} if rows[0].get("case") else {"rows": rows}
    fields = (own if listed or rows[0].get("case") else rows[0]) | {"answer": answer.row()}
    requests, replicas = (_span(row[key] for row in rows) for key in ("requests", "replicas"))
    heading = f"{trace}: {requests} requests, replicas: {replicas}"
    if any(row["replicas"] > 1 for row in rows):
        heading += f", routed {' or '.join(dict.fromkeys(row['route'] for row in rows))}"
    tables = [_times_table(rows), _use_table(rows)]
    settings = list_settings(short_names([row["technique"] for row in rows]))
    others = {
        label(parse(row["technique"])): row
        for row in rows
        if row["technique"] != answer.figures["technique"]
    }
    settings += [
        f"{name}: {loss}"
        for name, row in others.items()
        for loss in _price_of_choice(row, deployment)[:1]
    ]
    shown = rows if len(rows) <= MAX_STORED else rows[-1:]
    stored = [line for row in shown for line in _describe_stored(row)]
    settings, further = ([*settings, *stored], []) if len(rows) == 1 else (settings, stored)
    many = len(rows) >= MANY
    brief = 1 if many else BRIEF
    both: list[Block] = [tables[0], BLANK, tables[1], BLANK]
    first_tables = [_short_table(rows)] if many else [tables[0], replace(tables[1], note="")]
    worst = max(error for row in rows for error in [1e-4, *row["table_error"].values()])
    right = "Checked: no request is lost or starts too early, and memory is never exceeded."
    ground = evidence.describe_basis(rows[0]["basis"])
    return Result(
        f"{heading}; {names.describe_deployment(deployment)}",
        answer,
        fields,
        runs,
        rows,
        tables=tables,
        blocks=[
            *(Heading(heading), *answer.head()),
            *(block for table in first_tables for block in (table, BLANK)),
            *(*answer.body(brief), *settings, *_list_unserved(rows, deployment)),
            *([right] if checked else []),
        ],
        more=[
            *(both if many else []),
            *(*answer.rest(brief), *further),
            UTILISATION_NOTE,
            f"Times of passes are interpolated, with errors below {units.percent(worst)}.",
            ground,
        ],
        draw=lambda: _draw_runs(runs),
        remarks=[*settings, *further],
        notes=notes,
        data=evidence.newest_measurement([deployment]),
        foot=[ground],
    )


def _list_unserved(rows: Sequence[Row], deployment: Deployment) -> list[str]:
    """Describe the requests that runs refused, aborted or left unfinished, each fact once."""
    found: dict[str, list[str]] = {}
    for name, row in zip(_name_runs(rows), rows, strict=True):
        if row["refused"] or row["unfinished"]:
            more = row["refused"] > len(row["refused_rows"])
            which = ", ".join([*map(str, row["refused_rows"]), *(["…"] * more)])
            model, context = deployment.model.name, row["max_model_len"]
            said = describe_refusals(row["refused_by"], model, context)
            word = "numbers" if row["refused"] > 1 else "number"
            where = f" ({word} {which} in order of arrival)" if said else ""
            left = f"{row['unfinished']} unfinished" if row["unfinished"] else ""
            line = "; ".join(filter(None, [f"{said}{where}", left]))
            found.setdefault(line, []).append(name)
        if row["aborted"]:
            line = f"{row['aborted']} aborted, with the turns that would have followed them."
            found.setdefault(line, []).append(name)
    return [
        line if len(names) == len(rows) else f"{', '.join(names)}: {line}"
        for line, names in found.items()
    ]


def _times_table(rows: Sequence[Row]) -> Table:
    """Make the table of each technique's times: the median and the 99th percentile."""
    varied = _varied_option(rows)
    columns = [*_case_columns(rows), Column("done", "finished", units.integer, 4)]
    gaps = 0 if varied == "max_tokens" else 3  # which smaller passes shorten
    ranked = {"ttft_s": 0, "tpot_s": 0, "gap_s": gaps, "queue_s": 2, "latency_s": 1}
    for key, rank in ranked.items():
        parts = ("mean", "p50", "p99") if key in MEANS and varied else ("p50", "p99")
        columns += [quantity_column(key, rank, part) for part in parts]
    return Table(columns, rows)


def _short_table(rows: Sequence[Row]) -> Table:
    """Make the one table that a terminal shows of many runs."""
    reused = any(row["prefix_hit_share"] for row in rows)
    rate = "goodput_per_s" if any(rows[0]["targets"].values()) else "request_per_s"
    columns = [
        *_case_columns(rows),
        *(quantity_column("ttft_s", part == "mean", part) for part in ("mean", "p50", "p99")),
        *(quantity_column("tpot_s", 0, part) for part in ("p50", "p99")),
        *(quantity_column("latency_s", 2 * (part == "p99"), part) for part in ("p50", "p99")),
        *quantity_columns(**{"output_tok_s": 1, rate: 0}),
        *([percent_column("prefix hits %", "prefix_hit_share", ".3g", 1)] if reused else []),
        percent_column("KV peak %", "kv_peak_share", ".3g", 2),
        Column("pre- empted", "preemptions", units.integer, 3),
        quantity_column("usd_per_million_tokens", 2),
    ]
    return Table(columns, rows)


def _use_table(rows: Sequence[Row]) -> Table:
    """Make the table of each technique's throughput, use of the machine and price."""
    rate = "goodput_per_s" if any(rows[0]["targets"].values()) else "request_per_s"
    columns = [
        *_case_columns(rows),
        *quantity_columns(**{"output_tok_s": 0, rate: 0}),
        percent_column("busy %", "busy_share", ".3g", 3),
        percent_column("memory %", "utilisation.hbm", ".3g", 4),
        percent_column("compute %", "utilisation.compute", ".3g", 5),
        percent_column("H2D %", "utilisation.h2d", ".3g", 6),
        percent_column("D2H %", "utilisation.d2h", ".3g", 7),
        percent_column("KV peak %", "kv_peak_share", ".3g", 0),
        Column("KV peak GiB", "kv_peak_bytes", units.gib, 2),
        Column("pre- empted", "preemptions", units.integer, 2),
        percent_column("prefix hits %", "prefix_hit_share", ".3g", 1),
        Column("USD", "usd", units.usd, 8),
        quantity_column("usd_per_million_tokens", 1),
    ]
    return Table(columns, rows, note=UTILISATION_NOTE)


def run_fields(outcome: Outcome) -> Row:
    """Collect everything that reports need to know about a run.

    Parameters
    ----------
    outcome
        The simulated run.

    Returns
    -------
    Row
        ``row`` of the results table, ``over_time`` and ``quantiles`` for charts.
    """
    times = {"ttft_s": outcome.ttft_s, "tpot_s": outcome.tpot_s, "latency_s": outcome.latency_s}
    return {
        "row": outcome.summary()
        | {
            "targets": {f"{k}_s": number(getattr(outcome.targets, k)) for k in ("ttft", "tpot")},
            "percentile": number(100 * outcome.targets.share),
            "basis": basis(outcome.run.costs.deployment),
            "queue_grows": outcome.grows(outcome.queue_s, WAITING),
            "busy_request_per_s": number(outcome.busy_request_per_s),
        },
        "over_time": {k: _round(v) for k, v in make_timeline(outcome.run).items()},
        "quantiles": {
            name: _round(known if not known.size else np.quantile(known, np.linspace(0, 1, 201)))
            for name, values in times.items()
            for known in [values[np.isfinite(values)]]
        },
    }


def _round(values: Array) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _draw_runs(results: Sequence[Row]) -> list[Chart]:
    """Draw how requests fared, then one picture per quantity over time."""
    rows, looks = [result["row"] for result in results], _looks(results)
    labels, targets = _name_runs(rows), rows[0]["targets"]
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


def _write_answer(
    rows: Sequence[Row],
    deployment: Deployment,
    trace: str,
    left_out: Sequence[str],
    played: Sequence[Requests] = (),
    sought: bool = False,
    fleet: str = "",
) -> Answer:
    """Answer in words which run serves a trace best; parameters are those of ``make_result``."""
    asked = {k.removesuffix("_s").upper(): t for k, t in rows[0]["targets"].items() if t}
    targets = " and ".join(f"{name} {units.seconds(t)}" for name, t in asked.items())
    best = _select_best(rows, bool(targets))
    arrivals = [*map(arrival_rate, played)] or [None] * len(rows)
    if sought and "prefill_replicas" not in best["case"]:
        (key,) = best["case"]
        ordered = sorted(rows, key=lambda row: float(row["case"][key]))
        ordered = ordered[::-1] if key in ("req_s", "rate") else ordered  # what asks most first
        best = next((row for row in ordered if keeps_targets(row)), ordered[-1])
    full = next((row for row in rows if _name(row) == "full"), None)
    arrive = next((a for row, a in zip(rows, arrivals, strict=True) if row is best), None)
    if sought:
        over = _describe_overload(best, arrive)
        told = _describe_sought(rows, best, deployment, trace, targets, over)
    elif _varied_option(rows):
        where = _describe_machines(best, deployment)
        told = _describe_cases(rows, where, trace, best, targets, arrivals)
        if _varied_option(rows) not in ("rate", "req_s"):
            told = " ".join([told, *_describe_overload(best, arrive)])
    else:
        needed = _needed(best, deployment, targets, arrive)
        needed += _price_of_choice(best, deployment)
        told = verdict(needed, _list_optional_sentences(rows, best, full))
    return Answer(
        verdict=told,
        figures={key: best[key] for key in FIGURES_OF_BEST},
        changes=list(_changes(best, deployment, targets, fleet)),
        evidence=evidence.list_measurements(deployment, _name(best)),
        assumed=[
            *deployment.parallelism.notes(deployment.domain, deployment.stack.sums.skew),
            *evidence.list_assumptions(
                deployment.hardware, max(best["utilisation"][way] for way in COPY_STREAMS), ""
            ),
        ],
        left_out=left_out,
    )


def arrival_rate(requests: Requests) -> float | None:
    """Return the mean arrival rate of requests; None for turns, as it depends on the answers.

    Parameters
    ----------
    requests
        The requests.

    Returns
    -------
    float or None
        The rate. [requests/s]
    """
    if requests.parent is not None or requests.duration <= 0:
        return None
    return len(requests) / requests.duration


def _price_of_choice(best: Row, deployment: Deployment) -> list[str]:
    """What the best technique loses of quality, and that no engine runs it, if so."""
    technique = parse(best["technique"])
    if technique.exact:
        return []
    found = quality(technique, deployment.model, PROBE_TOKENS)
    runs = engines_running(label(technique), deployment)
    return [describe_loss(technique, found), *([] if runs else ["No serving engine runs it."])]


def _name(row: Row) -> str:
    return NAME_END.split(row["technique"])[0]


def _spoken(row: Row) -> str:
    return names.name_technique(parse(row["technique"]))


def _select_best(rows: Sequence[Row], targets: bool) -> Row:
    """Most goodput, or the shortest latency without targets; ties go to full KV, or the first.

    Runs that meet the targets come before others. Of several sizes of one option, the smallest of
    those that are equally good is taken; of numbers of replicas, the smallest that is sufficient.
    """

    def worth(row: Row) -> float:
        if targets:
            return float(row["goodput_per_s"] or 0.0)
        latency = row["latency_s"]["p50"]
        return 1 / latency if latency else 0.0

    key = _varied_option(rows)
    some = [row for row in rows if targets and keeps_targets(row)] or list(rows)
    if key in ("replicas", *SIZES):
        some = sorted(some, key=lambda row: float(row["case"][key]))
    if key == "replicas":
        met = targets and keeps_targets(some[0])
        sufficient = some if met else [row for row in some if not is_overloaded(row)]
        if sufficient and (met or not targets):
            return sufficient[0]
    most = max(map(worth, some))
    near = [row for row in some if worth(row) >= most * (1 - TIE)]
    return next((row for row in near if _name(row) == "full"), near[0])


def _describe_replica(deployment: Deployment) -> str:
    """The GPUs of a replica, such as ``4 h100 (tp 4)``."""
    words, gpus = deployment.parallelism.words(), deployment.gpus
    many = f"{gpus} " if gpus > 1 else ""
    return f"{many}{deployment.hardware.name}{f' ({words})' if words else ''}"


def _describe_machines(row: Row, deployment: Deployment) -> str:
    each = _describe_replica(deployment)
    return f"{row['replicas']} replicas of {each}" if row["replicas"] > 1 else each


def _span(counts: Iterable[int]) -> str:
    """Counts of several runs: two in full, of more the least and the most."""
    known = list(dict.fromkeys(counts))
    if len(known) > 2:
        return f"{min(known):,} to {max(known):,}"
    return " or ".join(f"{n:,}" for n in known)


def _needed(
    row: Row, deployment: Deployment, targets: str, arrive: float | None = None
) -> list[str]:
    """What is said in any case: whether targets are met, the times, and whether it is too much."""
    where = _describe_machines(row, deployment)
    ttft, tpot = row["ttft_s"]["p99"], row["tpot_s"]["p99"]
    times = f"TTFT p99 {units.seconds(ttft)}, TPOT p99 {units.seconds(tpot)}"
    tok = f"{units.rate(row['output_tok_s'])} output tok/s"
    said = [f"On {where} with {_spoken(row)}: {times}, {tok}."]
    said += _describe_overload(row, arrive)
    if targets:
        share = row["good_share"]
        met = "Yes" if share and 100 * share >= row["percentile"] else "No"
        said.insert(0, f"{met}: {units.percent(share)} of requests meet {targets}.")
    return said


def _describe_overload(row: Row, arrive: float | None) -> list[str]:
    """That more requests arrive than the server completes, if so."""
    if not is_overloaded(row):
        return []
    taken = row["request_per_s"] or 0.0
    if arrive is not None and taken < OVERLOADED * arrive:
        both = f"{units.rate(taken)} of {units.rate(arrive)}"
        count, played = count_replicas(row, arrive), row.get("sufficient_replicas")
        need = f", so at least {count:,} replicas are needed" if count > row["replicas"] else ""
        need = f"; {played:,} replicas keep up" if played else need
        return [f"Overloaded: the server completes {both} requests/s{need}."]
    if (row["queue_s"]["p50"] or 0.0) <= WAITING:
        return ["Overloaded: requests queue longer and longer."]
    return [f"Overloaded: requests queue for {units.seconds(row['queue_s']['p50'])} (median)."]


def is_overloaded(row: Row) -> bool:
    """Return whether a server does not keep up: the median wait is long, or the queue grows.

    Parameters
    ----------
    row
        The row of the run.
    """
    return bool(row.get("queue_grows") or (row["queue_s"]["p50"] or 0.0) > WAITING)


def count_replicas(row: Row, arrive: float | None, taken: float | None = None) -> int:
    """Count the replicas that an overloaded run needs at least to complete what arrives.

    It is a lower bound: queues grow before a server's highest throughput is reached.

    Parameters
    ----------
    row
        The row of the run.
    arrive
        Arrival rate. [requests/s]
    taken
        Rate that the replicas complete; by default that of the run, or of its middle half if
        that is more. [requests/s]

    Returns
    -------
    int
        0 if it is unknown.
    """
    taken = taken or max(row["request_per_s"] or 0.0, row.get("busy_request_per_s") or 0.0)
    if not arrive or not taken:
        return 0
    accepted = 1 - int(row["refused"]) / int(row["requests"])
    return ceil(int(row["replicas"]) * arrive * accepted / taken)


def _list_optional_sentences(rows: Sequence[Row], best: Row, full: Row | None) -> list[str]:
    said = []
    if full is not None and full is not best and full["output_tok_s"]:
        if any(best["targets"].values()):
            before, after = (units.percent(row["good_share"]) for row in (full, best))
            said.append(f"{after} of requests meet the targets, against {before} with full KV.")
        else:
            before, after = (units.seconds(row["latency_s"]["p50"]) for row in (full, best))
            said.append(f"E2E p50 is {after}, against {before} with full KV.")
    if len(rows) > 1 and full is best:
        said.append(f"No other technique is better by more than {100 * TIE:g} %.")
    said += _describe_gain(best)
    hits = best["prefix_hit_share"]
    if hits:
        said.append(f"{units.percent(hits)} of prompt tokens come from the prefix cache.")
    peak = f"KV memory peaks at {units.percent(best['kv_peak_share'])}"
    if hits and best["kv_peak_share"] > FULL and not best["preemptions"]:
        peak = "Cached prefixes fill the KV memory until it is needed; no request was preempted"
    if full is not None and full is not best:
        peak = f"With {_spoken(best)}, {peak} (full KV: {units.percent(full['kv_peak_share'])})"
    said.append(f"{peak}.")
    return said


def _describe_gain(row: Row) -> list[str]:
    """What prefix caching or a tier brings, where the same requests were played without it."""
    other = row.get("without")
    if other is None or not row["output_tok_s"]:
        return []
    rate = "goodput_per_s" if any(row["targets"].values()) else "request_per_s"
    pairs = [[x["ttft_s"]["p50"] or 0.0, x[rate] or 0.0] for x in (row, other)]
    what = other["of"]
    if all(abs(a - b) <= TIE * max(a, b) for a, b in zip(*pairs, strict=True)):
        return [f"Without {what}, TTFT p50 and requests/s are the same within {100 * TIE:g} %."]
    mine, none = (f"TTFT p50 {units.seconds(t)}, {units.rate(r)} requests/s" for t, r in pairs)
    if rate == "goodput_per_s":
        mine, none = (f"{text} on target" for text in (mine, none))
    return [f"With {what}: {mine}; without: {none}."]


def _describe_stored(row: Row) -> list[str]:
    """Where prompt tokens were found, and which way of loading stored ones was taken of all."""
    said, case = [], f" ({_name_runs([row])[0]})" if row.get("case") else ""
    hits = {name: share for name, share in row["prefix_hits"].items() if share}
    if set(hits) - {"gpu"}:
        told = join_words([f"{units.percent(hits[k])} in {TIERS[k]}" for k in hits])
        said.append(f"Prompt tokens found in the prefix cache{case}: {told}.")
    tried = row.get("prefix_load_ttft_s")
    if tried and hits and not set(hits) - {"gpu"}:
        said.append(f"Stored prefixes{case}: none was loaded, as GPU memory still had them.")
    elif tried and hits:
        by: dict[str, list[str]] = {}
        for way, ttft in tried.items():
            by.setdefault(units.seconds(ttft), []).append(way)
        told = "; ".join(f"{time} with {join_words(ways)}" for time, ways in by.items())
        took = f"--prefix-load {row['prefix_load']} was taken"
        said.append(f"Stored prefixes{case}: {took}. Mean TTFT: {told}.")
    return said


def _changes(row: Row, deployment: Deployment, targets: str, fleet: str) -> Sequence[str]:
    """What the run says of its own limits."""
    said = []
    refused = row["refused_by"]
    if refused["context"]:
        said.append(
            f"Requests longer than {row['max_model_len']:,} tokens, the context of "
            f"{deployment.model.name}, were refused ({refused['context']:,}): choose a model with "
            "a longer context, or set the engine's limit with --max-model-len."
        )
    if refused["cache"]:
        said.append(
            f"Requests larger than the KV cache were refused ({refused['cache']:,}): use more GPUs "
            "(--tp), narrower --weights, or a technique that keeps less on the GPU."
        )
    if targets and row["good_share"] is not None and 100 * row["good_share"] < row["percentile"]:
        said.append(f"To find a fleet that meets the targets: {fleet}")
    if row["preemptions"] >= OFTEN * row["requests"]:
        many = f"{row['preemptions']:,} preemptions"
        fewer = f"--max-seqs below {units.integer(row['mean_batch'] * 1.5)} (vLLM: --max-num-seqs)"
        said.append(
            f"The KV cache ({units.size(row['kv_capacity_bytes'])}) limits the server ({many}): "
            "more GPUs (--tp), narrower --weights or --technique fp8 give it room; "
            f"{fewer} only avoids preemptions."
            if is_overloaded(row)
            else f"The KV cache was full, with {many}; {fewer} would avoid most of them."
        )
    return said


def _varied_option(rows: Sequence[Row]) -> str:
    """The one option in which runs of one technique differ; empty if several things differ."""
    varied = list(rows[0].get("case", {}))
    alone = len(varied) == 1 and len({row["technique"] for row in rows}) == 1
    return varied[0] if alone and len(rows) > 1 else ""


def _case_columns(rows: Sequence[Row]) -> list[Column]:
    """Columns of the technique, and of each option in which runs differ."""
    labels = short_names([row["technique"] for row in rows])

    def column(key: str) -> Column:
        if any(isinstance(row["case"][key], str) for row in rows):
            return text_column(HEADINGS[key], lambda row: str(row["case"][key]))
        return Column(HEADINGS[key], f"case.{key}", lambda x: f"{simplify(x):,}")

    technique = text_column("technique", lambda row: labels[row["technique"]])
    return [technique, *map(column, rows[0].get("case", {}))]


def _name_runs(rows: Sequence[Row]) -> list[str]:
    """Runs by technique without settings, and by what they have otherwise."""
    names = short_names([row["technique"] for row in rows])
    one = len(names) == 1
    found = []
    for row in rows:
        case = [f"{HEADINGS[k]} {simplify(v)}" for k, v in row.get("case", {}).items()]
        own = names[row["technique"]]
        found.append(", ".join(case if one and case else [own, *case]))
    return found


def _describe_cases(
    rows: Sequence[Row],
    where: str,
    trace: str,
    best: Row,
    targets: str,
    arrivals: Sequence[float | None],
) -> str:
    """The verdict on runs of one technique that differ in one option."""
    key = _varied_option(rows)
    shares = _list(rows, lambda row: units.percent(row["good_share"]))
    met = f"{shares} of requests meet {targets}." if targets else ""
    if key in ("req_s", "rate"):
        return _describe_loads(rows, where, met, arrivals)
    if key in ("host_cache", "nvme_cache"):
        return _describe_tiers(rows, where, trace)
    if key == "prefix_load":
        return _describe_prefixes(rows, where, trace)
    if key == "replicas":
        return _describe_replicas(rows, best, targets)
    option = f"--{key.replace('_', '-')} {simplify(best['case'][key])}"
    times = f"TTFT p99 {_p99('ttft_s')(best)}, TPOT p99 {_p99('tpot_s')(best)}"
    if targets:
        has = "It has" if best["good_share"] else f"With {option}:"
        return verdict([*_describe_closest(rows, best, targets, option), f"{has} {times}."])
    latency = units.seconds(best["latency_s"]["p50"])
    most = (1 + TIE) * best["latency_s"]["p50"]
    near, others = [row for row in rows if row["latency_s"]["p50"] <= most], []
    for name, title in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        least = min(near, key=lambda row: float(row[name]["p99"] or 0.0))
        if (least[name]["p99"] or 0.0) < (1 - TIE) * (best[name]["p99"] or 0.0):
            others.append(f"{title} p99 is shortest with {_value(least)}: {_p99(name)(least)}.")
    if others:
        said = f"{option} has an E2E p50 of {latency}, {times}."
        return verdict([said, *others, "--ttft and --tpot decide between them."])
    return verdict([f"Use {option}: E2E p50 is {latency}, {times}."])


def _describe_closest(rows: Sequence[Row], best: Row, targets: str, option: str) -> list[str]:
    """The value that meets the targets, or that none does and which one comes closest."""
    share, of = units.percent(best["good_share"]), f"{best['percentile']:g} % of requests"
    (key,) = best["case"]
    equal = [
        _value(row)
        for row in rows
        if row is not best
        and abs(row["good_share"] - best["good_share"]) <= TIE * best["good_share"]
    ]
    same = f" ({join_words(equal)}: the same within {100 * TIE:g} %)" if equal else ""
    if keeps_targets(best):
        return [f"Use {option}: {share} of requests meet {targets}{same}."]
    none = f"No value of --{key.replace('_', '-')} meets {targets} for {of}"
    if not best["good_share"]:
        return [f"{none}: with each, no request meets {'them' if ' and ' in targets else 'it'}."]
    come = "come" if option.endswith("replicas") else "comes"
    return [f"{none}. {option} {come} closest, with {share}{same}."]


def _describe_replicas(rows: Sequence[Row], best: Row, targets: str) -> str:
    """How many replicas are needed, and why fewer are not enough."""
    count, share = best["replicas"], units.percent(best["good_share"] or 0.0)
    tried = {row["replicas"] for row in rows}
    option = f"{count} replica{'s' * (count > 1)}"
    needed = f"{option} are needed" if count - 1 in tried else f"{option} are enough"
    if count == 1:
        needed = f"{option} is enough"
    elif count == min(tried):
        needed += ", the fewest tried"
    times = f"TTFT p99 {_p99('ttft_s')(best)}, TPOT p99 {_p99('tpot_s')(best)}."
    fewer = max(
        (row for row in rows if row["replicas"] < count), key=lambda r: r["replicas"], default=None
    )
    if targets and not keeps_targets(best):
        has = "" if best["good_share"] else f"With {option}: "
        return verdict([*_describe_closest(rows, best, targets, option), f"{has}{times}"])
    less = ""
    if targets:
        said = f"{needed}: {share} of requests meet {targets}"
        if fewer is not None:
            less = f", against {units.percent(fewer['good_share'])} with {fewer['replicas']}"
        return verdict([f"{said}{less}.", times])
    if is_overloaded(best):
        more = "replica is" if max(tried) == 1 else "replicas are"
        return verdict([f"More than {max(tried)} {more} needed.", times])
    if fewer is not None:
        less = f"; {fewer['replicas']} {'are' if fewer['replicas'] > 1 else 'is'} overloaded"
    return verdict([f"{needed}{less}.", times])


def _list(rows: Sequence[Row], write: Callable[[Row], str]) -> str:
    told = [write(row) for row in rows]
    return join_words(told) if len(set(told)) > 1 else told[0]


def _value(row: Row) -> str:
    """What a run has of the one option in which runs differ."""
    (value,) = row["case"].values()
    return f"{simplify(value):,}"


def _p99(name: str) -> Callable[[Row], str]:
    return lambda row: units.seconds(row[name]["p99"])


def _hits(row: Row) -> str:
    return units.percent(row["prefix_hit_share"] or 0.0)


def keeps_targets(row: Row) -> bool:
    """Return whether a run meets its targets and served every request that fits the context.

    Parameters
    ----------
    row
        The row of the run.
    """
    within = 100 * _share_within(row) >= row["percentile"] * (1 - 1e-9)  # as rates are rounded
    return within and not row["refused_by"]["cache"] and not row["unfinished"]


def _share_within(row: Row) -> float:
    """The share within the targets, of the requests that fit the model's context."""
    fitting = row["requests"] - row["refused_by"]["context"]
    return float((row["good_share"] or 0.0) * row["requests"] / fitting) if fitting else 1.0


def _describe_sought(
    rows: Sequence[Row],
    best: Row,
    deployment: Deployment,
    trace: str,
    targets: str,
    over: Sequence[str],
) -> str:
    """The value that just keeps the targets, and what the next one would bring."""
    where, each = _describe_machines(best, deployment), _describe_replica(deployment)
    (key,) = best["case"]
    unit = {"host_cache": " GiB", "req_s": " requests/s"}.get(key, "")
    value, of = _value(best), f" for {best['percentile']:g} % of requests"
    plural = best["replicas"] > 1 or each[0].isdigit()

    def measured(row: Row) -> str:
        ttft, tpot = (units.seconds(row[name]["p99"] or 0.0) for name in ("ttft_s", "tpot_s"))
        met = f"{100 * _share_within(row):.1f} % of requests"
        return f"{met}, with TTFT p99 {ttft} and TPOT p99 {tpot}"

    if not keeps_targets(best):
        what = {
            "rate": f"load, down to {value}x the rate of {trace},",
            "req_s": f"rate down to {value} requests/s",
            "replicas": f"number of replicas up to {value}",
            "hit_rate": f"hit rate up to {value}",
            "host_cache": f"host cache of up to {value} GiB",
            "prefill_replicas": "division into prefill and decode replicas",
        }[key]
        told = f"No {what} meets {targets}{of} for {trace} on {where}."
        more = _describe_useless_cache(rows, best) if key == "host_cache" else []
        return verdict([told, *over, *more], [f"At {value}{unit}: {measured(best)}."])
    keep = "meet" if plural else "meets"
    cache = f"with a host cache of at least {value} GiB"
    ways = {
        "rate": f"{where} {keep} {targets}{of} up to {value}x the rate of {trace}",
        "req_s": f"{where} {keep} {targets}{of} up to {value} requests/s",
        "replicas": f"{trace} needs at least {value} replica{'s' * (value != '1')} of {each} "
        f"to meet {targets}{of}",
        "hit_rate": f"{where} {keep} {targets}{of} if at least {value} of each prompt is cached",
        "host_cache": f"{where} {keep} {targets}{of} of {trace} {cache}",
    }
    if key == "prefill_replicas":
        prefill = int(best["case"][key])
        told = f"Use {prefill} replica{'s' * (prefill > 1)} for prefill and "
        told += f"{best['replicas'] - prefill} for decoding ({each} each)"
        met, _, times = measured(best).partition(", ")
        return verdict([f"{told}: {met} then meet {targets} for {trace}, {times}."])
    if key == "host_cache" and value == "0":
        met, _, times = measured(best).partition(", ")
        told = f"No host cache is needed: for {trace}, {met} already meet {targets}, {times}."
        return verdict([told])
    harder = [row for row in rows if not keeps_targets(row)]
    nearest = harder[-1:] if key in ("hit_rate", "host_cache", "replicas") else harder[:1]
    beyond = [f"At {_value(row)}{unit}: {measured(row)}." for row in nearest]
    return verdict([f"{ways[key]}: {measured(best)}."], beyond)


def _describe_useless_cache(rows: Sequence[Row], best: Row) -> list[str]:
    """What a host cache changes although it does not make a run meet its targets."""
    least = min(rows, key=lambda row: float(row["case"]["host_cache"]))
    target, part = best["targets"], f"p{best['percentile']:g}"
    missed = [
        name.removesuffix("_s").upper()
        for name, limit in target.items()
        if limit and (best[name].get(part) or 0.0) > limit
    ]
    said = []
    if missed == ["TPOT"]:
        tpot, limit = units.seconds(best["tpot_s"][part]), units.seconds(target["tpot_s"])
        said.append(f"The cache is not what is missing: TPOT {part} is {tpot}, above {limit}.")
    if _ttft(best) < (1 - FASTER) * _ttft(least):
        enough = min(
            (r for r in rows if _ttft(r) <= (1 + FASTER) * _ttft(best)),
            key=lambda row: float(row["case"]["host_cache"]),
        )
        said.append(
            f"{_value(enough)} GiB shorten mean TTFT from {_mean(least)} to {_mean(enough)}."
        )
    elif least is not best:
        said.append("A host cache does not shorten TTFT.")
    return said


def _describe_loads(
    rows: Sequence[Row], where: str, met: str, arrivals: Sequence[float | None]
) -> str:
    """Which loads are more than the machine serves, and how much memory the others take."""
    late = [i for i, row in enumerate(rows) if is_overloaded(row)]
    some, kept = [rows[i] for i in late], [row for i, row in enumerate(rows) if i not in late]
    most = max((row["request_per_s"] or 0.0 for row in some), default=0.0)
    told = []
    if late:
        is_over, does = "is", "it completes"
        if rows[0]["replicas"] > 1:
            is_over, does = "are", "they complete"
        over = f"{where} {is_over} overloaded at {_list_loads(some)}: {does} at most "
        over += f"{units.rate(most)} requests/s"
        need = [count_replicas(rows[i], arrivals[i], most) for i in late]
        known = [f"{n:,}" for n in need if n]
        if len(known) == len(need):
            over += f", so at least {join_words(list(dict.fromkeys(known)))} replicas are needed"
        told.append(f"{over}.")
    if kept:
        held = _list(kept, lambda row: units.size(row["kv_peak_bytes"]))
        shares = _list(kept, lambda row: units.percent(row["kv_peak_share"]))
        pool = units.size(rows[0]["kv_capacity_bytes"])
        holds = f"At {_list_loads(kept)}, {_spoken(rows[0])} on {where} needs up to {held}"
        told.append(f"{holds} of KV cache ({shares} of its {pool}).")
    times = f"TTFT p99 at {_list_loads(rows)}: {_list(rows, _p99('ttft_s'))}."
    first = told[0] if late else ""
    return " ".join(filter(None, [first, met, *told[bool(late) :], times]))


def _list_loads(rows: Sequence[Row]) -> str:
    """Write the loads of runs, such as ``2 and 4 requests/s`` or ``1x and 4x the trace's rate``."""
    if _varied_option(rows) == "rate" or "rate" in rows[0]["case"]:
        return _list(rows, lambda row: f"{_value(row)}x") + " the trace's rate"
    return f"{_list(rows, _value)} requests/s"


def _describe_tiers(rows: Sequence[Row], where: str, trace: str) -> str:
    """Which size of a tier is enough, and what each brings."""
    key = _varied_option(rows)
    kind = "host cache" if key == "host_cache" else "NVMe cache"
    ranked = sorted(rows, key=lambda row: row["case"][key])
    least, best = ranked[0], min(_ttft(row) for row in ranked)
    enough = next(
        r for r in ranked if _ttft(least) - _ttft(r) >= SUFFICIENT_GAIN * (_ttft(least) - best)
    )
    if best > _ttft(least) * (1 - FASTER):
        told = f"A {kind} does not shorten TTFT for {trace} on {where}."
    else:
        start = f"no {kind}" if least["case"][key] == 0 else f"{_value(least)} GiB"
        gain = units.percent(1 - _ttft(enough) / _ttft(least))
        told = f"A {kind} of {_value(enough)} GiB shortens mean TTFT by {gain} for {trace} on "
        told += f"{where}, compared with {start}."
        whole = _ttft(least) - _ttft(enough)
        half = next(r for r in ranked if _ttft(least) - _ttft(r) >= PARTIAL_GAIN * whole)
        if half is not enough:
            share = units.percent((_ttft(least) - _ttft(half)) / whole)
            told += f" {_value(half)} GiB achieve {share} of that gain."
    times = f"Mean TTFT is {_mean(enough)} with {_value(enough)} GiB"
    if enough is not least:
        start = f"with {_value(least)} GiB" if least["case"][key] else "without"
        times += f", {_mean(least)} {start}"
    return verdict([f"{told} {times}."], [f"{_hits(enough)} of prompt tokens are in the cache."])


def _describe_prefixes(rows: Sequence[Row], where: str, trace: str) -> str:
    """Whether stored prefixes are loaded or computed again."""
    best = min(rows, key=_ttft)
    by = {row["case"]["prefix_load"]: row for row in rows}
    told = join_words([f"{_mean(row)} with {name}" for name, row in by.items()])
    start = f"{best['case']['prefix_load']} is best"
    if "recompute" in by:
        faster = _ttft(best) < (1 - FASTER) * _ttft(by["recompute"])
        start = f"Loading stored prefixes is {'faster' if faster else 'no faster'} than recomputing"
    said = f"{start} for {trace} on {where}: mean TTFT is {told}."
    return verdict([said], [f"{_hits(best)} of prompt tokens are in the cache."])


def _ttft(row: Row) -> float:
    return float(row["ttft_s"]["mean"] or 0.0)


def _mean(row: Row) -> str:
    return units.seconds(row["ttft_s"]["mean"])


MARK, ANSWER = b"kvsim run", b"kvsim result"
FATES = ["unfinished", "finished", "refused", "aborted"]


def run_digest(requests: Requests, costs: StepCosts, rate: Array | None, *others: object) -> str:
    """Compute a digest that identifies a run, for ``--resume``.

    Parameters
    ----------
    requests
        The requests.
    costs
        The cost model.
    rate
        Tokens per decoding round of each request; None for the mean. [tokens]
    *others
        All other inputs.

    Returns
    -------
    str
        Digest of the inputs and of kvsim's version.
    """
    digest = sha256()
    names = "arrival", "prompt", "generate", "block_ids", "block_start", *CONDUCT
    for column in (*(getattr(requests, name) for name in names), rate):
        digest.update(b"none" if column is None else column.tobytes())
        digest.update(b"|")
    what = (costs.technique, costs.deployment, costs.rules, costs.gpu_memory, others, __version__)
    digest.update(f"{requests.block_tokens}|{what!r}".encode())
    return digest.hexdigest()


def write_run(path: Path, run: Run, mark: str, result: Row) -> None:
    """Write times and status of every request to a Parquet file.

    Parameters
    ----------
    path
        The file.
    run
        The simulated run.
    mark
        Digest of the run's inputs, from :func:`run_digest`.
    result
        Row of the run, stored in the file's metadata.

    Raises
    ------
    InputError
        If the file cannot be written.
    """
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    p, requests, outcome = run.progress, run.requests, Outcome(run)  # statuses ascend as FATES do
    fate = np.maximum(p.status - FINISHED + 1, 0).astype(np.int8)
    columns = {
        "arrival_s": p.arrival,
        "prompt_tokens": requests.prompt,
        "generate_tokens": requests.generate,
        "replica": p.replica,
        "started_s": p.started,
        "first_token_s": p.arrival + outcome.ttft_s,
        "last_token_s": p.arrival + outcome.latency_s,
        "prefix_hit_tokens": p.hits,
        "preemptions": p.preempted,
        "status": pa.DictionaryArray.from_arrays(fate, FATES),
    }
    table = pa.table(columns).replace_schema_metadata({MARK: mark, ANSWER: json.dumps(result)})
    with replacing(path) as draft:
        parquet.write_table(table, draft)


def read_finished_run(path: Path, mark: str) -> Row | None:
    """Read the stored result of a run.

    Parameters
    ----------
    path
        Parquet file that :func:`write_run` wrote.
    mark
        Digest of the run's inputs.

    Returns
    -------
    Row or None
        The result; None if the file does not exist.

    Raises
    ------
    InputError
        If the file is of a different run.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    if not path.exists():
        return None
    with own_output():
        check_input(path, RESULT)
    try:
        found = read_schema(path).metadata or {}
    except (ArrowException, OSError):
        found = {}
    if found.get(MARK, b"").decode() == mark:
        result: Row = json.loads(found[ANSWER])
        return result
    another = "is of another run: trace, options or version differ"
    what = another if MARK in found else "is no file of kvsim simulate"
    raise InputError(f"--resume: {path} {what}; move it away, or choose another --out")
