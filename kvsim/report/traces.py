"""What a request trace is like, as JSON and as a table."""

from dataclasses import asdict
from typing import Any

from kvsim.report import units
from kvsim.report.answer import Answer, show_verdict, verdict
from kvsim.report.json import Row, envelope, print_json
from kvsim.report.screen import Screen
from kvsim.report.table import Table, of_cells
from kvsim.report.units import short
from kvsim.traces.read import Trace
from kvsim.traces.requests import Requests
from kvsim.traces.statistics import LengthStatistics, describe

LINES = {
    "requests": "requests", "duration_s": "duration [s]", "rate_rps": "rate [requests/s]",
    "gap_cv": "gaps: standard deviation / mean",
    "dispersion_per_minute": "arrivals per minute: variance / mean",
    "simultaneous_share": "share that arrives together with another",
    "input_tok_s": "prompt tokens/s", "output_tok_s": "generated tokens/s",
    "length_correlation": "rank correlation of both lengths",
}  # fmt: skip
REUSE = {
    "block_tokens": "tokens per prefix block", "blocks": "prefix blocks",
    "unique": "different ones", "hit_rate": "block hit rate, infinite cache",
    "token_share": "prompt tokens in hits", "request_share": "requests with a hit",
}  # fmt: skip


def described(name: str, requests: Requests) -> Row:
    """A trace's statistics under their contract names."""
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


def row(trace: Trace) -> Row:
    """The same of a trace that was read, with what was left out of it."""
    read = {"format": trace.format, "left_out": trace.left_out.counts, "notes": list(trace.notes)}
    return described(trace.name, trace.requests) | read


def answered(row: Row) -> Answer:
    """A trace in words: rate, lengths and what its prefixes share."""
    prompt, generate, reuse = (row[k] for k in ("prompt_tokens", "generate_tokens", "reuse"))
    shared = "It has no prefix blocks: prefix caching cannot be simulated."
    if reuse:
        shared = (
            f"With an unlimited cache {units.percent(reuse['token_share'])} of prompt tokens would "
            f"be prefix hits."
        )
    rate = f"{units.rate(row['rate_rps'])} per second over {units.seconds(row['duration_s'])}"
    return Answer(
        verdict(
            [
                f"{row['trace']} has {row['requests']:,} requests"
                + (f", {rate}." if row["duration_s"] else ", all at once."),
                f"Prompts have {prompt['mean']:,.0f} tokens on average (p99 {prompt['p99']:,.0f}), "
                f"answers {generate['mean']:,.0f} (p99 {generate['p99']:,.0f}).",
                shared,
            ]
        ),
        figures={k: row[k] for k in ("requests", "rate_rps", "duration_s")},
    )


def show(row: Row, json: bool, command: str, source: Row | None = None) -> None:
    """Print statistics; beside those of the trace they were fitted to, if there is one."""
    shown = [row, *([source] if source else [])]
    if json:
        own = {key: value for key, value in row.items() if key != "notes"}
        own |= {"like": source} if source else {}
        verdict, notes = answered(row).verdict, row.get("notes", ())
        print_json(envelope(command, own, verdict=verdict, notes=notes))
        return
    out = Screen()
    out.title(_title(row))
    if not source:
        show_verdict(out, answered(row))
    out.table(statistics_table(shown))
    out.blank()
    out.table(length_table(shown))


def statistics_table(shown: list[Row]) -> Table:
    """Rate, burstiness and reuse, a column per trace."""
    lines = [[said, *(short(one[key], 6) for one in shown)] for key, said in LINES.items()]
    if all(one["reuse"] for one in shown):
        lines += [
            [said, *(short(one["reuse"][key], 6) for one in shown)] for key, said in REUSE.items()
        ]
    return of_cells(["", "trace", *["like"] * (len(shown) - 1)], lines)


def length_table(shown: list[Row]) -> Table:
    """Prompt and generated tokens, a row per trace."""
    names = [name for name in shown[0]["prompt_tokens"] if name != "total"]
    lengths = [
        [f"{what} tokens{like}", *(short(one[f"{key}_tokens"][name]) for name in names)]
        for key, what in (("prompt", "prompt"), ("generate", "generated"))
        for one, like in zip(shown, ("", ", like"), strict=False)
    ]
    ranks = "0" + "".join("0" if name in ("mean", "p50", "p99") else "1" for name in names)
    return of_cells(["", *names], lengths, ranks=ranks)


def _title(row: Row) -> str:
    return f"{row['trace']}, format {row['format']}" if "format" in row else str(row["trace"])


def _lengths(found: LengthStatistics) -> dict[str, Any]:
    marks = {f"p{mark}": value for mark, value in found.percentiles.items()}
    ends = {"total": found.total, "mean": found.mean, "min": found.least}
    return ends | marks | {"max": found.most}
