"""Tables of rich, for reports that do not use ``kvsim.report.screen`` yet."""

from rich.console import Console
from rich.table import Table

from kvsim.report.grounds import grounds
from kvsim.report.json import Row
from kvsim.report.names import settings_of
from kvsim.report.names import short_names as short_names
from kvsim.report.units import short as short

WIDTH = 100


def console() -> Console:
    """Standard output; exactly as wide as a table may be when it is not a terminal."""
    out = Console(highlight=False, markup=False, emoji=False)
    if not out.is_terminal or out.width > WIDTH:
        out.width = WIDTH
    return out


def table(columns: dict[str, str], rows: list[list[str]]) -> Table:
    """``columns`` maps headings to their justification."""
    made = Table(box=None, pad_edge=False)
    for heading, justify in columns.items():
        made.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        made.add_row(*row)
    return made


def milliseconds(value: float | None) -> str:
    """Seconds as milliseconds."""
    return "-" if value is None else short(value * 1e3)


def print_settings(out: Console, names: dict[str, str]) -> None:
    """The settings behind each short name."""
    for line in settings_of(names):
        out.print(line)


def print_basis(out: Console, basis: Row) -> None:
    """What the numbers stand on."""
    out.print(grounds(basis))
