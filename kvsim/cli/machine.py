"""`kvsim calibrate --device`: a machine measured by microbenchmarks."""

import sys
from datetime import date
from pathlib import Path

import typer

from kvsim.cli.options import command_line, say_written
from kvsim.errors import InputError
from kvsim.files import check_target, own_output


def calibrate_machine(
    device: str, out: Path, quick: bool, json: bool, page: Path | None = None
) -> None:
    """Measure a device, fit its profile and the stack beside it, and say what was found."""
    from kvsim.evidence.machine.datasheet import find_datasheet
    from kvsim.evidence.machine.fit import fit_samples
    from kvsim.evidence.machine.profile import Machine, hardware_text, stack_text
    from kvsim.evidence.machine.samples import Log
    from kvsim.files import held, replacing_all, write_draft
    from kvsim.machines.profiles import load_hardware, load_stack
    from kvsim.report import calibrate as report
    from kvsim.report.json import envelope, print_json

    check_place(out)
    try:
        import torch
    except ImportError:
        raise InputError("calibrate needs PyTorch; pip install 'kvsim[validate]'") from None
    from kvsim.validate.bench import device as devices
    from kvsim.validate.bench.suite import run_suite
    from kvsim.validate.machine import find_device
    from kvsim.validate.processor import Processor

    where = find_device(device)
    if where.type == "cpu":
        Processor.here().bind()
        torch.set_num_threads(devices.compute_threads())
    found = devices.describe(where)
    check_same(out, found.name)
    place = devices.place(where, quick)
    in_use = devices.context_memory(where)
    log = Log.open(samples_path(out), devices.header(found, quick))
    if log.done:
        typer.echo(f"kvsim: going on after {len(log.done)} finished benchmarks", err=True)
    with held(log.path):
        run_suite(place, log, lambda text: print(f"kvsim: {text}", file=sys.stderr, flush=True))
    fit = fit_samples(log.samples)
    notes = devices.suspicions(devices.describe(where))
    host = devices.host_memory()
    said = (*devices.conditions(found, place), *notes)
    machine = Machine(found.name, found.memory, host, in_use, place.cache, said)
    today = str(date.today())
    with replacing_all(out, stack_path(out)) as (profile, stack):  # the stack goes first
        write_draft(stack, stack_text(fit, machine, today))
        write_draft(profile, hardware_text(fit, machine, today))
        load_stack(stack)  # what cannot be read back is not kept
        load_hardware(profile)
    sheet = find_datasheet(found.name, found.memory) if where.type == "cuda" else None
    answer = report.row(fit, machine, sheet, notes, len(log.samples), out)
    if page is not None:
        from kvsim.report import calibrate_page

        calibrate_page.write_machine(page, answer, command_line())
        say_written(page)
    if json:
        notes = answer.pop("notes")
        told = report.answered(answer).verdict
        print_json(envelope(command_line(), answer, verdict=told, notes=notes))
    else:
        report.show(answer)


def samples_path(profile: Path) -> Path:
    """Where the raw samples of a profile are."""
    return profile.with_suffix(".samples.jsonl")


def stack_path(profile: Path) -> Path:
    """Where the software calibrated with a profile is."""
    return profile.with_suffix(".stack.toml")


def check_place(out: Path) -> None:
    """Refuse a place that no profile could be written to, before anything is measured.

    Raises
    ------
    InputError
        Saying what is in the way.
    """
    check_target(out, "--out", (".toml",))
    for beside in (stack_path(out), samples_path(out)):
        check_target(beside, f"--out, whose {beside.name} is written too")


def check_same(out: Path, device: str) -> None:
    """Refuse to replace the profile of another device.

    Raises
    ------
    InputError
        If there is one, or something that is no profile.
    """
    from kvsim.machines.profiles import load_hardware

    if out.exists():
        with own_output():
            there = load_hardware(out)
        if there.device != device:
            name = there.device or there.title
            raise InputError(
                f"--out: {out} is a profile of {name}, this is {device}; choose another place"
            )
