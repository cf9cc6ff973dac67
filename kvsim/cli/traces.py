"""`kvsim traces`: look at request traces, convert them, draw new ones."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.arguments import number, option
from kvsim.cli.importing import import_
from kvsim.cli.options import ReportOption, command_line, say_written
from kvsim.cli.traceoptions import (
    CharsPerToken,
    Columns,
    Format,
    SkipBad,
    Sort,
    TimeUnit,
    at_least,
    hash_blocks,
    reading,
)
from kvsim.errors import InputError
from kvsim.files import check_target

app = typer.Typer(
    help="Inspect, convert and generate request traces.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.command("import")(import_)

File = Annotated[
    str, typer.Argument(metavar="FILE", help="A trace, gz or zst too; or sample:NAME.")
]
BlockTokens = Annotated[str, hash_blocks("--block-tokens")]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


@app.command()
def inspect(
    file: File,
    format: Format = "",
    columns: Columns = "",
    time_unit: TimeUnit = "",
    block_tokens: BlockTokens = "",
    chars_per_token: CharsPerToken = "",
    sort: Sort = False,
    skip_bad: SkipBad = False,
    report: ReportOption = None,
    json: Json = False,
) -> None:
    """Show rate, burstiness, lengths and prefix reuse of a trace."""
    from kvsim.report import traces
    from kvsim.traces.read import load

    if report is not None:
        check_target(report, "--report")
    options = reading(
        format, columns, time_unit, block_tokens, chars_per_token, sort, skip_bad
    )  # fmt: skip
    trace = load(file, options)
    _tell(trace.notes)
    row = traces.row(trace)
    if report is not None:
        from kvsim.report import traces_page

        traces_page.write_page(report, row, trace.requests, command_line())
        say_written(report)
    traces.show(row, json, command_line())


@app.command()
def convert(
    file: File,
    out: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="Where to write.")],
    format: Format = "",
    columns: Columns = "",
    time_unit: TimeUnit = "",
    block_tokens: BlockTokens = "",
    chars_per_token: CharsPerToken = "",
    sort: Sort = False,
    skip_bad: SkipBad = False,
) -> None:
    """Write a trace as Parquet, piece by piece, whole or not at all."""
    from kvsim.traces.read import Reader, load
    from kvsim.traces.write import check_ending, write, write_parquet

    check_ending(out, (".parquet",))
    options = reading(
        format, columns, time_unit, block_tokens, chars_per_token, sort, skip_bad
    )  # fmt: skip
    reader = Reader(file, options)
    if sort or reader.layout.conduct:  # all of it has to be at hand
        trace = load(file, options)
        write(out, trace.requests)
        done, notes = len(trace.requests), trace.notes
    else:
        told = _progress if sys.stderr.isatty() else _quiet
        done = write_parquet(out, reader.parts(), reader.layout.block_tokens, told)
        notes = reader.notes()
    _tell((*notes, f"{done:,} requests written to {out}"))


@app.command()
def generate(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A .parquet, .csv or .jsonl; .gz with the latter.")
    ],
    like: Annotated[str, option("--like", "FILE", "Fit everything to a trace.")] = "",
    arrivals: Annotated[
        str, option("--arrivals", "SPEC", "poisson, gamma:cv=2, onoff:on=10,off=30 or diurnal.")
    ] = "",
    lengths: Annotated[
        str, option("--lengths", "SPEC", "lognormal:prompt=1024,generate=160 or empirical:FILE.")
    ] = "",
    prefixes: Annotated[
        str, option("--prefixes", "SPEC", "reuse:share=0.7,depth=0.5; none if not given.")
    ] = "",
    rate: Annotated[
        str, option("--rate", "PER_S", "Mean requests per second; the trace's if --like.")
    ] = "",
    requests: Annotated[str, option("--requests", "N", "So many requests.")] = "",
    duration: Annotated[
        str, option("--duration", "SECONDS", "For so long; the trace's if --like.")
    ] = "",
    seed: Annotated[str, option("--seed", "N", "The same seed gives the same trace.")] = "0",
    json: Json = False,
) -> None:
    """Generate a synthetic trace: from chosen distributions, or like another one."""
    from kvsim.report import traces
    from kvsim.traces import likeness, specs
    from kvsim.traces.read import load
    from kvsim.traces.write import check_ending, write

    check_ending(out)
    source = load(like) if like else None
    if source is not None:
        workload, span = likeness.fit(source.requests), source.requests.duration
    elif not (rate and (requests or duration)):
        missing = "--requests or --duration" if rate else "--rate"
        raise InputError(f"{missing}: not given; expected it, or --like FILE")
    else:
        workload, span = likeness.TrafficModel(specs.arrivals("poisson"), 1.0, specs.DEFAULT), 0.0
    workload = workload.changed(
        arrivals=specs.arrivals(arrivals) if arrivals else None,
        rate=number("--rate", rate) if rate else None,
        lengths=specs.joint_lengths(lengths) if lengths else None,
        prefixes=specs.shared_prefixes(prefixes) if prefixes else None,
    )
    drawn = workload.draw(
        at_least("--seed", seed, 0),
        at_least("--requests", requests, 1) if requests else None,
        number("--duration", duration) if duration else None if requests else span,
    )
    if not len(drawn):
        raise InputError("no request fell into the duration; give a longer one or a higher rate")
    write(out, drawn)
    row = traces.described(str(out), drawn)
    _tell(source.notes if source else ())
    traces.show(row, json, command_line(), traces.row(source) if source else None)


def _tell(notes: tuple[str, ...]) -> None:
    for note in notes:
        typer.echo(f"kvsim: {note}", err=True)


def _progress(rows: int) -> None:
    typer.echo(f"\rkvsim: {rows:,} requests\r", err=True, nl=False)


def _quiet(rows: int) -> None:
    """Take the count of rows read so far and print nothing."""
