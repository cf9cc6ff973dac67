"""The page of ``kvsim simulate``: a run over time, and how its requests fared."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.report import page
from kvsim.report.grounds import grounds
from kvsim.report.json import Row
from kvsim.report.names import settings_of, short_names
from kvsim.report.simulate import SHARES, times_table, use_table
from kvsim.report.simulate_answer import Simulations

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLOURS = ("#1f5fa8", "#d1731c", "#2b8a57", "#a83246", "#7a5bb0", "#6b6b6b", "#1c9aa8", "#b59a1c")
OVER_TIME = {
    "waiting": ("waiting requests", 1.0),
    "running": ("decoding sequences", 1.0),
    "kv_share": ("KV cache in use [%]", 100.0),
    "busy_share": ("computing [% of time]", 100.0),
    "hbm": ("memory bandwidth [%]", 100.0),
    "compute": ("arithmetic [%]", 100.0),
    "h2d": ("host to GPU link [%]", 100.0),
    "d2h": ("GPU to host link [%]", 100.0),
}
"""What is drawn over time, one panel each: its title and the factor to the unit there."""

LINKS = ("h2d", "d2h")  # drawn only where used
TABLES = (times_table, use_table)
REQUESTS = {"ttft_s": "TTFT [s]", "tpot_s": "TPOT [s]", "latency_s": "arrival to last token [s]"}


def write_page(path: Path, heading: str, trace: str, result: Simulations) -> None:
    """A page on the runs of one trace."""
    results = list(result.results)
    from plotly.io import to_html

    names = short_names([result["row"]["technique"] for result in results])
    first = results[0]["row"]
    title = f"{trace}: {first['requests']:,} requests, replicas: {first['replicas']}"
    parts = [
        f"<h1>{escape(title)}</h1><p>{escape(heading)}</p>",
        result.answer.html(),
        *(page.table(made([result["row"] for result in results])) for made in TABLES),
        *(f"<p>{escape(line)}</p>" for line in (SHARES, *settings_of(names))),
        f'<p class="basis">{escape(grounds(first["basis"]))}</p>',
        "<h2>Over time</h2>" + to_html(_over_time(names, results), False, include_plotlyjs=True),
        "<h2>Requests</h2>" + to_html(_spread(names, results), False, include_plotlyjs=False),
    ]
    page.write(path, "kvsim simulate", "\n".join(parts))


def _over_time(names: Mapping[str, str], results: list[Row]) -> "Figure":
    """Panels with one line per technique, all above one axis of time."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    panels = {
        key: about
        for key, about in OVER_TIME.items()
        if key not in LINKS or any(max(r["over_time"][key]) > 0 for r in results)
    }
    titles = ["requests per second", *(title for title, _ in panels.values())]
    figure = make_subplots(
        rows=len(titles), shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.025
    )
    one = results[0]["over_time"]
    figure.add_trace(
        Scatter(x=one["start_s"], y=one["arrivals_per_s"], name="arrivals",
                line={"width": 1, "color": "#999", "shape": "hv"}),
        row=1, col=1,
    )  # fmt: skip
    for i, result in enumerate(results):
        name, series = names[result["row"]["technique"]], result["over_time"]
        lines = {"finished_per_s": 1.0} | {key: factor for key, (_, factor) in panels.items()}
        for row, (key, factor) in enumerate(lines.items(), 1):
            values = [factor * value for value in series[key]]
            line = {"width": 1.4, "color": COLOURS[i % len(COLOURS)], "shape": "hv"}
            figure.add_trace(
                Scatter(x=series["start_s"], y=values, name=name, legendgroup=name, line=line,
                        showlegend=row == 1),
                row=row, col=1,
            )  # fmt: skip
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(title="time [s]", row=len(titles), col=1)
    _finish(figure, 150 * len(titles))
    return figure


def _spread(names: Mapping[str, str], results: list[Row]) -> "Figure":
    """The share of requests that took no longer than each time."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    figure = make_subplots(cols=len(REQUESTS), shared_yaxes=True, horizontal_spacing=0.04)
    for i, result in enumerate(results):
        name = names[result["row"]["technique"]]
        for column, key in enumerate(REQUESTS, 1):
            times = result["quantiles"][key]
            shares = [100 * k / max(len(times) - 1, 1) for k in range(len(times))]
            line = {"width": 1.6, "color": COLOURS[i % len(COLOURS)]}
            figure.add_trace(
                Scatter(x=times, y=shares, name=name, legendgroup=name, line=line,
                        showlegend=column == 1),
                row=1, col=column,
            )  # fmt: skip
    for column, title in enumerate(REQUESTS.values(), 1):
        figure.update_xaxes(title=title, type="log", dtick=1, row=1, col=column)
    figure.update_yaxes(title="% of requests", row=1, col=1)
    _finish(figure, 380)
    return figure


def _finish(figure: "Figure", height: int) -> None:
    legend = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 1.0, "xanchor": "right"}
    margin = {"l": 60, "r": 20, "t": 60, "b": 50}
    figure.update_layout(template="plotly_white", height=height, legend=legend, margin=margin)
    figure.update_annotations(font_size=13, x=0, xanchor="left")
