"""The verdict on simulated runs: which technique serves the trace best, and within its targets."""

from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING

from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.report import evidence, mixed, simulate_cases, units
from kvsim.report.answer import Answer, verdict
from kvsim.report.json import Row
from kvsim.report.names import NAME_END
from kvsim.report.result import Result
from kvsim.report.table import Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TIE = 0.01  # relative difference of goodput or throughput that decides nothing
OFTEN = 0.05  # preemptions per request from which they are worth a word
ATTAINED = 0.9  # share of requests that must be good for the targets to be met


@frozen
class Simulations(Result):
    """Techniques on a trace.

    Attributes
    ----------
    results
        Of each technique its ``row``, its ``over_time`` and its ``quantiles``.
    heading
        The model and machine.
    trace
        The trace's name.
    row
        The command's own fields as ``--json`` has them.
    trace_notes
        What was noted when the trace was read.
    measured
        Date of the newest measurement that the runs stand on.
    checked
        Whether faults of the runs were looked for.
    """

    results: Sequence[Row]
    heading: str
    trace: str
    row: Row
    trace_notes: list[str]
    measured: str | None
    checked: bool

    @property
    def fields(self) -> Row:
        """The command's own fields as ``--json`` has them."""
        return self.row

    @property
    def notes(self) -> list[str]:
        """What was noted when the trace was read."""
        return self.trace_notes

    @property
    def data(self) -> str | None:
        """Date of the newest measurement that the runs stand on."""
        return self.measured

    @property
    def tables(self) -> list[Table]:
        """Times, then use of the machine."""
        from kvsim.report.simulate import times_table, use_table

        return [times_table(list(self.rows)), use_table(list(self.rows))]

    def figures(self) -> list[tuple[str, "Figure"]]:
        """The pictures of the page with their titles."""
        from kvsim.report import simulate_page

        return simulate_page.figures(list(self.results))


def answered(
    rows: Sequence[Row], deployment: Deployment, trace: str, targets: str, left_out: Sequence[str],
    played: Sequence[mixed.PlayedRun] = (),
) -> Answer:  # fmt: skip
    """The answer of ``kvsim simulate``.

    Parameters
    ----------
    targets : the TTFT and TPOT targets in words, empty without any.
    played : what the rows are of, one by one.
    """
    best = _best(rows, bool(targets))
    full = next((row for row in rows if _name(row) == "full"), None)
    if simulate_cases.axis(rows):
        told = simulate_cases.said(rows, _where(best, deployment), trace, best, targets)
    else:
        told = verdict(_needed(best, deployment, trace, targets), _wanted(rows, best, full))
    return Answer(
        verdict=told,
        figures=_figures(best),
        changes=list(_changes(best, deployment, targets)),
        evidence=[*evidence.on_card(deployment, _name(best)), *evidence.of_spread(deployment),
                  *_mixed(best, rows, played)],
        assumed=_assumed(best, deployment),
        left_out=left_out,
    )  # fmt: skip


def _mixed(best: Row, rows: Sequence[Row], played: Sequence[mixed.PlayedRun]) -> list[str]:
    own = next((run for row, run in zip(rows, played, strict=False) if row is best), None)
    return mixed.note(own, best["mean_batch"] or 0.0) if own else []


def _assumed(row: Row, deployment: Deployment) -> list[str]:
    """What a run that moves its cache to the host or from it takes for granted of the host."""
    moved = max(row["utilisation"]["h2d"], row["utilisation"]["d2h"])
    return evidence.assumed(deployment.hardware, float(moved > 0), "")


def _name(row: Row) -> str:
    return NAME_END.split(row["technique"])[0]


def _figures(row: Row) -> Row:
    keys = ("ttft_s", "tpot_s", "output_tok_s", "goodput_per_s", "good_share", "kv_peak_share",
            "usd_per_million_tokens")  # fmt: skip
    return {"technique": row["technique"], **{key: row[key] for key in keys}}


def _best(rows: Sequence[Row], targets: bool) -> Row:
    """Most goodput, or the shortest latency where there are no targets; ties go to the first."""

    def worth(row: Row) -> float:
        if targets:
            return float(row["goodput_per_s"] or 0.0)
        latency = row["latency_s"]["p50"]
        return 1 / latency if latency else 0.0

    most = max(map(worth, rows))
    return next(row for row in rows if worth(row) >= most * (1 - TIE))


def _where(row: Row, deployment: Deployment) -> str:
    replicas = f"{row['replicas']} x " if row["replicas"] > 1 else ""
    words = deployment.parallelism.words()
    spread = f" with {words}" if words else ""
    return f"{replicas}{deployment.hardware.name}{spread}"


def _needed(row: Row, deployment: Deployment, trace: str, targets: str) -> list[str]:
    where = _where(row, deployment)
    ttft, tpot = row["ttft_s"]["p99"], row["tpot_s"]["p99"]
    times = f"TTFT p99 {units.seconds(ttft)}, TPOT p99 {units.seconds(tpot)}"
    tok = f"{units.rate(row['output_tok_s'])} output tok/s"
    said = [f"{_name(row)} on {where} serves {trace}: {times}, {tok}."]
    waited = row["queue_s"]["p50"] or 0.0
    if waited > simulate_cases.WAITING:
        said.append(f"Requests queue for {units.seconds(waited)} (median): more than it serves.")
    if targets:
        share = row["good_share"]
        met = "Yes" if share and share >= ATTAINED else "No"
        said.insert(0, f"{met}: {units.percent(share)} of requests meet {targets}.")
    return said


def _wanted(rows: Sequence[Row], best: Row, full: Row | None) -> list[str]:
    said = []
    if full is not None and full is not best and full["output_tok_s"]:
        before, after = full["ttft_s"]["p99"], best["ttft_s"]["p99"]
        said.append(f"Full KV: TTFT p99 {units.seconds(before)} instead of {units.seconds(after)}.")
    hits = best["prefix_hit_share"]
    if hits:
        said.append(f"{units.percent(hits)} of prompt tokens come from the prefix cache.")
    said.append(f"KV memory peaks at {units.percent(best['kv_peak_share'])}.")
    if len(rows) > 1 and full is best:
        said.append("No other technique compared is better by more than 1 %.")
    return said


def _changes(row: Row, deployment: Deployment, targets: str) -> Sequence[str]:
    """What the run says of its own limits."""
    said = []
    if row["refused"]:
        said.append(
            f"{row['refused']} requests are larger than the KV cache: more GPUs (--tp), narrower "
            f"--weights, or a technique that keeps the cache elsewhere."
        )
    if targets and row["good_share"] is not None and row["good_share"] < ATTAINED:
        said.append(
            f"Find the fleet that meets them: kvsim capacity --gpus "
            f"{quote(deployment.hardware.name)}."
        )
    if row["preemptions"] >= OFTEN * row["requests"]:
        said.append(
            f"{row['preemptions']:,} preemptions for want of KV memory: --max-seqs (vLLM: "
            f"--max-num-seqs) below {units.whole(row['mean_batch'] * 1.5)} would avoid most."
        )
    return said
