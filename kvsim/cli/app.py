"""The command line: the commands put together, and every error as one line."""

import gc
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from kvsim.cli.command import CheckedCommand
from kvsim.cli.ends import run_command
from kvsim.console import run_on_command_line
from kvsim.version import __version__

COMMANDS = {
    "plan": "plan",
    "predict": "predict",
    "simulate": "simulate",
    "capacity": "capacity",
    "sweep": "sweep",
    "explore": "explore",
    "reproduce": "reproduce",
    "calibrate": "calibrate",
    "validate": "validate",
    "doctor": "doctor",
    "models": "lists",
    "gpus": "lists",
    "techniques": "lists",
    "stacks": "lists",
    "traces": "traces",
}
"""Every command by name, and its module in ``kvsim.cli``, in the order of the help."""

BEGIN = """\
kvsim says which KV-cache technique to run for a model on a GPU, with which settings, what it gains,
and how sure that is.

Three ways to begin:

  What should I run on my GPU?
    kvsim plan --model meta-llama/Llama-3.1-8B-Instruct --gpu "RTX 4090"

  How fast is it, and does it fit?
    kvsim predict --model Qwen/Qwen3-32B --gpu H100 --technique full,fp8 --batch 1,16 --prompt 8k

  How many GPUs do I need?
    kvsim capacity --model llama3.1-8b --gpus l40s,h100 --prompt 3k --generate 500 --rate 5 \\
      --ttft 2s --tpot 100ms

kvsim --help lists all commands, kvsim plan --help the options of one. Models and GPUs have the
names that Hugging Face, Ollama, nvidia-smi and clouds give them; kvsim models and kvsim gpus list
them."""
"""What `kvsim` alone prints."""

GC_THRESHOLD = 400_000
"""Objects made between two searches for garbage: commands are short and make few cycles, and
Python's 700 cost them 5 % of their time, 50,000 still 3 %."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvsim {__version__}")
        raise typer.Exit


def _general(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Plan, predict and simulate KV-cache techniques for LLM serving."""


def application(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Build the command-line application.

    Parameters
    ----------
    names
        Commands that it has; only their modules are imported.

    Returns
    -------
    typer.Typer
        The application.
    """
    app = typer.Typer(
        name="kvsim",
        add_completion=True,
        context_settings={"max_content_width": 100},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_general)
    for name in names:
        module = import_module(f"kvsim.cli.{COMMANDS[name]}")
        if isinstance(getattr(module, "app", None), typer.Typer):
            app.add_typer(module.app, name=name)
        else:
            app.command(name, cls=CheckedCommand)(getattr(module, name))
    return app


def main() -> None:
    """Run the command line; every error is one line on standard error."""
    gc.set_threshold(GC_THRESHOLD)
    # a plan's matrices are small: threads that NumPy's library starts for large ones would only
    # spin; PyTorch has its own
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    arguments = sys.argv[1:]
    completing = "_KVSIM_COMPLETE" in os.environ
    if not arguments and not completing:
        typer.echo(BEGIN)
        return
    sys.exit(run_command(lambda: _run(_typed() if completing else arguments, arguments)))


def _typed() -> list[str]:
    """What stands on the line that a shell completes, after ``kvsim``."""
    words = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return words.split()[1:]


def _run(typed: list[str], arguments: list[str]) -> object:
    """Run one command; all of them are put together only to list or to suggest them."""
    app = application(typed[:1] if typed and typed[0] in COMMANDS else COMMANDS)
    with run_on_command_line():
        return app(arguments, prog_name="kvsim", standalone_mode=False)


if __name__ == "__main__":
    main()
