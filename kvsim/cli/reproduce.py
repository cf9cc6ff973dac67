"""`kvsim reproduce`: published or measured rows beside predictions."""

from kvsim.cli.command import Call, command
from kvsim.console import print_written
from kvsim.files import replace_text


@command("reproduce")
def reproduce(call: Call) -> None:
    """Compare published or your own measurements with predictions."""
    from kvsim.api.predictions import reproduce as compare
    from kvsim.report.reproduce import to_markdown

    result = compare(**call.options)
    if result is None:  # a stack was fitted
        return
    if call.report is not None and call.report.suffix == ".md":
        replace_text(call.report, to_markdown(result))
        print_written(call.report)
    else:
        call.write(result)
    result.show(call.json)
