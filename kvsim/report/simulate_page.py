"""The page of ``kvsim simulate``: a run over time, and how its requests fared."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.report import page, simulate, units
from kvsim.report.charts import LOG, finished
from kvsim.report.colours import Marker, lined, mark, mark_at
from kvsim.report.json import Row
from kvsim.report.names import NAME_END, settings_of, short_names
from kvsim.report.simulate_answer import Simulations
from kvsim.report.simulate_cases import run_names

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

OVER_TIME = {
    "waiting": ("Waiting requests", 1.0),
    "running": ("Decoding sequences", 1.0),
    "kv_share": ("KV cache in use [%]", 100.0),
    "busy_share": ("Busy [% of time]", 100.0),
    "hbm": ("Memory bandwidth in use [%]", 100.0),
    "compute": ("Arithmetic in use [%]", 100.0),
    "h2d": ("Host-to-GPU link in use [%]", 100.0),
    "d2h": ("GPU-to-host link in use [%]", 100.0),
}
"""What is drawn over time, one panel each: its title and the factor to the unit there."""

LINKS = ("h2d", "d2h")  # drawn only where used
REQUESTS = {
    "ttft_s": "Time to first token (TTFT)",
    "tpot_s": "Time per token (TPOT)",
    "latency_s": "From arrival to the last token",
}


def write_page(path: Path, result: Simulations) -> None:
    """A page on the runs of one trace."""
    first = result.rows[0]
    title = f"{simulate.heading(result.trace, list(result.rows))}; {result.heading}"
    names = short_names([row["technique"] for row in result.rows])
    page.write(
        path,
        page.Page(
            title, result.answer, result.tables, result.figures(), first["basis"],
            settings_of(names), result.command,
        ),
    )  # fmt: skip


def figures(results: list[Row]) -> list[tuple[str, "Figure"]]:
    """How requests fared, then one picture per quantity over time."""
    names = run_names([result["row"] for result in results])
    drawn = [(title, _spread(names, results, key)) for key, title in REQUESTS.items()]
    series = {"finished_per_s": ("Finished requests per second", 1.0), **OVER_TIME}
    for key, (title, factor) in series.items():
        if key not in LINKS or any(max(r["over_time"][key]) > 0 for r in results):
            drawn.append((title, _over_time(names, results, key, factor)))
    return drawn


def _over_time(names: Sequence[str], results: list[Row], key: str, factor: float) -> "Figure":
    """One quantity over the run, a line per technique."""
    from plotly.graph_objects import Figure

    figure = Figure()
    if key == "finished_per_s":
        one = results[0]["over_time"]
        figure.add_scatter(
            x=one["start_s"], y=one["arrivals_per_s"], name="arrivals", mode="lines",
            line={"width": 1, "color": "#888888", "shape": "hv"},
        )  # fmt: skip
    for name, look, result in zip(names, _looks(results), results, strict=True):
        series, drawn = result["over_time"], lined(look)
        figure.add_scatter(
            x=series["start_s"], y=[factor * value for value in series[key]], name=name, **drawn
        )
        figure.data[-1].line.shape = "hv"
    return finished(figure, 260, "time [s]", "", yaxis={"rangemode": "tozero"})


def _spread(names: Sequence[str], results: list[Row], key: str) -> "Figure":
    """The share of requests that took no longer than each time, and the target if there is one."""
    from plotly.graph_objects import Figure

    figure = Figure()
    for name, look, result in zip(names, _looks(results), results, strict=True):
        times = result["quantiles"][key]
        shares = [100 * k / max(len(times) - 1, 1) for k in range(len(times))]
        figure.add_scatter(x=times, y=shares, name=name, **lined(look))
    target = results[0]["row"]["targets"].get(key)
    if target is not None:
        figure.add_scatter(
            x=[target] * 2, y=[0, 100], name=f"target {units.seconds(target)}", mode="lines",
            line={"color": "#c0453f", "dash": "dot"},
        )  # fmt: skip
    return finished(figure, 340, "s", "% of requests", xaxis=LOG)


def _looks(results: list[Row]) -> list[Marker]:
    """The mark of each run's technique; where runs of one technique differ, one per run."""
    rows = [result["row"] for result in results]
    if rows[0].get("case"):
        return [mark_at(i) for i in range(len(rows))]
    return [mark(NAME_END.split(row["technique"])[0]) for row in rows]
