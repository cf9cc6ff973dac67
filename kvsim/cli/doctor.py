"""`kvsim doctor`: every fault of a file at once."""

from typing import Annotated

import typer

from kvsim.cli.options import JsonOption


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
    from kvsim.report.screen import Screen

    found = examine(file)
    if json:
        from json import dumps

        fields = {"file": file, "kind": found.kind, "faults": found.faults, "notes": found.notes}
        typer.echo(dumps(fields, indent=2))
    else:
        count = len(found.faults)
        verdict = "no fault" if not count else f"{count} fault{'s' if count > 1 else ''}"
        out = Screen()
        out.say(f"{file}: {found.kind}, {verdict}")
        out.items([fault.removeprefix(f"{file}: ") for fault in found.faults])
        for note in found.notes:
            out.say(f"note: {note}")
    if found.faults:
        raise typer.Exit(1)
