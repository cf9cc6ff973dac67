"""Where the command line of today takes a path, as its own help says it."""

import re
from collections.abc import Iterator
from typing import Any

import typer

from kvsim.cli.app import application

PATH = re.compile(r"FILE|PATH|DIR|LOG|OUT|^\[?F(\.|$)|\.toml|\.csv|\.json|\.parquet|\.html")

SUBCOMMAND = re.compile("^validate (quality|layers|plan) --")
"""Of validate: its own older spellings have the same options, which are tried."""


def places() -> Iterator[str]:
    """Each option or argument that names a file: ``predict --model``, ``sweep spec``."""
    for command, found in _commands(typer.main.get_command(application()), ()):
        for parameter in found.params:
            option = parameter.param_type_name == "option"
            if PATH.search(parameter.metavar or ""):
                slot = f"{command} {parameter.opts[0] if option else parameter.name}"
                yield SUBCOMMAND.sub("validate --", slot.replace("plan file", "--plan"))


def _commands(found: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    below = getattr(found, "commands", None)
    if not below or len(path) == 1:
        yield " ".join(path), found
    if not below:
        return
    for name, command in below.items():
        yield from _commands(command, (*path, name))
