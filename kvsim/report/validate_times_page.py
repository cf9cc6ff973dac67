"""The page of ``kvsim validate`` with a measured profile: times, and rounds as lanes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvsim.report import page
from kvsim.report.colours import mark
from kvsim.report.json import Row
from kvsim.report.validate_times import (
    LEGEND,
    SIDES,
    STREAMS,
    TIMES,
    answered,
    left_out,
    op_table,
    technique_table,
)


def write_page(path: Path, answer: Row, command: str = "") -> None:
    """Predicted against measured as a page of its own."""
    rounds = [
        (f"One round of {r['technique'].partition(':')[0]}, {r['point']}", _round(r))
        for r in answer["rounds"]
    ]
    page.write(
        path,
        page.Page(
            f"{answer['device']}: predicted against measured", answered(answer),
            [technique_table(answer), op_table(answer)],
            [("Predicted against measured times", _scatter(answer)), *rounds],
            notes=[LEGEND, ROUNDS, *left_out(answer), *answer["suspicious"]], command=command,
        ),
    )  # fmt: skip


ROUNDS = (
    "Rounds: each technique at its last point. Copies are named by their direction where measured; "
    "on a CPU, other jobs show as gaps and long ops."
)


def _round(r: Row) -> Any:
    """A row per stream and side, a colour per op."""
    from plotly.colors import qualitative
    from plotly.graph_objects import Bar, Figure

    colours = qualitative.Dark24

    bars = [(side, *span) for side in SIDES for span in r[side]]
    names = list(dict.fromkeys(name for _, _, name, _, _ in bars))
    figure = Figure()
    for i, name in enumerate(names):
        here = [bar for bar in bars if bar[2] == name]
        begins = [max(0.0, begin) for *_, begin, _ in here]
        figure.add_trace(
            Bar(
                y=[f"{stream} {side}" for side, stream, *_ in here],
                base=[1e3 * begin for begin in begins],
                x=[1e3 * (bar[4] - begin) for bar, begin in zip(here, begins, strict=True)],
                orientation="h", name=name, marker_color=colours[i % len(colours)],
                hovertemplate="%{y}: %{x:.3f} ms from %{base:.3f} ms",
            )
        )  # fmt: skip
    rows = [f"{s} {side}" for s in STREAMS for side in SIDES if _has(bars, side, s)]
    figure.update_layout(
        barmode="overlay", height=150 + 40 * len(rows),
        xaxis={"title": "ms"}, yaxis={"categoryorder": "array", "categoryarray": rows[::-1]},
        margin={"t": 40, "b": 40},
    )  # fmt: skip
    return figure


def _has(bars: Sequence[tuple[Any, ...]], side: str, stream: str) -> bool:
    return any(bar[:2] == (side, stream) for bar in bars)


def _scatter(answer: Row) -> Any:
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    names = dict.fromkeys(p["technique"].partition(":")[0] for p in answer["points"])
    spans: list[float] = []
    for name in names:
        here = [p for p in answer["points"] if p["technique"].partition(":")[0] == name]
        found = [(p, m) for p in here for m in p["whole"] if m["name"] in TIMES]
        x, y = ([1e3 * m[key] for _, m in found] for key in ("measured", "predicted"))
        spans += [*x, *y]
        text = [
            f"{m['name']} {p['model']} {p['batch']} x {p['prompt']}: {100 * m['error']:+.1f} %"
            for p, m in found
        ]
        error = {"type": "data", "array": [1e3 * m["noise"] * m["measured"] for _, m in found]}
        look = mark(name)
        dots = {"color": look.colour, "symbol": look.symbol}
        figure.add_scatter(
            x=x, y=y, mode="markers", name=name, text=text, error_x=error, marker=dots
        )
    ends = [min(spans), max(spans)]
    figure.add_trace(Scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": "#bbb"}))
    figure.update_layout(
        xaxis={"title": "measured [ms]", "type": "log"},
        yaxis={"title": "predicted [ms]", "type": "log"},
        height=650,
    )  # fmt: skip
    return figure
