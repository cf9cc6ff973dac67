"""`kvsim reproduce`: published or measured rows beside predictions."""

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.arguments import option
from kvsim.cli.options import JsonOption, StackOption, command_line, say_written
from kvsim.files import check_target, replace_text


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
    from kvsim.report import reproduce as shown
    from kvsim.report import reproduce_page
    from kvsim.report.evidence import newest_measurement
    from kvsim.report.json import envelope, print_json

    for name, target in (("--report", report), ("--fit", fit)):
        if target:
            check_target(target, name)
    names = list(published.papers()) if source == "all" else [source]
    found = [row for name in names for row in published.read(name)]
    if fit:
        text = shown.fitted(found, stack, source)
        replace_text(Path(fit), text)
        return
    predicted = [published.predict(row) for row in found]
    scores = score(found, predicted)
    if report:
        reproduce_page.write_page(Path(report), source, found, predicted, command_line())
        say_written(Path(report))
    if json:
        fields = shown.answer(found, predicted, scores)
        data = newest_measurement(row.deployment() for row in found)
        verdict = fields["answer"]["verdict"]
        print_json(envelope(command_line(), fields, verdict=verdict, data=data))
    else:
        shown.print_answer(found, predicted, scores)
