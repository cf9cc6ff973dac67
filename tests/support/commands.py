"""``kvsim`` run in this process, and what its one line of an error must be like."""

import io
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple
from unittest.mock import patch

from kvsim.cli import app as cli
from kvsim.report.result import Result as Shown

WIDTH = 100  # of the terminal that tables are printed for
BAD = 2  # exit code of bad input


class Result(NamedTuple):
    code: int
    out: str
    err: str


def interruptible() -> None:
    """A child hears SIGINT even where the tests run in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(*args: str) -> Result:
    """``kvsim`` with these arguments, in this process."""
    out, err, code = io.StringIO(), io.StringIO(), -1
    with patch.object(sys, "argv", ["kvsim", *args]), redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def run_and_keep(*args: str) -> tuple[Result, Any]:
    """``run``, and what the command computed: to be shown in other ways without asking again."""
    kept: list[Shown[Any]] = []
    show = Shown.show

    def keep(found: Shown[Any], json: bool = False, verbose: bool = False) -> None:
        kept.append(found)
        show(found, json, verbose)

    with patch.object(Shown, "show", keep):
        return run(*args), kept[-1] if kept else None


def shown(found: Shown[Any], verbose: bool = False) -> str:
    """What a command prints of what it computed."""
    with redirect_stdout(io.StringIO()) as out:
        found.show(verbose=verbose)
    return out.getvalue()


def replaced(base: tuple[str, ...], *options: str) -> list[str]:
    """A command and its options, each with a value, with some replaced and others added."""
    command, pairs = base[0], zip(base[1::2], base[2::2], strict=True)
    return [command, *(w for name, v in pairs if name not in options for w in (name, v)), *options]


def line(*arguments: str, code: int = BAD) -> str:
    result = run(*arguments)
    assert result.code == code, result
    assert result.out == ""
    assert result.err.startswith("kvsim: ") and result.err.endswith("\n")
    message = result.err[len("kvsim: ") : -1]
    assert "Traceback" not in message and len(message) < (2500 if code == 1 else 1100)
    if code == 1:  # a missing plan lists its changes, with commands of several lines
        assert all(x.isprintable() and x.rstrip() == x for x in message.splitlines())
    else:
        assert message.isprintable() and message.strip() == message
    return message


def check(message: str, words: str) -> None:
    """Words separated by | must all be in the message."""
    assert not [word for word in words.split("|") if word.lower() not in message.lower()], message
