"""Validation of the rows of a trace: each rule has a name and an explanation."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.traces.requests import CLASSES, CONDUCT_DEFAULTS, LONGEST_REQUEST, Floats, Integers

LONGEST_TIME = 10 * 365 * 86400.0  # ten years [s]

RULES = {
    "columns": "expected as many columns as the header has",
    "encoding": "expected UTF-8",
    "json": "expected one JSON object",
    "record": "expected a JSON object with the format's columns",
    "missing": "empty or not there; expected a value",
    "type": "expected a number, not text, true/false or a list",
    "number": "expected a number",
    "date": "expected a date such as 2023-11-16 18:15:46.68, all with a zone or all without",
    "finite": "expected a finite number",
    "time": "expected a time of at least 0",
    "whole": "expected a whole number of tokens",
    "least": "expected at least 1 token",
    "most": f"expected at most {LONGEST_REQUEST:,} tokens",
    "blocks": "expected a list of whole block numbers, at least 0",
    "block count": "more prefix blocks than the prompt fills; set the tokens per block with "
    "--block-tokens (of kvsim simulate: --hash-block-tokens), or a longer prompt",
    "class": f"expected a priority class, a whole number from 0 to {CLASSES - 1}",
    "abort": "expected the time after which the client aborts, above 0, or nothing if it waits",
    "failed": "a request that failed",
}


class Broken(NamedTuple):
    """A rule that a value of a trace breaks.

    Attributes
    ----------
    rule
        Name of the rule, a key of ``RULES``.
    column
        Name of the column; empty if it concerns the whole row.
    got
        The value, as text.
    """

    rule: str
    column: str
    got: str


@dataclass
class TraceColumn:
    """A column of a chunk of a trace as numbers; values of rows in ``broken`` are undefined.

    Attributes
    ----------
    name
        Name of the column.
    values
        Its values. (n,)
    broken
        Violated rule by row.
    nanoseconds
        Dates as whole numbers, since they would be 256 ns apart as doubles; None for other columns.
        (n,) [ns]
    """

    name: str
    values: Floats
    broken: dict[int, Broken] = field(default_factory=dict)
    nanoseconds: Integers | None = None

    def mark(self, where: NDArray[np.bool_], rule: str) -> None:
        """Record that rows violate a rule, unless an earlier violation is recorded for them.

        Parameters
        ----------
        where
            Which rows violate it. (n,)
        rule
            Name of the rule, a key of ``RULES``.
        """
        for row in np.flatnonzero(where).tolist():
            self.broken.setdefault(row, Broken(rule, self.name, _number_text(self.values[row])))


@dataclass
class Blocks:
    """Prefix blocks of a chunk of a trace.

    Attributes
    ----------
    ids
        Ids of all rows, one after another. (m,)
    counts
        Number of blocks of each row. (n,)
    broken
        Violated rule by row.
    """

    ids: Integers
    counts: Integers
    broken: dict[int, Broken] = field(default_factory=dict)


@dataclass
class RowChunk:
    """Consecutive rows of a trace, as read from the file.

    Attributes
    ----------
    place
        Unit of ``positions``: "line", "item" or "row".
    positions
        Position of each row in the file. (n,)
    arrival, prompt, generate
        Columns with these roles.
    blocks
        Prefix blocks; None if the file has none.
    torn
        Broken rule by position, for rows of which no column could be read; they are not among the
        n.
    conduct
        Columns on turns, priority classes and aborts, by role.
    """

    place: str
    positions: Integers
    arrival: TraceColumn
    prompt: TraceColumn
    generate: TraceColumn
    blocks: Blocks | None = None
    torn: dict[int, Broken] = field(default_factory=dict)
    conduct: dict[str, TraceColumn] = field(default_factory=dict)


@dataclass
class LeftOut:
    """Rows of a trace that were left out.

    Attributes
    ----------
    counts
        Number of rows by violated rule.
    first
        Description of the first such row by rule.
    """

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, broken: Broken, told: str) -> None:
        """Count one row that breaks a rule, and keep the first one as an example.

        Parameters
        ----------
        broken
            The rule that the row breaks.
        told
            Description of the row.
        """
        self.counts[broken.rule] = self.counts.get(broken.rule, 0) + 1
        self.first.setdefault(broken.rule, told)

    @property
    def total(self) -> int:
        """Number of rows left out."""
        return sum(self.counts.values())


@frozen
class RowPolicy:
    """Decides what happens to rows that break a rule.

    Attributes
    ----------
    file
        Name of the trace, for messages.
    skip
        Whether such rows are left out and counted; otherwise the first one is an error.
    failed
        Meaning of 0 generated tokens in the format. Such rows are always left out; empty if they
        are
        errors like others.
    block_tokens
        Prompt tokens per prefix block. [tokens]
    """

    file: str
    skip: bool
    failed: str
    block_tokens: int

    def keep(self, chunk: RowChunk, left_out: LeftOut) -> NDArray[np.bool_]:
        """Decide which rows of a chunk are requests; count the others or refuse them.

        Parameters
        ----------
        chunk
            Rows of the file.
        left_out
            Counts of rows that are left out, which this adds to.

        Returns
        -------
        NDArray[np.bool_]
            Whether each row is a request.

        Raises
        ------
        InputError
            For the first row that breaks a rule, unless such rows are left out.
        """
        _check(chunk, self.block_tokens, bool(self.failed))
        broken: dict[int, Broken] = {}
        columns: list[TraceColumn | Blocks] = [chunk.arrival, chunk.prompt, chunk.generate]
        columns += chunk.conduct.values()
        for part in columns + ([chunk.blocks] if chunk.blocks else []):
            for row, what in part.broken.items():
                if row not in broken or broken[row].rule == "failed":
                    broken[row] = what
        kept = np.ones(len(chunk.positions), dtype=bool)
        kept[list(broken)] = False
        told = chunk.torn | {int(chunk.positions[row]): what for row, what in broken.items()}
        for position in sorted(told):
            what = told[position]
            line = self._line(chunk.place, position, what)
            if what.rule != "failed" and not self.skip:
                raise InputError(f"{line}; fix the row, or omit such rows with --skip-bad")
            left_out.add(what, line)
        return kept

    def _line(self, place: str, position: int, what: Broken) -> str:
        column = f", column {what.column!r}" if what.column else ""
        reason = self.failed if what.rule == "failed" else RULES[what.rule]
        got = f"got {what.got[:60]}; " if what.got else ""
        return f"{self.file}, {place} {position}{column}: {got}{reason} [rule: {what.rule}]"


def _check(chunk: RowChunk, block_tokens: int, zero_is_failed: bool) -> None:
    """Mark the values that break a rule."""
    with np.errstate(invalid="ignore"):
        for column in (chunk.prompt, chunk.generate):
            values = column.values
            column.mark(~np.isfinite(values), "finite")
            if zero_is_failed and column is chunk.generate:
                column.mark(values == 0, "failed")
            column.mark(values < 1, "least")
            column.mark(values > LONGEST_REQUEST, "most")
            column.mark(values != np.floor(values), "whole")
        chunk.arrival.mark(~np.isfinite(chunk.arrival.values), "finite")
        chunk.arrival.mark(chunk.arrival.values < 0, "time")
    if chunk.blocks is not None and block_tokens:
        most = np.ceil(chunk.prompt.values / block_tokens)
        for row in np.flatnonzero(chunk.blocks.counts > most).tolist():
            tokens = _number_text(chunk.prompt.values[row])
            got = f"{chunk.blocks.counts[row]} blocks for {tokens} tokens"
            chunk.blocks.broken.setdefault(row, Broken("block count", "", got))


def check_conduct(role: str, column: TraceColumn) -> TraceColumn:
    """Check a column on turns, priority classes or aborts, and fill in its empty values.

    Parameters
    ----------
    role
        Role of the column, a key of ``CONDUCT_DEFAULTS``.
    column
        The column, which is changed.

    Returns
    -------
    TraceColumn
        The same column, in which values that break a rule are marked.
    """
    column.values = column.values.copy()  # Arrow's are read-only
    for row, broken in list(column.broken.items()):
        if broken.rule == "missing":
            del column.broken[row]
            column.values[row] = CONDUCT_DEFAULTS[role]
    values = column.values
    with np.errstate(invalid="ignore"):
        column.mark(np.isnan(values) & ~np.isnan(CONDUCT_DEFAULTS[role]), "finite")
        if role == "priority":
            wrong = (values < 0) | (values >= CLASSES) | (values != np.floor(values))
            column.mark(wrong, "class")
        elif role == "think":
            column.mark(~(values >= 0) | np.isinf(values), "time")
        elif role == "abort_after":
            column.mark(~(values > 0), "abort")
    return column


def _number_text(value: float) -> str:
    return str(int(value)) if np.isfinite(value) and value == int(value) else repr(float(value))
