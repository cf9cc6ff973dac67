"""The pictures of a plan: the map of techniques, one round, roofline, memory, winners, prices."""

from collections.abc import Set
from math import isfinite, log10
from typing import TYPE_CHECKING

import numpy as np

from kvsim.planner.plan import ChosenPlan
from kvsim.planner.service import ServicePlan
from kvsim.prediction.generate import Prediction
from kvsim.report import charts, evidence, units
from kvsim.report.charts import LOG, finish_figure, lanes, lanes_title, memory_roofs, roofline
from kvsim.report.colours import PALETTE, mark
from kvsim.report.names import label
from kvsim.report.phrases import EQUAL_SPEED
from kvsim.report.predict import prediction
from kvsim.techniques import parse

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_OPTIONS = 9  # options of a technique on the map
MAP_STEPS = 5  # contexts and batches of the winner map: 2 ** -2 .. 2 ** 2 of what was asked
LATER = "legendonly"  # what is drawn once its name is clicked
MIN_DRAWN_GAIN = 5e-4  # smallest gain that is drawn
MAP = "Techniques: throughput against latency; open symbols lose quality, grey names can be shown"


def pictures(plan: ChosenPlan) -> list[tuple[str, "Figure"]]:
    """Draw all pictures of a plan, the map first.

    Parameters
    ----------
    plan
        Plan that was chosen.

    Returns
    -------
    list of tuple
        Titles and figures.
    """
    p = plan.choice
    count = units.integer(float(p.batch[0]))
    name = f"{p.technique.name}, {count} sequence{'' if count == '1' else 's'}"
    compared = [p, *([plan.baseline] if plan.baseline else [])]
    compared += [a.prediction for a in plan.alternatives]
    rows = [prediction(other) for other in compared]
    drawn = [
        (MAP, technique_map(plan, {other.technique.name for other in compared})),
        *memory_roofs(rows, p.deployment),
    ]
    if p.generate > 1:
        drawn += [
            (lanes_title(p, name), lanes(p)),
            (f"Roofline of its ops ({name})", roofline(p)),
            ("Fastest technique by batch and prompt", winners(plan)),
        ]
        if plan.baseline is not None:
            rivals = [
                _predict_at_batch(p, other) for other in compared if other is not plan.baseline
            ]
            drawn += charts.draw_break_evens(
                [other for other in rivals if other.technique.uniform], plan.baseline.technique
            )
    if any(gain > MIN_DRAWN_GAIN for gain in plan.prices.values()):
        drawn.append((f"What would improve {plan.objective}", prices(plan)))
    return drawn


def _predict_at_batch(choice: Prediction, other: Prediction) -> Prediction:
    """A technique at the batch of the choice, or the next one that its parts divide."""
    parts = other.technique.tiles()
    batch = np.ceil(choice.batch / parts) * parts
    return Prediction(other.technique, choice.deployment, batch, choice.prompt, choice.generate)


def technique_map(plan: ChosenPlan, compared: Set[str]) -> "Figure":
    """Throughput over TPOT of each technique's best options; lossless filled, lossy open.

    Parameters
    ----------
    compared
        Techniques that are shown at first; a reader shows others by their names in the legend.
    """
    from plotly.graph_objects import Figure

    table, limits = plan.table, plan.limits
    columns = table.columns
    fits = (columns["gpu_memory"] <= limits.gpu_memory) & (
        columns["host_memory"] <= limits.host_memory
    )
    fits &= np.isfinite(columns["tpot"]) & (columns["tpot"] > 0)
    figure = Figure()
    exact_rows = np.array([i for i, t in enumerate(table.technique) if t.exact and fits[i]], int)
    front = _pareto_front(exact_rows, columns) if exact_rows.size else []
    figure.add_scatter(
        x=1e3 * columns["tpot"][front], y=-columns["throughput"][front], mode="lines",
        name="lossless front", line={"color": "#888888", "width": 7}, opacity=0.35,
        hoverinfo="skip",
    )  # fmt: skip
    for name in dict.fromkeys(t.name for t in table.technique):
        rows = np.array([i for i in _pareto_front(table.rows_of(name), columns) if fits[i]], int)
        if not rows.size:
            continue
        rows = rows[np.unique(np.linspace(0, rows.size - 1, MAX_OPTIONS).round().astype(int))]
        look = mark(name)
        exact = [table.technique[i].exact for i in rows]
        figure.add_scatter(
            x=1e3 * columns["tpot"][rows], y=-columns["throughput"][rows],
            mode="lines+markers", name=name if any(exact) else f"{name} (lossy)",
            visible=True if name in compared else LATER,
            line={"color": look.colour, "dash": look.dash, "width": 1},
            marker={
                "color": look.colour, "size": 8, "line": {"width": 1.5, "color": look.colour},
                "symbol": [look.symbol if same else f"{look.symbol}-open" for same in exact],
            },
            text=[f"{table.technique[i]}<br>{table.batch[i]:.0f} sequences" for i in rows],
            hovertemplate="%{text}<br>%{x:.4g} ms, %{y:.4g} tok/s<extra></extra>",
        )  # fmt: skip
    p = plan.choice
    figure.add_scatter(
        x=1e3 * np.nan_to_num(p.tpot_s), y=p.output_tok_s, mode="markers", name="the choice",
        marker={"size": 20, "symbol": "circle-open", "color": "#888888", "line": {"width": 3}},
    )  # fmt: skip
    if np.isfinite(limits.tpot):
        rates = np.concatenate([line.y for line in figure.data if line.visible != LATER])
        ends = [float(rates.min()), float(rates.max())]
        figure.add_scatter(
            x=[1e3 * limits.tpot] * 2, y=ends, mode="lines", name="TPOT target",
            line={"color": "#c0453f", "dash": "dot"},
        )  # fmt: skip
    return finish_figure(figure, 560, "TPOT [ms]", "output tok/s", xaxis=LOG, yaxis=LOG)


def _pareto_front(rows: np.ndarray, columns: dict[str, np.ndarray]) -> list[int]:
    """Options of one technique that no other option of it beats in both."""
    order = rows[np.lexsort((columns["throughput"][rows], columns["tpot"][rows]))]
    best, kept = np.inf, []
    for row in order:
        if columns["throughput"][row] < best:
            best = columns["throughput"][row]
            kept.append(int(row))
    return kept


def winners(plan: ChosenPlan) -> "Figure":
    """The technique that decodes fastest at other batches and prompts, of those compared here.

    Full KV where no other is faster by more than the known error, as plans choose.
    """
    from plotly.graph_objects import Figure

    p = plan.choice
    some = [p, *(a.prediction for a in plan.alternatives if a.allowed)]
    techniques = {"full": parse("full")} | {o.technique.name: o.technique for o in some}
    full = techniques["full"]
    known = {n: max(plan.question.between(t, full), EQUAL_SPEED) for n, t in techniques.items()}
    scale = 2.0 ** np.arange(-(MAP_STEPS // 2), MAP_STEPS // 2 + 1)
    longest = max(p.prompt, p.deployment.model.max_context - p.generate)
    prompts = np.unique(np.clip(np.round(p.prompt * scale), 1, longest))
    figure = Figure()
    won: dict[str, list[tuple[str, str]]] = {}
    for prompt in prompts:
        speeds = {
            name: _speeds(Prediction(t, p.deployment, _batches(p, t.tiles()), int(prompt),
                                     p.generate, contexts=4))
            for name, t in techniques.items()
        }  # fmt: skip
        for i, batch in enumerate(_batches(p, 1)):
            best = max(speeds, key=lambda name: float(speeds[name][i]))
            if speeds["full"][i] * (1 + known[best]) >= speeds[best][i]:
                best = "full"
            label = best if speeds[best][i] > 0 else "nothing fits"
            won.setdefault(label, []).append((units.integer(batch), units.integer(prompt)))
    for name, points in won.items():
        look = mark(name)
        figure.add_scatter(
            x=[batch for batch, _ in points], y=[prompt for _, prompt in points], name=name,
            mode="markers", marker={"color": look.colour, "symbol": look.symbol, "size": 22}
            if name != "nothing fits"
            else {"color": "#888888", "symbol": "x-thin-open", "size": 12},
            hovertemplate=f"{name}<br>batch %{{x}}, prompt %{{y}}<extra></extra>",
        )  # fmt: skip
    across, up = ([units.integer(value) for value in some] for some in (_batches(p, 1), prompts))
    return finish_figure(
        figure, 400, "batch", "prompt [tokens]",
        xaxis={"type": "category", "categoryorder": "array", "categoryarray": across},
        yaxis={"type": "category", "categoryorder": "array", "categoryarray": up},
    )  # fmt: skip


def _batches(prediction: Prediction, parts: int) -> np.ndarray:
    scale = 2.0 ** np.arange(-(MAP_STEPS // 2), MAP_STEPS // 2 + 1)
    wanted = np.unique(np.maximum(1, np.round(float(prediction.batch[0]) * scale)))
    return np.asarray(np.ceil(wanted / parts) * parts)


def _speeds(prediction: Prediction) -> np.ndarray:
    """Tokens per second of batches that fit, 0 of others. [tokens/s]"""
    return np.where(prediction.fits, prediction.rate_tok_s, 0.0)


def prices(plan: ChosenPlan) -> "Figure":
    """What a little more of each thing would bring."""
    from plotly.graph_objects import Figure

    gains = {
        k: v for k, v in sorted(plan.prices.items(), key=lambda kv: kv[1]) if v > MIN_DRAWN_GAIN
    }
    figure = Figure()
    figure.add_bar(
        y=list(gains), x=[100 * gain for gain in gains.values()], orientation="h",
        marker={"color": PALETTE[0]}, hovertemplate="%{x:.3g} %<extra></extra>",
    )  # fmt: skip
    return finish_figure(figure, 120 + 40 * len(gains), "%", "")


def draw_service(plan: ServicePlan) -> list[tuple[str, "Figure"]]:
    """Draw the pictures of a service's plan: times against the rate, memory, one round, roofline.

    Parameters
    ----------
    plan
        Plan that was chosen.

    Returns
    -------
    list of tuple
        Titles and figures.
    """
    p = plan.prediction
    drawn = [
        ("TTFT and TPOT (p90) with 80 % intervals, against the request rate", rate_curve(plan)),
        *memory_roofs([prediction(p)], p.deployment),
    ]
    if p.generate > 1:
        drawn += [
            (lanes_title(p, p.technique.name), lanes(p)),
            (f"Roofline of its ops ({p.technique.name})", roofline(p)),
        ]
    return drawn


def rate_curve(plan: ServicePlan) -> "Figure":
    """TTFT and TPOT (p90) against the rate with their intervals, the targets and the planned rate.

    Parameters
    ----------
    plan
        Plan that was chosen.
    """
    from plotly.graph_objects import Figure, Scatter

    points, c = list(plan.curve()), plan.choice.carried
    figure, rates = Figure(), [point["requests_per_s"] for point in points]
    factors = evidence.time_ranges(c.deployment, label(c.technique), 1.0, 1.0)
    for i, (name, dash) in enumerate((("ttft", "solid"), ("tpot", "dash"))):
        key, title = f"{name}_s", name.upper()
        times = [point[key]["p90"] for point in points]  # type: ignore[index]
        for end in ("low", "high") if key in factors else ():
            figure.add_trace(
                Scatter(
                    x=rates, y=[factors[key][end] * t for t in times], mode="lines",
                    line={"width": 0, "color": PALETTE[i]}, opacity=0.4,
                    fill="tonexty" if end == "high" else None, showlegend=False,
                    hoverinfo="skip",
                )
            )  # fmt: skip
        figure.add_trace(
            Scatter(x=rates, y=times, name=f"{title} p90", mode="lines", line_dash=dash,
                    line_color=PALETTE[i])
        )  # fmt: skip
        target = getattr(plan.question.asked, name)
        if isfinite(target):
            figure.add_hline(y=target, line_dash="dot", line_color=PALETTE[i],
                             annotation_text=f"{title} target",
                             annotation_y=log10(target))  # fmt: skip
    figure.add_vline(
        x=plan.choice.carried.per_s,
        line_dash="dot",
        annotation_text="planned",
        annotation_position="bottom right",
    )
    return finish_figure(figure, 360, "requests/s", "s", yaxis=LOG)
