"""Parquet, read batch by batch."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.traces.conduct import checked
from kvsim.traces.formats.base import Layout
from kvsim.traces.rules import RowChunk, TraceColumn
from kvsim.traces.source import Source

BLOCK_TOKENS = "kvsim.block_tokens"  # key of the file's metadata
ROWS = 1 << 18


def columns(source: Source) -> list[str]:
    """Names in the schema."""
    return list(_open(source).schema_arrow.names)


def block_tokens(source: Source) -> int:
    """Tokens per prefix block that the file states; 0 if it does not. [tokens]"""
    stated = (_open(source).schema_arrow.metadata or {}).get(BLOCK_TOKENS.encode(), b"0")
    return int(stated) if stated.isdigit() else 0


def chunks(source: Source, layout: Layout) -> Iterator[RowChunk]:
    """The rows, in order.

    Raises
    ------
    InputError
        If the file is damaged, or a column holds what no trace column can.
    """
    import pyarrow as pa

    from kvsim.traces.containers import arrays

    file, behind = _open(source), 0
    if layout.blocks:
        kind = file.schema_arrow.field(layout.blocks).type
        if not (pa.types.is_list(kind) and pa.types.is_integer(kind.value_type)):
            where = f"{source.name}, column {layout.blocks!r}"
            raise InputError(f"{where}: holds {kind}; expected lists of whole numbers")
    try:
        for batch in file.iter_batches(ROWS, columns=layout.columns()):

            def column(name: str, unit: str = "", batch: Any = batch) -> TraceColumn:
                return arrays.column(name, _plain(batch.column(name)), unit)

            rows = np.arange(behind + 1, behind + batch.num_rows + 1, dtype=np.int64)
            behind += batch.num_rows
            here = layout.arrival
            yield RowChunk(
                "row",
                rows,
                column(here, layout.unit) if here else TraceColumn("", np.zeros(batch.num_rows)),
                column(layout.prompt),
                column(layout.generate),
                arrays.blocks(layout.blocks, batch.column(layout.blocks))
                if layout.blocks
                else None,
                conduct={role: checked(role, column(name)) for role, name in layout.conduct},
            )
    except (pa.ArrowException, OSError) as problem:
        raise source.damaged(problem) from None


def _open(source: Source) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(source.path)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        what = "is cut off or damaged; fetch or write the file again"
        raise InputError(f"{source.name}: the parquet data {what}") from None


def _plain(array: Any) -> Any:
    """Dictionaries decoded, text as bytes."""
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = array.cast(pa.binary())
    return array
