"""Self-contained HTML pages with sortable tables and interactive charts.

A page includes plotly.js once, compressed, and needs no network. ``templates/page.html`` is the
layout of all pages; the footer states command, version and date.
"""

import json
import re
from base64 import b64encode
from collections.abc import Callable
from datetime import date
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from zlib import compress

import numpy as np

from kvsim.console import escape_controls
from kvsim.report.json import Row
from kvsim.report.table import Column
from kvsim.report.terminal import COMMAND
from kvsim.version import __version__

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup
    from plotly.graph_objects import Figure

WIDE, DENSE = 10, 12  # columns from which a table is wider than the text, and printed smaller
CODE = re.compile("`([^`]+)`")
OPTION = re.compile(r"(--[a-z]\S*)")  # never broken at its hyphens
JSON_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
MARGIN = 0.05  # of a logarithmic axis, beside its values
PACKED, GZIP = 3, 31  # zlib's level, which takes 0.1 s, and its code for gzip's header


def render_page(result: Any) -> str:
    """Render a result as an HTML page, which ``templates/page.html`` lays out.

    Parameters
    ----------
    result
        The :class:`kvsim.report.result.Result` of a command.

    Returns
    -------
    str
        The HTML document.
    """
    pictures = [(title, _serialize(figure)) for title, figure in result.figures()]
    page = _load_template().render(
        result=result,
        pictures=pictures,
        grid=_escape_json(result.grid),
        plotly=pack_plotly() if pictures or result.grid else "",
        made=f"kvsim {__version__}, {date.today().isoformat()}",
    )
    return escape_controls(page)


def render_part(template: str, macro: str, *given: object) -> str:
    """Render a macro of a template, for display in a notebook.

    Parameters
    ----------
    template
        File in ``templates``.
    macro
        Name of the macro.
    *given
        Arguments of the macro.
    """
    made = getattr(_load_template(template).module, macro)
    return escape_controls(str(made(*given)))


@cache
def _load_template(name: str = "page.html") -> "Template":
    """Load a template together with the filters and functions that it calls."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=PackageLoader("kvsim.report")
    )
    environment.filters |= {"coded": _safely(_mark_code), "commands": _safely(_mark_command)}
    environment.filters |= {"options": _safely(_keep_options)}
    environment.globals |= {"wide": WIDE, "dense": DENSE, "value": _safely(_value)}
    environment.globals["asset"] = _safely(_read_asset)
    return environment.get_template(name)


def _safely(make: Callable[..., str]) -> "Callable[..., Markup]":
    """A function whose HTML is not escaped again."""
    from markupsafe import Markup

    return lambda *given: Markup(make(*given))


def _read_asset(name: str) -> str:
    return (files("kvsim.report") / "templates" / name).read_text(encoding="utf-8")


def _mark_code(text: str) -> str:
    """Escape text and set what stands in back ticks as code."""
    return CODE.sub(r"<code>\1</code>", escape(text))


def _mark_command(line: str) -> str:
    """Escape a line and set its codes, and an engine's command, as code."""
    return COMMAND.sub(r"\1: <code>\2</code>\3", _mark_code(line))


def _keep_options(text: str) -> str:
    return OPTION.sub(r'<span class="option">\1</span>', escape(text))


def _value(column: Column, row: Row) -> str:
    """The number behind a cell, by which it sorts and is copied."""
    value = column.value(row)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f' data-value="{value!r}"' if number else ""


def _serialize(figure: "Figure") -> str:
    """A figure as JSON inside HTML; the page has its own colours."""
    figure.update_layout(template=None)
    _bound_axes(figure)
    return _escape_json(str(figure.to_json(engine="json")))


def _escape_json(text: str) -> str:
    """Escape control characters in strings of JSON, and what begins a tag.

    A script would read ``\\u202e`` as that character.
    """

    def escape_string(found: re.Match[str]) -> str:
        string = found[0]
        return json.dumps(escape_controls(json.loads(string))) if "\\" in string else string

    return JSON_STRING.sub(escape_string, text).replace("<", "\\u003c")


def _bound_axes(figure: "Figure") -> None:
    """Bound logarithmic axes, so that the page knows their ticks before it draws."""
    for name in ("x", "y"):
        axis = figure.layout[f"{name}axis"]
        lines = [trace for trace in figure.data if trace.type == "scatter"]
        if axis.type != "log" or axis.range or len(lines) < len(figure.data):
            continue
        values = np.concatenate([_visible(line, name) for line in lines])
        values = np.log10(values[np.isfinite(values) & (values > 0)])
        if values.size:
            room = MARGIN * max(np.ptp(values), 0.3)
            ends = float(values.min() - room), float(values.max() + room)
            axis.range = [round(end, 9) for end in ends]  # processors differ in the last digit


def _visible(line: Any, name: str) -> np.ndarray:
    """Values along one axis of the points that a line has, not of those that it lacks."""
    across, up = (np.asarray(line[axis], dtype=float) for axis in "xy")
    there = np.isfinite(across) & np.isfinite(up) & (line.visible in (None, True))
    return np.asarray((across if name == "x" else up)[there])


def pack_plotly() -> str:
    """Return plotly.js compressed and base64-encoded, to be unpacked by the page's script.

    Its few non-ASCII characters are escaped, as browsers would otherwise store the whole script
    with two bytes per character.
    """
    from plotly.offline import get_plotlyjs

    source = get_plotlyjs().encode("ascii", "backslashreplace")
    return b64encode(compress(source, PACKED, wbits=GZIP)).decode()
