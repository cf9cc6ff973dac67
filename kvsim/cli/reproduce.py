"""`kvsim reproduce`: published or measured rows beside predictions."""

from kvsim.cli.command import Call, command


@command("reproduce")
def reproduce(call: Call) -> None:
    """Compare published or your own measured rows with predictions."""
    from kvsim.api.predictions import reproduce as compare
    from kvsim.report.reproduce import print_answer

    result = compare(**call.options)
    if "fit" in call.options:
        return
    call.write(result)
    if call.json:
        call.print_json(result.envelope())
    else:
        print_answer(result.rows, result.predicted, result.scores)
