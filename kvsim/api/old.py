"""The functions that Python users call: names and meanings are those of the command line.

Every value may be written as on the command line (``prompt="32k"``, ``tpot="50ms"``) or as a
number; several are a list. Errors are ``kvsim.errors.InputError`` and ``InfeasibleError``, whose
text is the line that the command prints.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.cli.values import Given, deployment_of, line_of, text
from kvsim.errors import InputError
from kvsim.machines.hardware import DEFAULT_STACK, RELEASED
from kvsim.techniques import parse_several

if TYPE_CHECKING:
    from kvsim.report.calibrate_run import CalibratedRun

__all__ = ["calibrate_run"]


def calibrate_run(
    log: Given,
    model: Given,
    gpu: Given,
    out: Given | None = None,
    technique: str = "full",
    *,
    fit_first: int = 100,
    max_seqs: int = 256, max_tokens: int = 2048, block_tokens: int = 16, blocks: int = 0,
    prefix_caching: bool = False,
    stack: Given = DEFAULT_STACK, tp: Given = 1, weights: str = RELEASED,
) -> "CalibratedRun":  # fmt: skip
    """Fit a stack to the request log of a serving run; write it if ``out`` is given.

    Raises
    ------
    InputError
        For a log that cannot be read, or too few requests.
    """
    from kvsim.evidence.logs import read_run
    from kvsim.report.calibrate_run import calibrated
    from kvsim.serving.rules import Rules

    where = deployment_of(model, gpu, stack, tp, weights)
    techniques = parse_several(technique)
    if len(techniques) != 1:
        raise InputError(f"technique: got {technique[:40]!r}; expected the one that was served")
    rules = Rules(
        max_seqs=max_seqs, max_tokens=max_tokens, block_tokens=block_tokens, blocks=blocks,
        prefix_caching=prefix_caching,
    )  # fmt: skip
    command = line_of(
        "calibrate", from_run=log, model=model, gpu=gpu, technique=technique,
        fit_first=fit_first, max_seqs=max_seqs, max_tokens=max_tokens, out=out,
    )  # fmt: skip
    run = read_run(Path(text(log)))
    place = None if out is None else Path(text(out))
    return calibrated(run, techniques[0], where, rules, fit_first, text(stack), place, command)
