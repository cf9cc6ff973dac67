"""`kvsim models`, `gpus`, `techniques` and `stacks`."""

from typing import Annotated

import typer

from kvsim.cli.options import JsonOption, command_line

Name = Annotated[str, typer.Argument(metavar="[NAME]", help="One entry in full, with its sources.")]


def models(name: Name = "", json: JsonOption = False) -> None:
    """List the model catalogue, or show one model."""
    _show("models", name, json)


def gpus(name: Name = "", json: JsonOption = False) -> None:
    """List the hardware profiles, or show one with its sources."""
    _show("gpus", name, json)


def techniques(name: Name = "", json: JsonOption = False) -> None:
    """List the techniques, or show one with its settings and paper."""
    _show("techniques", name, json)


def stacks(name: Name = "", json: JsonOption = False) -> None:
    """List the software stacks, or show one with its known error."""
    _show("stacks", name, json)


def _show(kind: str, name: str, json: bool) -> None:
    from kvsim.report import lists

    lists.show(kind, name, json, command_line())
