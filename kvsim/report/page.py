"""Self-contained HTML pages: plotly.js inside, nothing from the network."""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvsim.errors import InputError
from kvsim.files import replace_text
from kvsim.planner.options import GIB
from kvsim.planner.plan import Plan
from kvsim.report.rows import Row, entries, error, gib, spec
from kvsim.report.tables import milliseconds, outlook, short

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


def check_target(name: str, option: str = "--report") -> None:
    """Refuse a file that could not be written, before anything is computed.

    Raises
    ------
    InputError
        If the folder is missing or not writable, or the path is anything but a file.
    """
    path = Path(name)
    try:
        taken = path.exists() and not path.is_file()  # a folder; a device, which we would replace
        usable = path.name and path.parent.is_dir() and os.access(path.parent, os.W_OK)
    except (OSError, ValueError):  # a name that is too long or holds a NUL
        taken = True
    if taken or not usable or not path.name.isprintable():
        raise InputError(
            f"{option}: got {name[:200]!r}; expected a file in an existing, writable folder"
        )


def write_plan(path: Path, heading: str, answer: Row, result: Plan) -> None:
    """The page of ``kvsim plan``."""
    from plotly.io import to_html

    shown = entries(answer)
    bars = [(label if i == 0 else row["technique"], row) for i, (label, row) in enumerate(shown)]
    sections = [
        ("Every option", _frontier(result)),
        ("GPU memory", _bars(bars, "gpu_bytes", GIB, "GiB")),
        ("Work in one decoding round, overlapped or not", _bars(bars, "round_s", 1e-3, "ms")),
    ]
    parts = [f"<h1>{escape(heading)}</h1>", _summary(answer), _table(shown)]
    for i, (title, figure) in enumerate(sections):
        chart = to_html(figure, full_html=False, include_plotlyjs="inline" if i == 0 else False)
        parts.append(f"<h2>{escape(title)}</h2>{chart}")
    write(path, "kvsim plan", "\n".join(parts))


def write(path: Path, title: str, body: str) -> None:
    """A page around a body, written beside its place and then renamed."""
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{body}</body></html>"
    )
    replace_text(path, page)


def _summary(answer: Row) -> str:
    chosen, basis = answer["predicted"], answer["basis"]
    said = [
        f"Prompt {chosen['prompt']}, {chosen['generate']} generated tokens, best "
        f"{answer['objective']}: run <b>{escape(spec(chosen))}</b> at batch "
        f"<b>{chosen['batch']}</b>. It is bound by {chosen['bound_by']}.",
        *(escape(line) for line in outlook(answer)),
        *(f"Note: {escape(n)}." for n in chosen["notes"]),
    ]
    missing = f"Not modelled: {escape('; '.join(answer['not_modelled']))}."
    lines = "".join(f"<p>{line}</p>" for line in said)
    return f'{lines}<p class="basis">{grounds(basis)}<br>{missing}</p>'


def _table(shown: list[tuple[str, Row]]) -> str:
    headings = ("", "technique", "batch", "TTFT ms", "TPOT ms", "tok/s", "GPU GiB", "host GiB")
    rows = []
    for label, r in shown:
        cells = (
            label, spec(r), short(r["batch"], 6), milliseconds(r["ttft_s"]),
            milliseconds(r["tpot_s"]), short(r["output_tok_s"]), gib(r["gpu_bytes"]),
            gib(r["host_bytes"]),
        )  # fmt: skip
        rows.append(cells)
    return table(headings, rows)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is the choice."""
    lines = []
    for i, cells in enumerate(rows):
        mark = ' class="choice"' if i == 0 else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def grounds(basis: Row) -> str:
    """What the numbers stand on."""
    return (
        f"Basis: {basis['kind']}; hardware {escape(basis['hardware'])}, stack "
        f"{escape(basis['stack'])}. Error on rows not seen: {escape(error(basis))}"
    )


def _frontier(result: Plan) -> "Figure":
    """Throughput over TPOT of every option that fits, the choice marked."""
    from plotly import graph_objects as go

    table, limits = result.table, result.limits
    columns = table.columns
    fits = (columns["gpu_memory"] <= limits.gpu_memory) & (
        columns["host_memory"] <= limits.host_memory
    )
    figure = go.Figure()
    for name in dict.fromkeys(t.name for t in table.technique):
        rows = table.rows_of(name)
        rows = rows[fits[rows]]
        if not rows.size:
            continue
        labels = [f"{table.technique[i]}<br>batch {table.batch[i]:.0f}" for i in rows]
        figure.add_scatter(
            x=1e3 * columns["tpot"][rows], y=-columns["throughput"][rows], mode="markers",
            name=name, text=labels, marker={"size": 5, "opacity": 0.6},
            hovertemplate="%{text}<br>%{x:.1f} ms, %{y:.1f} tok/s<extra></extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=1e3 * result.choice.tpot_s, y=result.choice.output_tok_s, mode="markers", name="choice",
        marker={"size": 16, "symbol": "star", "color": "black"},
    )  # fmt: skip
    if np.isfinite(limits.tpot):
        shown = -columns["throughput"][fits]
        mark_limit(figure, 1e3 * limits.tpot, [shown.min(), shown.max()], "TPOT limit")
    figure.update_xaxes(title="TPOT [ms]", type="log")
    figure.update_yaxes(title="generated tokens per second, prefill included", type="log")
    figure.update_layout(template="plotly_white", height=520)
    return figure


def mark_limit(figure: "Figure", x: float, height: list[float], name: str) -> None:
    """A dotted line upwards; plotly would put the text of its own one off a logarithmic axis."""
    line = {"dash": "dot", "color": "black"}
    figure.add_scatter(x=[x, x], y=height, mode="lines", name=name, line=line)


def _bars(shown: list[tuple[str, Row]], part: str, unit: float, label: str) -> "Figure":
    """Stacked bars of one part of the breakdown, one bar per entry."""
    from plotly import graph_objects as go

    names = dict.fromkeys(n for _, row in shown for n in row["breakdown"][part])
    figure = go.Figure()
    for name in names:
        values = [row["breakdown"][part].get(name, 0) / unit for _, row in shown]
        figure.add_bar(x=[label for label, _ in shown], y=values, name=name)
    figure.update_layout(barmode="stack", template="plotly_white", height=420)
    figure.update_yaxes(title=label)
    return figure
