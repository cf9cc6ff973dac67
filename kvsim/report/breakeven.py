"""Pictures of where techniques overtake full KV, one per axis."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvsim.prediction.breakeven import AXES, BreakEven, break_evens
from kvsim.prediction.generate import Prediction
from kvsim.report import units
from kvsim.report.charts import finished
from kvsim.report.colours import mark
from kvsim.report.names import distinct, label, params
from kvsim.techniques.technique import Technique

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

DRAWN = 5  # techniques compared
TITLES = {
    "prompt": "Break-even by context",
    "batch": "Break-even by batch",
    "acceptance": "Break-even by acceptance",
    "link": "Break-even by speed of the host link",
}
AMOUNTS = {
    "prompt": units.whole,
    "batch": units.whole,
    "acceptance": lambda share: f"{share:.2f}",
    "link": units.times,
}


def pictures(found: Sequence[Prediction], full: Technique) -> list[tuple[str, "Figure"]]:
    """Decoding speed over full KV's along every axis that matters to one of the techniques."""
    others = [p for p in found if p.technique.name != "full" and p.generate > 1][:DRAWN]
    rows = [{"technique": label(p.technique), "params": params(p.technique)} for p in others]
    lines = [
        (name, p.technique.name, list(break_evens(p, full)))
        for name, p in zip(distinct(rows), others, strict=True)
    ]
    drawn = []
    for axis, title in TITLES.items():
        here = [(n, t, b) for n, t, every in lines for b in every if b.axis == axis]
        if here:
            drawn.append((_title(title, axis, others[0], here), _figure(axis, here)))
    return drawn


def _title(
    title: str, axis: str, prediction: Prediction, lines: Sequence[tuple[str, str, BreakEven]]
) -> str:
    """The axis, the point that stays, and where each technique crosses."""
    point = {"batch": float(prediction.batch[0]), "prompt": float(prediction.prompt)}
    stays = ", ".join(f"{k} {units.whole(v)}" for k, v in point.items() if k != axis)
    told = [
        f"{name} at {' and '.join(AMOUNTS[axis](x) for x in found.crossings)}"
        for name, _, found in lines
        if found.crossings
    ]
    where = "; ".join(told) or "none within these bounds"
    return f"{title} ({stays}): {where}"


def _figure(axis: str, lines: Sequence[tuple[str, str, BreakEven]]) -> "Figure":
    from plotly.graph_objects import Figure

    figure = Figure()
    for i, (name, technique, found) in enumerate(lines):
        look = mark(technique)
        again = [other for _, other, _ in lines[:i]].count(technique)
        figure.add_scatter(
            x=found.values, y=found.ratio, name=name, mode="lines+markers",
            line={"color": look.colour, "dash": ("solid", "dash", "dot")[again % 3], "width": 1.5},
            marker={"color": look.colour, "symbol": look.symbol, "size": 8},
            hovertemplate=f"{name}<br>%{{x:,.4g}}: %{{y:.3g}} x full KV<extra></extra>",
        )  # fmt: skip
    ends = [found.values[np.isfinite(found.ratio)] for _, _, found in lines]
    figure.add_scatter(
        x=[np.concatenate(ends).min(), np.concatenate(ends).max()], y=[1, 1], mode="lines",
        name="full KV", line={"color": "#888888", "width": 1.5, "dash": "dot"}, hoverinfo="skip",
    )  # fmt: skip
    scale = {} if axis == "acceptance" else {"type": "log"}
    return finished(
        figure, 360, AXES[axis], "decode tok/s, full KV = 1", xaxis=scale,
        yaxis={"rangemode": "tozero"},
    )  # fmt: skip
