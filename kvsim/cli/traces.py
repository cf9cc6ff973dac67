"""`kvsim traces`: look at request traces, convert them, draw new ones, import production's."""

import typer

from kvsim.cli.command import Call, CheckedCommand, command

app = typer.Typer(
    help="Inspect, convert and generate request traces.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("import", cls=CheckedCommand)
@command("traces import")
def import_(call: Call) -> None:
    """Create a trace from metrics, spans or access logs."""
    from kvsim.api import traces

    call.show(traces.import_(**call.options))


@app.command("inspect", cls=CheckedCommand)
@command("traces inspect")
def inspect(call: Call) -> None:
    """Show the rate, burstiness, lengths and prefix reuse of a trace."""
    from kvsim.api import traces

    call.show(traces.inspect(**call.options))


@app.command("convert", cls=CheckedCommand)
@command("traces convert")
def convert(call: Call) -> None:
    """Convert a trace to Parquet."""
    from kvsim.api import traces

    traces.convert(**call.options)


@app.command("generate", cls=CheckedCommand)
@command("traces generate")
def generate(call: Call) -> None:
    """Generate a synthetic trace from distributions, or one similar to another trace."""
    from kvsim.api import traces

    call.show(traces.generate(**call.options))
