"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from kvsim.deployment import Deployment

app = typer.Typer(
    name="kvsim",
    help="Which KV-cache technique to run, with which settings, what it gains, how sure that is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelOption = Annotated[
    str, typer.Option("--model", help="Catalogue name, or path to a config.json or its directory.")
]
GpuOption = Annotated[str, typer.Option("--gpu", help="Profile name, or path to a profile.")]
StackOption = Annotated[str, typer.Option("--stack", help="Stack name, or path to a stack file.")]
TpOption = Annotated[int, typer.Option("--tp", help="Tensor-parallel GPUs: 1, 2, 4 or 8.")]
WeightsOption = Annotated[str, typer.Option("--weights", help="fp16, fp8, int8 or int4.")]
HostOption = Annotated[
    str, typer.Option("--host-memory", help="Host memory in GiB; the profile's if not given.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


def main() -> None:
    """Run the command line; every error is one line on standard error."""
    try:
        code = app(standalone_mode=False)
    except (InputError, InfeasibleError) as error:
        typer.echo(f"kvsim: {error}", err=True)
        code = 1 if isinstance(error, InfeasibleError) else 2
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of the parser's own errors
            raise
        typer.echo(f"kvsim: {error.format_message()}; see kvsim --help", err=True)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)


@app.command()
def models(json: JsonOption = False) -> None:
    """List the model catalogue."""
    from kvsim.report import rows

    fields = {
        "name": "model", "parameters": "10^9 params", "active_parameters": "active",
        "layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "KV heads",
        "max_context": "context", "kv_bytes_per_token": "KV KiB/token",
    }  # fmt: skip
    _list("Models", rows.models(), fields, json)


@app.command()
def gpus(json: JsonOption = False) -> None:
    """List the hardware profiles."""
    from kvsim.report import rows

    fields = {
        "name": "gpu", "title": "card", "gpu_memory_bytes": "GiB", "hbm_bytes_per_s": "GB/s",
        "fp16_flop_per_s": "fp16 TFLOP/s", "h2d_bytes_per_s": "H2D GB/s",
        "usd_per_hour": "USD/h", "basis": "basis",
    }  # fmt: skip
    _list("GPUs (sources: --json)", rows.gpus(), fields, json)


@app.command()
def techniques(json: JsonOption = False) -> None:
    """List the techniques and their settings."""
    from kvsim.report import rows
    from kvsim.techniques import TECHNIQUES

    listed = rows.techniques()
    for row in listed:
        row["settings"] = str(TECHNIQUES[row["name"]]())
    fields = {"settings": "technique and defaults", "lossless": "lossless", "summary": "what it is"}
    _list("Techniques (parameters and papers: --json)", listed, fields, json)


@app.command()
def stacks(json: JsonOption = False) -> None:
    """List the software stacks."""
    from kvsim.report import rows

    fields = {"name": "stack", "title": "what it is", "basis": "basis", "error": "known error"}
    _list("Stacks", rows.stacks(), fields, json)


@app.command()
def predict(
    model: ModelOption,
    gpu: GpuOption,
    technique: Annotated[
        list[str], typer.Option("--technique", help="name:key=value,... May be repeated.")
    ],
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, as 1,8.")] = "1",
    prompt: Annotated[str, typer.Option("--prompt", help="Prompt tokens, as 2048,8192.")] = "2048",
    generate: Annotated[str, typer.Option("--generate", help="Tokens to generate.")] = "128",
    stack: StackOption = "fused",
    tp: TpOption = 1,
    weights: WeightsOption = "fp16",
    host_memory: HostOption = "",
    json: JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="CSV on standard output.")] = False,
) -> None:
    """Predict latency, throughput and memory of techniques."""
    import numpy as np

    from kvsim.generate import Prediction
    from kvsim.report import rows, tables
    from kvsim.techniques import parse

    deployment = _deployment(model, gpu, stack, tp, weights, host_memory)
    batches = np.array(_counts("--batch", batch), dtype=float)
    points = [(p, g) for p in _counts("--prompt", prompt) for g in _counts("--generate", generate)]
    found = [
        row
        for text in technique
        for p, g in points
        for row in rows.predictions(Prediction(parse(text), deployment, batches, p, g))
    ]
    if json:
        _print_json(found)
    elif csv:
        _print_csv(found)
    else:
        tables.print_predictions(found)


@app.command()
def plan(
    model: ModelOption,
    gpu: GpuOption,
    prompt: Annotated[str, typer.Option("--prompt", help="Prompt tokens.")] = "2048",
    generate: Annotated[str, typer.Option("--generate", help="Tokens to generate.")] = "128",
    batch: Annotated[str, typer.Option("--batch", help="Batch size, or auto.")] = "auto",
    objective: Annotated[
        str, typer.Option("--objective", help="throughput, latency or cost.")
    ] = "throughput",
    lossy: Annotated[bool, typer.Option("--lossy", help="Admit lossy techniques.")] = False,
    max_loss: Annotated[
        str, typer.Option("--max-loss", help="Quality that may be lost: 0 to 1, unknown counts 1.")
    ] = "",
    acceptance: Annotated[
        str, typer.Option("--acceptance", help="Accepted share of drafted tokens, measured by you.")
    ] = "",
    ttft: Annotated[str, typer.Option("--ttft", help="Longest time to first token in s.")] = "",
    tpot: Annotated[str, typer.Option("--tpot", help="Longest time per token in s.")] = "",
    gpu_memory: Annotated[
        str, typer.Option("--gpu-memory", help="GPU memory to use in GiB; all if not given.")
    ] = "",
    host_memory: HostOption = "",
    stack: StackOption = "fused",
    tp: TpOption = 1,
    weights: WeightsOption = "fp16",
    json: JsonOption = False,
    report: Annotated[str, typer.Option("--report", help="Write an HTML page there.")] = "",
) -> None:
    """Choose technique, settings and batch for a workload."""
    from kvsim.planner.options import GIB, Workload
    from kvsim.planner.plan import OBJECTIVES, Limits, make_plan
    from kvsim.report import page, rows, tables
    from kvsim.techniques import candidates

    if objective not in OBJECTIVES:
        expected = ", ".join(OBJECTIVES)
        raise InputError(f"--objective: got {objective!r}; expected one of {expected}")
    if report:
        page.check_target(Path(report))
    deployment = _deployment(model, gpu, stack, tp, weights, host_memory)
    hardware = deployment.hardware
    workload = Workload(
        _count("--prompt", prompt),
        _count("--generate", generate),
        None if batch == "auto" else _count("--batch", batch),
    )
    share = _number("--acceptance", acceptance, 1.0) if acceptance else None
    loss = 1.0 if lossy else _number("--max-loss", max_loss, 1.0) if max_loss else 0.0
    limits = Limits(
        gpu_memory=_number("--gpu-memory", gpu_memory) * GIB if gpu_memory else hardware.gpu_memory,
        host_memory=hardware.host_memory,
        ttft=_number("--ttft", ttft) if ttft else float("inf"),
        tpot=_number("--tpot", tpot) if tpot else float("inf"),
        loss=loss,
    )
    result = make_plan(deployment, workload, objective, limits, candidates(share))
    answer = rows.plan(result)
    if report:
        page.write_plan(Path(report), rows.deployment(deployment), answer, result)
    if json:
        _print_json(answer)
    else:
        tables.print_plan(rows.deployment(deployment), answer)


def _deployment(
    model: str, gpu: str, stack: str, tp: int, weights: str, host_memory: str
) -> "Deployment":
    from dataclasses import replace

    from kvsim.configs import load_model
    from kvsim.deployment import Deployment
    from kvsim.profiles import load_hardware, load_stack

    hardware = load_hardware(gpu)
    if host_memory:
        hardware = replace(hardware, host_memory=_number("--host-memory", host_memory) * 2**30)
    return Deployment(load_model(model), hardware, load_stack(stack), weights, tp)


def _number(option: str, text: str, most: float = 1e9) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= most or (value == 0 and most > 1):
        raise InputError(f"{option}: got {text[:40]!r}; expected a number above 0, up to {most:g}")
    return value


def _count(option: str, text: str) -> int:
    numbers = _counts(option, text)
    if len(numbers) != 1:
        raise InputError(f"{option}: got {text[:40]!r}; expected one whole number")
    return numbers[0]


def _counts(option: str, text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise InputError(
            f"{option}: got {text[:40]!r}; expected whole numbers separated by commas, as 1,8"
        ) from None


def _list(title: str, rows: list[dict[str, Any]], fields: dict[str, str], json: bool) -> None:
    from kvsim.report import tables

    if json:
        _print_json(rows)
    else:
        tables.print_list(title, rows, fields)


def _print_json(value: Any) -> None:
    from json import dumps

    typer.echo(dumps(value, indent=2, allow_nan=False))


def _print_csv(rows: list[dict[str, Any]]) -> None:
    from csv import DictWriter
    from json import dumps

    writer = DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: dumps(v) if isinstance(v, (dict, list)) else v for k, v in row.items()})


if __name__ == "__main__":
    main()
