"""The result of a command: printed on the terminal, as JSON, as an HTML page or a data frame."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Read-only access to a dictionary by attribute, with or without the unit of a name.

    ``figures.ttft`` finds the field ``ttft_s``, and ``figures.gpu`` finds ``gpu_bytes``.

    Parameters
    ----------
    fields
        A dictionary with the structure of the JSON output.

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
    """Return the unit of a number in the JSON output, which its name implies.

    Parameters
    ----------
    path
        Dotted name of the number, such as ``ranges.ttft_s.low``.

    Returns
    -------
    str
        The unit; ``"1"`` for counts and shares.

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
    """Flatten a nested row: inner values get dotted names, and settings become one text.

    Parameters
    ----------
    row
        A row of a result.

    Returns
    -------
    dict
        Texts and numbers by name.
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
    """List every number in a result, with its name and unit.

    Parameters
    ----------
    fields
        The fields of the JSON output that are specific to the command.

    Yields
    ------
    tuple
        Field, index in it if it is a list (else None), dotted name, value and unit.
    """
    for part, value in fields.items():
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for row, item in items:
            for path, leaf in _leaves(item):
                if _is_number(leaf):
                    yield part, row, path or part, leaf, unit_of(f"{part}.{path}".rstrip("."))


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the innermost values of nested dictionaries and lists with their dotted names."""
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
    """The result of a command or of a function of ``kvsim.api``.

    Attributes
    ----------
    title
        Heading of the HTML page.
    answer
        The verdict, and the sections that follow it.
    fields
        The fields of the JSON output that are specific to the command.
    found
        The computed object, such as a plan, predictions or simulated runs.
    rows
        The rows of :meth:`frame`.
    tables
        Tables that are shown above the charts of the page.
    blocks, more
        What the terminal shows, and what ``--verbose`` adds.
    draw
        Function that draws the charts of the page.
    details
        Tables that are shown below the charts of the page.
    remarks
        Sentences below the charts of the page.
    notes
        Caveats about the numbers.
    data
        Date of the newest measurement that the result depends on.
    foot
        Last lines of the page: the profiles and stacks used.
    pastes
        Configurations of engines that can be copied.
    grid
        JSON of the grid behind the sliders of ``kvsim explore``.
    passed
        False if a check failed; the command then exits with code 1.
    command
        The equivalent command line.
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
        """Print the result on the terminal.

        Parameters
        ----------
        json
            Whether to print JSON instead of text.
        verbose
            Whether to print all evidence and every table.
        """
        if json:
            print_json(self.envelope())
        else:
            Terminal().show([*self.blocks, *self.more] if verbose else self.blocks)

    def envelope(self) -> Row:
        """Return the result as the dictionary that ``--json`` prints."""
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
        """The recommended configuration: technique, settings and batch, or the replicas of a fleet.

        Raises
        ------
        AttributeError
            If the command recommends nothing, such as ``predict``.
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
        """Times, throughput and memory of the recommended configuration."""
        return Figures(self.answer.figures)

    @property
    def ttft(self) -> Any:
        """Time to first token of the recommended configuration, or its percentiles. [s]"""
        return self.figures_of_choice.ttft

    @property
    def tpot(self) -> Any:
        """Time per output token of the recommended configuration, or its percentiles. [s]"""
        return self.figures_of_choice.tpot

    def to_dict(self) -> Row:
        """Return the result as the dictionary that ``--json`` prints."""
        return self.envelope()

    def to_frame(self) -> "DataFrame":
        """Return every number of the JSON output as a data frame in long format.

        Returns
        -------
        pandas.DataFrame
            One line per number, with the columns ``part`` (field), ``row`` (index in the field),
            ``quantity``, ``value`` and ``unit``; ``attrs`` has the command and the version.

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
        """Return the rows as a data frame; nested values become columns with dotted names.

        Returns
        -------
        pandas.DataFrame
            One line per row; ``attrs["units"]`` has the unit of each column of numbers, also where
            no row has a value.

        Raises
        ------
        InputError
            If pandas is not installed.
        """
        require("pandas")
        from pandas import DataFrame

        found = DataFrame([flatten(row) for row in self.rows])
        other = found.dropna(axis="columns", how="all").select_dtypes(exclude="number")
        names = [str(name) for name in found if name not in other]
        units = {name: unit_of(name) for name in names}
        found.attrs.update(units=units, command=self.command, kvsim=__version__)
        return found

    def save_report(self, path: str | Path) -> None:
        """Write the result as an HTML page, as ``--report`` does.

        Parameters
        ----------
        path
            The file to write.
        """
        self.write(path)

    def figure(self) -> "Figure":
        """Return the first chart, a plotly figure."""
        return self.figures()[0][1]

    def figures(self) -> "list[tuple[str, Figure]]":
        """Return all charts as pairs of title and plotly figure."""
        return [(chart.title, chart.figure) for chart in self.draw()]

    def html(self) -> str:
        """Return the result as an HTML page."""
        from kvsim.report.page import render_page

        return render_page(self)

    def write(self, path: str | Path) -> None:
        """Write the result as an HTML page; after an error no partial file is left.

        Parameters
        ----------
        path
            The file to write.
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
