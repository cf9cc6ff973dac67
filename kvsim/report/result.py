"""What a command found, rendered once each as terminal, JSON, page and data frame."""

from collections.abc import Callable, Sequence
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
    blocks
        What the terminal shows, from top to bottom.
    draw
        Makes the pictures of the page with their titles.
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
    draw: Callable[[], "list[tuple[str, Figure]]"] = list
    details: Sequence[Table] = ()
    remarks: Sequence[str] = ()
    notes: Sequence[str] = ()
    data: str | None = None
    foot: Sequence[str] = ()
    pastes: Sequence[str] = ()
    grid: str = ""
    passed: bool = True

    def show(self, json: bool = False) -> None:
        """Print the answer on the terminal.

        Parameters
        ----------
        json
            Whether to print JSON for programs instead.
        """
        if json:
            print_json(self.envelope())
        else:
            Terminal().show(self.blocks)

    def envelope(self) -> Row:
        """All of it as ``--json`` prints it."""
        said = self.answer
        return envelope(
            self.command, self.fields, verdict=said.verdict or None, notes=self.notes,
            evidence=said.evidence, data=self.data,
        )  # fmt: skip

    def frame(self) -> "DataFrame":
        """The rows as a data frame; nested values are left out, settings are text.

        Raises
        ------
        InputError
            If pandas is not installed.
        """
        require("pandas")
        from pandas import DataFrame

        return DataFrame([flatten(row) for row in self.rows])

    def figure(self) -> "Figure":
        """The first picture of the page."""
        return self.figures()[0][1]

    def figures(self) -> "list[tuple[str, Figure]]":
        """The pictures of the page with their titles."""
        return self.draw()

    def html(self) -> str:
        """The page that ``--report`` writes."""
        from kvsim.report.page import render_page

        return render_page(
            self.draw(), self.grid, title=self.title, answer=self.answer, tables=self.tables,
            details=self.details, notes=self.remarks, pastes=self.pastes, command=self.command,
            foot=[f"kvsim {__version__}, {date.today().isoformat()}", *self.foot],
        )  # fmt: skip

    def write(self, path: str | Path) -> None:
        """Write the page beside its place and rename it, so that it is whole or not there.

        Parameters
        ----------
        path
            File of the page.
        """
        replace_text(Path(path), self.html())

    def _repr_html_(self) -> str:
        from kvsim.report.page import render_tables

        return self.answer.html() + render_tables(self.tables)

    def __repr__(self) -> str:
        lines = wrap_prose(self.answer.verdict, WIDTH).splitlines()
        for table in self.tables:
            lines += table.lines(WIDTH)
        if len(lines) > LINES:
            more = f"... {len(lines) - LINES + 1} more lines: .answer, .frame(), .figure()"
            lines = [*lines[: LINES - 1], more]
        return "\n".join(lines)


def flatten(row: Row) -> dict[str, Any]:
    """Reduce a row to its plain cells.

    Settings become ``key=value`` and the basis becomes its kind; other nested values are left out.

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

    found = {k: v for k, v in row.items() if not isinstance(v, (dict, list, tuple))}
    if "params" in row:
        found["params"] = settings(row)
    if "basis" in row:
        found["basis"] = row["basis"]["kind"]
    return {key: found[key] for key in row if key in found}
