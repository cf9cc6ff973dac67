"""What a command found, the same for the terminal, pages, JSON and Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.errors import require
from kvsim.frozen import frozen
from kvsim.report.answer import Answer
from kvsim.report.json import Row, envelope
from kvsim.report.screen import fitted
from kvsim.report.table import Table

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

LINES, WIDTH = 10, 100  # of a repr


@frozen
class Result:
    """A result with its answer.

    Attributes
    ----------
    command
        The command line that gives the same.
    answer
        The verdict and what follows it.
    rows
        The figures under the names that ``--json`` has.
    """

    command: str
    answer: Answer
    rows: Sequence[Row]

    @property
    def title(self) -> str:
        """The heading of the page."""
        return self.command

    @property
    def tables(self) -> list[Table]:
        """The tables that the terminal shows."""
        return []

    @property
    def remarks(self) -> list[str]:
        """What the page says under the pictures."""
        return []

    @property
    def fields(self) -> Row:
        """The command's own fields as ``--json`` has them."""
        return {"rows": list(self.rows), "answer": self.answer.row()}

    @property
    def notes(self) -> list[str]:
        """What a reader should know before using the numbers."""
        return []

    @property
    def data(self) -> str | None:
        """Date of the newest measurement that the answer stands on."""
        return None

    def envelope(self) -> Row:
        """All of it as ``--json`` prints it."""
        return envelope(
            self.command, self.fields, verdict=self.answer.verdict, notes=self.notes,
            evidence=self.answer.evidence, data=self.data,
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

        return DataFrame([flat(row) for row in self.rows])

    def figure(self) -> "Figure":
        """The first picture of the page."""
        return self.figures()[0][1]

    def figures(self) -> list[tuple[str, "Figure"]]:
        """The pictures of the page with their titles."""
        return []

    def write(self, path: str | Path) -> None:
        """Write the page that ``--report`` writes."""
        from kvsim.report import page

        page.write_result(Path(path), self)

    def _repr_html_(self) -> str:
        from kvsim.report import page

        return self.answer.html() + "".join(page.table(table) for table in self.tables)

    def __repr__(self) -> str:
        lines = fitted(self.answer.verdict, WIDTH).splitlines()
        for table in self.tables:
            lines += table.lines(WIDTH)
        if len(lines) > LINES:
            more = f"... {len(lines) - LINES + 1} more lines: .answer, .frame(), .figure()"
            lines = [*lines[: LINES - 1], more]
        return "\n".join(lines)


def flat(row: Row) -> dict[str, Any]:
    """The plain cells of a row; settings become ``key=value``, the basis its kind."""
    from kvsim.report.names import settings

    found = {k: v for k, v in row.items() if not isinstance(v, (dict, list, tuple))}
    if "params" in row:
        found["params"] = settings(row)
    if "basis" in row:
        found["basis"] = row["basis"]["kind"]
    return {key: found[key] for key in row if key in found}
