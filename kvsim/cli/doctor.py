"""`kvsim doctor`: every fault of a file at once."""

import typer

from kvsim.cli.command import Call, command


@command("doctor")
def doctor(call: Call) -> None:
    """List all faults of an input file.

    The command exits with code 1 if the file has a fault.
    """
    from kvsim.doctor import examine
    from kvsim.report.answer import Answer
    from kvsim.report.result import Result
    from kvsim.report.terminal import Block, Items

    file = call.options["file"]
    found = examine(file)
    count = len(found.faults)
    verdict = "no fault" if not count else f"{count} fault{'s' if count > 1 else ''}"
    told = f"{file}: {found.kind}, {verdict}"
    faults = [fault.removeprefix(f"{file}: ") for fault in found.faults]
    blocks: list[Block] = [
        told,
        *([Items(faults)] if faults else []),
        *(f"note: {x}" for x in found.notes),
    ]
    fields = {"file": file, "kind": found.kind, "faults": found.faults}
    said = Answer(told)
    call.show(
        Result(told, said, fields, found, blocks=blocks, notes=found.notes, command=call.line)
    )
    if found.faults:
        raise typer.Exit(1)
