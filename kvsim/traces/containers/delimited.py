"""CSV, with commas, semicolons or tabs; read block by block."""

import csv
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError
from kvsim.traces.conduct import checked
from kvsim.traces.formats.base import Layout
from kvsim.traces.requests import Integers
from kvsim.traces.rules import Broken, RowChunk, TraceColumn
from kvsim.traces.source import BLOCK, Source

DELIMITERS = ",;\t"
LONGEST_HEADER = 50_000  # bytes
NO_ROWS = ("Empty CSV file", "Could not skip initial 1 rows")  # as Arrow says it


def columns(source: Source) -> list[str]:
    """Names in the header line, without blanks around them.

    Raises
    ------
    InputError
        If the first line is no header, or names a column twice.
    """
    names, _ = _header(source)
    return names


def chunks(source: Source, layout: Layout) -> Iterator[RowChunk]:
    """The rows below the header; blank lines are none."""
    import pyarrow as pa
    from pyarrow import csv as arrow

    names, delimiter = _header(source)
    pending: dict[int, Broken] = {}  # torn rows that no chunk has told of yet

    def skip(row: arrow.InvalidRow) -> str:
        got = f"{row.actual_columns} columns, header has {row.expected_columns}"
        pending[row.number] = Broken("columns", "", got)
        return "skip"

    if layout.blocks:
        raise InputError(f"{source.name}: prefix blocks in CSV; expected JSONL or Parquet for them")
    read = arrow.ReadOptions(use_threads=False, skip_rows=1, column_names=names, block_size=BLOCK)
    parse = arrow.ParseOptions(
        delimiter=delimiter, ignore_empty_lines=False, invalid_row_handler=skip
    )
    convert = arrow.ConvertOptions(column_types=dict.fromkeys(names, pa.binary()))
    behind = 1  # lines behind us: the header
    try:
        with source.open() as stream, _undecoded_rows_unsaid():
            for batch in arrow.open_csv(stream, read, parse, convert):
                lines = _lines(behind, batch.num_rows, list(pending))
                behind = int(lines[-1]) if len(lines) else behind
                # The parser is ahead of the batch it hands out: torn rows may lie beyond it.
                torn = {line: pending.pop(line) for line in list(pending) if line < behind}
                filled = ~_blank(batch)
                if not filled.all():
                    batch, lines = batch.filter(pa.array(filled)), lines[filled]
                yield _chunk(lines, batch, layout, torn)
    except pa.ArrowInvalid as problem:
        if not str(problem).startswith(NO_ROWS):
            raise InputError(f"{source.name}: {_reason(problem)}; mend the file") from None
    except OSError as problem:
        raise source.damaged(problem) from None
    if pending:
        nothing = pa.record_batch([pa.array([], pa.binary()) for _ in names], names)
        yield _chunk(np.empty(0, dtype=np.int64), nothing, layout, pending)


@contextmanager
def _undecoded_rows_unsaid() -> Iterator[None]:
    """Arrow decodes a torn row before it asks what to do, and would print that it could not."""
    before = sys.unraisablehook

    def hook(found: Any) -> None:
        if not issubclass(found.exc_type, UnicodeDecodeError):
            before(found)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _chunk(lines: Integers, batch: Any, layout: Layout, torn: dict[int, Broken]) -> RowChunk:
    from kvsim.traces.containers.arrays import column

    def read(name: str, unit: str = "") -> TraceColumn:
        return column(name, batch.column(name), unit)

    here = layout.arrival
    arrival = read(here, layout.unit) if here else TraceColumn("", np.zeros(batch.num_rows))
    prompt, generate = read(layout.prompt), read(layout.generate)
    conduct = {role: checked(role, read(name)) for role, name in layout.conduct}
    return RowChunk("line", lines, arrival, prompt, generate, torn=torn, conduct=conduct)


def _lines(behind: int, count: int, torn: list[int]) -> Integers:
    """Line numbers of the next rows; torn lines, ascending, lie between them."""
    rows = np.arange(count, dtype=np.int64)
    rows_before = np.array(torn, dtype=np.int64) - behind - 1 - np.arange(len(torn))
    numbers: Integers = behind + 1 + rows + np.searchsorted(rows_before, rows, side="right")
    return numbers


def _blank(batch: Any) -> NDArray[np.bool_]:
    import pyarrow.compute as pc

    blank = np.ones(batch.num_rows, dtype=bool)
    for column in batch.columns:
        if not blank.any():
            break
        blank &= pc.binary_length(column).to_numpy(zero_copy_only=False) == 0
    return blank


def _reason(problem: Exception) -> str:
    text = str(problem)
    if "straddling" in text:
        return f"a line is longer than {BLOCK:,} bytes"
    return text.partition("\n")[0][:200]


def _header(source: Source) -> tuple[list[str], str]:
    line = source.peek.split(b"\n", 1)[0].rstrip(b"\r")
    if len(line) > LONGEST_HEADER:
        raise InputError(f"{source.name}, line 1: longer than a header; expected CSV or JSON")
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise InputError(f"{source.name}, line 1: not UTF-8; expected a header in UTF-8") from None
    if "\r" in text:
        raise InputError(f"{source.name}, line 1: lines end with CR alone; expected newlines")
    delimiter = max(DELIMITERS, key=text.count)
    names = [name.strip() for name in next(csv.reader([text], delimiter=delimiter), [])]
    if not names or all(_number(name) for name in names):
        got = repr(text[:60])
        mend = "expected a header with column names; add one and name the columns with --columns"
        raise InputError(f"{source.name}, line 1: got {got}; {mend}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(
            f"{source.name}, line 1: column {twice!r} stands there twice; name it once"
        )
    return names, delimiter


def _number(text: str) -> bool:
    return text.replace(".", "").replace("-", "").replace(":", "").replace(" ", "").isdigit()
