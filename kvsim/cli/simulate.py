"""`kvsim simulate`: a request trace under continuous batching."""

from kvsim.cli.command import Call, command
from kvsim.console import tell_written


@command("simulate")
def simulate(call: Call) -> None:
    """Replay a request trace under continuous batching."""
    from kvsim.api.simulations import simulate as replay
    from kvsim.report import simulate as report
    from kvsim.report import simulate_page

    result = replay(**call.options)
    if call.report is not None:
        simulate_page.write_page(call.report, result)
        tell_written(call.report)
    if call.json:
        call.print_json(result.envelope())
    else:
        report.show(result)
