"""The page of ``kvsim validate``: what real runs counted beside what was predicted."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.report import page
from kvsim.report.charts import finished
from kvsim.report.names import settings_of, short_names
from kvsim.report.table import of_cells
from kvsim.report.validate import (
    KEY,
    answered,
    kinds,
    line_table,
    reasons,
    resident,
    summary_table,
)
from kvsim.validate.counts.check import CheckedTechnique
from kvsim.validate.counts.compare import Buffer, Line

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SHADES = {
    "equal": ("#26866a", ""), "explained": ("#8a7413", "/"), "DIFFER": ("#c0453f", "x"),
}  # fmt: skip


def write_page(path: Path, title: str, found: list[CheckedTechnique], command: str) -> None:
    """The verdict, a summary, and every count of every technique."""
    names = short_names([str(o.technique) for o in found])
    held = ("phase", "tier", "buffer", "", "B")
    details = []
    for o in found:
        name = names[str(o.technique)]
        details.append(line_table(o.comparison.lines, f"{name}: ops"))
        cells = [row for b in o.comparison.buffers for row in resident(b)]
        details.append(of_cells(held, cells, 4, title=f"{name}: buffers"))
    page.write(
        path,
        page.Page(
            title, answered(found), [summary_table(found)],
            [("Counts of ops and buffers, by how they stand beside the prediction", _bars(found))],
            notes=[*_reasons(found), KEY, *settings_of(names)], command=command, details=details,
        ),
    )  # fmt: skip


def _reasons(found: list[CheckedTechnique]) -> list[str]:
    """Why counts differ that are explained."""
    items: list[Line | Buffer] = [x for o in found for x in o.comparison.lines]
    items += [x for o in found for x in o.comparison.buffers]
    return [f"{', '.join(about)}: {why}." for why, about in reasons(items).items()]


def _bars(found: list[CheckedTechnique]) -> "Figure":
    from plotly.graph_objects import Figure

    names = short_names([str(o.technique) for o in found])
    labels = [names[str(o.technique)] for o in found]
    figure = Figure()
    for kind, (colour, pattern) in SHADES.items():
        figure.add_bar(
            y=labels, x=[kinds(o)[kind] for o in found], name=kind.lower(), orientation="h",
            marker={"color": colour, "pattern": {"shape": pattern}},
            hovertemplate="%{x} counts<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    axis = {"autorange": "reversed"}
    return finished(figure, 130 + 30 * len(found), "counts", "", yaxis=axis)
