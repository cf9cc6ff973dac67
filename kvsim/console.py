"""What a command tells whoever watches it: notes and progress on standard error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_COMMAND_LINE: ContextVar[bool] = ContextVar("command line", default=False)


@contextmanager
def run_on_command_line() -> Iterator[None]:
    """In the block errors name options rather than keywords, and notes are printed."""
    token = _COMMAND_LINE.set(True)
    try:
        yield
    finally:
        _COMMAND_LINE.reset(token)


def on_command_line() -> bool:
    """Whether a command is running, rather than a function that Python called."""
    return _COMMAND_LINE.get()


def tell(note: str) -> None:
    """Print a note of a command on standard error; functions called from Python print none."""
    if on_command_line():
        print(f"kvsim: {note}", file=sys.stderr, flush=True)


def tell_progress(note: str) -> None:
    """Print a note only where somebody watches a terminal."""
    if sys.stderr.isatty():
        tell(note)


def tell_written(place: Path) -> None:
    """Say that a file is there."""
    tell(f"wrote {place}")
