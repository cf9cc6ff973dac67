"""One input of a fuzzer: given to a reader or a command in this process, held to the rule."""

import io
import re
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType

from kvsim.cli.app import OUT_OF_MEMORY, application, run_command

SECONDS = 10.0  # of CPU that one input may take
BYTES = 2 * 10**9  # that it may add to what the process holds
NOISE = re.compile(r"Traceback|Warning|fault in kvsim|memory ran out")
COMMANDS = application()
ONE_RUN = ("simulate", "--model", "smollm2-135m", "--gpu", "t4", "--trace", "{}")
Work = Callable[[Path], object]
"""What is done with an input: a reader of a path, or a command line."""


class TookTooLongError(Exception):
    """An input used up its time."""


def command(*arguments: str) -> Work:
    """A command line; ``{}`` in it is the input's path."""

    def work(path: Path) -> object:
        words = [word.replace("{}", str(path)) for word in arguments]
        return COMMANDS(words, prog_name="kvsim", standalone_mode=False)

    return work


def faults(work: Work, path: Path) -> tuple[int, list[str]]:
    """The exit code of a reader or command, and what is wrong with how it run_command."""
    out, err = io.StringIO(), io.StringIO()
    before, begin = _peak(), time.process_time()
    names = _names(path.parent)
    with redirect_stdout(out), redirect_stderr(err), _timed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        code = run_command(lambda: work(path))
    seconds, grown = time.process_time() - begin, _peak() - before
    wrong, said = [], err.getvalue()
    if code not in (0, 1, 2) or NOISE.search(said) or OUT_OF_MEMORY in said:
        wrong.append(f"exit code {code}: {said[-600:]}")
    elif code == 2:
        last = said.splitlines()[-1] if said else ""
        if not last.startswith("kvsim: ") or len(last) > 1100 or not last.isprintable():
            wrong.append(f"no one line: {said[-300:]!r}")
        if out.getvalue():
            wrong.append(f"standard output has {out.getvalue()[:80]!r}")
    if seconds > SECONDS:
        wrong.append(f"took {seconds:.1f} s of CPU: {said[-300:]}")
    if grown > BYTES:
        wrong.append(f"took {grown / 1e9:.1f} GB: {said[-300:]}")
    if code != 0 and _names(path.parent) != names:
        wrong.append(f"left {_names(path.parent) - names}")
    return code, wrong


def warm_up() -> None:
    """Have the serving simulator compiled, which happens once after an installation."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        run_command(lambda: command(*ONE_RUN)(Path("sample:chat")))


@contextmanager
def given_file(name: str, content: bytes, folder: Path) -> Iterator[Path]:
    """An input's file in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    yield path


@contextmanager
def _timed() -> Iterator[None]:
    """Raise in the block once it has used its CPU time twice over, until it ends."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError(f"after {2 * SECONDS:g} s of CPU")

    with suppress(ValueError):  # signals belong to the main thread
        before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * SECONDS, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        with suppress(ValueError):
            signal.signal(signal.SIGVTALRM, before)


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def _peak() -> int:
    """The largest resident memory so far. [B]"""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
