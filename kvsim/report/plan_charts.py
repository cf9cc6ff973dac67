"""Charts of a plan: throughput against latency, one round, memory, break-evens and gains."""

from collections.abc import Set
from math import isfinite, log10
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.planner.service import ServicePlan
from kvsim.prediction.generate import Prediction
from kvsim.report import evidence, units
from kvsim.report.charts import draw_break_evens, draw_memory, draw_round
from kvsim.report.colours import PALETTE, mark
from kvsim.report.names import label
from kvsim.report.pictures import GREY, Chart, draw_bars
from kvsim.report.predict import prediction

if TYPE_CHECKING:
    from kvsim.planner.plan import ChosenPlan

MAX_OPTIONS = 9  # options of a technique on the map
MAX_MEMORY = 3  # techniques whose memory is drawn
LATER = "legendonly"  # what is drawn once its name is clicked
MIN_DRAWN_GAIN = 5e-4  # smallest gain that is drawn
MAP = "Techniques: throughput against latency; open symbols lose quality, grey names can be shown"


def draw_plan(plan: "ChosenPlan") -> list[Chart]:
    """Draw the charts of ``kvsim plan --offline``.

    Parameters
    ----------
    plan
        The plan.
    """
    p = plan.choice
    count = units.integer(float(p.batch[0]))
    name = f"{p.technique.name}, {count} sequence{'' if count == '1' else 's'}"
    compared = [p, *([plan.baseline] if plan.baseline else [])]
    compared += [a.prediction for a in plan.alternatives]
    drawn = [
        _draw_map(plan, {other.technique.name for other in compared}),
        *draw_memory([prediction(other) for other in compared[:MAX_MEMORY]], p.deployment),
    ]
    if p.generate > 1:
        drawn += draw_round(p, name)[:1]  # predict has the roofline
        if plan.baseline is not None:
            rivals = [
                _predict_at_batch(p, other)
                for other in compared
                if other is not plan.baseline and other.technique.uniform
            ]
            drawn += draw_break_evens(rivals, plan.baseline.technique)
    ranked = sorted(plan.prices.items(), key=lambda price: price[1])
    if gains := {what: 100 * gain for what, gain in ranked if gain > MIN_DRAWN_GAIN}:
        drawn.append(draw_bars(f"What would improve {plan.objective}", gains, "%"))
    return drawn


def _predict_at_batch(choice: Prediction, other: Prediction) -> Prediction:
    """Predict a technique at the batch of the choice, rounded up to a multiple it can split."""
    parts = other.technique.tiles()
    batch = np.ceil(choice.batch / parts) * parts
    return Prediction(other.technique, choice.deployment, batch, choice.prompt, choice.generate)


def _draw_map(plan: "ChosenPlan", compared: Set[str]) -> Chart:
    """Draw throughput against TPOT for the best settings of each technique."""
    table, limits = plan.table, plan.limits
    columns = table.columns
    fits = (columns["gpu_memory"] <= limits.gpu_memory) & (
        columns["host_memory"] <= limits.host_memory
    )
    fits &= np.isfinite(columns["tpot"]) & (columns["tpot"] > 0)
    chart = Chart(MAP, "TPOT [ms]", "output tok/s", 440, log="xy")

    def place(rows: np.ndarray | list[int]) -> tuple[np.ndarray, np.ndarray]:
        return 1e3 * columns["tpot"][rows], -columns["throughput"][rows]

    exact_rows = np.array([i for i, t in enumerate(table.technique) if t.exact and fits[i]], int)
    front = _pareto_front(exact_rows, columns) if exact_rows.size else []
    wide = {"color": GREY, "width": 7}
    chart.line("lossless front", *place(front), line=wide, opacity=0.35, hoverinfo="skip")
    for name in dict.fromkeys(t.name for t in table.technique):
        rows = np.array([i for i in _pareto_front(table.rows_of(name), columns) if fits[i]], int)
        if not rows.size:
            continue
        rows = rows[np.unique(np.linspace(0, rows.size - 1, MAX_OPTIONS).round().astype(int))]
        look, exact = mark(name), [table.technique[i].exact for i in rows]
        chart.line(
            label(table.technique[rows[0]]) + ("" if any(exact) else " (lossy)"),
            *place(rows),
            look,
            visible=True if name in compared else LATER,
            marker={
                "color": look.colour,
                "size": 8,
                "line": {"width": 1.5, "color": look.colour},
                "symbol": [look.symbol if same else f"{look.symbol}-open" for same in exact],
            },
            text=[f"{table.technique[i]}<br>{table.batch[i]:.0f} sequences" for i in rows],
            hovertemplate="%{text}<br>%{x:.4g} ms, %{y:.4g} tok/s<extra></extra>",
        )
    p = plan.choice
    ring = {"size": 20, "symbol": "circle-open", "color": GREY, "line": {"width": 3}}
    chart.dots("the choice", 1e3 * np.nan_to_num(p.tpot_s), p.output_tok_s, ring)
    if np.isfinite(limits.tpot):
        rates = np.concatenate([line.y for line in chart.figure.data if line.visible != LATER])
        ends = [float(rates.min()), float(rates.max())]
        chart.target("TPOT target", [1e3 * limits.tpot] * 2, ends)
    return chart


def _pareto_front(rows: np.ndarray, columns: dict[str, np.ndarray]) -> list[int]:
    """Options of one technique that no other option of it beats in both."""
    order = rows[np.lexsort((columns["throughput"][rows], columns["tpot"][rows]))]
    best, kept = np.inf, []
    for row in order:
        if columns["throughput"][row] < best:
            best = columns["throughput"][row]
            kept.append(int(row))
    return kept


def draw_service(plan: ServicePlan) -> list[Chart]:
    """Draw the charts of ``kvsim plan`` for a service.

    Parameters
    ----------
    plan
        The plan.
    """
    p = plan.prediction
    memory = draw_memory([prediction(p)], p.deployment)
    return [_draw_rates(plan), *memory, *draw_round(p, p.technique.name)]


def _draw_rates(plan: ServicePlan) -> Chart:
    """Draw p90 of TTFT and TPOT against the request rate, with intervals and targets."""
    points, c = list(plan.curve()), plan.choice.carried
    title = "TTFT and TPOT (p90) with 80 % intervals, against the request rate"
    chart = Chart(title, "requests/s", "s", 360, log="y")
    rates = [point["requests_per_s"] for point in points]
    factors = evidence.time_ranges(c.deployment, label(c.technique), 1.0, 1.0)
    for i, (name, dash) in enumerate((("ttft", "solid"), ("tpot", "dash"))):
        key, named, colour = f"{name}_s", name.upper(), PALETTE[i]
        times = [point[key]["p90"] for point in points]  # type: ignore[index]
        look: dict[str, Any] = {"opacity": 0.4, "hoverinfo": "skip"}
        look["line"] = {"width": 0, "color": colour}
        for end, fill in (("low", None), ("high", "tonexty")) if key in factors else ():
            bound = [factors[key][end] * t for t in times]
            chart.line(None, rates, bound, fill=fill, showlegend=False, **look)
        chart.line(f"{named} p90", rates, times, line={"color": colour, "dash": dash})
        target = getattr(plan.question.asked, name)
        if isfinite(target):
            told = {"annotation_text": f"{named} target", "annotation_y": log10(target)}
            chart.figure.add_hline(target, line={"dash": "dot", "color": colour}, **told)
    told = {"annotation_text": "planned", "annotation_position": "bottom right"}
    chart.figure.add_vline(c.per_s, line_dash="dot", **told)
    return chart
