"""JSON lines: Arrow reads whole blocks; a block with anything unusual is read line by line."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.traces.conduct import checked
from kvsim.traces.containers.records import Builder, decoder, unpacked
from kvsim.traces.formats.base import Layout
from kvsim.traces.requests import Integers
from kvsim.traces.rules import Broken, RowChunk, TraceColumn
from kvsim.traces.source import LONGEST, Source


def columns(source: Source) -> list[str]:
    """Names in the first record.

    Raises
    ------
    InputError
        If the first line is no JSON object.
    """
    for number, line in _numbered(source):
        try:
            record = decoder().decode(line.decode())
        except (ValueError, RecursionError) as problem:
            raise InputError(
                f"{source.name}, line {number}: {_why(problem)}; expected one JSON object per line"
            ) from None
        if not isinstance(record, dict):
            raise InputError(f"{source.name}, line {number}: expected one JSON object per line")
        return list(record)
    return []


def chunks(source: Source, layout: Layout) -> Iterator[RowChunk]:
    """The rows; blank lines are none."""
    if layout.unpack:
        yield from unpacked(source.name, layout, _decoded(source), "line")
        return
    behind = 0
    for block in _whole_lines(source):
        count = block.count(b"\n") + (not block.endswith(b"\n"))
        fast = _at_once(block, layout, behind, count)
        yield fast if fast is not None else _one_by_one(block, layout, behind)
        behind += count


def _whole_lines(source: Source) -> Iterator[bytes]:
    """Blocks that end where a line ends."""
    rest = b""
    for block in source.blocks():
        end = block.rfind(b"\n") + 1
        if not end:
            rest += block
            if len(rest) > LONGEST:
                raise InputError(f"{source.name}: a line is longer than {LONGEST:,} bytes")
            continue
        yield rest + block[:end]
        rest = block[end:]
    if rest:
        yield rest


def _numbered(source: Source) -> Iterator[tuple[int, bytes]]:
    behind = 0
    for block in _whole_lines(source):
        lines = block.split(b"\n")
        for number, line in enumerate(lines, behind + 1):
            if line.strip():
                yield number, line
        behind += len(lines) - 1


def _decoded(source: Source) -> Iterator[tuple[int, Any]]:
    decode = decoder().decode
    for number, line in _numbered(source):
        try:
            yield number, decode(line.decode())
        except (ValueError, RecursionError) as problem:
            raise InputError(
                f"{source.name}, line {number}: {_why(problem)}; expected one JSON object per line"
            ) from None


def _at_once(block: bytes, layout: Layout, behind: int, count: int) -> RowChunk | None:
    """A block through Arrow, or None if a single line needs a closer look."""
    import pyarrow as pa
    from pyarrow import json as arrow

    from kvsim.traces.containers import arrays

    time = pa.string() if layout.unit == "date" else pa.float64()
    kinds = {layout.prompt: pa.float64(), layout.generate: pa.float64()}
    kinds |= {layout.arrival: time} if layout.arrival else {}
    kinds |= {name: pa.float64() for _, name in layout.conduct}
    kinds |= {layout.blocks: pa.list_(pa.int64())} if layout.blocks else {}
    parse = arrow.ParseOptions(explicit_schema=pa.schema(kinds), unexpected_field_behavior="ignore")
    read = arrow.ReadOptions(use_threads=False, block_size=len(block))
    try:
        block.decode()
        table = arrow.read_json(pa.BufferReader(block), read, parse).combine_chunks()
    except (UnicodeDecodeError, pa.ArrowInvalid):
        return None
    if table.num_rows != count or any(column.null_count for column in table.columns):
        return None

    def column(name: str, unit: str = "") -> TraceColumn:
        array = table.column(name).chunk(0)
        return arrays.column(name, array.cast(pa.binary()) if unit == "date" else array, unit)

    lists = (
        arrays.blocks(layout.blocks, table.column(layout.blocks).chunk(0))
        if layout.blocks
        else None
    )
    if lists is not None and lists.broken:
        return None
    lines: Integers = np.arange(behind + 1, behind + count + 1, dtype=np.int64)
    arrival = (
        column(layout.arrival, layout.unit) if layout.arrival else TraceColumn("", np.zeros(count))
    )
    lengths = column(layout.prompt), column(layout.generate)
    conduct = {role: checked(role, column(name)) for role, name in layout.conduct}
    return RowChunk("line", lines, arrival, *lengths, lists, conduct=conduct)


def _one_by_one(block: bytes, layout: Layout, behind: int) -> RowChunk:
    decode = decoder().decode
    builder = Builder("line", layout)
    for number, line in enumerate(block.split(b"\n"), behind + 1):
        if not line.strip():
            continue
        try:
            builder.add(number, decode(line.decode()))
        except UnicodeDecodeError:
            builder.torn[number] = Broken("encoding", "", repr(line[:40]))
        except (ValueError, RecursionError) as problem:
            builder.torn[number] = Broken("json", "", _why(problem))
    return builder.chunk()


def _why(problem: Exception) -> str:
    if isinstance(problem, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(problem, RecursionError):
        return "nested too deeply"
    return f"not JSON ({str(problem)[:60]})"
