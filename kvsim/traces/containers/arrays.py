"""Arrow arrays to columns of numbers; what cannot be one is marked row by row."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvsim.traces.rules import Blocks, Broken, TraceColumn


def column(name: str, array: Any, unit: str) -> TraceColumn:
    """Text, numbers or timestamps as numbers; nulls and what is none of them are marked.

    Dates and timestamps become nanoseconds since 1970, exact in `nanoseconds`.
    """
    if pa.types.is_binary(array.type) or pa.types.is_string(array.type):
        return _from_text(name, array, unit)
    if pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("ns"), safe=False)
    exact = pa.types.is_timestamp(array.type)
    if exact:
        array = array.cast(pa.timestamp("ns", array.type.tz)).cast(pa.int64())
    missing = array.is_null().to_numpy(zero_copy_only=False)
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        kind = "null" if array.type == pa.null() else str(array.type)
        values = np.full(len(array), np.nan)
        rule = "missing" if array.type == pa.null() else "type"
        return TraceColumn(name, values, dict.fromkeys(range(len(array)), Broken(rule, name, kind)))
    numbers = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    found = TraceColumn(name, np.asarray(numbers, dtype=float))
    if exact:
        found.nanoseconds = array.fill_null(0).to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(missing).tolist():
        found.broken[row] = Broken("missing", name, "")
    return found


def blocks(name: str, array: Any) -> Blocks:
    """A list column as block ids."""
    nulls = array.is_null().to_numpy(zero_copy_only=False)
    counts = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    flat = array.flatten().cast(pa.int64())
    broken = {row: Broken("missing", name, "") for row in np.flatnonzero(nulls).tolist()}
    wrong = flat.is_null().to_numpy(zero_copy_only=False)
    ids = flat.fill_null(-1).to_numpy(zero_copy_only=False)
    owner = np.repeat(np.arange(len(counts)), counts)
    for row in np.unique(owner[wrong | (ids < 0)]).tolist():
        broken.setdefault(row, Broken("blocks", name, str(array[row].as_py())[:60]))
    return Blocks(ids.astype(np.int64), counts.astype(np.int64), broken)


def _from_text(name: str, array: Any, unit: str) -> TraceColumn:
    text = _cast_where_possible(array, pa.string())
    trimmed = pc.utf8_trim_whitespace(text)
    if unit == "date":
        numbers = _dates(trimmed)
        exact = numbers.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        found = TraceColumn(name, exact.astype(float), nanoseconds=exact)
    else:
        numbers = _cast_where_possible(trimmed, pa.float64())
        found = TraceColumn(name, numbers.fill_null(np.nan).to_numpy(zero_copy_only=False))
    for row in np.flatnonzero(numbers.is_null().to_numpy(zero_copy_only=False)).tolist():
        if not text[row].is_valid:
            raw = array[row].as_py()
            found.broken[row] = Broken("encoding" if raw else "missing", name, repr(raw or ""))
        elif not trimmed[row].as_py():
            found.broken[row] = Broken("missing", name, "")
        else:
            rule = "date" if unit == "date" else "number"
            found.broken[row] = Broken(rule, name, repr(text[row].as_py()))
    return found


def _dates(text: Any) -> Any:
    """Text to nanoseconds; all dates have a zone or none has, whichever most have."""
    plain = _cast_where_possible(text, pa.timestamp("ns"))
    if plain.null_count * 2 < len(plain):
        return plain
    zoned = _cast_where_possible(text, pa.timestamp("ns", "UTC"))
    return zoned if zoned.null_count < plain.null_count else plain


def _cast_where_possible(array: Any, kind: Any) -> Any:
    """Cast; what cannot be cast becomes null, found by halving."""
    try:
        return array.cast(kind)
    except pa.ArrowInvalid:
        if len(array) == 1:
            return pa.nulls(1, kind)
        middle = len(array) // 2
        halves = (array[:middle], array[middle:])
        return pa.concat_arrays([_cast_where_possible(half, kind) for half in halves])
