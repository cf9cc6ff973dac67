"""`kvsim validate`: techniques run for real; tokens and counts checked, or quality measured."""

import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from kvsim.cli.arguments import count, number, option, run_sizes
from kvsim.cli.options import GpuOption, JsonOption, command_line, say_written
from kvsim.cli.timing import validate_times
from kvsim.errors import InputError
from kvsim.files import check_target


def validate(
    model: Annotated[
        str | None,
        option(
            "--model",
            "NAME|PATH",
            "From `kvsim models` (random weights), folder, or GGUF; smollm2-135m, or the plan's.",
        ),
    ] = None,
    device: Annotated[str, option("--device", "DEVICE", "cpu, cuda or cuda:N.")] = "cpu",
    techniques: Annotated[
        list[str] | None,
        option(
            "--technique",
            "SPEC",
            "NAME:KEY=VALUE,... + ...; may be repeated; all if not given.",
            also=("--techniques",),
        ),
    ] = None,
    layers: Annotated[str, option("--layers", "N", "The first N layers only; 0: all.")] = "0",
    batch: Annotated[
        str | None, option("--batch", "N", "Sequences; 2, 8 for --quality, or the plan's.")
    ] = None,
    prompt: Annotated[
        str | None, option("--prompt", "N", "Prompt tokens of each; 96, 1024, or the plan's.")
    ] = None,
    generate: Annotated[
        str | None, option("--generate", "N", "Tokens to generate or score; 16, 64, or the plan's.")
    ] = None,
    gpu: GpuOption = "a6000",
    quality: Annotated[
        bool, typer.Option("--quality", help="Measure perplexity, attention and acceptance.")
    ] = False,
    text: Annotated[
        str | None, option("--text", "FILE", "What is read for a loss; Python's manual by default.")
    ] = None,
    out: Annotated[
        str | None, option("--out", "FILE", "Write what --quality measured as attention trace.")
    ] = None,
    per_layer: Annotated[
        bool,
        typer.Option("--per-layer", help="With --quality: each layer's keys and values alone."),
    ] = False,
    plan: Annotated[
        str | None, option("--plan", "FILE", "Run what `kvsim plan --json` chose; its loss, times.")
    ] = None,
    bits: Annotated[
        str | None, option("--bits", "X", "With --per-layer: run the best plan of X mean bits.")
    ] = None,
    points: Annotated[
        str, option("--points", "all|few", "With a measured --gpu: the grid that is timed.")
    ] = "all",
    max_error: Annotated[
        str | None, option("--max-error", "X", "Exit 1 if the median error of times is above X.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="F.html", help="Write an HTML page there.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run techniques for real and compare with predictions.

    Compared are tokens, FLOPs, bytes and memory.

    With a profile that kvsim calibrate measured on this device as --gpu, compare times instead,
    over a grid of points.
    """
    from kvsim.machines.deployment import Deployment
    from kvsim.machines.profiles import load_hardware, load_stack
    from kvsim.report.json import envelope, print_json
    from kvsim.techniques import parse

    if plan is not None:
        from kvsim.cli.validate_plan import validate_plan

        validate_plan(plan, model, device, (batch, prompt, generate), gpu, text, json)
        return
    model = model or "smollm2-135m"
    texts = [] if techniques in (None, ["all"]) else list(techniques or [])
    if per_layer and (not quality or texts):
        raise InputError("--per-layer: goes with --quality, and chooses its own techniques")
    if bits is not None and not per_layer:
        raise InputError("--bits: only with --quality --per-layer")
    if per_layer:
        from kvsim.cli.quality import measure_per_layer

        measure_per_layer(model, device, (batch, prompt, generate), gpu, text, out, bits, json)
        return
    if quality:
        from kvsim.cli.quality import measure_quality

        measure_quality(model, device, texts, batch, prompt, generate, gpu, text, out, json)
        return
    sizes = run_sizes((batch, prompt, generate), (2, 96, 16))
    asked = [parse(text) for text in texts]
    hardware = load_hardware(gpu)
    limit = None if max_error is None else number("--max-error", max_error)
    if report is not None:
        check_target(report, "--report")
    try:
        import torch
    except ImportError:
        raise InputError("validate needs PyTorch; pip install 'kvsim[validate]'") from None
    if hardware.device:
        validate_times(gpu, hardware, device, asked, points, limit, report, json)
        return
    if limit is not None:
        raise InputError(
            f"--gpu: {gpu} was not measured here, and times can only be compared on the machine "
            f"that was; kvsim calibrate --device {quote(device)} measures it"
        )
    from kvsim.report import validate as shown
    from kvsim.validate.counts.check import (
        CannotRun,
        CheckedTechnique,
        RandomPrompts,
        check,
        check_workload,
        rehearse,
        runnable,
    )
    from kvsim.validate.machine import find_device
    from kvsim.validate.model.attention import kernels
    from kvsim.validate.model.checkpoint import open_model
    from kvsim.validate.techniques import check_known

    where = find_device(device)
    check_known(asked)
    arch, source = open_model(model)
    cut = count("--layers", layers)
    arch = arch.first(cut) if cut else arch
    work = RandomPrompts(*sizes)
    check_workload(arch, source, work, where)
    d = Deployment(arch.model, hardware, load_stack("kvsim"))
    for technique in asked:
        rehearse(arch, technique, work, d)
    if not asked:
        asked, refused = runnable(arch, work, d)
        for error in refused:
            typer.echo(f"left out: {error}", err=True)
    found: list[CheckedTechnique] = []
    failed: list[CannotRun] = []
    for step in check(arch, source, asked, work, where, d):
        if isinstance(step, CheckedTechnique):
            found.append(step)
        elif isinstance(step, CannotRun):
            failed.append(step)
            typer.echo(f"left out: {step.technique} cannot run here: {step.reason}", err=True)
        else:
            typer.echo(step, err=True)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    passed = all(outcome.passed for outcome in found) and not failed
    weights = "random weights" if source is None else "its own weights"
    depth = f"{arch.model.layers} layer{'s' * (arch.model.layers > 1)}"
    title = f"{arch.model.name}, {depth}, {weights}, on {name}: "
    title += f"batch {work.batch}, prompt {work.prompt}, generate {work.generate}"
    if report is not None:
        from kvsim.report import validate_page

        validate_page.write_page(report, title, found, command_line())
        say_written(report)
    if json:
        answer = {
            "model": arch.model.name, "layers": arch.model.layers,
            "weights": "random" if source is None else source.where,
            "device": device, "device_name": name, "torch": torch.__version__,
            "attention": kernels(arch.model, where),
            "batch": work.batch, "prompt": work.prompt, "generate": work.generate,
            "techniques": [shown.outcome(outcome) for outcome in found],
            "left_out": [{"technique": str(f.technique), "reason": f.reason} for f in failed],
            "passed": passed, "answer": shown.answered(found).row(),
        }  # fmt: skip
        verdict = shown.answered(found).verdict
        print_json(envelope(command_line(), answer, verdict=verdict))
    else:
        shown.print_outcomes(title, found)
    if not passed:
        sys.stdout.flush()
        raise typer.Exit(1)
