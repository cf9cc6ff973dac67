"""Self-contained HTML pages: plotly.js inside, nothing from the network."""

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.files import replace_text
from kvsim.report.json import Row
from kvsim.report.table import Column, Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; }
table { border-collapse: collapse; margin: 1em 0; } th { font-weight: 600; color: #555; }
td, th { padding: .3em .8em; text-align: right; border-bottom: 1px solid #e4e4e4; }
td:first-child, td:nth-child(2), th:first-child, th:nth-child(2) { text-align: left; }
tr.choice { background: #eef6ee; } .basis { color: #555; border-left: 3px solid #ccc;
padding-left: 1em; } h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
"""


def write(path: Path, title: str, body: str) -> None:
    """A page around a body, written beside its place and then renamed."""
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{body}</body></html>"
    )
    replace_text(path, page)


def table(table: Table) -> str:
    """A table whose cells carry the number behind them; settings stand under a row's name."""
    columns, lines = table.columns, []
    for row in table.rows:
        mark = ' class="choice"' if table.marked(row) else ""
        cells = "".join(_cell(column, row) for column in columns)
        below = table.below(row)
        lines.append(f"<tr{mark}>{cells}</tr>")
        if below:
            lines.append(
                f'<tr class="below"><td colspan="{len(columns)}">{escape(below)}</td></tr>'
            )
    head = "".join(f'<th title="{escape(c.meaning)}">{escape(c.heading)}</th>' for c in columns)
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _cell(column: Column, row: Row) -> str:
    value = column.value(row) if column.value else None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kept = f' data-value="{value!r}"' if number else ""
    return f"<td{kept}>{escape(column.show(row))}</td>"


def mark_limit(figure: "Figure", x: float, height: list[float], name: str) -> None:
    """A dotted line upwards; plotly would put the text of its own one off a logarithmic axis."""
    line = {"dash": "dot", "color": "black"}
    figure.add_scatter(x=[x, x], y=height, mode="lines", name=name, line=line)
