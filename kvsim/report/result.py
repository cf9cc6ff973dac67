"""What a command found, rendered once each as terminal, JSON, page and data frame."""

from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvsim.errors import require
from kvsim.files import replace_text
from kvsim.frozen import frozen
from kvsim.report.answer import Answer
from kvsim.report.frames import LONG, Figures, flatten, numbers_of, unit_of
from kvsim.report.json import Row, envelope, print_json
from kvsim.report.table import Table
from kvsim.report.terminal import Block, Terminal, wrap_prose
from kvsim.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from kvsim.report.pictures import Chart

LINES, WIDTH = 10, 100  # of a repr

Found = TypeVar("Found")


@frozen
class Result(Generic[Found]):
    """The answer of a command.

    Attributes
    ----------
    command
        The command line that gives the same.
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
    """

    command: str
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
