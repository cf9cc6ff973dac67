"""One JSON document: a list of records, taken from it one after another, or a single object."""

import codecs
import re
from collections.abc import Iterator
from typing import Any

from kvsim.errors import InputError
from kvsim.traces.containers.records import MANY, Builder, decoder, unpacked
from kvsim.traces.formats.base import Layout
from kvsim.traces.rules import RowChunk
from kvsim.traces.source import LONGEST, Source

SPACE = re.compile(r"[ \t\r\n]*")


def columns(source: Source) -> list[str]:
    """Names in the first record.

    Raises
    ------
    InputError
        If the list is empty or its first item is no object.
    """
    for _, record in _items(source):
        if not isinstance(record, dict):
            raise InputError(f"{source.name}, item 1: expected a JSON object per request")
        return list(record)
    raise InputError(f"{source.name}: an empty list; expected a trace with at least one request")


def chunks(source: Source, layout: Layout) -> Iterator[RowChunk]:
    """The rows, in order."""
    if layout.unpack:
        yield from unpacked(source.name, layout, _items(source), "item")
        return
    builder = Builder("item", layout)
    for number, record in _items(source):
        builder.add(number, record)
        if len(builder.rows) >= MANY:
            yield builder.chunk()
            builder = Builder("item", layout)
    yield builder.chunk()


def _items(source: Source) -> Iterator[tuple[int, Any]]:
    """Items of the list and their numbers, one in memory at a time; an object is one item."""
    decode = decoder().raw_decode
    pieces = _text(source)
    text = next(pieces, "").lstrip()
    listed = text.startswith("[")
    at, number = int(listed), 1
    while True:
        at = SPACE.match(text, at).end()  # type: ignore[union-attr] # matches always
        if listed and text.startswith("]", at):
            return
        try:
            item, end = decode(text, at)
            follows = SPACE.match(text, end).end()  # type: ignore[union-attr]
            closed, reason = text[follows : follows + 1] in (",", "]") or not listed, "cut off"
        except RecursionError:
            raise _broken(source, number, "nested too deeply") from None
        except ValueError as problem:
            closed, reason = False, str(problem)
        if closed:
            yield number, item
            if not listed:
                return
            at, number = follows + text.startswith(",", follows), number + 1
            continue
        piece = next(pieces, "")
        if not piece or len(text) - at > LONGEST:
            raise _broken(source, number, reason)
        text, at = text[at:] + piece, 0


def _text(source: Source) -> Iterator[str]:
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        for block in source.blocks():
            yield decode(block)
    except UnicodeDecodeError:
        raise InputError(f"{source.name}: not UTF-8; expected JSON in UTF-8") from None


def _broken(source: Source, number: int, reason: str) -> InputError:
    where = f"{source.name}, item {number}: not JSON ({reason[:60]})"
    return InputError(f"{where}; expected a list of JSON objects")
