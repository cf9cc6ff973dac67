"""The pages of ``kvsim calibrate``: errors of a fitted run, numbers of a measured machine."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvsim.report import page
from kvsim.report.calibrate import answered, number_table
from kvsim.report.charts import LOG, finished
from kvsim.report.colours import PALETTE, PATTERNS
from kvsim.report.json import Row

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def of_run(row: Row, quantiles: Row) -> list[tuple[str, "Figure"]]:
    """Errors before and after a fit, and the waits that were measured and predicted."""
    return [
        ("Predicted over measured less one, requests that the fit did not see", _errors(row)),
        ("Time to first token of those requests", _waits(quantiles)),
    ]


def _errors(row: Row) -> "Figure":
    from plotly.graph_objects import Figure

    from kvsim.report.calibrate_run import NAMES

    figure = Figure()
    some = {"before the fit": row["error_before"], "after the fit": row["error_not_seen"]}
    for i, (name, errors) in enumerate(some.items()):
        figure.add_bar(
            x=[NAMES[key] for key in errors], y=[100 * v for v in errors.values()], name=name,
            marker={"color": PALETTE[i], "pattern": {"shape": PATTERNS[i]}},
            hovertemplate="%{y:+.1f} %<extra></extra>",
        )  # fmt: skip
    return finished(figure, 320, "", "%")


def _waits(quantiles: Row) -> "Figure":
    from plotly.graph_objects import Figure

    figure = Figure()
    for i, (name, values) in enumerate(quantiles.items()):
        figure.add_scatter(
            x=values, y=np.linspace(0, 100, len(values)), name=name, mode="lines",
            line={"color": PALETTE[i], "dash": ("solid", "dash", "dot")[i], "width": 1.8},
        )  # fmt: skip
    return finished(figure, 340, "s", "% of requests", xaxis=LOG)


def write_machine(path: Path, answer: Row, command: str) -> None:
    """The page of a measured machine."""
    beside = [n for n in answer["numbers"] if n["datasheet"]]
    pictures = [("Measured, of the data sheet", _beside(beside))] if beside else []
    page.write(
        path,
        page.Page(
            f"{answer['device']}: {answer['samples']:,} samples",
            answered(answer),
            [number_table(answer)], pictures, notes=answer["notes"], command=command,
        ),
    )  # fmt: skip


def _beside(numbers: list[Row]) -> "Figure":
    from plotly.graph_objects import Figure

    figure = Figure()
    figure.add_bar(
        y=[n["key"] for n in numbers], x=[100 * n["value"] / n["datasheet"] for n in numbers],
        orientation="h", marker={"color": PALETTE[0]}, hovertemplate="%{x:.3g} %<extra></extra>",
    )  # fmt: skip
    axis = {"autorange": "reversed"}
    return finished(figure, 120 + 30 * len(numbers), "% of the data sheet", "", yaxis=axis)
