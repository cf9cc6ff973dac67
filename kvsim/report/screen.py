"""The terminal: prose, titles and tables within its width; bold only where it is read as such."""

import os
import re
import sys
from shutil import get_terminal_size
from textwrap import fill

from kvsim.report.table import Table

NARROWEST, WIDEST, PIPED = 40, 160, 100
PROSE = 100  # longer lines of prose are hard to read
UNIT = re.compile(r"(?<=\d) (?=(?:µs|ms|s|min|h|B|[KMG]iB|GB|GB/s|%|tok/s|tokens|req/s|GPUs?)\b|%)")
BAR = 12  # characters of the longest bar


class Screen:
    """Standard output, at the width and with the styles that the terminal has."""

    def __init__(self) -> None:
        columns = get_terminal_size((PIPED, 24)).columns
        self.width = min(max(columns, NARROWEST), WIDEST)
        shown = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._styled = shown and not os.environ.get("NO_COLOR")
        if "utf" not in (sys.stdout.encoding or "").lower() and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")

    def title(self, text: str) -> None:
        """Print a heading, bold where the terminal shows it."""
        print(self._bold(fitted(text, min(self.width, PROSE))))

    def say(self, text: str, indent: str = "") -> None:
        """A paragraph; a number stays with its unit."""
        print(fitted(text, min(self.width, PROSE), indent))

    def items(self, texts: list[str]) -> None:
        """Print one text per line, each after a dash."""
        for text in texts:
            print(fitted(f"- {text}", min(self.width, PROSE), "  "))

    def blank(self) -> None:
        """Print one empty line."""
        print()

    def table(self, table: Table) -> None:
        """A table, with its title and its note if it has them."""
        if table.title:
            self.title(table.title)
        print("\n".join(table.lines(self.width, self._bold)))
        if table.note:
            self.say(table.note)

    def _bold(self, text: str) -> str:
        return f"\033[1m{text}\033[0m" if self._styled else text


def fitted(text: str, width: int, indent: str = "") -> str:
    """Text wrapped at spaces, but not between a number and its unit."""
    kept = UNIT.sub("\u00a0", text)
    wrapped: str = fill(
        kept, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return str(wrapped).replace("\u00a0", " ")


def bar(share: float, length: int = BAR) -> str:
    """A share as a bar in eighths of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * length * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
