"""The result of ``kvsim validate`` with a measured profile: times compared with predictions."""

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from kvsim.report import units
from kvsim.report.answer import Answer, verdict
from kvsim.report.colours import bar_style, mark
from kvsim.report.json import Row
from kvsim.report.pictures import Chart
from kvsim.report.result import Result
from kvsim.report.table import Column, Table, percent_column, text_column
from kvsim.report.terminal import BLANK, Heading

if TYPE_CHECKING:
    from kvsim.validate.times.compared import Compared, Measured, SkippedPoint, Summary

TIME_METRICS = ("ttft_s", "tpot_s")
COMPUTING = "computing_s"  # what other jobs on a machine do not move
COPY_METRICS = ("h2d_B", "d2h_B")
STREAM_ORDER = ("gpu", "h2d", "d2h", "cpu")
COMPARED_SIDES = ("predicted", "measured")
TABLE_LEGEND = (
    "Errors in %, medians over points: TTFT, TPOT, what compute works of it by a CPU's own clock, "
    "the worst of both times beside the runs' noise, peak memory, bytes copied; then the share of "
    "copies' time that runs beside compute, predicted / measured."
)
MAX_WORST_OPS = 15  # ops told of
ROUNDS_NOTE = (
    "Rounds: each technique at its last point. Copies are named by their direction where measured; "
    "on a CPU, other jobs show as gaps and long ops."
)


def make_result(answer: Row) -> Result[Row]:
    """Make the result of a comparison of times.

    Parameters
    ----------
    answer
        The fields of the JSON output, from :func:`times_fields`.
    """
    said = _write_answer(answer)
    title = f"{answer['device']}: predicted against measured"
    tables = [_technique_table(answer["points"]), _op_table(answer["points"])]
    lacking = [*said.left_out, *_describe_machine(answer["summary"]), *answer["suspicious"]]

    return Result(
        title,
        said,
        answer,
        answer,
        tables=tables,
        blocks=[
            *(Heading(title), *said.head(), TABLE_LEGEND, tables[0], BLANK, tables[1]),
            *(*lacking, *_replayed(answer["points"])),
        ],
        draw=lambda: [_draw_times(answer), *map(_draw_round, answer["rounds"])],
        remarks=[TABLE_LEGEND, ROUNDS_NOTE, *lacking],
        notes=answer["suspicious"],
    )


def times_fields(
    found: Sequence["Compared"],
    missing: Sequence["SkippedPoint"],
    summary: "Summary",
    device: str,
    suspicious: Sequence[str],
) -> Row:
    """Collect the fields of the JSON output for a comparison of times.

    Parameters
    ----------
    found
        The measured points and their predictions.
    missing
        Points that could not run, with the reason.
    summary
        Errors over all points.
    device
        Name of the machine.
    suspicious
        Irregularities during the measurement.
    """
    return {
        "device": device,
        "summary": {k: v if isinstance(v, str) else _finite(v) for k, v in vars(summary).items()},
        "suspicious": list(suspicious),
        "left_out": [
            {"technique": str(m.technique), "point": _name_point(m), "reason": m.reason}
            for m in missing
        ],
        "points": [
            {
                **{key: getattr(c, key) for key in ("model", "layers", "batch", "prompt")},
                "technique": str(c.technique),
                "rounds_replayed": c.eager is None,
                "rounds_issued_because": c.eager,
                "whole": [_measured_row(m) for m in c.whole],
                "ops": [_measured_row(m) for m in c.ops],
                "overlap": {
                    key: _finite(r.overlap)
                    for key, r in zip(COMPARED_SIDES, c.rounds, strict=False)
                },
            }
            for c in found
        ],
        "rounds": [
            {"technique": str(c.technique), "point": _name_point(c)}
            | {
                key: [[s.stream, s.name, s.begin, s.end] for s in r.spans]
                for key, r in zip(COMPARED_SIDES, c.rounds, strict=True)
            }
            for c in {c.technique.name: c for c in found if c.rounds}.values()
        ],
    }


def _name_point(found: "Compared | SkippedPoint") -> str:
    return f"{found.model}, {found.layers} layers, {found.batch} x {found.prompt}"


def _measured_row(m: "Measured") -> Row:
    return {name: getattr(m, name) for name in ("name", "predicted", "measured", "error", "noise")}


def _finite(value: float) -> object:
    return value if isfinite(value) else None


def _technique_table(points: Sequence[Row]) -> Table:
    """Median errors of times, memory and copies, a line per technique."""
    columns = [
        text_column("technique", "technique"),
        Column("points", "points", rank=3),
        percent_column("TTFT", "ttft_s", ".2g"),
        percent_column("TPOT", "tpot_s", ".2g"),
        percent_column("computing", COMPUTING, ".2g", 4),
        percent_column("worst", "worst", "+.2g", 1),
        percent_column("noise", "noise", ".2g", 5),
        percent_column("peak", "peak_B", ".2g", 6),
        percent_column("copied", "copied", ".2g", 7),
        Column("overlap", "overlap", rank=6),
    ]
    return Table(columns, [_errors(*each) for each in _by_technique(points).items()])


def _errors(name: str, points: Sequence[Row]) -> Row:
    """How far the predictions of a technique are off."""

    def errors(*names: str) -> np.ndarray:
        return np.array([m["error"] for p in points for m in p["whole"] if m["name"] in names])

    times = errors(*TIME_METRICS)
    noise = [m["noise"] for p in points for m in p["whole"] if m["name"] in TIME_METRICS]
    return {
        "technique": name,
        "points": len(points),
        **{key: _middle(errors(key)) for key in (*TIME_METRICS, COMPUTING, "peak_B")},
        "worst": float(times[np.abs(times).argmax()]),
        "noise": float(np.median(noise)),
        "copied": _middle(errors(*COPY_METRICS)),
        "overlap": _overlaps(points),
    }


def _middle(errors: np.ndarray) -> float | None:
    return float(np.median(np.abs(errors))) if errors.size else None


def _overlaps(points: Sequence[Row]) -> str:
    """Medians of the share of copies' time that runs beside compute, predicted and measured."""
    found = [[p["overlap"].get(side) for p in points] for side in COMPARED_SIDES]
    known = [[value for value in side if value is not None] for side in found]
    return " / ".join(f"{100 * np.median(side):.0f}" if side else "-" for side in known)


def _op_table(points: Sequence[Row]) -> Table:
    """The ops whose prediction misses most time, the worst first."""
    rows = [
        {
            **m,
            "technique": p["technique"].partition(":")[0],
            "point": f"{p['model']}, {p['layers']} layers, {p['batch']} x {p['prompt']}",
        }
        for p in points
        for m in p["ops"]
    ]
    rows.sort(key=lambda row: -abs(row["predicted"] - row["measured"]))
    columns = [
        text_column("op", lambda row: row["name"].removesuffix("_s")),
        text_column("technique", "technique"),
        text_column("point", "point", 2),
        *(Column(f"{side} ms", side, lambda took: f"{1e3 * took:.3g}") for side in COMPARED_SIDES),
        percent_column("off %", "error", "+.2g"),
    ]
    return Table(columns, rows[:MAX_WORST_OPS], "Operations with the largest absolute errors")


def _replayed(points: Sequence[Row]) -> list[str]:
    """Whose rounds were CUDA graphs, where some were, and why others were not."""
    names = sorted({p["technique"] for p in points if p["rounds_replayed"]})
    if not names:
        return []
    others: dict[str, set[str]] = {}
    for p in points:
        if not p["rounds_replayed"]:
            others.setdefault(p["rounds_issued_because"], set()).add(p["technique"])
    return [
        f"Rounds of {', '.join(names)} were replayed as CUDA graphs and are predicted as such",
        *(f"Rounds of {', '.join(sorted(t))} were not: {why}" for why, t in others.items()),
    ]


def describe_error(answer: Row, today: str) -> str:
    """Describe the error of a stack at points that it was not fitted to.

    Parameters
    ----------
    answer
        The fields of the JSON output, from :func:`times_fields`.
    today
        Date of the measurement.

    Returns
    -------
    str
        The text for the stack's entry ``error``.
    """
    names, s = _by_technique(answer["points"]), answer["summary"]
    return (
        f"held out, {today}, {', '.join(names)}: {s['points']} times by the {s['clock']} clock, "
        f"{units.percent(s['median'])} at the median, {units.percent(s['nine_in_ten'])} for nine "
        f"in ten; the runs' own noise {units.percent(s['noise'])}"
    )


def _write_answer(answer: Row) -> Answer:
    """State how far times are off on this machine."""
    s = answer["summary"]
    clock = " by the compute thread's own clock" if s["clock"] == "thread" else ""
    keys = "points", "median", "nine_in_ten", "noise", "wall_median"
    off, most, noise = (units.percent(s[key]) for key in keys[1:4])
    said = (
        f"On {answer['device']}, {s['points']} predicted times are off by {off} at the "
        f"median{clock}, 90th percentile at most {most}; the runs' own noise is {noise}."
    )
    return Answer(
        verdict([said], [_describe_order(s)]),
        figures={key: s[key] for key in keys},
        left_out=[
            f"left out: {m['technique']} at {m['point']}: {m['reason']}" for m in answer["left_out"]
        ],
    )


def _describe_machine(row: Row) -> list[str]:
    """Say what share of a core the runs were given, and what the wall clock shows."""
    if row["machine_share"] is None:
        return []
    return [
        f"By the wall clock the median is {units.percent(row['wall_median'])}: the machine gave "
        f"at most {units.percent(row['machine_share'])} of a core."
    ]


def _describe_order(row: Row) -> str:
    """Say whether the predicted winner wins and the predicted order holds."""
    if row["same_order"] is None:
        return "No two techniques differ by more than the runs' noise at any point."
    order = f"{units.percent(row['same_order'])} of the pairs that differ have the predicted order"
    if row["same_winner"] is None:
        return f"No technique is measurably fastest at any point; {order}."
    won = units.percent(row["same_winner"])
    return f"The predicted winner wins at {won} of the points; {order}."


def _draw_round(r: Row) -> Chart:
    """A row per stream and side, a colour per op."""
    title = f"One round of {r['technique'].partition(':')[0]}, {r['point']}"
    bars = [(side, *span) for side in COMPARED_SIDES for span in r[side]]
    drawn = {(side, stream) for side, stream, *_ in bars}
    rows = [f"{s} {side}" for s in STREAM_ORDER for side in COMPARED_SIDES if (side, s) in drawn]
    order = {"categoryorder": "array", "categoryarray": rows[::-1]}
    chart = Chart(title, "ms", height=150 + 40 * len(rows), yaxis=order, barmode="overlay")
    for i, name in enumerate(dict.fromkeys(name for _, _, name, _, _ in bars)):
        here = [bar for bar in bars if bar[2] == name]
        begins = [max(0.0, begin) for *_, begin, _ in here]
        lasts = [1e3 * (bar[4] - begin) for bar, begin in zip(here, begins, strict=True)]
        lanes = [f"{stream} {side}" for side, stream, *_ in here]
        starts, hover = [1e3 * x for x in begins], "%{y}: %{x:.3f} ms from %{base:.3f} ms"
        chart.bars(name, lasts, lanes, bar_style(i), base=starts, hovertemplate=hover)
    return chart


def _draw_times(answer: Row) -> Chart:
    title = "Predicted against measured times"
    chart = Chart(title, "measured [ms]", "predicted [ms]", 650, log="xy")
    spans: list[float] = []
    for name, here in _by_technique(answer["points"]).items():
        found = [(p, m) for p in here for m in p["whole"] if m["name"] in TIME_METRICS]
        x, y = ([1e3 * m[key] for _, m in found] for key in ("measured", "predicted"))
        spans += [*x, *y]
        text = [
            f"{m['name']} {p['model']} {p['batch']} x {p['prompt']}: {100 * m['error']:+.1f} %"
            for p, m in found
        ]
        error = {"type": "data", "array": [1e3 * m["noise"] * m["measured"] for _, m in found]}
        look = mark(name)
        dot = {"color": look.colour, "symbol": look.symbol}
        chart.dots(name, x, y, dot, text=text, error_x=error)
    ends = [min(spans), max(spans)]
    return chart.line("equal", ends, ends)


def _by_technique(points: Sequence[Row]) -> dict[str, list[Row]]:
    """Points of each technique, whatever its settings."""
    found: dict[str, list[Row]] = {}
    for point in points:
        found.setdefault(point["technique"].partition(":")[0], []).append(point)
    return found
