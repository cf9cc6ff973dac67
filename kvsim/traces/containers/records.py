"""Parsed JSON values to chunks, one by one; slow, and exact about what is wrong."""

from collections.abc import Callable, Iterable, Iterator
from json import JSONDecoder
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.traces.conduct import checked
from kvsim.traces.formats.base import Layout, Record
from kvsim.traces.rules import Blocks, Broken, RowChunk, TraceColumn

MANY = 50_000  # rows per chunk


def decoder() -> JSONDecoder:
    """A JSON decoder that does not accept a name twice in one object."""

    def once(pairs: list[tuple[str, Any]]) -> Record:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands there twice")
        return found

    return JSONDecoder(object_pairs_hook=once)


class Builder:
    """Rows gathered into one chunk."""

    def __init__(self, place: str, layout: Layout) -> None:
        self.place, self.layout = place, layout
        self.positions: list[int] = []
        self.rows: list[Record] = []
        self.torn: dict[int, Broken] = {}

    def add(self, position: int, record: object) -> None:
        """One parsed JSON value and its place in the file."""
        if not isinstance(record, dict):
            self.torn[position] = Broken("record", "", repr(record)[:60])
            return
        self.positions.append(position)
        self.rows.append(record)

    def chunk(self) -> RowChunk:
        """The rows that were gathered, as columns."""
        layout = self.layout
        times = [row.get(layout.arrival) for row in self.rows] if layout.arrival else None
        return RowChunk(
            self.place,
            np.array(self.positions, dtype=np.int64),
            TraceColumn("", np.zeros(len(self.rows))) if times is None else self._times(times),
            _numbers(layout.prompt, [row.get(layout.prompt) for row in self.rows]),
            _numbers(layout.generate, [row.get(layout.generate) for row in self.rows]),
            _blocks(layout.blocks, self.rows) if layout.blocks else None,
            self.torn,
            {
                role: checked(role, _numbers(name, [row.get(name) for row in self.rows]))
                for role, name in layout.conduct
            },
        )

    def _times(self, times: list[object]) -> TraceColumn:
        if self.layout.unit != "date":
            return _numbers(self.layout.arrival, times)
        import pyarrow as pa

        from kvsim.traces.containers import arrays

        text = pa.array([time if isinstance(time, str) else None for time in times], pa.string())
        return arrays.column(self.layout.arrival, text.cast(pa.binary()), "date")


def unpacked(
    name: str, layout: Layout, records: Iterable[tuple[int, object]], place: str
) -> Iterator[RowChunk]:
    """Chunks of the rows that a format makes of its records, numbered over the whole file."""
    unpack: Callable[[Record], Iterator[Record]] = layout.unpack or (lambda record: iter([record]))
    builder = Builder("request", layout)
    count = 0
    for position, record in records:
        if not isinstance(record, dict):
            raise InputError(f"{name}, {place} {position}: expected a JSON object")
        try:
            for row in unpack(record):
                count += 1
                builder.add(count, row)
        except InputError as problem:
            count += 1
            builder.torn[count] = Broken("record", "", f"{place} {position}: {problem}"[:120])
        if len(builder.rows) >= MANY:
            yield builder.chunk()
            builder = Builder("request", layout)
    yield builder.chunk()


def _numbers(name: str, values: list[object]) -> TraceColumn:
    numbers = np.full(len(values), np.nan)
    found = TraceColumn(name, numbers)
    for row, value in enumerate(values):
        if type(value) is float or type(value) is int:
            try:
                numbers[row] = value
            except OverflowError:
                numbers[row] = np.inf
        else:
            rule = "missing" if value is None else "type"
            found.broken[row] = Broken(rule, name, "" if value is None else repr(value)[:60])
    return found


def _blocks(name: str, rows: list[Record]) -> Blocks:
    ids: list[int] = []
    counts: list[int] = []
    broken: dict[int, Broken] = {}
    for row, record in enumerate(rows):
        value = record.get(name)
        if isinstance(value, list) and all(type(i) is int and 0 <= i < 2**63 for i in value):
            ids += value
            counts.append(len(value))
        else:
            counts.append(0)
            got = "" if value is None else repr(value)[:60]
            broken[row] = Broken("blocks" if got else "missing", name, got)
    return Blocks(np.array(ids, dtype=np.int64), np.array(counts, dtype=np.int64), broken)
