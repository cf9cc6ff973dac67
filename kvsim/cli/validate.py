"""`kvsim validate`: techniques run for real; tokens and counts checked, or quality measured."""

import sys
from typing import TYPE_CHECKING, Any

import typer

from kvsim.cli.command import Call, CheckedCommand, CheckedGroup, command

if TYPE_CHECKING:
    from kvsim.report.result import Result

app = typer.Typer(rich_markup_mode=None)


@app.callback(cls=CheckedGroup, invoke_without_command=True)
@command("validate")
def validate(call: Call) -> None:
    """Run techniques in PyTorch and compare them with predictions.

    Tokens, FLOPs, bytes and memory are compared.

    If --gpu is a profile of this device, measured by kvsim calibrate, times are compared instead,
    over a grid of points.
    """
    from kvsim.api.validations import validate as run

    _show(call, run(**call.options))


@app.command("quality", cls=CheckedCommand)
@command("validate quality")
def validate_quality(call: Call) -> None:
    """Measure perplexity, attention and acceptance of drafts on a text."""
    from kvsim.api.validations import validate_quality as run

    _show(call, run(**call.options))


@app.command("layers", cls=CheckedCommand)
@command("validate layers")
def validate_layers(call: Call) -> None:
    """Measure the loss of quantising the keys or values of each layer alone."""
    from kvsim.api.validations import validate_layers as run

    _show(call, run(**call.options))


@app.command("plan", cls=CheckedCommand)
@command("validate plan")
def validate_plan(call: Call) -> None:
    """Run the plan of `kvsim plan --json` and measure its loss, times and memory."""
    from kvsim.api.validations import validate_plan as run

    _show(call, run(**call.options))


def _show(call: Call, result: "Result[Any]") -> None:
    call.show(result)
    if not result.passed:
        sys.stdout.flush()
        raise typer.Exit(1)
