"""Runs the command line in a child, bounded in time and memory, and says how it ended."""

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SECONDS = 10  # of CPU that a case may take
WALL = 120  # seconds until a case counts as hanging; the machine may be busy
BYTES = 2 * 10**9  # memory that a case may take
PRELOADED = ("numpy", "pandas", "pyarrow.parquet", "pulp", "plotly.graph_objects", "numba")


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes
    ----------
    code
        Its exit code; negative: the signal that killed it.
    out, err
        What it printed.
    cpu
        Seconds of CPU time.
    peak
        Largest resident memory. [B]
    """

    code: int
    out: str
    err: str
    cpu: float
    peak: int


def preload(*more: str) -> None:
    """Import once what children share; the first call of a command pays nothing then."""
    import importlib

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rooms = ("kvsim.cli.app", "kvsim.serving.simulate", "kvsim.planner.plan")
    for name in (*PRELOADED, *more, *rooms):
        try:
            importlib.import_module(name)
        except ImportError:
            continue


def execute(
    arguments: tuple[str, ...],
    folder: Path,
    environment: Mapping[str, str | None] | None = None,
    limits: Mapping[int, int] | None = None,
) -> Ended:
    """Run ``kvsim`` with arguments in a folder, as a forked child.

    Parameters
    ----------
    environment
        Variables to set, or with ``None`` to remove.
    limits
        Further resource limits, by their number in ``resource``.
    """
    streams = {name: folder.parent / f"{folder.name}.{name}" for name in ("out", "err")}
    child = os.fork()
    if not child:
        _become(arguments, folder, streams, environment or {}, limits or {})
    begin, status, usage = time.monotonic(), 0, None
    while usage is None:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            usage = used
        elif time.monotonic() - begin > WALL:
            os.kill(child, signal.SIGKILL)
        else:
            time.sleep(0.002)
    texts = {name: path.read_text(errors="replace") for name, path in streams.items()}
    for path in streams.values():
        path.unlink()
    code = os.waitstatus_to_exitcode(status)
    cpu = usage.ru_utime + usage.ru_stime
    return Ended(code, texts["out"], texts["err"], cpu, usage.ru_maxrss * 1024)


def _become(
    arguments: tuple[str, ...],
    folder: Path,
    streams: Mapping[str, Path],
    environment: Mapping[str, str | None],
    limits: Mapping[int, int],
) -> None:
    """The child: never returns."""
    code = 99
    try:
        os.chdir(folder)
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(streams[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        resource.setrlimit(resource.RLIMIT_CPU, (4 * SECONDS, 4 * SECONDS + 2))
        resource.setrlimit(resource.RLIMIT_DATA, (3 * BYTES, 3 * BYTES))
        for number, most in limits.items():
            resource.setrlimit(number, (most, most))
        from kvsim.cli.app import main

        sys.argv = ["kvsim", *arguments]
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def fresh(folder: Path) -> Path:
    """An empty folder under that name."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder
