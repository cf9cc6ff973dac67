"""Charts with a title, drawn with plotly: lines, points, bars and targets."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Self

import numpy as np

from kvsim.graph import Array
from kvsim.report import units
from kvsim.report.colours import PALETTE, Marker, line_style

GREY, RED = "#888888", "#c0453f"
"""Of what is only referred to, and of limits and faults."""
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
DOWNWARDS = {"autorange": "reversed"}
"""Of an axis whose first name stands on top."""
DASHES = ("solid", "dash", "dot")
WINDOWS = 80  # over which arrivals are counted

Values = Sequence[object] | Array
"""Numbers or names along an axis; None leaves a gap."""


class Chart:
    """A chart with a title, for HTML pages and notebooks.

    Parameters
    ----------
    title
        Title, shown above the chart.
    across, up
        Titles of the horizontal and the vertical axis, with units.
    height
        Height without the legend. [px]
    log
        Logarithmic axes: ``"x"``, ``"y"`` or ``"xy"``.
    xaxis, yaxis
        Further properties of an axis, as in plotly.
    **layout
        Further properties of the layout, as in plotly.
    """

    def __init__(
        self,
        title: str,
        across: str = "",
        up: str = "",
        height: int = 340,
        *,
        log: str = "",
        xaxis: Mapping[str, object] = MappingProxyType({}),
        yaxis: Mapping[str, object] = MappingProxyType({}),
        **layout: object,
    ) -> None:
        from plotly.graph_objects import Figure

        self.title, self.figure = title, Figure()
        self.figure.update_layout(height=height, legend=LEGEND, margin={"t": 16, "r": 12}, **layout)
        kinds = {axis: {"type": "log"} if axis in log else {} for axis in "xy"}
        self.figure.update_xaxes(title=across, **kinds["x"], **xaxis)
        self.figure.update_yaxes(title=up, **kinds["y"], **yaxis)

    def line(
        self,
        name: str | None,
        across: Values,
        up: Values,
        look: Marker | str = GREY,
        **trace: object,
    ) -> Self:
        """Add a line.

        Parameters
        ----------
        name
            Name in the legend.
        across, up
            Coordinates of the points; None leaves a gap.
        look
            Marker of a technique, which adds symbols, or a colour.
        **trace
            Further properties of the trace, as in plotly.
        """
        style: dict[str, object] = {"mode": "lines", "line": {"color": look, "width": 1.5}}
        if isinstance(look, Marker):
            style = line_style(look)
        self.figure.add_scatter(x=across, y=up, name=name, **{**style, **trace})
        return self

    def dots(
        self, name: str, across: Values, up: Values, marker: Mapping[str, object], **trace: object
    ) -> Self:
        """Add points without a line.

        Parameters
        ----------
        name
            Name in the legend.
        across, up
            Coordinates of the points.
        marker
            Appearance of the points, as in plotly.
        **trace
            Further properties of the trace, as in plotly.
        """
        self.figure.add_scatter(x=across, y=up, name=name, mode="markers", marker=marker, **trace)
        return self

    def bars(
        self,
        name: str | None,
        across: Values,
        up: Values,
        marker: Mapping[str, object],
        **trace: object,
    ) -> Self:
        """Add horizontal bars; ``orientation="v"`` makes them vertical.

        Parameters
        ----------
        name
            Name in the legend; None for no entry.
        across, up
            Lengths and positions of the bars.
        marker
            Appearance of the bars, as in plotly.
        **trace
            Further properties of the trace, as in plotly.
        """
        self.figure.add_bar(
            x=across, y=up, name=name, marker=marker, **{"orientation": "h", **trace}
        )
        return self

    def target(self, name: str, across: Values, up: Values) -> Self:
        """Add a target as a dotted line between two points.

        Parameters
        ----------
        name
            Name in the legend.
        across, up
            Coordinates of both ends.
        """
        return self.line(name, across, up, line={"color": RED, "dash": "dot"})

    def second_axis(self, up: str, **axis: object) -> Self:
        """Add a vertical axis on the right, from 0, for traces with ``yaxis="y2"``.

        Parameters
        ----------
        up
            Title of the axis.
        **axis
            Further properties of the axis, as in plotly.
        """
        own = {"overlaying": "y", "side": "right", "title": up, "showgrid": False, **axis}
        self.figure.update_layout(yaxis2={**own, "rangemode": "tozero"})
        return self


def draw_bars(
    title: str,
    sizes: Mapping[str, float],
    across: str,
    colours: str | Sequence[str] = PALETTE[0],
    hover: str = "%{x:.3g} %<extra></extra>",
    downwards: bool = False,
) -> Chart:
    """Draw a horizontal bar for each name.

    Parameters
    ----------
    title
        Title of the chart.
    sizes
        Length of each bar, by name.
    across
        Title of the axis, with the unit.
    colours
        Colour of all bars, or of each.
    hover
        Text shown for a bar under the pointer, in plotly's format.
    downwards
        Whether the first bar is at the top.
    """
    chart = Chart(title, across, height=120 + 32 * len(sizes), yaxis=DOWNWARDS if downwards else {})
    values = list(sizes.values())
    return chart.bars(None, values, list(sizes), {"color": colours}, hovertemplate=hover)


def draw_distribution(
    title: str,
    quantiles: Mapping[str, Values],
    looks: Sequence[Marker] = (),
    target: float | None = None,
    across: str = "s",
) -> Chart:
    """Draw cumulative distributions: the share of requests within a time.

    Parameters
    ----------
    title
        Title of the chart.
    quantiles
        For each line, values at evenly spaced quantiles from 0 to 1.
    looks
        Markers of the lines; by default, colours and dashes in turn.
    target
        Target to mark. [s]
    across
        Unit of the values.
    """
    chart = Chart(title, across, "% of requests", log="x")
    for i, (name, values) in enumerate(quantiles.items()):
        shares = np.linspace(0, 100, len(values))
        if looks:
            chart.line(name, values, shares, looks[i])
        else:
            colour, dash = PALETTE[i % len(PALETTE)], DASHES[i % len(DASHES)]
            chart.line(name, values, shares, line={"color": colour, "dash": dash, "width": 1.8})
    if target is not None and np.isfinite(target):
        chart.target(f"target {units.seconds(target)}", [target] * 2, [0, 100])
    return chart


def draw_arrivals(title: str, arrival: Array) -> Chart:
    """Draw the request rate of a trace over time.

    Parameters
    ----------
    title
        Title of the chart.
    arrival
        Arrival times in ascending order. (n,) [s]
    """
    lasts = float(arrival[-1] - arrival[0])
    unit, scale = ("s", 1.0) if lasts < 600 else ("minutes", 60.0)
    edges = np.linspace(0, max(lasts, 1.0), WINDOWS + 1)
    rate = np.histogram(arrival - arrival[0], edges)[0] / np.diff(edges)
    chart = Chart(title, f"time [{unit}]", "requests per second", 300, bargap=0)
    bars = {"orientation": "v", "offset": 0, "width": np.diff(edges) / scale}
    hover, look = "%{y:.3g} per second<extra></extra>", {"color": PALETTE[0]}
    return chart.bars(None, edges[:-1] / scale, rate, look, hovertemplate=hover, **bars)
