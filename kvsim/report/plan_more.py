"""What ``--pareto`` and ``--explain`` add to the answer of ``kvsim plan``."""

from kvsim.planner.plan import ChosenPlan
from kvsim.planner.sensitivity import BREAKPOINT_FACTORS, Breakpoint
from kvsim.report.json import Row
from kvsim.report.names import settings
from kvsim.report.plan import brief
from kvsim.report.screen import Screen
from kvsim.report.table import Table, of, words
from kvsim.report.units import rounded

STEP = 1.02  # times the throughput, from which on another plan is worth a line


def front(result: ChosenPlan) -> list[Row]:
    """Plans between the lowest TPOT and the highest throughput."""
    return [brief(p) for p in result.front()]


def apart(rows: list[Row]) -> list[Row]:
    """Those that differ by more than ``STEP`` in throughput, the first and the last among them."""
    shown: list[Row] = []
    for row in rows[:-1]:
        if not shown or row["output_tok_s"] >= STEP * shown[-1]["output_tok_s"]:
            shown.append(row)
    if len(shown) > 1 and rows[-1]["output_tok_s"] < STEP * shown[-1]["output_tok_s"]:
        shown.pop()
    return [*shown, *rows[-1:]]


def flips(result: ChosenPlan) -> list[Row]:
    """Where another technique would be chosen."""
    return [{**vars(f), "words": _flipped(f, result)} for f in result.flips()]


def _flipped(f: Breakpoint, result: ChosenPlan) -> str:
    start = "From" if f.factor > 1 else "Down from"
    value = float(f"{f.value:.2g}")
    unit = {"prompt": f"{value:,.0f} tokens", "batch": f"{value:,.0f}"}
    amount = unit.get(f.what, f"{value / 1e9:.3g} GB/s")
    instead = f"{f.technique} is chosen" if f.technique else "nothing here meets the limits"
    times = rounded(f.factor, 2)
    return f"{start} a {f.what} of about {amount} ({times} times) on, {instead}."


def show_front(rows: list[Row]) -> None:
    """The front as a table."""
    columns = [words("technique", lambda row: row["technique"]), of("batch", 1), of("ttft_s"),
               of("tpot_s"), of("output_tok_s"), of("gpu_bytes", 3)]  # fmt: skip
    out = Screen()
    out.blank()
    out.say("Between the lowest TPOT and the highest throughput:")
    out.table(Table(columns, apart(rows), below=settings))


def show_flips(rows: list[Row]) -> None:
    """Each change in a sentence, or that there is none."""
    out = Screen()
    for row in rows:
        out.say(row["words"])
    if not rows:
        out.say(
            f"The same is chosen with {max(BREAKPOINT_FACTORS):g} times more or less of any of "
            f"these alone: prompt, batch where one was asked for, host link bandwidth, host memory "
            f"bandwidth."
        )
