"""Readers of CSV, JSON lines, JSON documents and Parquet files, in chunks of rows.

The standard library reads CSV and JSON, and says of every cell what is wrong with it. PyArrow reads
Parquet and, where it is installed, blocks of lines in which nothing is unusual, five times as fast.
"""

import codecs
import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from json import JSONDecoder
from typing import TYPE_CHECKING

import numpy as np

from kvsim.errors import InputError
from kvsim.files import unique_names
from kvsim.traces.formats import Record, TraceFormat
from kvsim.traces.requests import Integers
from kvsim.traces.rules import Blocks, Broken, RowChunk, TraceColumn, check_conduct
from kvsim.traces.source import BYTES_AT_ONCE, MAX_LINE_BYTES, Source

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet

DELIMITERS = ",;\t"
LONGEST_HEADER = 50_000  # bytes
MAX_BLANK_BYTES = 1 << 26  # a compressed file of nothing else would be read for minutes
CHUNK_ROWS = 50_000  # of JSON
PARQUET_ROWS = 1 << 18
BLOCK_KEY = "kvsim.block_tokens"  # key of a Parquet file's metadata
JSON_SPACE = re.compile(r"[ \t\r\n]*")
DATE_PATTERN = re.compile(
    r"\s*(\d{4}-\d\d-\d\d(?:[ T]\d\d(?::\d\d(?::\d\d)?)?)?)(?:\.(\d{1,9}))?"
    r"(Z|[+-]\d\d(?::?\d\d)?)?\s*",
    re.ASCII,
)
LEAP_SECONDS = (":59:60", ":29:60")  # in zones of whole and of half hours
CENTURIES = 9.2e9  # seconds from 1970 that fit into 64 bits of nanoseconds


def column_names(source: Source) -> list[str]:
    """Return the names of a trace's columns, without reading the whole file.

    They are those of the CSV header, of the first JSON record, or of the Parquet schema.

    Parameters
    ----------
    source
        The opened trace.

    Returns
    -------
    list of str
        Names in the order of the file.

    Raises
    ------
    InputError
        If there is no header or record, or it cannot be parsed.
    """
    if source.kind == "csv":
        return _header(source)[0]
    if source.kind == "parquet":
        return list(_open_parquet(source).schema_arrow.names)
    place = _place(source)
    for number, record in _records(source):
        if isinstance(record, Broken):
            raise _not_json(source, number, record)
        if not isinstance(record, dict):
            each = "per line" if place == "line" else "per request"
            raise InputError(f"{source.name}, {place} {number}: expected one JSON object {each}")
        return list(record)
    raise InputError(f"{source.name}: an empty list; expected a trace with at least one request")


def row_chunks(source: Source, layout: TraceFormat) -> Iterator[RowChunk]:
    """Read the rows of a file in order, skipping blank lines.

    Parameters
    ----------
    source
        The opened trace.
    layout
        Column of each role, and the unit of time.

    Yields
    ------
    RowChunk
        Consecutive rows; values that break a rule are marked.

    Raises
    ------
    InputError
        If the file is damaged, or a column has a type that no trace can have.
    """
    if source.kind == "csv":
        return _read_csv(source, layout)
    if source.kind == "parquet":
        return _read_parquet(source, layout)
    if layout.unpack:
        return _gather("request", layout, _unpack(source, layout.unpack))
    if source.kind == "jsonl":
        return _read_json_lines(source, layout)
    return _gather("item", layout, _records(source))


def stated_block_tokens(source: Source) -> int:
    """Return the tokens per prefix block that a Parquet file states.

    Parameters
    ----------
    source
        The opened trace.

    Returns
    -------
    int
        0 if it states none. [tokens]
    """
    if source.kind != "parquet":
        return 0
    stated = (_open_parquet(source).schema_arrow.metadata or {}).get(BLOCK_KEY.encode(), b"0")
    return int(stated) if stated.isdigit() else 0


def _chunk(
    place: str,
    positions: Integers,
    layout: TraceFormat,
    column: Callable[[str, str], TraceColumn],
    blocks: Blocks | None = None,
    torn: dict[int, Broken] | None = None,
) -> RowChunk:
    """A chunk with the columns of a layout, which ``column`` makes from a name and a unit."""
    here = layout.arrival
    arrival = column(here, layout.unit) if here else TraceColumn("", np.zeros(len(positions)))
    conduct = {role: check_conduct(role, column(name, "")) for role, name in layout.conduct}
    lengths = column(layout.prompt, ""), column(layout.generate, "")
    return RowChunk(place, positions, arrival, *lengths, blocks, torn or {}, conduct)


def _line_blocks(source: Source, longest: int) -> Iterator[tuple[int, bytes]]:
    """Blocks that end where a line ends, with the number of lines before each."""
    pieces: list[bytes] = []
    before, waiting, blank = 0, 0, 0
    for block in source.blocks():
        end = block.rfind(b"\n") + 1
        if end:
            whole = b"".join([*pieces, block[:end]])
            blank = 0 if whole.strip() else blank + len(whole)
            if blank > MAX_BLANK_BYTES:
                said = f"more than {MAX_BLANK_BYTES:,} bytes of blank lines in a row"
                raise InputError(f"{source.name}, line {before + 1}: {said}; fix the file")
            yield before, whole
            before += whole.count(b"\n")
            pieces, waiting = [], 0
        pieces.append(block[end:])
        waiting += len(block) - end
        if waiting > longest:
            where = f"{source.name}, line {before + 1}"
            raise InputError(f"{where}: longer than {longest:,} bytes; fix the file")
    if waiting:
        yield before, b"".join(pieces)


# CSV


def _read_csv(source: Source, layout: TraceFormat) -> Iterator[RowChunk]:
    names, delimiter = _header(source)
    if layout.blocks:
        raise InputError(f"{source.name}: prefix blocks in CSV; expected JSONL or Parquet for them")
    for before, block in _line_blocks(source, BYTES_AT_ONCE):
        fast = _read_csv_block(block, names, delimiter, layout, before)
        if fast is not None:
            yield fast
            continue
        positions: list[int] = []
        rows: list[list[str]] = []
        torn: dict[int, Broken] = {}
        text = block.replace(b"\r\n", b"\n").decode("utf-8", "surrogateescape")
        for number, line in enumerate(text.split("\n"), before + 1):
            cells = line.split(delimiter) if '"' not in line else _split_quoted(line, delimiter)
            if number == 1 or not any(cells):
                continue
            if len(cells) == len(names):
                positions.append(number)
                rows.append(cells)
            else:
                got = f"{len(cells)} columns, header has {len(names)}"
                torn[number] = Broken("columns", "", got)
        table = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {}
        yield _chunk(
            "line",
            np.array(positions, dtype=np.int64),
            layout,
            lambda name, unit, table=table: _parse_text(name, table.get(name, ()), unit),  # type: ignore[misc]
            torn=torn,
        )


def _read_csv_block(
    block: bytes, names: list[str], delimiter: str, layout: TraceFormat, before: int
) -> RowChunk | None:
    """Read whole lines with PyArrow; None without it, or if a line needs a closer look."""
    try:
        import pyarrow as pa
        from pyarrow import csv as arrow
    except ModuleNotFoundError:
        return None
    header = int(not before)
    count = block.count(b"\n") + (not block.endswith(b"\n")) - header
    kinds = dict.fromkeys(layout.columns(), pa.float64())
    if layout.unit == "date" and layout.arrival:
        kinds[layout.arrival] = pa.timestamp("ns")
    try:
        table = arrow.read_csv(
            pa.BufferReader(block),
            arrow.ReadOptions(
                use_threads=False, block_size=len(block), skip_rows=header, column_names=names
            ),
            arrow.ParseOptions(delimiter=delimiter, ignore_empty_lines=False),
            arrow.ConvertOptions(column_types=kinds, include_columns=[*kinds], null_values=[]),
        ).combine_chunks()
    except pa.ArrowInvalid:
        return None
    if table.num_rows != count or not count:
        return None
    positions = np.arange(before + header + 1, before + header + count + 1, dtype=np.int64)
    return _arrow_chunk("line", positions, table.to_batches()[0], layout)


def _split_quoted(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:  # a cell longer than any number
        return [line]


def _header(source: Source) -> tuple[list[str], str]:
    """Column names of the header line, and the delimiter.

    Raises
    ------
    InputError
        If the first line is no header, or names a column twice.
    """
    where = f"{source.name}, line 1"
    line = source.peek.split(b"\n", 1)[0].rstrip(b"\r")
    if len(line) > LONGEST_HEADER:
        raise InputError(f"{where}: too long for a header; expected CSV or JSON")
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise InputError(f"{where}: not UTF-8; expected a header in UTF-8") from None
    if "\r" in text:
        raise InputError(f"{where}: lines end with CR only; expected newlines")
    delimiter = max(DELIMITERS, key=text.count)
    names = [name.strip() for name in _split_quoted(text, delimiter)]
    if not names or all(re.fullmatch(r"[\d.:\- ]*\d[\d.:\- ]*", name) for name in names):
        mend = "expected a header with column names; add one and name the columns with --columns"
        raise InputError(f"{where}: got {text[:60]!r}; {mend}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{where}: column {twice!r} appears twice; name it once")
    return names, delimiter


def _parse_text(name: str, cells: Sequence[str], unit: str) -> TraceColumn:
    """Numbers or dates of a column of text."""
    if unit == "date":
        return _parse_dates(name, cells)
    found = TraceColumn(name, np.full(len(cells), np.nan))
    every = "".join(cells)
    plain = every.isascii() and "_" not in every  # else Python reads more than is a number
    try:
        if plain:
            found.values = np.array([float(cell) for cell in cells])
            return found
    except ValueError:
        pass
    for row, cell in enumerate(cells):
        try:
            if not plain and ("_" in cell or not cell.strip().isascii()):
                raise ValueError
            found.values[row] = float(cell)
        except ValueError:
            found.broken[row] = _no_value(name, cell, "number")
    return found


def _parse_dates(name: str, cells: Sequence[str]) -> TraceColumn:
    """Nanoseconds since 1970; the majority of rows decides whether dates have a time zone."""
    dates = [DATE_PATTERN.fullmatch(cell) for cell in cells]
    zones = [date[3] is not None for date in dates if date]
    zoned = 2 * sum(zones) > len(zones)
    good = {row: d for row, d in enumerate(dates) if d and (d[3] is not None) == zoned}
    leaps = np.array([date[1].endswith(LEAP_SECONDS) for date in good.values()], dtype=np.int64)
    texts = [
        date[1][:-2] + "59" if leap else date[1]
        for date, leap in zip(good.values(), leaps, strict=True)
    ]
    seconds = _seconds_of_dates(texts) + leaps  # clocks count a leap second and the one after alike
    if zoned:
        seconds -= np.array([_zone_seconds(date[3]) for date in good.values()], dtype=np.int64)
    parts = np.array([int((d[2] or "").ljust(9, "0")) for d in good.values()], dtype=np.int64)
    exact = np.zeros(len(cells), dtype=np.int64)
    known = np.abs(seconds) < CENTURIES
    rows = np.array([*good], dtype=np.int64)[known]
    exact[rows] = seconds[known] * 10**9 + parts[known]
    broken = set(range(len(cells))).difference(rows.tolist())
    marks = {row: _no_value(name, cells[row], "date") for row in sorted(broken)}
    return TraceColumn(name, exact.astype(float), marks, exact)


def _seconds_of_dates(texts: list[str]) -> Integers:
    """Seconds since 1970; the largest integer for dates that do not exist."""
    try:
        return np.array(texts, dtype="datetime64[s]").astype(np.int64)
    except ValueError:
        if len(texts) == 1:
            return np.array([np.iinfo(np.int64).max])
        half = len(texts) // 2
        return np.concatenate([_seconds_of_dates(texts[:half]), _seconds_of_dates(texts[half:])])


def _zone_seconds(zone: str) -> int:
    """Seconds that a zone is east of Greenwich. [s]"""
    if zone == "Z":
        return 0
    digits = zone[1:].replace(":", "").ljust(4, "0")
    return int(f"{zone[0]}1") * (3600 * int(digits[:2]) + 60 * int(digits[2:]))


def _no_value(name: str, cell: str, rule: str) -> Broken:
    """The rule that a cell of text breaks."""
    if not cell.strip():
        return Broken("missing", name, "")
    try:
        cell.encode()
    except UnicodeEncodeError:
        return Broken("encoding", name, repr(cell.encode("utf-8", "surrogateescape")))
    return Broken(rule, name, repr(cell))


# JSON


def _place(source: Source) -> str:
    return "line" if source.kind == "jsonl" else "item"


def _records(source: Source) -> Iterator[tuple[int, object]]:
    """Values of a file with their positions; ``Broken`` for a JSON line without a value."""
    if source.kind == "json":
        yield from _items(source)
        return
    for before, block in _line_blocks(source, MAX_LINE_BYTES):
        yield from _decode_lines(before, block)


def _decode_lines(before: int, block: bytes) -> Iterator[tuple[int, object]]:
    decode = JSONDecoder(object_pairs_hook=unique_names).decode
    for number, line in enumerate(block.split(b"\n"), before + 1):
        if not line.strip():
            continue
        try:
            yield number, decode(line.decode())
        except UnicodeDecodeError:
            yield number, Broken("encoding", "", repr(line[:40]))
        except RecursionError:
            yield number, Broken("json", "", "nested too deeply")
        except ValueError as problem:
            yield number, Broken("json", "", f"not JSON ({str(problem)[:60]})")


def _items(source: Source) -> Iterator[tuple[int, object]]:
    """Items of a list and their numbers, one in memory at a time; an object is one item."""
    decode = JSONDecoder(object_pairs_hook=unique_names).raw_decode
    pieces = _text(source)
    text = next(pieces, "").lstrip()
    listed = text.startswith("[")
    at, number = int(listed), 1
    while True:
        at = JSON_SPACE.match(text, at).end()  # type: ignore[union-attr] # matches always
        if listed and text.startswith("]", at):
            return
        try:
            item, end = decode(text, at)
            follows = JSON_SPACE.match(text, end).end()  # type: ignore[union-attr]
            closed, reason = text[follows : follows + 1] in (",", "]") or not listed, "cut off"
        except RecursionError:
            raise _not_json(source, number, Broken("json", "", "nested too deeply")) from None
        except ValueError as problem:
            closed, reason = False, str(problem)
        if closed:
            yield number, item
            if not listed:
                return
            at, number = follows + text.startswith(",", follows), number + 1
            continue
        piece = next(pieces, "")
        if not piece or len(text) - at > MAX_LINE_BYTES:
            raise _not_json(source, number, Broken("json", "", f"not JSON ({reason[:60]})"))
        text, at = text[at:] + piece, 0


def _text(source: Source) -> Iterator[str]:
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        for block in source.blocks():
            yield decode(block)
    except UnicodeDecodeError:
        raise InputError(f"{source.name}: not UTF-8; expected JSON in UTF-8") from None


def _not_json(source: Source, number: int, broken: Broken) -> InputError:
    got = "not UTF-8" if broken.rule == "encoding" else broken.got
    wanted = "one JSON object per line" if source.kind == "jsonl" else "a list of JSON objects"
    return InputError(f"{source.name}, {_place(source)} {number}: {got}; expected {wanted}")


def _unpack(
    source: Source, unpack: Callable[[Record], Iterator[Record]]
) -> Iterator[tuple[int, object]]:
    """Rows that a format unpacks from its records, numbered over the whole file."""
    count = 0
    for number, record in _records(source):
        where = f"{_place(source)} {number}"
        if isinstance(record, Broken):
            raise _not_json(source, number, record)
        if not isinstance(record, dict):
            raise InputError(f"{source.name}, {where}: expected a JSON object")
        try:
            for row in unpack(record):
                count += 1
                yield count, row
        except InputError as problem:
            count += 1
            yield count, Broken("record", "", f"{where}: {problem}"[:120])


def _gather(
    place: str, layout: TraceFormat, records: Iterable[tuple[int, object]]
) -> Iterator[RowChunk]:
    """Chunks of parsed JSON values with their places."""
    positions: list[int] = []
    rows: list[Record] = []
    torn: dict[int, Broken] = {}

    def chunk() -> RowChunk:
        def column(name: str, unit: str) -> TraceColumn:
            return _parse_values(name, [row.get(name) for row in rows], unit)

        lists = [row.get(layout.blocks) for row in rows]
        blocks = _parse_blocks(layout.blocks, lists) if layout.blocks else None
        return _chunk(place, np.array(positions, dtype=np.int64), layout, column, blocks, torn)

    for position, record in records:
        if isinstance(record, dict):
            positions.append(position)
            rows.append(record)
        else:
            unread = isinstance(record, Broken)
            torn[position] = record if unread else Broken("record", "", repr(record)[:60])  # type: ignore[assignment]
        if len(rows) >= CHUNK_ROWS:
            yield chunk()
            positions, rows, torn = [], [], {}
    yield chunk()


def _parse_values(name: str, cells: Sequence[object], unit: str = "") -> TraceColumn:
    """Numbers of a column of JSON values; dates are text."""
    if unit == "date":
        return _parse_dates(name, [cell if isinstance(cell, str) else "" for cell in cells])
    found = TraceColumn(name, np.full(len(cells), np.nan))
    for row, cell in enumerate(cells):
        if type(cell) is float or type(cell) is int:
            try:
                found.values[row] = cell
            except OverflowError:
                found.values[row] = np.inf
        elif cell is None:
            found.broken[row] = Broken("missing", name, "")
        else:
            found.broken[row] = Broken("type", name, repr(cell)[:60])
    return found


def _parse_blocks(name: str, cells: Iterable[object]) -> Blocks:
    """Lists of block numbers."""
    ids: list[int] = []
    counts: list[int] = []
    broken: dict[int, Broken] = {}
    for row, cell in enumerate(cells):
        if isinstance(cell, list) and all(type(i) is int and 0 <= i < 2**63 for i in cell):
            ids += cell
            counts.append(len(cell))
        else:
            counts.append(0)
            got = "" if cell is None else repr(cell)[:60]
            broken[row] = Broken("blocks" if got else "missing", name, got)
    return Blocks(np.array(ids, dtype=np.int64), np.array(counts, dtype=np.int64), broken)


def _read_json_lines(source: Source, layout: TraceFormat) -> Iterator[RowChunk]:
    for before, block in _line_blocks(source, MAX_LINE_BYTES):
        fast = _read_json_block(block, layout, before)
        if fast is not None:
            yield fast
        else:
            yield from _gather("line", layout, _decode_lines(before, block))


def _read_json_block(block: bytes, layout: TraceFormat, before: int) -> RowChunk | None:
    """Read whole lines with PyArrow; None without it, or if a line needs a closer look."""
    try:
        import pyarrow as pa
        from pyarrow import json
    except ModuleNotFoundError:
        return None
    kinds = dict.fromkeys(layout.columns(), pa.float64())
    if layout.unit == "date" and layout.arrival:
        kinds[layout.arrival] = pa.string()
    if layout.blocks:
        kinds[layout.blocks] = pa.list_(pa.int64())
    parse = json.ParseOptions(explicit_schema=pa.schema(kinds), unexpected_field_behavior="ignore")
    read = json.ReadOptions(use_threads=False, block_size=len(block))
    count = block.count(b"\n") + (not block.endswith(b"\n"))
    try:
        block.decode()
        table = json.read_json(pa.BufferReader(block), read, parse).combine_chunks()
    except (UnicodeDecodeError, pa.ArrowInvalid):
        return None
    if table.num_rows != count or any(column.null_count for column in table.columns):
        return None
    positions = np.arange(before + 1, before + count + 1, dtype=np.int64)
    found = _arrow_chunk("line", positions, table.to_batches()[0], layout)
    return None if found.blocks and found.blocks.broken else found


# Parquet


def _read_parquet(source: Source, layout: TraceFormat) -> Iterator[RowChunk]:
    import pyarrow as pa

    file, before = _open_parquet(source), 0
    if layout.blocks:
        kind = file.schema_arrow.field(layout.blocks).type
        if not (pa.types.is_list(kind) and pa.types.is_integer(kind.value_type)):
            where = f"{source.name}, column {layout.blocks!r}"
            raise InputError(f"{where}: holds {kind}; expected lists of whole numbers")
    try:
        for batch in file.iter_batches(PARQUET_ROWS, columns=layout.columns()):
            rows = np.arange(before + 1, before + batch.num_rows + 1, dtype=np.int64)
            before += batch.num_rows
            yield _arrow_chunk("row", rows, batch, layout)
    except (pa.ArrowException, OSError) as problem:
        raise source.damaged(problem) from None


def _open_parquet(source: Source) -> "pyarrow.parquet.ParquetFile":
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(source.path)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        what = "is cut off or damaged; fetch or write the file again"
        raise InputError(f"{source.name}: the parquet data {what}") from None


def _arrow_chunk(
    place: str, positions: Integers, batch: "pa.RecordBatch", layout: TraceFormat
) -> RowChunk:
    blocks = _arrow_blocks(layout.blocks, batch.column(layout.blocks)) if layout.blocks else None

    def column(name: str, unit: str) -> TraceColumn:
        return _arrow_column(name, batch.column(name), unit)

    return _chunk(place, positions, layout, column, blocks)


def _arrow_column(name: str, array: "pa.Array", unit: str) -> TraceColumn:
    """Text, numbers or timestamps as numbers; timestamps keep their nanoseconds."""
    import pyarrow as pa

    kinds = pa.types
    if kinds.is_dictionary(array.type):
        array = array.dictionary_decode()
    if kinds.is_string(array.type) or kinds.is_large_string(array.type):
        array = array.cast(pa.binary())
    if kinds.is_binary(array.type):
        cells = [(cell or b"").decode("utf-8", "surrogateescape") for cell in array.to_pylist()]
        return _parse_text(name, cells, unit)
    if kinds.is_date(array.type):
        array = array.cast(pa.timestamp("ns"), safe=False)
    exact = kinds.is_timestamp(array.type)
    if exact:
        array = array.cast(pa.timestamp("ns", array.type.tz)).cast(pa.int64())
    if not (kinds.is_integer(array.type) or kinds.is_floating(array.type)):
        values, nothing = np.full(len(array), np.nan), array.type == pa.null()
        what = Broken("missing", name, "null") if nothing else Broken("type", name, str(array.type))
        return TraceColumn(name, values, dict.fromkeys(range(len(array)), what))
    numbers = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    missing = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist()
    return TraceColumn(
        name,
        np.asarray(numbers, dtype=float),
        dict.fromkeys(missing, Broken("missing", name, "")),
        array.fill_null(0).to_numpy(zero_copy_only=False) if exact else None,
    )


def _arrow_blocks(name: str, array: "pa.Array") -> Blocks:
    """A list column as block numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if array.null_count or pc.min(array.flatten()).as_py() is None:
        return _parse_blocks(name, array.to_pylist())
    flat = array.flatten().cast(pa.int64())
    if flat.null_count or pc.min(flat).as_py() < 0:
        return _parse_blocks(name, array.to_pylist())
    counts = pc.list_value_length(array).to_numpy(zero_copy_only=False)
    return Blocks(flat.to_numpy(zero_copy_only=False), counts.astype(np.int64))
