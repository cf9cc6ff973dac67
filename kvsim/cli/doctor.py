"""`kvsim doctor`: every fault of a file at once."""

import typer

from kvsim.cli.command import Call, command


@command("doctor")
def doctor(call: Call) -> None:
    """List every fault of a file, not only the first.

    The exit code is 1 if there is any.
    """
    from kvsim.doctor import examine
    from kvsim.report.json import envelope
    from kvsim.report.screen import Screen

    file = call.options["file"]
    found = examine(file)
    count = len(found.faults)
    verdict = f"{count} fault{'s' if count > 1 else ''}" if count else "no fault"
    told = f"{file}: {found.kind}, {verdict}"
    if call.json:
        fields = {"file": file, "kind": found.kind, "faults": found.faults}
        call.print_json(envelope(call.line, fields, verdict=told, notes=found.notes))
    else:
        out = Screen()
        out.say(told)
        out.items([fault.removeprefix(f"{file}: ") for fault in found.faults])
        for note in found.notes:
            out.say(f"note: {note}")
    if found.faults:
        raise typer.Exit(1)
