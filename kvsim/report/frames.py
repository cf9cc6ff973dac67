"""Answers for Python: attributes instead of keys, and data frames that hold every number."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvsim.report.json import Row

LONG = ("part", "row", "quantity", "value", "unit")
"""Columns of a long frame."""

UNITS = {
    "usd_per_million_tokens": "USD per million tokens",
    "usd_per_hour": "USD/h",
    "usd": "USD",
    "tok_s": "token/s",
    "per_s": "1/s",
    "bytes": "B",
    "gpu_memory": "B",
    "host_memory": "B",
    "s": "s",
    "ttft": "s",
    "tpot": "s",
    "prompt": "token",
    "generate": "token",
    "batch": "sequence",
    "max_batch": "sequence",
    "J": "J",
    "kW": "kW",
    "W": "W",
}
"""Unit by the last part of a name; what has none is a count or a share."""


class Figures(Mapping[str, Any]):
    """Fields of an answer as attributes; ``ttft`` is ``ttft_s``, ``gpu`` memory ``gpu_bytes``.

    Parameters
    ----------
    fields
        A part of an answer as JSON has it.

    Examples
    --------
    >>> choice = Figures({"technique": "full", "batch": 8, "tpot_s": 0.02})
    >>> choice.batch, choice.tpot
    (8, 0.02)
    >>> choice
    technique  full
    batch      8
    tpot_s     0.02
    """

    def __init__(self, fields: Row) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        value = self._fields[key]
        return Figures(value) if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __getattr__(self, name: str) -> Any:
        for key in (f"{name}_s", f"{name}_bytes", f"{name}_tok_s", name):
            if not name.startswith("_") and key in self._fields:
                return self[key]
        raise AttributeError(f"{name!r} is not among {', '.join(self._fields)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._fields]

    def __repr__(self) -> str:
        plain = {k: v for k, v in self._fields.items() if not isinstance(v, dict | list)}
        width = max(map(len, plain), default=0) + 2
        return "\n".join(f"{key:{width}}{value}" for key, value in plain.items())


def unit_of(path: str) -> str:
    """Return the unit of a number, by the names on the way to it.

    Parameters
    ----------
    path
        Dotted name, as ``ranges.ttft_s.low``.

    Examples
    --------
    >>> unit_of("ranges.ttft_s.low"), unit_of("output_tok_s"), unit_of("good_share")
    ('s', 'token/s', '1')
    """
    for name in reversed(path.split(".")):
        words = name.split("_")
        for i in range(len(words)):
            unit = UNITS.get("_".join(words[i:]))
            if unit is not None:
                return unit
    return "1"


def flatten(row: Row) -> Row:
    """Flatten a row: nested values get dotted names, settings become ``key=value``.

    Parameters
    ----------
    row
        Row of an answer.

    Returns
    -------
    dict
        Plain cells in the order of the row.
    """
    from kvsim.report.names import settings

    found: Row = {}
    for key, value in row.items():
        if key == "params":
            found[key] = settings(row)
            found |= {f"params.{k}": v for k, v in _leaves(value) if _is_number(v)}
        elif key == "basis" and isinstance(value, dict):
            found[key] = value["kind"]
        else:
            found |= dict(_leaves(value, key))
    return found


def numbers_of(fields: Row) -> Iterator[tuple[str, int | None, str, float, str]]:
    """List every number of an answer with its place and unit.

    Parameters
    ----------
    fields
        The command's own fields.
    """
    for part, value in fields.items():
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for row, item in items:
            for path, leaf in _leaves(item):
                if _is_number(leaf):
                    yield part, row, path or part, leaf, unit_of(f"{part}.{path}".rstrip("."))


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """List the plain values in a nested one, each with its dotted name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{i}" if path else str(i))
    else:
        yield path, value


def _is_number(value: object) -> bool:
    """Tell whether a value is a number rather than a truth value or text."""
    return isinstance(value, int | float) and not isinstance(value, bool)
