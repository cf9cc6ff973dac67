"""Output on the terminal: paragraphs, headings, lists and tables within its width."""

import os
import re
import sys
from collections.abc import Sequence
from shutil import get_terminal_size
from textwrap import fill

from kvsim.console import escape_controls
from kvsim.report.table import OMITTED, Table

NARROWEST, WIDEST, PIPED = 40, 160, 100
PROSE = 100  # longer lines of prose are hard to read
UNIT_SPACE = re.compile(
    r"(?<=\d) (?=(?:µs|ms|s|min|h|B|[KMG]iB|GB|GB/s|%|tok/s|tokens|req/s|GPUs?)\b|%)"
)

COMMAND = re.compile(r"^([\w-]+): ((?:[\w-]+ serve|python -m sglang\.\w+) .*)$")
"""A line that gives the command of an engine after its name."""

BEGIN_BOLD, END_BOLD = "\ue000", "\ue001"  # of private use, until controls are escaped
BOLD = str.maketrans({BEGIN_BOLD: "\033[1m", END_BOLD: "\033[0m"})

BLANK = ""
"""An empty line between two blocks."""


class Heading(str):
    """A line that is shown in bold."""


class Hanging(str):
    """A paragraph with a hanging indent."""


class Verbatim(str):
    """Lines that are not wrapped, such as commands to copy."""


class Items(tuple[str, ...]):
    """A list; each item begins with a dash."""


Block = str | Items | Table
"""What an answer consists of on a terminal: a paragraph, a heading, a list or a table."""


class Terminal:
    """Standard output, with the width and the styles of the terminal."""

    def __init__(self) -> None:
        columns = get_terminal_size((PIPED, 24)).columns
        self.width = min(max(columns, NARROWEST), WIDEST)
        shown = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._styled = shown and not os.environ.get("NO_COLOR")
        if "utf" not in (sys.stdout.encoding or "").lower() and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")

    def show(self, blocks: Sequence[Block]) -> None:
        """Print blocks from top to bottom.

        Parameters
        ----------
        blocks
            Paragraphs, headings, lists and tables.
        """
        for block in blocks:
            text = escape_controls("\n".join(self._lines(block)))
            print(text.translate(BOLD) if self._styled else text)

    def _lines(self, block: Block) -> list[str]:
        prose = min(self.width, PROSE)
        if isinstance(block, Table):
            titled = [Heading(block.title)] if block.title else []
            noted = [block.note] if block.note else []
            rows = list(block.lines(self.width, self._embolden))
            if noted and rows and rows[-1].startswith(OMITTED):
                noted = [f"{rows.pop()} {block.note}"]
            return [*map(self._wrap, titled), *rows, *map(self._wrap, noted)]
        if isinstance(block, Items):
            return [wrap_prose(f"- {text}", prose, "  ") for text in block]
        return [block if isinstance(block, Verbatim) else self._wrap(block)]

    def _wrap(self, text: str) -> str:
        indent = "  " if isinstance(text, Hanging) else ""
        wrapped = wrap_prose(text, min(self.width, PROSE), indent)
        return self._embolden(wrapped) if isinstance(text, Heading) else wrapped

    def _embolden(self, text: str) -> str:
        return f"{BEGIN_BOLD}{text}{END_BOLD}" if self._styled else text


def wrap_prose(text: str, width: int, indent: str = "") -> str:
    """Wrap a text at spaces, but not between a number and its unit.

    Parameters
    ----------
    text
        The text.
    width
        Maximum width. [characters]
    indent
        Indentation of every line after the first.
    """
    kept = UNIT_SPACE.sub("\u00a0", text)
    wrapped: str = fill(
        kept, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapped.replace("\u00a0", " ")
