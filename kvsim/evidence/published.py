"""Tables of published or measured rows: those that ship, and CSV files of the same columns."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvsim.errors import InputError, unknown
from kvsim.files import TABLE, read_records, read_rows
from kvsim.machines.deployment import WEIGHT_FORMATS
from kvsim.machines.hardware import DEFAULT_STACK
from kvsim.techniques import parse

if TYPE_CHECKING:
    from kvsim.evidence.predicted import PublishedRow


RUN = ("model", "gpu", "technique", "batch", "prompt", "generate")
"""Columns of a run; one more names the metric and holds what was measured."""
MORE = ("stack", "tp", "weights", "note")
"""Columns that may be there."""
OWN_METRICS = (
    "ttft_ms",
    "tpot_ms",
    "decode_tok_s",
    "decode_latency_s",
    "prefill_ms",
    "step_ms",
    "peak_gib",
    "max_batch",
)
"""What may be measured; a papers' table knows more."""


def is_own(header: Sequence[str]) -> bool:
    """Decide whether a table holds a user's own runs rather than a paper's rows.

    Parameters
    ----------
    header
        The table's columns.

    Returns
    -------
    bool
        True for a table of runs.
    """
    return "gpu" in header and "hardware" not in header


def metric_of(name: str, header: Sequence[str]) -> str:
    """Find the column of the measured quantity.

    Parameters
    ----------
    name
        The table, for messages.
    header
        Its columns.

    Returns
    -------
    str
        One of ``OWN_METRICS``.

    Raises
    ------
    InputError
        If a column of the run is missing, or there is not exactly one metric.
    """
    listed = f"{','.join(RUN)} and one of {', '.join(OWN_METRICS)}"
    for column in RUN:
        if column not in header:
            raise InputError(f"{name!r}: column {column} is missing; expected {listed}")
    found = [column for column in header if column not in (*RUN, *MORE)]
    if len(found) != 1 or found[0] not in OWN_METRICS:
        got = ", ".join(found) or "none"
        raise InputError(f"{name!r}: got {got} besides the run's columns; expected {listed}")
    return found[0]


def to_paper_row(name: str, metric: str, row: Mapping[str, str]) -> dict[str, str]:
    """Convert one row of a user's runs to the columns of a paper's table.

    Parameters
    ----------
    name
        The table's name, used in place of the paper's.
    metric
        The column of the measured quantity.
    row
        The row, by column.

    Returns
    -------
    dict
        The row by ``PAPER_COLUMNS``; it is compared with its prediction, never fitted to.
    """
    technique, _, settings = row["technique"].strip().partition(":")
    params = [part for part in settings.split(",") if part.strip()]
    params += [f"{key}={row[key].strip()}" for key in ("tp", "weights") if row.get(key, "").strip()]
    same = {column: row[column] for column in ("model", "batch", "prompt", "generate")}
    where = {"paper": name, "table": "", "use": "check", "note": row.get("note", "")}
    stack = row.get("stack", "").strip() or DEFAULT_STACK
    kind = {"stack": stack, "technique": technique, "params": ";".join(params)}
    measured = {"hardware": row["gpu"], "metric": metric, "published": row[metric]}
    return same | where | kind | measured


PAPER_COLUMNS = (
    "paper",
    "table",
    "model",
    "hardware",
    "stack",
    "technique",
    "params",
    "batch",
    "prompt",
    "generate",
    "metric",
    "published",
    "use",
    "note",
)
RUNS = (".json", ".jsonl", ".parquet")  # how files of serving runs end
ROW_USES = ("fit", "check", "anomaly")
RUN_OPTIONS = ("baseline", "weights", "tp", "width", "op")
"""Keys of ``params`` that are not settings of the technique: the technique a speedup is over,
weight format, tensor-parallel GPUs, the numbers per token of a ratio's closed form, and the op of
one layer that a kernel-level measurement timed."""


def papers() -> dict[str, Traversable]:
    """Return the shipped tables of published numbers, by name of the paper."""
    folder = files("kvsim") / "evidence" / "papers"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".csv"))
    return {name.removesuffix(".csv"): folder / name for name in names}


def read(name_or_path: str, tell: Callable[[str], None] | None = None) -> "list[PublishedRow]":
    """Read the rows of a shipped paper, or of a CSV file.

    A file has the columns of a paper's table, or those of a table of runs.

    Parameters
    ----------
    name_or_path
        Name of a shipped paper, or path of a CSV file.
    tell
        Called with the fault of each unsound row, which is then left out; without it the first
        unsound row is an error.

    Returns
    -------
    list of PublishedRow
        The rows in the order of the table.

    Raises
    ------
    InputError
        For a missing file or column, and for the first unsound row, naming line and column.
    """
    if name_or_path.endswith(RUNS):
        raise InputError(
            f"{name_or_path}: expected a table of runs as CSV; a log of a server or of `kvsim "
            f"simulate` goes to kvsim calibrate --from-run"
        )
    if name_or_path.endswith(".csv") or "/" in name_or_path:
        file: Traversable = Path(name_or_path)
    elif name_or_path in papers():
        file = papers()[name_or_path]
    else:
        raise unknown("paper", name_or_path, papers(), "or give the path of a .csv file")
    lines = read_rows(str(file), TABLE)
    header = [name.strip() for name in next(lines, (1, []))[1]]
    metric = metric_of(name_or_path, header) if is_own(header) else ""
    _check_header(name_or_path, header, (*RUN, *MORE, metric) if metric else PAPER_COLUMNS)
    rows: list[PublishedRow] = []
    seen: dict[tuple[object, ...], str] = {}
    for number, cells in lines:
        try:
            where = f"{name_or_path}, line {number}"
            fields = _fields(where, header, cells)
            row = _row(where, to_paper_row(file.name, metric, fields) if metric else fields)
            _check_new(row, seen)
            rows.append(row)
        except InputError as fault:
            if tell is None:
                raise
            tell(str(fault))
    if not rows and tell is None:
        raise InputError(f"{name_or_path!r} holds no rows; expected at least one under the header")
    return rows


def read_cells(name: str) -> Iterator[dict[str, str]]:
    """Read a shipped table without checking its rows.

    Parameters
    ----------
    name
        Name of the paper.

    Yields
    ------
    dict
        The text of each cell of a row, by column.
    """
    for _, line in read_records(str(papers()[name]), TABLE):
        yield line


def _check_new(row: "PublishedRow", seen: dict[tuple[object, ...], str]) -> None:
    """Refuse a run and metric that an earlier line has."""
    key = (
        row.table,
        row.model,
        row.hardware,
        row.stack,
        row.settings,
        *row.options.items(),
        row.batch,
        row.prompt,
        row.generate,
        row.metric,
    )
    if key in seen:
        raise InputError(f"{row.where}: the same run and metric as {seen[key]}; remove one")
    seen[key] = row.where


def _check_header(name: str, got: Sequence[str], known: Sequence[str]) -> None:
    for column in PAPER_COLUMNS if known == PAPER_COLUMNS else ():
        if column not in got:
            raise InputError(
                f"{name!r}: column {column} is missing; expected {','.join(PAPER_COLUMNS)}"
            )
    for place, column in enumerate(got):
        if column not in known:
            raise unknown(f"column in {name!r}:", column, known, "remove it")
        if column in got[:place]:
            raise InputError(f"{name!r}: column {column} appears twice; remove one")


def _fields(where: str, header: Sequence[str], cells: Sequence[str]) -> dict[str, str]:
    if len(cells) != len(header):
        raise InputError(f"{where}: expected {len(header)} fields; quote texts that hold commas")
    return {name: cell.strip() for name, cell in zip(header, cells, strict=True)}


def _row(where: str, given: Mapping[str, str]) -> "PublishedRow":
    from kvsim.evidence.predicted import METRICS, PublishedRow

    pairs = [item.partition("=") for item in given["params"].split(";") if item.strip()]
    for key, equals, value in pairs:
        if not (key.strip() and equals and value.strip()):
            raise InputError(
                f"{where}, params: got {given['params']!r}; expected key=value;key=value"
            )
    params = {key.strip(): value.strip() for key, _, value in pairs}
    options = {k: params.pop(k) for k in RUN_OPTIONS if k in params}
    batch, parts = _batch(where, given["batch"])
    if parts and "parts" not in params:
        params["parts"] = str(parts)
    settings = given["technique"] + "".join(
        f"{',' if i else ':'}{k}={v}" for i, (k, v) in enumerate(params.items())
    )
    for column, known in (("metric", METRICS), ("use", ROW_USES)):
        if given[column] not in known:
            raise unknown(f"{column} in {where}:", given[column], known)
    if given["metric"] == "speedup" and "baseline" not in options:
        raise InputError(f"{where}, params: a speedup needs baseline=TECHNIQUE; add it")
    if options.get("weights", "fp16") not in WEIGHT_FORMATS:
        raise unknown(f"weights in {where}:", options["weights"], WEIGHT_FORMATS)
    try:
        _checked(settings)
    except InputError as error:
        raise InputError(f"{where}, technique: {error}") from None
    texts = ("paper", "table", "model", "hardware", "stack", "technique", "metric", "use", "note")
    return PublishedRow(
        where=where,
        settings=settings,
        options=options,
        batch=batch,
        prompt=_parse_whole(where, "prompt", given["prompt"]),
        generate=_parse_whole(where, "generate", given["generate"]),
        published=_positive(where, given["published"], given["metric"]),
        **{name: given[name] for name in texts},
    )


@lru_cache(maxsize=1024)
def _checked(settings: str) -> None:
    """Refuse settings that no technique takes; rows of a table repeat them."""
    parse(settings)


def _batch(where: str, text: str) -> tuple[int | None, int]:
    """Sequences, and the parts a column schedule splits them into."""
    if text == "max":
        return None, 0
    part, tiled, parts = text.partition("x")
    if not tiled:
        return _parse_whole(where, "batch", part), 0
    count = _parse_whole(where, "batch", parts)
    return _parse_whole(where, "batch", part) * count, count


MAX_DIGITS = 100  # Python refuses to convert thousands of them


def _parse_whole(where: str, column: str, text: str) -> int:
    plain = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
    if not plain or not 0 < int(text) <= 10**9:
        raise InputError(f"{where}, {column}: got {text[:40]!r}; expected a positive whole number")
    return int(text)


def _positive(where: str, text: str, metric: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (isfinite(value) and (value > 0 or (metric == "fits" and value == 0))):
        raise InputError(f"{where}, published: got {text[:40]!r}; expected a positive number")
    return value


METRIC_KINDS = dict.fromkeys(("step_ms", "decode_latency_s", "decode_tok_s", "speedup"), "decode")
METRIC_KINDS |= {"prefill_ms": "prefill", "peak_gib": "memory"}
# ranges of contexts with errors of their own [tokens]
CONTEXT_RANGES = ((0, 2048), (2048, 16_384), (16_384, 10**9))


def summarise_mechanisms(
    pairs: "Iterable[tuple[PublishedRow, float]]",
) -> dict[tuple[str, str], tuple[int, float, float]]:
    """Summarise errors by context length, head grouping and technique.

    Only held-out rows of times and memory are counted.

    Parameters
    ----------
    pairs
        Published rows with the predicted value of each.

    Returns
    -------
    dict
        Number of rows, mean error and worst error by mechanism, as ``mechanisms`` names it.
    """
    groups: dict[tuple[str, str], list[float]] = {}
    for row, predicted in pairs:
        if row.use == "check" and row.metric in METRIC_KINDS:
            for key in mechanisms(row):
                groups.setdefault(key, []).append(abs(predicted / row.published - 1))
    return summarise(groups)


def mechanisms(row: "PublishedRow") -> tuple[tuple[str, str], ...]:
    """Name the groups that a row belongs to.

    Parameters
    ----------
    row
        The published row.

    Returns
    -------
    tuple
        Pairs of a kind and a group: its range of contexts, its grouping of heads, its technique.
    """
    grouped = row.deployment().model.queries_per_kv > 1
    length = next(i for i, (low, high) in enumerate(CONTEXT_RANGES) if low <= row.prompt < high)
    return (
        ("context", ("below 2k", "2k to 16k", "above 16k")[length]),
        ("heads", "grouped heads" if grouped else "one query head per KV head"),
        ("technique", row.technique),
    )


def summarise(
    groups: dict[tuple[str, str], list[float]],
) -> dict[tuple[str, str], tuple[int, float, float]]:
    """Summarise the errors of each group.

    Parameters
    ----------
    groups
        Absolute relative errors by group; 0.1 is 10 %.

    Returns
    -------
    dict
        Number of rows, mean error and largest error by group.
    """
    return {
        key: (len(off), float(np.mean(off)), float(np.max(off)))
        for key, off in sorted(groups.items())
    }
