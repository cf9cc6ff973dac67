"""`kvsim traces`: look at request traces, convert them, draw new ones, import production's."""

import typer

from kvsim.cli.command import Call, CheckedCommand, command
from kvsim.console import tell_written

app = typer.Typer(
    help="Inspect, convert and generate request traces.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("import", cls=CheckedCommand)
@command("traces import")
def import_(call: Call) -> None:
    """Make a trace from metrics, spans or access logs."""
    from kvsim.api import traces
    from kvsim.report import traces as report

    report.show(traces.import_(**call.options), call.json, call.line)


@app.command("inspect", cls=CheckedCommand)
@command("traces inspect")
def inspect(call: Call) -> None:
    """Show rate, burstiness, lengths and prefix reuse of a trace."""
    from kvsim.api import traces
    from kvsim.report import traces as report

    row, requests = traces.inspect(**call.options)
    if call.report is not None:
        from kvsim.report import traces_page

        traces_page.write_page(call.report, row, requests, call.line)
        tell_written(call.report)
    report.show(row, call.json, call.line)


@app.command("convert", cls=CheckedCommand)
@command("traces convert")
def convert(call: Call) -> None:
    """Write a trace as Parquet, piece by piece, whole or not at all."""
    from kvsim.api import traces

    traces.convert(**call.options)


@app.command("generate", cls=CheckedCommand)
@command("traces generate")
def generate(call: Call) -> None:
    """Generate a synthetic trace: from chosen distributions, or like another one."""
    from kvsim.api import traces
    from kvsim.report import traces as report

    row, source = traces.generate(**call.options)
    report.show(row, call.json, call.line, source)
