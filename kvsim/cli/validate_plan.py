"""`kvsim validate --plan`: a plan run on real weights, beside what it expects."""

from shlex import quote

import typer

from kvsim.cli.arguments import run_sizes
from kvsim.cli.options import command_line
from kvsim.cli.quality import needs_torch
from kvsim.errors import InputError

WINDOWS, SCORED = 8, 16  # of the text at most; tokens scored behind each at least


def validate_plan(
    path: str,
    model: str | None,
    device: str,
    sizes: tuple[str | None, str | None, str | None],
    gpu: str,
    text: str | None,
    json: bool,
) -> None:
    """Run a plan and full-precision KV; print loss, times and memory beside the plan's.

    Parameters
    ----------
    model : a checkpoint, or None for the plan's own model.
    sizes : batch, prompt and generate as texts; None for the plan's own.

    Raises
    ------
    InputError
        If the plan is of another model, cannot run here, or does not fit the machine's memory.
    typer.Exit
        If the measured loss is above what the plan allows for.
    """
    from kvsim.quality.planfile import read_plan

    plan = read_plan(path)
    batch, prompt, generate = run_sizes(sizes, (plan.batch, plan.prompt, plan.generate))
    needs_torch()
    from kvsim.cli.timing import stack_beside
    from kvsim.machines.deployment import Deployment
    from kvsim.machines.profiles import load_hardware
    from kvsim.report import validate_plan as report
    from kvsim.report.json import envelope, print_json
    from kvsim.validate.bench import device as devices
    from kvsim.validate.counts.check import SLACK, RandomPrompts, check_workload, rehearse
    from kvsim.validate.machine import find_device
    from kvsim.validate.model.checkpoint import open_packaged
    from kvsim.validate.model.decoder import Decoder
    from kvsim.validate.model.weights import load_weights, random_weights
    from kvsim.validate.planned import PlanTimes, measure_loss, time_plan
    from kvsim.validate.quality.settings import Reading, check_reading
    from kvsim.validate.quality.text import read_text
    from kvsim.validate.techniques import check_known

    where, hardware = find_device(device), load_hardware(gpu)
    check_known([plan.technique])
    arch, source = open_packaged(model or plan.model)
    ranges = plan.technique.refuses(machine := Deployment(arch.model, hardware, stack_beside(gpu)))
    if ranges:
        raise InputError(f"--plan: {path!r} cannot run on {arch.model.name}: {ranges}")
    work = RandomPrompts(batch, prompt, generate)
    check_workload(arch, source, work, where)
    rehearse(arch, plan.technique, work, machine)
    left_out: list[str] = []
    loss = None
    if source is None:
        left_out.append("loss: random weights say nothing; give a checkpoint as --model")
    elif plan.technique.drafts:
        left_out.append("loss: drafts are verified, so that full KV's tokens are kept")
    else:
        from kvsim.cli.openquality import Opened

        reading = Reading(min(batch, WINDOWS), prompt, max(generate, SCORED))
        length = check_reading(arch, reading, False, where)
        opened = Opened(model or plan.model, arch, source, where, machine)
        decoder, texts, _ = opened.read(read_text(text), reading, length)
        typer.echo(f"loss: {reading.about.partition(';')[0]}", err=True)
        loss = measure_loss(decoder, plan.technique, reading, texts)
    half = devices.place(where, quick=False).half
    weights = (
        load_weights(arch, source, where, half) if source else random_weights(arch, where, half)
    )
    runner = Decoder(arch, weights, prompt + generate + SLACK, deployment=machine)
    here = devices.describe(where).name
    known = hardware.device == here
    if not known:
        left_out.append(
            f"predicted times: {gpu} was not measured on this machine ({here}); "
            f"`kvsim calibrate --device {quote(device)}` measures it"
        )
    found = None
    for step in time_plan(runner, plan.technique, work):
        if isinstance(step, PlanTimes):
            found = step.compared(machine, work, known)
        else:
            typer.echo(step, err=True)
    assert found is not None
    kind = "random weights" if source is None else "its own weights"
    title = (
        f"{arch.model.name}, {kind}, on {here}: batch {batch}, prompt {prompt}, generate {generate}"
    )
    outcome = report.PlanRun(plan, title, work, loss, found, left_out)
    if json:
        fields = report.record(outcome)
        print_json(envelope(command_line(), fields, verdict=fields["answer"]["verdict"]))
    else:
        report.show(outcome)
    if outcome.holds is False:
        raise typer.Exit(1)
