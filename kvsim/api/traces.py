"""``kvsim traces``: describe, convert, generate and import request traces."""

from dataclasses import replace

from kvsim.api.traffic import read_options
from kvsim.console import print_count, print_note
from kvsim.errors import InputError
from kvsim.files import METRICS, parse_json, read_text
from kvsim.options import Inputs, takes_options
from kvsim.report.result import Result
from kvsim.report.traces import describe_requests, describe_trace, make_result
from kvsim.traces import production, synthetic
from kvsim.traces.read import Reader, check_ending, load, write, write_parquet
from kvsim.traces.requests import Requests

IMPORT_KINDS = ("prometheus", "otel", "access")
"""Files of production that a trace is made from."""


@takes_options("traces inspect", "file")
def inspect(inputs: Inputs) -> Result[Requests | None]:
    """Summarise a trace: request rate, burstiness, lengths and prefix reuse.

    Returns
    -------
    Result
        The statistics; ``.found`` has the requests.
    """

    trace = load(inputs.file, read_options(inputs))
    print_note(*trace.notes)
    return make_result(describe_trace(trace), requests=trace.requests)


@takes_options("traces convert", "file", "target")
def convert(inputs: Inputs) -> None:
    """Convert a trace to Parquet, reading it in pieces; no partial file is left after an error."""

    check_ending(inputs.target, (".parquet",))
    options = read_options(inputs)
    reader = Reader(inputs.file, options)
    if inputs.sort or reader.layout.conduct:  # all of it has to be at hand
        trace = load(inputs.file, options)
        write(inputs.target, trace.requests)
        done, notes = len(trace.requests), trace.notes
    else:
        parts, tokens = reader.parts(), reader.layout.block_tokens
        done = write_parquet(inputs.target, parts, tokens, print_count)
        notes = reader.notes()
    print_note(*notes, f"{done:,} requests written to {inputs.target}")


@takes_options("traces generate", "target")
def generate(inputs: Inputs) -> Result[Requests | None]:
    """Generate a synthetic trace and write it to a file.

    The distributions are given as options or fitted to another trace (``like``).

    Returns
    -------
    Result
        Statistics of the generated trace, and of the one it was fitted to.
    """

    check_ending(inputs.target)
    source = load(inputs.like) if inputs.like else None
    if source is not None:
        workload, span = synthetic.fit_traffic(source.requests), source.requests.duration
    elif inputs.rate is None or (inputs.requests is None and inputs.duration is None):
        missing = "--rate" if inputs.rate is None else "--requests or --duration"
        raise InputError(f"{missing}: not given; expected it, or --like FILE")
    else:
        poisson, span = synthetic.parse_arrivals("poisson"), 0.0
        workload = synthetic.TrafficModel(poisson, 1.0, synthetic.DEFAULT)
    given = {
        "arrivals": inputs.arrivals and synthetic.parse_arrivals(inputs.arrivals),
        "rate": inputs.rate,
        "lengths": inputs.lengths and synthetic.parse_lengths(inputs.lengths),
        "prefixes": inputs.prefixes and synthetic.parse_prefixes(inputs.prefixes),
    }
    workload = replace(workload, **{name: value for name, value in given.items() if value})
    duration = inputs.duration
    if duration is None and inputs.requests is None:
        duration = span
    drawn = workload.draw(inputs.seed, inputs.requests, duration)
    if not len(drawn):
        raise InputError("no request fell into the duration; give a longer one or a higher rate")
    write(inputs.target, drawn)
    print_note(*(source.notes if source else ()))
    about = describe_requests(str(inputs.target), drawn)
    return make_result(about, describe_trace(source) if source else None)


@takes_options("traces import", "files", "out")
def import_(inputs: Inputs) -> Result[Requests | None]:
    """Create a trace from Prometheus metrics, OpenTelemetry spans or access logs.

    Returns
    -------
    Result
        Statistics of the trace, which is written to ``out``.
    """

    check_ending(inputs.out)
    if inputs.kind and inputs.kind not in IMPORT_KINDS:
        known = ", ".join(IMPORT_KINDS)
        raise InputError(f"--kind: got {inputs.kind[:40]!r}; expected one of {known}")
    found, notes = _import_files(inputs)
    write(inputs.out, found)
    print_note(*notes)
    return make_result(describe_requests(str(inputs.out), found))


def _import_files(inputs: Inputs) -> tuple[Requests, list[str]]:
    files = [str(file) for file in inputs.files]
    texts, where = [read_text(file, METRICS) for file in files], files[0]
    kind, every = inputs.kind or _recognise(texts[0], where), inputs.every
    matrix = texts[0].lstrip().startswith("{")
    if inputs.lengths and kind != "access":
        raise InputError("--lengths: metrics and spans contain their own lengths; omit it")
    if every is not None and (kind != "prometheus" or matrix):
        raise InputError("--every: only texts of /metrics need it; omit it")
    if kind == "access":
        if not inputs.lengths:
            raise InputError("--lengths: not given; expected lengths, as access logs have none")
        lines = (line for text in texts for line in text.splitlines())
        return production.read_access_log(
            lines, synthetic.parse_lengths(inputs.lengths), where, inputs.seed
        )
    if kind == "otel":
        documents = []
        for file, text in zip(files, texts, strict=True):
            documents += _parse_documents(text, file)
        return production.read_spans(documents, where)
    if matrix:
        series = []
        for file, text in zip(files, texts, strict=True):
            series += production.read_matrix(parse_json(text, file, "JSON"), file)
    else:
        if len(texts) > 1 and every is None:
            raise InputError("--every: not given; expected the time between the texts of /metrics")
        series = production.read_scrapes(texts, files, 1.0 if every is None else every)
    return production.draw_requests(series, where, inputs.seed)


def _parse_documents(text: str, file: str) -> list[object]:
    """Parse a text that is one JSON document or has one in each line."""

    lines = [line for line in text.splitlines() if line.strip()]
    if lines and lines[0].rstrip().endswith("}") and lines[0].lstrip().startswith("{"):
        return [parse_json(x, f"{file}, line {i}", "JSON") for i, x in enumerate(lines, 1)]
    return [parse_json(text, file, "JSON")]


def _recognise(text: str, where: str) -> str:
    """Recognise the kind of a file by its beginning."""

    begin = text.lstrip()[:100_000]
    if begin.startswith("{"):
        return "otel" if '"resourceSpans"' in begin else "prometheus"
    line = next((x for x in begin.splitlines() if x.strip()), "")
    if line.startswith(("# HELP", "# TYPE")) or production.METRIC_LINE.fullmatch(line.strip()):
        return "prometheus"
    if production.ACCESS.match(line):
        return "access"
    raise InputError(f"{where}: not recognised; give --kind prometheus, otel or access")
