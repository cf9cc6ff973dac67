"""Results of ``kvsim traces``: statistics of a request trace."""

from dataclasses import asdict

import numpy as np

from kvsim.report import units
from kvsim.report.answer import Answer, verdict
from kvsim.report.json import Row
from kvsim.report.pictures import Chart, draw_arrivals, draw_distribution
from kvsim.report.result import Result
from kvsim.report.table import Table, cells_table
from kvsim.report.terminal import BLANK, Heading
from kvsim.report.units import format_number
from kvsim.traces.read import Trace
from kvsim.traces.requests import Requests
from kvsim.traces.statistics import LengthStatistics, describe

QUANTILE_POINTS = 300  # of a curve
STATISTICS = {
    "requests": "requests",
    "duration_s": "duration [s]",
    "rate_rps": "rate [requests/s]",
    "gap_cv": "gaps: standard deviation / mean",
    "dispersion_per_minute": "arrivals per minute: variance / mean",
    "simultaneous_share": "share that arrives together with another",
    "input_tok_s": "prompt tokens/s",
    "output_tok_s": "generated tokens/s",
    "length_correlation": "rank correlation of both lengths",
}
REUSE = {
    "block_tokens": "tokens per prefix block",
    "blocks": "prefix blocks",
    "unique": "different ones",
    "hit_rate": "block hit rate, infinite cache",
    "token_share": "prompt tokens in hits",
    "request_share": "requests with a hit",
}


def describe_requests(name: str, requests: Requests) -> Row:
    """Compute the statistics of requests.

    Parameters
    ----------
    name
        Name of the trace.
    requests
        The requests.

    Returns
    -------
    Row
        Request rate, burstiness, lengths and prefix reuse.
    """
    found = describe(requests)
    span = found.duration or None
    return {
        "trace": name,
        "requests": found.requests,
        "duration_s": found.duration,
        "rate_rps": found.rate,
        "gap_cv": found.gap_cv,
        "dispersion_per_minute": found.dispersion,
        "simultaneous_share": found.simultaneous,
        "input_tok_s": span and found.prompt.total / span,
        "output_tok_s": span and found.generate.total / span,
        "prompt_tokens": _lengths(found.prompt),
        "generate_tokens": _lengths(found.generate),
        "length_correlation": found.correlation,
        "reuse": found.reuse and asdict(found.reuse),
    }


def describe_trace(trace: Trace) -> Row:
    """Compute the statistics of a trace that was read from a file.

    Parameters
    ----------
    trace
        The trace.

    Returns
    -------
    Row
        As :func:`describe_requests`, with format, omitted rows and notes.
    """
    read = {"format": trace.format, "left_out": trace.left_out.counts, "notes": list(trace.notes)}
    return describe_requests(trace.name, trace.requests) | read


def _write_answer(row: Row) -> Answer:
    """Describe a trace in words: rate, lengths and what its prefixes share."""
    prompt, generate, reuse = (row[k] for k in ("prompt_tokens", "generate_tokens", "reuse"))
    shared = "It has no prefix blocks: prefix caching cannot be simulated."
    if reuse:
        share = units.percent(reuse["token_share"])
        shared = f"With an unlimited cache {share} of prompt tokens would be prefix hits."
    rate = f"{units.rate(row['rate_rps'])} per second over {units.seconds(row['duration_s'])}"
    rate = rate if row["duration_s"] else "all at once"
    prompts, answers = (f"{x['mean']:,.0f}" for x in (prompt, generate))
    lengths = (
        f"Prompts have {prompts} tokens on average (p99 {prompt['p99']:,.0f}), answers {answers} "
        f"(p99 {generate['p99']:,.0f})."
    )
    return Answer(
        verdict([f"{row['trace']} has {row['requests']:,} requests, {rate}.", lengths, shared]),
        figures={k: row[k] for k in ("requests", "rate_rps", "duration_s")},
    )


def make_result(
    row: Row, source: Row | None = None, requests: Requests | None = None
) -> Result[Requests | None]:
    """Make the result of a command on traces.

    Parameters
    ----------
    row
        Statistics of the trace.
    source
        Statistics of the trace that it was fitted to, for comparison.
    requests
        The requests, for charts.
    """
    answer, shown = _write_answer(row), [row, *([source] if source else [])]
    tables, notes = [_statistics_table(shown), _length_table(shown)], row.get("notes", ())
    own = {key: value for key, value in row.items() if key != "notes"}
    name = f"{row['trace']}, format {row['format']}" if "format" in row else str(row["trace"])
    return Result(
        f"Trace {row['trace']}",
        answer,
        own | ({"like": source} if source else {}),
        requests,
        shown,
        tables=tables,
        blocks=[
            *(Heading(name), *(() if source else answer.head())),
            *(tables[0], BLANK, tables[1]),
        ],
        draw=lambda: [] if requests is None else _draw_requests(requests),
        remarks=notes,
        notes=notes,
    )


def _statistics_table(shown: list[Row]) -> Table:
    """Make the table of rate, burstiness and reuse, a column per trace."""
    parts = [(STATISTICS, shown)]
    if all(one["reuse"] for one in shown):
        parts.append((REUSE, [one["reuse"] for one in shown]))
    lines = [
        [said, *(format_number(one[key]) for one in rows)]
        for names, rows in parts
        for key, said in names.items()
    ]
    return cells_table(["", "trace", *["like"] * (len(shown) - 1)], lines)


def _length_table(shown: list[Row]) -> Table:
    """Make the table of prompt and generated tokens, a row per trace."""
    names = [name for name in shown[0]["prompt_tokens"] if name != "total"]
    lengths = [
        [f"{what} tokens{like}", *(format_number(one[f"{key}_tokens"][name]) for name in names)]
        for key, what in (("prompt", "prompt"), ("generate", "generated"))
        for one, like in zip(shown, ("", ", like"), strict=False)
    ]
    ranks = "0" + "".join("0" if name in ("mean", "p50", "p99") else "1" for name in names)
    return cells_table(["", *names], lengths, ranks=ranks)


def _lengths(found: LengthStatistics) -> Row:
    marks = {f"p{mark}": value for mark, value in found.percentiles.items()}
    ends = {"total": found.total, "mean": found.mean, "min": found.least}
    return ends | marks | {"max": found.most}


def _draw_requests(requests: Requests) -> list[Chart]:
    """Draw a trace over time, where arrivals differ, and by length."""
    share = np.linspace(0, 1, QUANTILE_POINTS)
    sizes = {"prompt": requests.prompt, "generated": requests.generate}
    quantiles = {name: np.quantile(values, share) for name, values in sizes.items()}
    title = "Prompt and generated tokens of requests"
    pictures = [draw_distribution(title, quantiles, across="tokens")]
    if requests.duration > 0:
        pictures.insert(0, draw_arrivals("Requests per second", requests.arrival))
    return pictures
