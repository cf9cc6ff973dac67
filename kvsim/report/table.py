"""Tables that can be rendered as text of any width, or as HTML."""

from collections.abc import Callable, Sequence
from dataclasses import field
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from kvsim.frozen import frozen
from kvsim.report.json import Row
from kvsim.report.units import DASH, QUANTITIES

OMITTED = "Columns omitted at this width"  # begins the line that names them
COLUMN_GAP = "  "  # between columns
NARROWEST_TEXT = 12  # columns to which text is wrapped before columns are left out


@frozen
class Column:
    """A column of a table: how to obtain and to format its values.

    Attributes
    ----------
    heading
        Heading, with the unit if the values have none.
    key
        Dotted name of the value in a row, such as ``ttft_s.p50``, or a function of the row.
    form
        Formats the value.
    rank
        Order of removal if the terminal is narrow: highest first; 0 is never removed.
    text
        Whether cells are left-aligned and wrapped.
    meaning
        Explanation of the column, for HTML pages.
    write
        Formats the cell from the whole row, in place of ``form``.
    """

    heading: str
    key: str | Callable[[Row], object]
    form: Callable[[Any], str] = str
    rank: int = 0
    text: bool = False
    meaning: str = ""
    write: Callable[[Row], str] | None = None

    def value(self, row: Row) -> object:
        """Return the value of the column for a row; None if the row lacks it.

        Parameters
        ----------
        row
            A row of the table.
        """
        if not isinstance(self.key, str):
            return self.key(row)
        found: object = row
        for name in self.key.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def show(self, row: Row) -> str:
        """Return the formatted cell of a row.

        Parameters
        ----------
        row
            A row of the table.
        """
        return self.form(self.value(row)) if self.write is None else self.write(row)


def quantity_column(key: str, rank: int = 0, part: str = "") -> Column:
    """Make the column of a standard quantity, with its usual heading and format.

    Parameters
    ----------
    key
        Name of the quantity in the JSON output, such as ``ttft_s``.
    rank
        Order of removal, as in :class:`Column`.
    part
        Key within the quantity, such as ``p50``.
    """
    known, name = QUANTITIES[key], f"{key}.{part}".rstrip(".")
    heading = f"{known.heading} {part}".rstrip()
    return Column(heading, name, known.show, rank, known.show is str, known.meaning)


def quantity_columns(**ranks: int) -> list[Column]:
    """Make the columns of several standard quantities, given as name=rank."""
    return [quantity_column(key, rank) for key, rank in ranks.items()]


def disk_column(rows: Sequence[Row]) -> dict[str, int]:
    """Return the name and rank of the column of drive space if a row needs drive space.

    Parameters
    ----------
    rows
        Rows of predictions or plans.
    """
    return {"disk_bytes": 2} if any(row.get("disk_bytes") for row in rows) else {}


def percent_column(
    heading: str, key: str | Callable[[Row], object], form: str = "+.1f", rank: int = 0
) -> Column:
    """Make a column that shows shares in per cent.

    Parameters
    ----------
    heading
        The heading, which states the unit.
    key
        Name of the share in a row, or a function of the row.
    form
        Format of the percentage.
    rank
        Order of removal, as in :class:`Column`.
    """
    share = Column(heading, key)

    def value(row: Row) -> float | None:
        found = share.value(row)
        return 100 * found if isinstance(found, int | float) else None

    return Column(heading, value, lambda x: DASH if x is None else format(x, form), rank)


def text_column(
    heading: str, key: str | Callable[[Row], object], rank: int = 0, meaning: str = ""
) -> Column:
    """Make a column of text, left-aligned and wrapped.

    Parameters
    ----------
    heading
        The heading.
    key
        Name of the text in a row, or a function of the row.
    rank
        Order of removal, as in :class:`Column`.
    meaning
        Explanation of the column, for HTML pages.
    """
    return Column(heading, key, str, rank, True, meaning)


@frozen
class Table:
    """A table of rows with typed columns.

    Attributes
    ----------
    columns, rows
        The columns, and the dictionaries they take values from.
    title
        Title above the table.
    below
        Text on a separate line below a row, such as settings.
    marked
        Whether a row is emphasised, such as the recommendation.
    note
        Explanation below the table.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    below: Callable[[Row], str] = field(default=lambda row: "")
    marked: Callable[[Row], bool] = field(default=lambda row: False)
    note: str = ""

    def fit_columns(self, width: int) -> list[Column]:
        """Select the columns that fit into a width; those of the highest rank are dropped first.

        Parameters
        ----------
        width
            Width of the terminal. [characters]

        Returns
        -------
        list of Column
            The columns to show, in order.
        """
        kept = list(self.columns)
        while _total([*map(self._narrow, kept)]) > width and any(column.rank for column in kept):
            kept.remove(max(reversed(kept), key=lambda column: column.rank))
        return kept

    def _narrow(self, column: Column) -> int:
        """The least width of a column: nothing breaks but text, and that at spaces."""
        cells = [column.show(row) for row in self.rows]
        lengths = [1, *map(len, column.heading.split())]
        if not column.text:
            return max([*lengths, *map(len, cells)])
        longest = max(map(len, cells), default=0)
        words = [len(word) for cell in cells for word in cell.split()]
        return max([*lengths, *words, min(longest, NARROWEST_TEXT)])

    def lines(self, width: int, bold: Callable[[str], str] = str) -> list[str]:
        """Render the table as text.

        Parameters
        ----------
        width
            Maximum width, which only a long word can exceed. [characters]
        bold
            Makes a line bold, for emphasised rows.

        Returns
        -------
        list of str
            Lines; the last names the columns that were dropped.
        """
        columns = self.fit_columns(width)
        widths = self._widths(columns, width)
        if _total(widths) > width:
            return self._upright(columns, width)
        heads = [wrap(c.heading, w)[::-1] for c, w in zip(columns, widths, strict=True)]
        parts = [*zip_longest(*heads, fillvalue="")] or [("",) * len(columns)]
        out = [_line(part, columns, widths) for part in parts[::-1]]
        for row in self.rows:
            cells = [
                _wrap(c.show(row), w) if c.text else [c.show(row)]
                for c, w in zip(columns, widths, strict=True)
            ]
            parts = [*zip_longest(*cells, fillvalue="")] or [("",) * len(columns)]
            said = [_line(part, columns, widths) for part in parts]
            out += [bold(line) for line in said] if self.marked(row) else said
            out += [f"    {line}" for line in _wrap(self.below(row), max(width - 4, 20))]
        left_out = [column.heading for column in self.columns if column not in columns]
        if left_out:
            out += _wrap(f"{OMITTED}: {', '.join(left_out)}.", max(width, 20))
        return out

    def _widths(self, columns: Sequence[Column], width: int) -> list[int]:
        """Text columns share what the others leave."""
        widths = [self._narrow(column) for column in columns]
        spare = width - _total(widths)
        for i, column in enumerate(columns):
            if column.text and spare > 0:
                wanted = max([len(column.heading), *(len(column.show(row)) for row in self.rows)])
                more = min(spare, max(0, wanted - widths[i]))
                widths[i], spare = widths[i] + more, spare - more
        return widths

    def _upright(self, columns: Sequence[Column], width: int) -> list[str]:
        """One line per cell, for a width in which no row fits."""
        out: list[str] = []
        for row in self.rows:
            for column in columns:
                out += _wrap(f"{column.heading}: {column.show(row)}", max(width, 20))
            out += [f"    {line}" for line in _wrap(self.below(row), max(width - 4, 20))]
            out.append("")
        return out[:-1]


def _total(widths: Sequence[int]) -> int:
    """Width of a line with columns of these widths."""
    return sum(widths) + len(COLUMN_GAP) * (len(widths) - 1)


def _wrap(text: str, width: int) -> list[str]:
    return wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    placed = [
        cell.ljust(width) if column.text else cell.rjust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ]
    return COLUMN_GAP.join(placed).rstrip()


def cells_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    text: int = 1,
    ranks: str = "",
    title: str = "",
    note: str = "",
) -> Table:
    """Make a table of formatted cells.

    Parameters
    ----------
    headings
        Headings of the columns.
    rows
        The cells of each row.
    text
        Number of columns, from the left, that hold text.
    ranks
        Rank of each column as one digit, as in :class:`Column`; by default 0.
    title, note
        Text above and below the table.
    """

    def column(i: int, heading: str) -> Column:
        rank = int(ranks[i]) if ranks else 0
        return Column(heading, lambda row: row["cells"][i], rank=rank, text=i < text)

    columns = [column(i, heading) for i, heading in enumerate(headings)]
    return Table(columns, [{"cells": cells} for cells in rows], title, note=note)
