"""`kvsim doctor`: every fault of a file at once."""

from typing import Annotated

import typer

from kvsim.cli.options import JsonOption, command_line


def doctor(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A hardware profile, stack, config.json, trace, or table of measured rows.",
        ),
    ],
    json: JsonOption = False,
) -> None:
    """List every fault of a file, not only the first.

    The exit code is 1 if there is any.
    """
    from kvsim.doctor import examine
    from kvsim.report.json import envelope, print_json
    from kvsim.report.screen import Screen

    found = examine(file)
    count = len(found.faults)
    verdict = "no fault" if not count else f"{count} fault{'s' if count > 1 else ''}"
    if json:
        fields = {"file": file, "kind": found.kind, "faults": found.faults}
        told = f"{file}: {found.kind}, {verdict}"
        print_json(envelope(command_line(), fields, verdict=told, notes=found.notes))
    else:
        out = Screen()
        out.say(f"{file}: {found.kind}, {verdict}")
        out.items([fault.removeprefix(f"{file}: ") for fault in found.faults])
        for note in found.notes:
            out.say(f"note: {note}")
    if found.faults:
        raise typer.Exit(1)
