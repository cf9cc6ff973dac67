"""The pictures of ``kvsim capacity``: demand, cost beside others, waits, sensitivity."""

from typing import TYPE_CHECKING

import numpy as np

from kvsim.graph import Array
from kvsim.planner.fleet.answer import CapacityAnswer
from kvsim.report.capacity_tables import format_wait
from kvsim.report.colours import PALETTE
from kvsim.report.json import Row

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SAMPLE_POINTS = 400  # of a curve
WINDOWS = 40  # of a short trace's demand
TARGET = "#a83246"


def draw_fleet(row: Row, answer: CapacityAnswer) -> "list[tuple[str, Figure]]":
    """Draw all pictures of ``kvsim capacity``.

    Parameters
    ----------
    row
        Fields of the answer.
    answer
        Answer of the capacity planner.

    Returns
    -------
    list of tuple
        Titles and figures.
    """
    percentile = 100 * answer.targets.share
    return [
        ("Demand over the trace", _demand(answer)),
        ("Cost against alternatives, and of replicas that are always busy", _costs(row)),
        ("Time to first token", _waits(answer, "ttft")),
        ("Time per token", _waits(answer, "tpot")),
        ("Other loads: requests within both targets, and cost", _sensitivity(row, percentile)),
    ]


def _demand(answer: CapacityAnswer) -> "Figure":
    """Requests per second by class, and with a schedule the replicas that run."""
    from plotly import graph_objects as go

    traffic = answer.question.traffic
    demand = traffic.demand
    start = np.concatenate([[0.0], np.cumsum(demand.hours)])[:-1]
    if len(start) == 1:
        return _arrivals(traffic.requests.arrival)
    figure = go.Figure()
    for c in range(traffic.classes):
        figure.add_bar(
            x=start, y=demand.rate[:, c], width=demand.hours, offset=0,
            name=f"{traffic.prompt[c]:.0f} + {traffic.generate[c]:.0f} tokens",
            marker_color=PALETTE[c % len(PALETTE)], marker_opacity=1 - 0.45 * (c // len(PALETTE)),
        )  # fmt: skip
    if answer.question.schedule is not None:
        figure.add_scatter(
            x=start, y=answer.fleet.running.sum(axis=1), yaxis="y2", name="replicas",
            mode="lines", line={"shape": "hv", "color": "#888888"},
        )  # fmt: skip
        figure.update_layout(yaxis2={
            "overlaying": "y", "side": "right", "title": "replicas", "showgrid": False,
            "tickmode": "linear", "tick0": 0, "dtick": -(-int(answer.fleet.replicas.sum()) // 5),
            "rangemode": "tozero",
        })  # fmt: skip
    figure.update_layout(barmode="stack", height=360)
    figure.update_xaxes(title="hours from the first request")
    figure.update_yaxes(title="requests per second", selector={"overlaying": None})
    return figure


def _arrivals(arrival: Array) -> "Figure":
    """Requests per second over a trace that is planned for as one window."""
    from plotly import graph_objects as go

    edges = np.linspace(0, max(float(arrival[-1]), 1.0), WINDOWS + 1)
    rate = np.histogram(arrival, edges)[0] / np.diff(edges)
    figure = go.Figure(
        go.Bar(x=edges[:-1] / 60, y=rate, width=np.diff(edges) / 60, offset=0,
               marker_color=PALETTE[0], hovertemplate="%{y:.3g} per second<extra></extra>")
    )  # fmt: skip
    figure.update_layout(height=300, bargap=0)
    figure.update_xaxes(title="minutes from the first request")
    figure.update_yaxes(title="requests per second")
    return figure


def _costs(row: Row) -> "Figure":
    from plotly import graph_objects as go

    bars = [("this fleet", row["usd_per_hour"], "")]
    bars += [
        (a["name"], a["usd_per_hour"], a["fleet"])
        for a in row["alternatives"]
        if a["usd_per_hour"] is not None
    ]
    figure = go.Figure(
        go.Bar(
            y=[name for name, _, _ in bars], x=[usd for _, usd, _ in bars], orientation="h",
            text=[f"{usd:.2f}" for _, usd, _ in bars], customdata=[what for _, _, what in bars],
            hovertemplate="%{y}: %{x:.2f} USD/h<br>%{customdata}<extra></extra>",
            marker_color=[PALETTE[2], *[PALETTE[5]] * (len(bars) - 1)],
        )
    )  # fmt: skip
    bound = row["search"]["bound_usd_per_hour"]
    figure.add_scatter(
        x=[bound] * len(bars), y=[name for name, _, _ in bars], mode="lines",
        name="always busy", line={"dash": "dot", "color": PALETTE[1], "width": 3},
    )  # fmt: skip
    figure.update_traces(selector={"type": "bar"}, showlegend=False)
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="USD per hour")
    figure.update_layout(height=80 + 36 * len(bars))
    return figure


def _waits(answer: CapacityAnswer, name: str) -> "Figure":
    """Share of requests within a time, of the whole trace and of each kind of replica."""
    from plotly import graph_objects as go

    played, target = answer.played, getattr(answer.targets, name)
    figure = go.Figure()
    parts: list[tuple[str, Array]] = [("all requests", np.ones(len(played.kind), bool))]
    if len(answer.used) > 1:
        parts += [(answer.fleet.kinds[j].name, played.kind == j) for j in answer.used]
    share = np.linspace(0, 1, SAMPLE_POINTS)
    for i, (label, rows) in enumerate(parts):
        values = getattr(played, name)[rows]
        known = values[np.isfinite(values)]
        if known.size:
            figure.add_scatter(
                x=np.quantile(known, share), y=100 * share, mode="lines", name=label,
                line={"color": PALETTE[i % len(PALETTE)]},
            )  # fmt: skip
    if np.isfinite(target):
        figure.add_scatter(
            x=[target, target], y=[0, 100], mode="lines", name=f"target {format_wait(target)}",
            line={"dash": "dot", "color": TARGET},
        )  # fmt: skip
    figure.update_xaxes(title="seconds", type="log")
    figure.update_yaxes(title="% of requests")
    figure.update_layout(height=340)
    return figure


def _sensitivity(row: Row, percentile: float) -> "Figure":
    """Share of requests within both targets at other loads, and what such a load costs."""
    from plotly import graph_objects as go

    loads = {1.0: row["simulated"]} | {float(k): v for k, v in row["at_load"].items()}
    costs = {1.0: row["usd_per_hour"]}
    costs |= {float(k): v["usd_per_hour"] for k, v in row["fleet_at_load"].items()}
    some, paid = sorted(loads), sorted(k for k, usd in costs.items() if usd)
    figure = go.Figure(
        go.Scatter(
            x=some,
            y=[100 * loads[x]["good_share"] for x in some],
            mode="lines+markers",
            name="within both targets",
            line_color=PALETTE[0],
        )
    )
    figure.add_scatter(
        x=paid,
        y=[costs[x] for x in paid],
        mode="lines+markers",
        yaxis="y2",
        name="USD/h of the cheapest fleet",
        line_color=PALETTE[1],
        line_dash="dash",
    )
    figure.add_hline(
        y=percentile,
        line_dash="dot",
        line_color=TARGET,
        annotation_text=f"target {percentile:g} %",
        annotation_position="bottom left",
    )
    figure.update_xaxes(title="load, in times of the trace's")
    figure.update_yaxes(title="% of requests within both targets", range=[0, 101])
    y2 = {
        "title": "USD/h",
        "overlaying": "y",
        "side": "right",
        "rangemode": "tozero",
        "tickmode": "auto",
        "showgrid": False,
    }
    figure.update_layout(height=340, yaxis2=y2)
    return figure
