"""Output on the terminal: paragraphs, headings, lists and tables within its width."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from textwrap import fill

from kvsim.console import escape_controls
from kvsim.report.table import OMITTED, Table

NARROWEST, WIDEST, PIPED = 40, 160, 100
PROSE = 100  # longer lines of prose are hard to read
UNIT_SPACE = re.compile(
    r"(?<=\d) (?=(?:µs|ms|s|min|h|B|[KMG]iB|GB|GB/s|%|tok/s|tokens|req/s|GPUs?)\b|%)"
)

COMMAND = re.compile(
    r"^([\w. -]+): ((?:(?:[A-Z_]+=\S+ )*[\w-]+ serve|python -m sglang\.\w+|trtllm-serve"
    r"|llama-server)(?: .*?)?)( \(`.*`.*\))?$"
)
"""A line that gives the command of an engine after its name, and what else that needs."""

WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")

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


class Command(str):
    """A command line to be pasted, continued with backslashes between its options."""


class Items(tuple[str, ...]):
    """A list; each item begins with a dash."""


Block = str | Items | Table
"""What an answer consists of on a terminal: a paragraph, a heading, a list or a table."""


class Terminal:
    """Standard output, with the width and the styles of the terminal.

    Parameters
    ----------
    columns
        Width; the terminal's if 0. [characters]
    """

    def __init__(self, columns: int = 0) -> None:
        columns = columns or get_terminal_size((PIPED, 24)).columns
        self.width = min(max(columns, NARROWEST), WIDEST)
        shown = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._styled = shown and not os.environ.get("NO_COLOR")

    def show(self, blocks: Sequence[Block]) -> None:
        """Print blocks from top to bottom.

        Parameters
        ----------
        blocks
            Paragraphs, headings, lists and tables.
        """
        if "utf" not in (sys.stdout.encoding or "").lower() and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")
        for text in self.lines(blocks):
            print(text)

    def lines(self, blocks: Sequence[Block]) -> Iterator[str]:
        """Format each block as text for the terminal.

        Parameters
        ----------
        blocks
            Paragraphs, headings, lists and tables.

        Yields
        ------
        str
            The text of one block, which may have several lines.
        """
        for block in blocks:
            text = escape_controls("\n".join(self._lines(block)))
            yield text.translate(BOLD) if self._styled else text

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
        if isinstance(block, Command):
            return list(continue_lines(block, prose))
        return [block if isinstance(block, Verbatim) else self._wrap(block)]

    def _wrap(self, text: str) -> str:
        indent = "  " if isinstance(text, Hanging) else ""
        wrapped = wrap_prose(text, min(self.width, PROSE), indent)
        return self._embolden(wrapped) if isinstance(text, Heading) else wrapped

    def _embolden(self, text: str) -> str:
        return f"{BEGIN_BOLD}{text}{END_BOLD}" if self._styled else text


def count_lines(blocks: Sequence[Block]) -> int:
    """Count the lines that a terminal of usual width shows of some blocks."""
    return sum(text.count("\n") + 1 for text in Terminal(PIPED).lines(blocks))


def continue_lines(command: str, width: int) -> Iterator[str]:
    """Break a command line between its options, so that a shell reads it as one line.

    Parameters
    ----------
    command
        Command line, whose words may be quoted.
    width
        Of the lines. [characters]
    """
    parts: list[str] = []
    for word in WORD.findall(command):
        if parts and not word.startswith("-") and parts[-1].startswith("--"):
            parts[-1] += f" {word}"  # the value of an option stays beside it
        else:
            parts.append(word)
    line = "  "
    for part in parts:
        if line.strip() and len(line) + len(part) + 3 > width:
            yield f"{line}\\"
            line = "    "
        line += f"{part} "
    yield line.rstrip()


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
