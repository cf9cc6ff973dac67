"""The page of ``kvsim reproduce``: errors by table, and predicted against published."""

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.evidence.published import PublishedRow
from kvsim.evidence.scores import error, score
from kvsim.files import replace_text
from kvsim.report.charts import LOG, finished
from kvsim.report.colours import PALETTE
from kvsim.report.page import Page, write
from kvsim.report.reproduce import (
    MECHANISM_COLUMNS,
    SCORE_COLUMNS,
    answered,
    markdown,
    mechanism_cells,
    mechanism_table,
    score_cells,
    score_table,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LINES = 20  # tables in one picture
COLOURS = {
    "fit": ("#888888", "circle", "fitted"),
    "check": (PALETTE[0], "diamond", "not fitted"),
    "anomaly": ("#c0453f", "x", "anomaly"),
}


def write_page(
    path: Path, title: str, rows: list[PublishedRow], predicted: list[float], command: str = ""
) -> None:
    """Errors by table, and predicted against published.

    A path that ends with .md gets the table of errors instead.
    """
    if path.suffix == ".md":
        text = f"# Errors of `kvsim reproduce {title}`, {date.today().isoformat()}\n\n"
        text += "In %, mean / worst.\n\n"
        text += f"{markdown(SCORE_COLUMNS, score_cells(score(rows, predicted)))}\n"
        cells = mechanism_cells(rows, predicted)
        if cells:
            told = "Times that no stack was fitted to, by what they differ in."
            text += f"\n## By mechanism\n\n{told}\n\n{markdown(MECHANISM_COLUMNS, cells)}\n"
        replace_text(path, text)
        return
    table = score_table(score(rows, predicted))
    page = Page(
        f"Predicted against published: {title}", answered(rows, predicted),
        [table, mechanism_table(rows, predicted)],
        [*errors_by_table(rows, predicted),
         ("Predicted against published", against(rows, predicted))],
        command=command, sources=[f"Rows of {', '.join(sorted({r.paper for r in rows}))}."],
    )  # fmt: skip
    write(path, page)


def errors_by_table(rows: list[PublishedRow], predicted: list[float]) -> "list[tuple[str, Figure]]":
    """The error of every row, a line per table; papers in turn, as many as a sheet of A4 holds."""
    lines: dict[str, set[str]] = {}
    for r in rows:
        lines.setdefault(r.paper, set()).add(_line(r))
    sheets: list[list[str]] = []
    for paper, own in lines.items():
        taken = sum(len(lines[other]) for other in sheets[-1]) if sheets else LINES
        if taken + len(own) > LINES:
            sheets.append([])
        sheets[-1].append(paper)
    pairs = list(zip(rows, predicted, strict=True))
    return [
        (
            f"Errors by table: {', '.join(papers)}" if len(sheets) > 1 else "Errors by table",
            _errors([(r, v) for r, v in pairs if r.paper in papers]),
        )
        for papers in sheets
    ]


def _errors(pairs: list[tuple[PublishedRow, float]]) -> "Figure":
    """Errors of some rows; what a row's use is shows as a shape."""
    from plotly.graph_objects import Figure

    figure = Figure()
    for use, (colour, symbol, said) in COLOURS.items():
        here = [(r, v) for r, v in pairs if r.use == use and r.metric != "fits" and v > 0]
        figure.add_scatter(
            x=[100 * error(r, v) for r, v in here], y=[_line(r) for r, _ in here], mode="markers",
            name=said, marker={"color": colour, "symbol": symbol, "size": 8},
            text=[_told(r) for r, _ in here], hovertemplate="%{text}<br>%{x:.3g} %",
        )  # fmt: skip
    names = {_line(r) for r, _ in pairs}
    axis = {"autorange": "reversed"}
    return finished(figure, 140 + 24 * len(names), "error [%]", "", yaxis=axis)


def _line(r: PublishedRow) -> str:
    return f"{r.paper} {r.table}: {r.metric}"


def against(rows: list[PublishedRow], predicted: list[float]) -> "Figure":
    """Predicted over published, both logarithmic."""
    from plotly.graph_objects import Figure

    figure = Figure()
    pairs = [(r, v) for r, v in zip(rows, predicted, strict=True) if v > 0 and r.published > 0]
    if pairs:
        ends = [f(f(r.published, v) for r, v in pairs) for f in (min, max)]
        figure.add_scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": "#888888"})
    for use, (colour, symbol, said) in COLOURS.items():
        here = [(r, v) for r, v in pairs if r.use == use]
        figure.add_scatter(
            x=[r.published for r, _ in here], y=[v for _, v in here], mode="markers", name=said,
            marker={"color": colour, "symbol": symbol}, text=[_told(r) for r, _ in here],
            hovertemplate="%{text}<br>%{x:.4g} published, %{y:.4g} predicted",
        )  # fmt: skip
    return finished(figure, 520, "published", "predicted", xaxis=LOG, yaxis=LOG)


def _told(r: PublishedRow) -> str:
    return f"{r.paper} {r.table}, {r.metric}<br>{r.settings}<br>batch {r.batch}, prompt {r.prompt}"
