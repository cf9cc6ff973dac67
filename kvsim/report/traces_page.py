"""The page of ``kvsim traces inspect``: a trace in words, over time, and by length."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvsim.report import page
from kvsim.report.charts import LOG, finished
from kvsim.report.colours import PALETTE
from kvsim.report.json import Row
from kvsim.report.traces import answered, length_table, statistics_table
from kvsim.traces.requests import Floats, Integers, Requests

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

BINS = 80  # of the picture over time
POINTS = 300  # of a curve


def write_page(path: Path, row: Row, requests: Requests, command: str) -> None:
    """The verdict, both tables, and the pictures."""
    pictures = [("Prompt and generated tokens of requests", lengths(requests))]
    if requests.duration > 0:
        pictures.insert(0, ("Requests per second", arrivals(requests)))
    page.write(
        path,
        page.Page(
            f"Trace {row['trace']}", answered(row), [statistics_table([row]), length_table([row])],
            pictures, notes=row.get("notes", ()), command=command,
        ),
    )  # fmt: skip


def arrivals(requests: Requests) -> "Figure":
    """Arrivals per second over the trace."""
    from plotly.graph_objects import Figure

    edges = np.linspace(0, requests.duration, BINS + 1)
    rate = np.histogram(requests.arrival - requests.arrival[0], edges)[0] / np.diff(edges)
    figure = Figure()
    figure.add_bar(
        x=edges[:-1], y=rate, width=np.diff(edges), offset=0, marker={"color": PALETTE[0]},
        hovertemplate="%{y:.3g} per second at %{x:.4g} s<extra></extra>",
    )  # fmt: skip
    figure.update_layout(bargap=0)
    return finished(figure, 300, "time [s]", "requests per second")


def lengths(requests: Requests) -> "Figure":
    """The share of requests that are no longer than each length."""
    from plotly.graph_objects import Figure

    figure = Figure()
    some = (("prompt", requests.prompt, "solid"), ("generated", requests.generate, "dash"))
    for i, (name, values, dash) in enumerate(some):
        figure.add_scatter(
            x=_quantiles(values), y=np.linspace(0, 100, POINTS), name=name, mode="lines",
            line={"color": PALETTE[i], "dash": dash, "width": 1.8},
        )  # fmt: skip
    return finished(figure, 340, "tokens", "% of requests", xaxis=LOG)


def _quantiles(values: Integers) -> Floats:
    return np.asarray(np.quantile(values, np.linspace(0, 1, POINTS)))
