"""What a command found, rendered once each as terminal, JSON, page and data frame."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvsim.errors import require
from kvsim.files import replace_text
from kvsim.frozen import frozen
from kvsim.report.answer import Answer
from kvsim.report.json import Row, envelope, print_json
from kvsim.report.table import Table
from kvsim.report.terminal import Block, Terminal, wrap_prose
from kvsim.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from kvsim.report.pictures import Chart


LONG = ("part", "row", "quantity", "value", "unit")
"""Columns of a long frame."""

UNITS = {
    "usd_per_million_tokens": "USD per million tokens",
    "usd_per_hour": "USD/h",
    "usd": "USD",
    "tok_s": "token/s",
    "per_s": "1/s",
    "bytes": "B",
    "gpu_memory": "B",
    "host_memory": "B",
    "s": "s",
    "ttft": "s",
    "tpot": "s",
    "prompt": "token",
    "generate": "token",
    "batch": "sequence",
    "max_batch": "sequence",
    "J": "J",
    "kW": "kW",
    "W": "W",
}
"""Unit by the last part of a name; what has none is a count or a share."""


class Figures(Mapping[str, Any]):
    """Fields of an answer as attributes; ``ttft`` is ``ttft_s``, ``gpu`` memory ``gpu_bytes``.

    Parameters
    ----------
    fields
        A part of an answer as JSON has it.

    Examples
    --------
    >>> choice = Figures({"technique": "full", "batch": 8, "tpot_s": 0.02})
    >>> choice.batch, choice.tpot
    (8, 0.02)
    >>> choice
    technique  full
    batch      8
    tpot_s     0.02
    """

    def __init__(self, fields: Row) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        value = self._fields[key]
        return Figures(value) if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __getattr__(self, name: str) -> Any:
        for key in (f"{name}_s", f"{name}_bytes", f"{name}_tok_s", name):
            if not name.startswith("_") and key in self._fields:
                return self[key]
        raise AttributeError(f"{name!r} is not among {', '.join(self._fields)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._fields]

    def __repr__(self) -> str:
        plain = {k: v for k, v in self._fields.items() if not isinstance(v, dict | list)}
        width = max(map(len, plain), default=0) + 2
        return "\n".join(f"{key:{width}}{value}" for key, value in plain.items())


def unit_of(path: str) -> str:
    """Return the unit of a number, by the names on the way to it.

    Parameters
    ----------
    path
        Dotted name, as ``ranges.ttft_s.low``.

    Examples
    --------
    >>> unit_of("ranges.ttft_s.low"), unit_of("output_tok_s"), unit_of("good_share")
    ('s', 'token/s', '1')
    """
    for name in reversed(path.split(".")):
        words = name.split("_")
        for i in range(len(words)):
            unit = UNITS.get("_".join(words[i:]))
            if unit is not None:
                return unit
    return "1"


def flatten(row: Row) -> Row:
    """Flatten a row: nested values get dotted names, settings become ``key=value``.

    Parameters
    ----------
    row
        Row of an answer.

    Returns
    -------
    dict
        Plain cells in the order of the row.
    """
    from kvsim.report.names import settings

    found: Row = {}
    for key, value in row.items():
        if key == "params":
            found[key] = settings(row)
            found |= {f"params.{k}": v for k, v in _leaves(value) if _is_number(v)}
        elif key == "basis" and isinstance(value, dict):
            found[key] = value["kind"]
        else:
            found |= dict(_leaves(value, key))
    return found


def numbers_of(fields: Row) -> Iterator[tuple[str, int | None, str, float, str]]:
    """List every number of an answer with its place and unit.

    Parameters
    ----------
    fields
        The command's own fields.
    """
    for part, value in fields.items():
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for row, item in items:
            for path, leaf in _leaves(item):
                if _is_number(leaf):
                    yield part, row, path or part, leaf, unit_of(f"{part}.{path}".rstrip("."))


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """List the plain values in a nested one, each with its dotted name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{i}" if path else str(i))
    else:
        yield path, value


def _is_number(value: object) -> bool:
    """Tell whether a value is a number rather than a truth value or text."""
    return isinstance(value, int | float) and not isinstance(value, bool)


LINES, WIDTH = 10, 100  # of a repr

Found = TypeVar("Found")


@frozen
class Result(Generic[Found]):
    """The answer of a command.

    Attributes
    ----------
    title
        The heading of the page.
    answer
        The verdict and what follows it.
    fields
        The command's own fields as ``--json`` has them.
    found
        What was computed: predictions, a plan, runs.
    rows
        The figures that a data frame has.
    tables
        The tables that stand before the pictures.
    blocks, more
        What the terminal shows, from top to bottom, and what ``--verbose`` adds.
    draw
        Draws the pictures of the page.
    details
        Tables of the page that follow the pictures.
    remarks
        What the page says under the pictures.
    notes
        What a reader should know before using the numbers.
    data
        Date of the newest measurement that the answer stands on.
    foot
        What the numbers rest on, in the page's last lines.
    pastes
        Settings of engines, to paste.
    grid
        JSON of what the sliders of a page choose from.
    passed
        Whether what was checked holds; commands end with 1 where it does not.
    command
        The command line that gives the same. The functions of ``kvsim.api`` fill it in.
    """

    title: str
    answer: Answer
    fields: Row
    found: Found
    rows: Sequence[Row] = ()
    tables: Sequence[Table] = ()
    blocks: Sequence[Block] = ()
    more: Sequence[Block] = ()
    draw: Callable[[], "Sequence[Chart]"] = tuple
    details: Sequence[Table] = ()
    remarks: Sequence[str] = ()
    notes: Sequence[str] = ()
    data: str | None = None
    foot: Sequence[str] = ()
    pastes: Sequence[str] = ()
    grid: str = ""
    passed: bool = True
    command: str = ""

    def show(self, json: bool = False, verbose: bool = False) -> None:
        """Print the answer on the terminal.

        Parameters
        ----------
        json
            Whether to print JSON for programs instead.
        verbose
            Whether to print all that is known about it.
        """
        if json:
            print_json(self.envelope())
        else:
            Terminal().show([*self.blocks, *self.more] if verbose else self.blocks)

    def envelope(self) -> Row:
        """All of it as ``--json`` prints it."""
        said = self.answer
        return envelope(
            self.command,
            self.fields,
            verdict=said.verdict or None,
            notes=self.notes,
            evidence=said.evidence,
            data=self.data,
        )

    @property
    def choice(self) -> Figures:
        """What was chosen: technique, settings and batch, or the replicas of a fleet.

        Raises
        ------
        AttributeError
            If the command chooses nothing.
        """
        chosen = self.fields.get("choice")
        fleet = self.fields.get("fleet")
        if isinstance(fleet, list):
            paid = {key: self.fields[key] for key in ("gpus", "usd_per_hour")}
            chosen = {"replicas": {kind["name"]: kind["replicas"] for kind in fleet}} | paid
        if not isinstance(chosen, dict):
            raise AttributeError(f"{self.command.split()[1]} chooses nothing; see .rows")
        return Figures(chosen)

    @property
    def figures_of_choice(self) -> Figures:
        """The numbers of the verdict: times, throughput and memory of what it recommends."""
        return Figures(self.answer.figures)

    @property
    def ttft(self) -> Any:
        """Time to first token of what the verdict recommends, or its percentiles. [s]"""
        return self.figures_of_choice.ttft

    @property
    def tpot(self) -> Any:
        """Time per output token of what the verdict recommends, or its percentiles. [s]"""
        return self.figures_of_choice.tpot

    def to_dict(self) -> Row:
        """All of it as ``--json`` prints it."""
        return self.envelope()

    def to_frame(self) -> "DataFrame":
        """Every number of the JSON, one per line, long and tidy.

        Returns
        -------
        pandas.DataFrame
            ``part`` of the answer, ``row`` in it where it is a list, ``quantity``, ``value`` and
            ``unit``; ``attrs`` has the command and the version.

        Raises
        ------
        InputError
            If pandas is not installed.
        """
        require("pandas")
        from pandas import DataFrame

        found = DataFrame(list(numbers_of(self.fields)), columns=list(LONG))
        found["row"] = found["row"].astype("Int64")
        found.attrs.update(command=self.command, kvsim=__version__)
        return found

    def frame(self) -> "DataFrame":
        """The rows as a data frame, one line each; nested values have dotted names.

        Returns
        -------
        pandas.DataFrame
            Settings are text; ``attrs["units"]`` has the unit of each column of numbers.

        Raises
        ------
        InputError
            If pandas is not installed.
        """
        require("pandas")
        from pandas import DataFrame

        found = DataFrame([flatten(row) for row in self.rows])
        units = {str(name): unit_of(str(name)) for name in found.select_dtypes("number").columns}
        found.attrs.update(units=units, command=self.command, kvsim=__version__)
        return found

    def save_report(self, path: str | Path) -> None:
        """Write the page of ``--report``.

        Parameters
        ----------
        path
            File of the page.
        """
        self.write(path)

    def figure(self) -> "Figure":
        """The first picture of the page."""
        return self.figures()[0][1]

    def figures(self) -> "list[tuple[str, Figure]]":
        """The pictures of the page with their titles."""
        return [(chart.title, chart.figure) for chart in self.draw()]

    def html(self) -> str:
        """The page that ``--report`` writes."""
        from kvsim.report.page import render_page

        return render_page(
            self.figures(),
            self.grid,
            title=self.title,
            answer=self.answer,
            tables=self.tables,
            details=self.details,
            notes=self.remarks,
            pastes=self.pastes,
            command=self.command,
            foot=[f"kvsim {__version__}, {date.today().isoformat()}", *self.foot],
        )

    def write(self, path: str | Path) -> None:
        """Write the page beside its place and rename it, so that it is whole or not there.

        Parameters
        ----------
        path
            File of the page.
        """
        replace_text(Path(path), self.html())

    def _repr_html_(self) -> str:
        from kvsim.report.page import render_part

        tables = [
            render_part("table.html", "table", found, i) for i, found in enumerate(self.tables, 1)
        ]
        return self.answer.html() + "".join(tables)

    def __repr__(self) -> str:
        lines = wrap_prose(self.answer.verdict, WIDTH).splitlines()
        for table in self.tables:
            lines += table.lines(WIDTH)
        if len(lines) > LINES:
            more = f"... {len(lines) - LINES + 1} more lines: .answer, .frame(), .figure()"
            lines = [*lines[: LINES - 1], more]
        return "\n".join(lines)
