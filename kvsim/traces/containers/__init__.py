"""How rows are stored: CSV, JSON lines, a JSON document, Parquet. Each yields chunks of rows."""

from collections.abc import Iterator
from typing import Protocol

from kvsim.traces.containers import delimited, document, lines, parquet
from kvsim.traces.formats.base import Layout
from kvsim.traces.rules import RowChunk
from kvsim.traces.source import Source


class Container(Protocol):
    """What a module of this folder offers."""

    def columns(self, source: Source) -> list[str]:
        """Names of the columns, from the header or the first record."""

    def chunks(self, source: Source, layout: Layout) -> Iterator[RowChunk]:
        """The rows of a file, in order."""


CONTAINERS: dict[str, Container] = {
    "csv": delimited,
    "jsonl": lines,
    "json": document,
    "parquet": parquet,
}


def columns(source: Source) -> list[str]:
    """Names of the columns, from the header or the first record."""
    return CONTAINERS[source.kind].columns(source)


def chunks(source: Source, layout: Layout) -> Iterator[RowChunk]:
    """The rows of a file, in order."""
    return CONTAINERS[source.kind].chunks(source, layout)
