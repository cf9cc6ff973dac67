"""`kvsim validate` with a profile of this machine: times predicted and measured."""

import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import typer

from kvsim.cli.machine import stack_path
from kvsim.cli.options import command_line, say_written
from kvsim.errors import InputError

if TYPE_CHECKING:
    from kvsim.machines.hardware import Hardware, Stack
    from kvsim.techniques.technique import Technique


def stack_beside(gpu: str) -> "Stack":
    """The stack that was measured with a profile, or that of kvsim's own kernels."""
    from kvsim.machines.profiles import load_stack

    beside = stack_path(Path(gpu))
    return load_stack(beside if beside.exists() else "kvsim")


def validate_times(
    gpu: str,
    hardware: "Hardware",
    device: str,
    asked: "Sequence[Technique]",
    points: str,
    max_error: float | None,
    report_to: Path | None,
    json: bool,
) -> None:
    """Run techniques over a grid, predict each from the profile, and compare.

    The stack beside the profile then says how far off it was, and predictions say so with it.

    Raises
    ------
    InputError
        If the profile is of another device, memory is short, or nothing can run.
    typer.Exit
        If the median error is above ``max_error``.
    """
    import torch

    from kvsim.evidence.machine.profile import with_error
    from kvsim.files import own_output, read_text, replace_text
    from kvsim.files.kinds import PROFILE
    from kvsim.report import validate_times as report
    from kvsim.report import validate_times_page
    from kvsim.report.json import envelope, print_json
    from kvsim.validate.bench import device as devices
    from kvsim.validate.machine import find_device
    from kvsim.validate.techniques import check_known
    from kvsim.validate.times.compared import Compared, SkippedPoint, summarise
    from kvsim.validate.times.points import Grid, compare_times

    where = find_device(device)
    check_known(asked)
    if where.type == "cpu":
        torch.set_num_threads(devices.compute_threads())
    here = devices.describe(where)
    if hardware.device != here.name:
        raise InputError(
            f"--gpu: {gpu} was measured on {hardware.device}, this is {here.name}; "
            f"kvsim calibrate --device {quote(device)} measures this one"
        )
    place = devices.place(where, quick=False)
    beside = stack_path(Path(gpu))
    stack = stack_beside(gpu)
    grid = Grid.of(where).reduced(points)
    found: list[Compared] = []
    missing: list[SkippedPoint] = []
    for step in compare_times(grid, asked, where, place.half, hardware, stack):
        if isinstance(step, Compared):
            found.append(step)
        elif isinstance(step, SkippedPoint):
            missing.append(step)
        else:
            print(f"kvsim: {step}", file=sys.stderr, flush=True)
    if not found:
        raise InputError(f"--techniques: none could run; {missing[0].reason}")
    summary, suspicious = summarise(found), devices.suspicions(devices.describe(where))
    answer = report.answer(found, missing, summary, here.name, suspicious)
    if points == "all" and beside.exists():
        known = report.held_out(answer, str(date.today()))
        with own_output():
            text = read_text(beside, PROFILE)
            replace_text(beside, with_error(text, known))
    if report_to:
        validate_times_page.write_page(report_to, answer, command_line())
        say_written(report_to)
    if json:
        verdict = report.answered(answer).verdict
        print_json(envelope(command_line(), answer, verdict=verdict, notes=answer["suspicious"]))
    else:
        report.show(answer)
    if max_error is not None and not summary.median <= max_error:
        sys.stdout.flush()
        raise typer.Exit(1)
