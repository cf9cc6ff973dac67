"""`kvsim traces import`: a trace from metrics, spans or logs of production."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.arguments import option, seconds
from kvsim.cli.options import command_line
from kvsim.cli.traceoptions import at_least
from kvsim.errors import InputError

if TYPE_CHECKING:
    from kvsim.traces.requests import Requests

KINDS = ("prometheus", "otel", "access")
LONGEST_STEP = 1e6  # between two texts [s]


def import_(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Metrics, spans or logs.")],
    out: Annotated[Path, option("--out", "F", "The trace: a .parquet, .csv or .jsonl.")],
    kind: Annotated[
        str, option("--kind", "KIND", "prometheus, otel or access; by default recognised.")
    ] = "",
    every: Annotated[
        str, option("--every", "TIME", "Between several texts of /metrics, as 60s.")
    ] = "",
    lengths: Annotated[
        str, option("--lengths", "SPEC", "Of access logs: lognormal:prompt=1024,generate=160.")
    ] = "",
    seed: Annotated[str, option("--seed", "N", "The same seed gives the same trace.")] = "0",
    json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Make a trace from metrics, spans or access logs."""
    from kvsim.report import traces
    from kvsim.traces.write import check_ending, write

    check_ending(out)
    if kind and kind not in KINDS:
        raise InputError(f"--kind: got {kind[:40]!r}; expected one of {', '.join(KINDS)}")
    found, notes = _imported(files, kind, every, lengths, at_least("--seed", seed, 0))
    write(out, found)
    for note in notes:
        typer.echo(f"kvsim: {note}", err=True)
    traces.show(traces.described(str(out), found), json, command_line())


def _imported(
    files: list[str], kind: str, every: str, lengths: str, seed: int
) -> "tuple[Requests, list[str]]":
    from kvsim.files import read_text
    from kvsim.files.kinds import METRICS
    from kvsim.files.parsing import parsed_json
    from kvsim.traces import specs
    from kvsim.traces.production import logs, metrics

    texts = [read_text(file, METRICS) for file in files]
    where = files[0]
    kind = kind or _recognised(texts[0], where)
    if lengths and kind != "access":
        raise InputError("--lengths: metrics and spans have lengths of their own; omit it")
    if every and (kind != "prometheus" or texts[0].lstrip().startswith("{")):
        raise InputError("--every: only texts of /metrics need it; omit it")
    if kind == "access":
        if not lengths:
            raise InputError("--lengths: an access log has no tokens; say how long requests are")
        lines = (line for text in texts for line in text.splitlines())
        return logs.of_access(lines, specs.joint_lengths(lengths), where, seed)
    expected = "JSON"
    if kind == "otel":
        documents = []
        for file, text in zip(files, texts, strict=True):
            documents += _documents(text, file)
        return logs.of_spans(documents, where)
    if texts[0].lstrip().startswith("{"):
        series = []
        for file, text in zip(files, texts, strict=True):
            series += metrics.of_matrix(parsed_json(text, file, expected), file)
    else:
        if len(texts) > 1 and not every:
            raise InputError("--every: several texts of /metrics; say the time between them")
        step = seconds("--every", every, LONGEST_STEP) if every else 1.0
        series = metrics.of_texts(texts, files, step)
    return metrics.drawn(series, where, seed)


def _documents(text: str, file: str) -> list[object]:
    """One JSON document, or one per line."""
    from kvsim.files.parsing import parsed_json

    lines = [line for line in text.splitlines() if line.strip()]
    if lines and lines[0].rstrip().endswith("}") and lines[0].lstrip().startswith("{"):
        return [parsed_json(x, f"{file}, line {i}", "JSON") for i, x in enumerate(lines, 1)]
    return [parsed_json(text, file, "JSON")]


def _recognised(text: str, where: str) -> str:
    """What kind of file it is, by how it begins."""
    from kvsim.traces.production import logs, metrics

    begin = text.lstrip()[:100_000]
    if begin.startswith("{"):
        return "otel" if '"resourceSpans"' in begin else "prometheus"
    line = next((x for x in begin.splitlines() if x.strip()), "")
    if line.startswith(("# HELP", "# TYPE")) or metrics.LINE.fullmatch(line.strip()):
        return "prometheus"
    if logs.ACCESS.match(line):
        return "access"
    raise InputError(f"{where}: not recognised; say --kind prometheus, otel or access")
