"""Units of ``make.py gpu`` on a GPU that is pretended, as small as they can be.

Commands that a unit starts run in this process, where the GPU is pretended; times mean nothing.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

from kvsim.cli import app as cli
from kvsim.validate.bench import compute, suite
from kvsim.validate.bench import work as bench_work
from kvsim.validate.counts import expected
from kvsim.validate.session import work
from kvsim.validate.session.state import SessionState
from tests.support.pretended import pretended

FLOPS = 1e9  # of one timing, which a CPU makes in fp16


def here(command: list[str], told: bool = False) -> "CompletedProcess[str]":
    """A command of kvsim in this process; others are only said to have run."""
    if command[1:3] != ["-m", "kvsim"]:
        return CompletedProcess(command, 0, "", "")
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", ["kvsim", *command[3:]]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
    if told:
        sys.stderr.write(err.getvalue())
    return CompletedProcess(command, code, out.getvalue(), err.getvalue())


@contextmanager
def small(model: Path, interpreted: bool, seconds: float) -> Iterator[None]:
    """A pretended GPU, and little to do on it.

    Parameters
    ----------
    model : a configuration, of which one layer is calibrated with.
    seconds : what the microbenchmarks, and whole runs after them, may take.
    """
    changed: list[tuple[Any, str, Any]] = [
        (work, "_run", here), (bench_work, "GPU_FLOP_PER_TIMING", FLOPS),
        (compute, "SHAPES", ((256, 256), (256, 512)) * 2), (compute, "PRODUCT_ROWS", (1, 16, 64)),
        (compute, "OTHER_ROWS", (32,)),
        (suite, "SUITE_SECONDS", dict.fromkeys((True, False), seconds)),
        (suite, "RUNS_LIMIT", dict.fromkeys((True, False), seconds)),
        (suite, "SUITE_GPU_MODELS", ((str(model), 1),)), (suite, "GPU_PROMPTS", (24,)),
        (expected, "TIMED_GENERATED", 3), (work, "TIMED_MODEL", {"cuda": (str(model), 1)}),
        (work, "TIMED_SIZES", {"cuda": {"short": ((1, 40),)}}),
    ]  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(pretended(interpreted))
        for module, name, new in changed:
            stack.enter_context(patch.object(module, name, new))
        yield


def run_unit(
    name: str, state: SessionState, model: Path, interpreted: bool = False, seconds: float = 0.5
) -> dict[str, Any]:
    """What a unit of ``make.py gpu`` finds on the pretended GPU."""
    what, *settings = name.split()
    with small(model, interpreted, seconds):
        return work.WORK[what]("cuda:0", state, "short", *settings)
