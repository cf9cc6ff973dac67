"""JSON, TOML and CSV from files, with bounded nesting and errors that name the line."""

import csv
import json
import tomllib
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from kvsim.errors import InputError
from kvsim.files.kinds import Kind
from kvsim.files.nesting import check_json, check_toml
from kvsim.files.reading import read_lines, read_text, shown

LONGEST_FIELD = 1_000_000  # characters of one CSV field
MOST_DIGITS = 300  # of a whole number in JSON, so that it is one for floats, too


def read_json(path: Path | str, kind: Kind, strict: bool = True) -> Any:
    """A JSON document.

    Raises
    ------
    InputError
        As ``read_text`` and ``parsed_json``.
    """
    return parsed_json(read_text(path, kind), shown(path), kind.expected, strict)


def parsed_json(text: str, where: str, expected: str, strict: bool = True) -> Any:
    """A JSON text as Python values.

    Parameters
    ----------
    strict
        Refuse a name that stands twice in one object.

    Raises
    ------
    InputError
        Naming the line that is not JSON or nests too deeply.
    """
    check_json(text, where)
    try:
        return json.loads(text, object_pairs_hook=once if strict else None, parse_int=_whole)
    except json.JSONDecodeError as problem:
        place = f"not valid JSON in line {problem.lineno} ({problem.msg})"
        raise InputError(f"{where}: {place}; expected {expected}") from None
    except (ValueError, RecursionError) as problem:  # a number of 5000 digits, a name twice
        raise InputError(
            f"{where}: not valid JSON ({str(problem)[:80]}); expected {expected}"
        ) from None


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON text; a hook for ``json`` that refuses a name given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:40]!r} stands there twice")
    return found


def read_toml(path: Path | str, kind: Kind) -> dict[str, Any]:
    """A TOML document.

    Raises
    ------
    InputError
        As ``read_text``; or naming the line that is not TOML or nests too deeply.
    """
    text, where = read_text(path, kind), shown(path)
    check_toml(text, where)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as problem:  # syntax; an integer of 5000 digits
        reason = str(problem).partition("\n")[0][:120]
        raise InputError(f"{where}: not valid TOML: {reason}; expected {kind.expected}") from None


def read_rows(path: Path | str, kind: Kind) -> Iterator[tuple[int, list[str]]]:
    """Lines of a CSV file that hold anything, and the number of the line where each ends.

    Raises
    ------
    InputError
        As ``read_text``; or naming the line that is not CSV or has a field that is too long.
    """
    text, where = read_text(path, kind), shown(path)
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(StringIO(text, newline=""), strict=True)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as problem:
            place = f"{where}, line {reader.line_num}: not CSV ({problem})"
            raise InputError(f"{place}; expected {kind.expected}") from None
        if row is None:
            return
        if row:
            yield reader.line_num, row


def read_records(path: Path | str, kind: Kind) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a CSV file by the names in its header, and the number of the line where each ends.

    Raises
    ------
    InputError
        As ``read_rows``; or naming the row that has more or fewer fields than the header, or the
        column that stands there twice.
    """
    rows = read_rows(path, kind)
    line, header = next(rows, (1, []))
    names = [name.strip() for name in header]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise InputError(f"{shown(path)}, line {line}: column {twice[:40]!r} stands there twice")
    for number, cells in rows:
        if len(cells) != len(names):
            where = f"{shown(path)}, line {number}"
            raise InputError(f"{where}: has {len(cells)} fields; expected {len(names)}")
        yield number, dict(zip(names, cells, strict=True))


def read_json_lines(path: Path | str, kind: Kind) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered JSON objects, one per line; blank lines are none.

    Raises
    ------
    InputError
        As ``read_lines``; or naming the line that is no JSON object.
    """
    expected = "one JSON object per line"
    for number, line in read_lines(path, kind):
        where = f"{shown(path)}, line {number}"
        found = parsed_json(line, where, expected)
        if not isinstance(found, dict):
            raise InputError(f"{where}: {type(found).__name__}; expected {expected}")
        yield number, found
