"""Notes and progress of a command on standard error."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from time import monotonic
from typing import TypeVar
from unicodedata import category

T = TypeVar("T")

CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of characters that are no text: controls, formats, halves of pairs, separators."""

QUIET = 2.0
"""A run shorter than this says nothing. [s]"""

INTERVALS = {True: 0.5, False: 10.0}
"""Between two lines, on a terminal or in a log. [s]"""

_COMMAND_LINE: ContextVar[bool] = ContextVar("command line", default=False)


@contextmanager
def run_on_command_line() -> Iterator[None]:
    """Mark the block as run from the command line.

    Within it, errors name options rather than keywords, and notes are printed.
    """
    token = _COMMAND_LINE.set(True)
    try:
        yield
    finally:
        _COMMAND_LINE.reset(token)


def on_command_line() -> bool:
    """Whether a command is running, rather than a function that Python called."""
    return _COMMAND_LINE.get()


def escape_controls(text: str, kept: str = "\n\t") -> str:
    r"""Replace control characters by escapes such as ``\x1b``, since names may come from strangers.

    A terminal would obey these characters, and those that reverse the direction of writing would
    display a different text.

    Parameters
    ----------
    text
        Any text.
    kept
        Control characters that are kept.

    Returns
    -------
    str
        The text in one printable form.
    """
    found = (c for c in set(text) - set(kept) if category(c) in CONTROLS)
    return text.translate({ord(c): ascii(c)[1:-1] for c in found})


def print_note(*notes: str) -> None:
    """Print notes of a command on standard error; functions called from Python print none.

    Parameters
    ----------
    *notes
        Texts of one line each.
    """
    for note in notes if on_command_line() else ():
        print(f"kvsim: {escape_controls(note, '')}", file=sys.stderr, flush=True)


@cache
def print_once(note: str) -> None:
    """Print a note of a command once.

    Parameters
    ----------
    note
        One line of text.
    """
    print_note(note)


def print_progress(note: str) -> None:
    """Print a note if standard error is a terminal.

    Parameters
    ----------
    note
        One line of text.
    """
    if sys.stderr.isatty():
        print_note(note)


class TimeLeft:
    """Notes on the steps of a long run, with an estimate of the remaining time.

    They are printed if standard error is a terminal.
    """

    def __init__(self) -> None:
        self.began = monotonic()

    def __call__(self, note: str, share: float = 0.0) -> None:
        """Print a note.

        Parameters
        ----------
        note
            One line of text.
        share
            How much of the work is done; 0 where that is unknown.
        """
        took = monotonic() - self.began
        if share and took > INTERVALS[False]:
            note += f"; about {_format_span(took * (1 - share) / share)} left"
        print_progress(note)


def print_written(place: Path) -> None:
    """Print a note that a file has been written.

    Parameters
    ----------
    place
        Path of the file.
    """
    print_note(f"wrote {place}")


def print_count(rows: int) -> None:
    """Update a count of rows in place if standard error is a terminal.

    Parameters
    ----------
    rows
        Rows read so far.
    """
    if sys.stderr.isatty():
        print(f"\rkvsim: {rows:,} requests\r", end="", file=sys.stderr, flush=True)


class ProgressLine:
    """Progress of a long run, printed at intervals on standard error.

    Parameters
    ----------
    what
        Name of the task; empty for a command's main task.
    unit
        Name of the counted items, such as ``requests``.
    total
        Number of items in all.
    estimates
        Whether the remaining time is estimated.
    """

    def __init__(self, what: str, unit: str, total: int, estimates: bool = False) -> None:
        self.what, self.unit, self.total, self.estimates = what, unit, total, estimates
        self.live, self.told = sys.stderr.isatty(), False
        self.restart()

    def restart(self) -> None:
        """Restart the clock at zero done."""
        self.began = self.last = monotonic()
        self.next = self.began + QUIET
        self.warm: tuple[float, int] | None = None  # when the first items were done, and how many

    def started_by(self, work: Iterable[T]) -> Iterator[T]:
        """Iterate over items of work, and restart the clock at the first of them.

        Parameters
        ----------
        work
            The items; files may be read before the first one.

        Yields
        ------
        object
            The items.
        """
        self.restart()
        yield from work

    @property
    def took(self) -> float:
        """Time from the start to the last finished item. [s]"""
        return self.last - self.began

    def __call__(self, done: int) -> None:
        """Report progress.

        Parameters
        ----------
        done
            Number of finished items.
        """
        self.last = now = monotonic()
        since, first = self.warm = self.warm or (now, done)
        if now < self.next:
            return
        self.next, self.told = now + INTERVALS[self.live], True
        line = f"kvsim: {self.what}{': ' if self.what else ''}"
        line += f"{done:,} of {self.total:,} {self.unit}"
        if self.estimates and done > first:  # the first items also took what is loaded once
            each = (now - since) / (done - first)
            line += f", about {_format_span(each * (self.total - done))} left"
        shown = f"\r{line:<70}" if self.live else line
        print(shown, end="" if self.live else "\n", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """End the line that has been overwritten so far."""
        if self.live and self.told:
            print(file=sys.stderr)


def _format_span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
