"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsim import __version__
from kvsim.commands.arguments import counts, option
from kvsim.commands.calibrate import calibrate
from kvsim.commands.doctor import doctor
from kvsim.commands.options import (
    GpuOption,
    HostOption,
    JsonOption,
    ModelOption,
    StackOption,
    TpOption,
    WeightsOption,
    deployment,
)
from kvsim.commands.plan import plan
from kvsim.commands.simulate import simulate
from kvsim.commands.traces import app as traces_app
from kvsim.commands.validate import validate
from kvsim.errors import InfeasibleError, InputError

LINE = 1000  # longest message that anyone would read

app = typer.Typer(
    name="kvsim",
    add_completion=False,
    context_settings={"max_content_width": 100},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(traces_app, name="traces")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvsim {__version__}")
        raise typer.Exit


@app.callback()
def _general(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit."),
    ] = False,
) -> None:
    """Which KV-cache technique to run, with which settings, what it gains, how sure that is."""


app.command()(plan)
app.command()(simulate)
app.command()(calibrate)
app.command()(validate)
app.command()(doctor)


def main() -> None:
    """Run the command line; every error is one line on standard error."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="kvsim", standalone_mode=False)
        sys.stdout.flush()
    except InfeasibleError as error:
        code = _fail(str(error), 1)
    except InputError as error:
        code = _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # the reader of our output has what it wanted
        code = _silence(1)
    except OSError as error:
        place = error.filename or "standard output"
        code = _silence(_fail(f"{place}: {error.strerror}; expected a place with room", 2))
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of the parser's own errors
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "kvsim"
        code = _fail(f"{error.format_message().rstrip('.?')}; see {command} --help", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    if len(printable) > LINE:
        printable = f"{printable[: LINE // 2]} ... {printable[-LINE // 2 :]}"
    typer.echo(f"kvsim: {printable}", err=True)
    return code


def _silence(code: int) -> int:
    """Keep Python's own flush at exit from failing on what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


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

    listed = rows.techniques()
    for row in listed:
        defaults = {parameter["name"]: parameter["default"] for parameter in row["parameters"]}
        row["settings"] = rows.spec({"technique": row["name"], "params": defaults})
    fields = {"settings": "technique and defaults", "lossless": "lossless", "summary": "what it is"}
    _list(
        "Techniques, given as name:key=value,... (meanings and papers: --json)",
        listed,
        fields,
        json,
    )


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
        list[str], option("--technique", "SPEC", "NAME or NAME:KEY=VALUE,... May be repeated.")
    ],
    batch: Annotated[str, option("--batch", "N,...", "Batch sizes, as 1,8.")] = "1",
    prompt: Annotated[str, option("--prompt", "N,...", "Prompt tokens, as 2048,8192.")] = "2048",
    generate: Annotated[str, option("--generate", "N,...", "Tokens to generate.")] = "128",
    stack: StackOption = "fused",
    tp: TpOption = "1",
    weights: WeightsOption = "fp16",
    host_memory: HostOption = None,
    json: JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="CSV on standard output.")] = False,
) -> None:
    """Predict latency, throughput and memory of techniques."""
    import numpy as np

    from kvsim.prediction.generate import Prediction
    from kvsim.report import rows, tables
    from kvsim.techniques import parse

    if json and csv:
        raise InputError("--json and --csv: both are given; expected at most one of them")
    where = deployment(model, gpu, stack, tp, weights, host_memory)
    batches = np.array(counts("--batch", batch), dtype=float)
    points = [(p, g) for p in counts("--prompt", prompt) for g in counts("--generate", generate)]
    predictions = [
        Prediction(parse(text), where, batches, p, g) for text in technique for p, g in points
    ]
    found = [row for prediction in predictions for row in rows.predictions(prediction)]
    if json:
        _print_json(found)
    elif csv:
        typer.echo(rows.csv(found), nl=False)
    else:
        tables.print_predictions(found)


@app.command()
def reproduce(
    source: Annotated[
        str, typer.Argument(metavar="[PAPER|FILE.csv]", help="A paper's tables, or your own rows.")
    ] = "all",
    fit: Annotated[
        str, option("--fit", "FILE", "Fit --stack to the rows marked fit and write it there.")
    ] = "",
    stack: StackOption = "fused",
    json: JsonOption = False,
    report: Annotated[str, option("--report", "FILE", "Write an HTML or .md page there.")] = "",
) -> None:
    """Compare published or your own measured rows with predictions."""
    from kvsim.evidence import published
    from kvsim.evidence.scores import score
    from kvsim.report import page, reproduction

    for name, target in (("--report", report), ("--fit", fit)):
        if target:
            page.check_target(target, name)
    names = list(published.papers()) if source == "all" else [source]
    found = [row for name in names for row in published.read(name)]
    if fit:
        text = reproduction.fitted(found, stack, source)
        from kvsim.files import replace_text

        replace_text(Path(fit), text)
        return
    predicted = [published.predict(row) for row in found]
    scores = score(found, predicted)
    if report:
        reproduction.write_page(Path(report), source, found, predicted)
    if json:
        _print_json(reproduction.answer(found, predicted, scores))
    else:
        reproduction.print_answer(found, predicted, scores)


def _list(title: str, rows: list[dict[str, Any]], fields: dict[str, str], json: bool) -> None:
    from kvsim.report import tables

    if json:
        _print_json(rows)
    else:
        tables.print_list(title, rows, fields)


def _print_json(value: Any) -> None:
    from json import dumps

    typer.echo(dumps(value, indent=2, allow_nan=False))


if __name__ == "__main__":
    main()
