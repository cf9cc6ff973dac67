"""The command line: the commands put together, and every error as one line."""

import gc
import sys
from typing import Annotated

import typer

from kvsim import __version__
from kvsim.commands.calibrate import calibrate
from kvsim.commands.capacity import capacity
from kvsim.commands.doctor import doctor
from kvsim.commands.effects import checked
from kvsim.commands.ends import ended
from kvsim.commands.explore import explore
from kvsim.commands.lists import gpus, models, stacks, techniques
from kvsim.commands.plan import plan
from kvsim.commands.predict import predict
from kvsim.commands.reproduce import reproduce
from kvsim.commands.simulate import simulate
from kvsim.commands.sweep import sweep
from kvsim.commands.traces import app as traces_app
from kvsim.commands.validate import validate

app = typer.Typer(
    name="kvsim",
    add_completion=True,
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


for command in (
    plan, predict, simulate, capacity, sweep, explore,
    reproduce, calibrate, validate, doctor,
    models, gpus, techniques, stacks,
):  # fmt: skip
    app.command()(command)


YOUNG = 50_000
"""Objects made between two searches for garbage: commands are short and make few cycles, and
Python's 700 cost them 5 % of their time."""


def main() -> None:
    """Run the command line; every error is one line on standard error."""
    gc.set_threshold(YOUNG)
    arguments = sys.argv[1:] or ["--help"]
    sys.exit(ended(lambda: checked(app)(arguments, prog_name="kvsim", standalone_mode=False)))


if __name__ == "__main__":
    main()
