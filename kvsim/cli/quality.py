"""`kvsim validate --quality`: what techniques cost in quality, and what drafts they accept."""

from pathlib import Path

import typer

from kvsim.cli.arguments import number, run_sizes
from kvsim.cli.options import command_line
from kvsim.errors import InputError
from kvsim.files import check_target
from kvsim.techniques import parse

WINDOWS, LAYER_WINDOWS = (8, 1024, 64), (8, 256, 16)  # of the text: how many, read, scored


def needs_torch() -> None:
    """Refuse in one line where PyTorch is missing."""
    try:
        import torch  # noqa: F401 - only whether it is there
    except ImportError:
        raise InputError("validate needs PyTorch; pip install 'kvsim[validate]'") from None


def measure_quality(
    model: str,
    device: str,
    techniques: list[str],
    batch: str | None,
    prompt: str | None,
    generate: str | None,
    gpu: str,
    text: str | None,
    out: str | None,
    json: bool,
) -> None:
    """Read a text under every technique; print the trace, and write it."""
    sizes = run_sizes((batch, prompt, generate), WINDOWS)
    asked = [parse(item) for item in techniques]
    needs_torch()
    from kvsim.cli.openquality import Opened
    from kvsim.machines.deployment import Deployment
    from kvsim.machines.profiles import load_hardware, load_stack
    from kvsim.report import validate_quality as report
    from kvsim.report.json import envelope, print_json
    from kvsim.traces import attentionfile
    from kvsim.validate.machine import find_device
    from kvsim.validate.model.checkpoint import open_weights
    from kvsim.validate.quality.measure import measure
    from kvsim.validate.quality.settings import (
        Reading,
        check_reading,
        rehearse_all,
        sort_out,
        usual,
    )
    from kvsim.validate.quality.text import read_text

    if out is not None:
        check_target(out, "--out")
    where = find_device(device)
    sort_out(asked)
    read = read_text(text)
    arch, source = open_weights(model)
    machine = Deployment(arch.model, load_hardware(gpu), load_stack("kvsim"))  # KVPR's split
    reading = Reading(*sizes)
    able, refused = rehearse_all(arch, asked or usual(arch.model, reading.prompt), reading, machine)
    for error in refused:
        if asked:
            raise error
        typer.echo(f"left out: {error}", err=True)
    settings = sort_out(able)
    length = check_reading(arch, reading, bool(settings.drafts), where)
    opened = Opened(model, arch, source, where, machine)
    decoder, texts, about = opened.read(read, reading, length)
    for step in measure(decoder, settings, reading, texts, about, opened.facts(read, reading)):
        if isinstance(step, str):
            typer.echo(step, err=True)
            continue
        if out is not None:
            attentionfile.write(Path(out), step)
        if json:
            print_json(envelope(command_line(), attentionfile.record(step)))
        else:
            report.print_trace(step)


def measure_per_layer(
    model: str,
    device: str,
    sizes: tuple[str | None, str | None, str | None],
    gpu: str,
    text: str | None,
    out: str | None,
    bits: str | None,
    json: bool,
) -> None:
    """Losses of every layer's keys and values alone; a plan of so many bits, run for real."""
    reading_sizes = run_sizes(sizes, LAYER_WINDOWS)
    wanted = None if bits is None else number("--bits", bits)
    needs_torch()
    from kvsim.cli.openquality import Opened
    from kvsim.machines.deployment import Deployment
    from kvsim.machines.profiles import load_hardware, load_stack
    from kvsim.planner.bits import assign
    from kvsim.quality.layers import write
    from kvsim.quality.unfinished import Unfinished
    from kvsim.report.json import envelope, print_json
    from kvsim.report.validate_layers import Executed, print_layers, record
    from kvsim.techniques import parse
    from kvsim.validate.machine import find_device
    from kvsim.validate.model.checkpoint import open_weights
    from kvsim.validate.quality.perlayer import executed, measure_layers
    from kvsim.validate.quality.settings import Reading, check_reading
    from kvsim.validate.quality.text import read_text

    if out is not None:
        check_target(out, "--out")
    where, read = find_device(device), read_text(text)
    arch, source = open_weights(model)
    reading = Reading(*reading_sizes)
    length = check_reading(arch, reading, False, where)
    machine = Deployment(arch.model, load_hardware(gpu), load_stack("kvsim"))
    opened = Opened(model, arch, source, where, machine)
    decoder, texts, about = opened.read(read, reading, length)
    group = max(g for g in (8, 16, 32, 64) if arch.model.head_dim % g == 0 or g == 8)
    asked = {**about, "sizes": list(reading_sizes), "group": group}
    so_far = Unfinished.beside(out, asked)
    if so_far.runs:
        typer.echo(f"{len(so_far.runs)} runs are done already ({so_far.path})", err=True)
    for step in measure_layers(decoder, reading, texts, group, about, so_far=so_far):
        if isinstance(step, str):
            typer.echo(step, err=True)
            continue
        if out is not None:
            write(Path(out), step)
            so_far.close()
        plan: Executed | None = None
        if wanted is not None:
            widths = assign(step, wanted)
            typer.echo(f"running {step.notation(widths)}", err=True)
            (measured,) = executed(decoder, reading, texts, [parse(step.notation(widths))])
            plan = Executed(wanted, widths, measured)
        if json:
            print_json(envelope(command_line(), record(step, plan)))
        else:
            print_layers(step, plan)
