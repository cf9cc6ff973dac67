"""Self-contained HTML pages: plotly.js inside once, light and dark, readable on phones and paper.

A page is a verdict, what follows it, tables that sort and copy as CSV, and pictures. Its foot says
which command, version and day it is from.
"""

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import compress

import numpy as np

from kvsim import __version__
from kvsim.files import replace_text
from kvsim.report.answer import CODE, Answer
from kvsim.report.grounds import grounds
from kvsim.report.json import Row
from kvsim.report.table import Column, Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvsim.report.result import Result

WIDE, DENSE = 10, 12  # columns from which a table is wider than the text, and printed smaller
OPTION = re.compile(r"(--[a-z]\S*)")  # never broken at its hyphens
MARGIN = 0.05  # of a logarithmic axis, beside its values
PACKED, GZIP = 3, 31  # zlib's level, which takes 0.1 s, and its code for gzip's header

Picture = tuple[str, "Figure"]
"""A title and what is drawn under it."""


@dataclass
class Page:
    """What a page says, from its head to its foot."""

    title: str
    answer: Answer
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    basis: Row | None = None
    notes: Sequence[str] = ()
    command: str = ""
    script: str = ""  # what a page of its own kind adds
    extra: str = ""
    plotted: bool = False  # whether that script draws with plotly
    sources: Sequence[str] = field(default_factory=tuple)
    details: Sequence[Table] = ()  # tables that follow the pictures

    def html(self) -> str:
        """The whole page as HTML, which needs no other file."""
        body = [
            f"<h1>{escape(self.title)}</h1>",
            self.answer.html(),
            *(table(found, i) for i, found in enumerate(self.tables, 1)),
            self.extra,
            *(_picture(i, title, figure) for i, (title, figure) in enumerate(self.pictures)),
            *(table(found, i) for i, found in enumerate(self.details, len(self.tables) + 1)),
            *(f"<p>{_coded(note)}</p>" for note in self.notes),
        ]
        style, script = _asset("page.css"), _asset("page.js")
        drawn = _plotly() if self.pictures or self.plotted else ""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title>"
            f"<style>{style}</style></head><body><main>{''.join(body)}</main>{self._foot()}"
            f"{drawn}<script>{script}{self.script}</script></body></html>"
        )

    def _foot(self) -> str:
        lines = []
        if self.command:
            lines.append(f"Made by <code>{escape(self.command)}</code>")
        lines.append(f"kvsim {__version__}, {date.today().isoformat()}")
        if self.basis is not None:
            lines.append(escape(grounds(self.basis)))
        lines += [escape(source) for source in self.sources]
        return f"<footer>{''.join(f'<p>{line}</p>' for line in lines)}</footer>"


def _coded(note: str) -> str:
    return CODE.sub(r"<code>\1</code>", escape(note))


def write_result(path: Path, result: "Result", title: str = "") -> None:
    """The page of a result."""
    basis = next((row["basis"] for row in result.rows if "basis" in row), None)
    page = Page(
        title or result.title, result.answer, result.tables, pictures=result.figures(),
        basis=basis, notes=result.remarks, command=result.command,
    )  # fmt: skip
    write(path, page)


def write(path: Path, page: Page) -> None:
    """Write a page beside its place and rename it: it is whole or not there."""
    replace_text(path, page.html())


def table(found: Table, place: int = 1) -> str:
    """A table whose cells carry the number behind them, so that it sorts and copies as CSV."""
    columns, lines = found.columns, []
    named = next((c for c in columns if c.heading == "technique"), columns[0])
    for row in found.rows:
        mark = ' class="choice"' if found.marked(row) else ""
        below = found.below(row)
        cells = "".join(_cell(c, row, below if c is named else "") for c in columns)
        lines.append(f"<tr{mark}>{cells}</tr>")
    head = "".join(_head(column) for column in columns)
    title = f"<h2>{escape(found.title)}</h2>" if found.title else ""
    label = f"{escape(found.title or 'results')}, table {place}"
    kind = " wide" * (len(columns) >= WIDE) + " dense" * (len(columns) >= DENSE)
    note = f'<p class="note">{escape(found.note)}</p>' if found.note else ""
    return (
        f'{title}<div class="scroll{kind}" tabindex="0" role="region" '
        f'aria-label="{label}"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(lines)}</tbody></table></div><button class="copy">Copy as CSV</button>'
        f"{note}"
    )


def _head(column: Column) -> str:
    kind = ' class="text"' if column.text else ""
    label = escape(column.heading) or '<span class="hidden">standing</span>'
    return f'<th scope="col"{kind}><button title="{escape(column.meaning)}">{label}</button></th>'


def _cell(column: Column, row: Row, below: str) -> str:
    value = column.value(row) if column.value else None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kept = f' data-value="{value!r}"' if number else ""
    kind = ' class="text"' if column.text else ""
    small = f"<small>{escape(below)}</small>" if below else ""
    shown = OPTION.sub(r'<span class="option">\1</span>', escape(column.show(row)))
    return f"<td{kind}{kept}>{shown}{small}</td>"


def _picture(index: int, title: str, figure: "Figure") -> str:
    figure.update_layout(template=None)  # the page has its own colours
    _bounded(figure)
    drawn = figure.to_json().replace("</", "<\\/")
    return (
        f"<section><h2>{escape(title)}</h2>"
        f'<div class="picture" id="picture{index}" role="img" aria-label="{escape(title)}"></div>'
        f'<script type="application/json" data-for="picture{index}">{drawn}</script></section>'
    )


def _bounded(figure: "Figure") -> None:
    """Bounds of logarithmic axes, so that the page knows its ticks before it draws."""
    for name in ("x", "y"):
        axis = figure.layout[f"{name}axis"]
        lines = [trace for trace in figure.data if trace.type == "scatter"]
        if axis.type != "log" or axis.range or len(lines) < len(figure.data):
            continue
        values = np.concatenate([_shown(line, name) for line in lines])
        values = np.log10(values[np.isfinite(values) & (values > 0)])
        if values.size:
            room = MARGIN * max(np.ptp(values), 0.3)
            axis.range = [float(values.min() - room), float(values.max() + room)]


def _shown(line: Any, name: str) -> np.ndarray:
    """Values along one axis of the points that a line has, not of those that it lacks."""
    across, up = (np.asarray(line[axis], dtype=float) for axis in "xy")
    there = np.isfinite(across) & np.isfinite(up) & (line.visible in (None, True))
    return np.asarray((across if name == "x" else up)[there])


def _asset(name: str) -> str:
    return (files("kvsim.report") / "assets" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    """plotly.js, packed to a third; the page's script unpacks it.

    Its two dozen characters beyond ASCII are escaped: with them browsers keep and compile all of it
    at two bytes per character.
    """
    from plotly.offline import get_plotlyjs

    source = get_plotlyjs().encode("ascii", "backslashreplace")
    packed = compress(source, PACKED, wbits=GZIP)
    return f'<script type="text/plain" id="plotly">{b64encode(packed).decode()}</script>'
