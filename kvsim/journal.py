"""Journals of long measurements, written after each unit of work, so that they can resume."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar

from kvsim.errors import InputError
from kvsim.files import (
    SAMPLES_FILE,
    append,
    current_ledger,
    locked,
    own_output,
    read_bytes,
    truncate,
    write_error,
)

T = TypeVar("T")
NONE: Mapping[str, str] = MappingProxyType({})
NO_ROW = (ValueError, KeyError, TypeError, AttributeError, RecursionError, InputError)


@dataclass
class Journal(Generic[T]):
    """A JSON-lines file that records finished units of work.

    The first line describes the measurement. Each unit has a line per item, and a last line with
    its name; items after the last such line belong to an interrupted unit and are discarded.

    Parameters
    ----------
    path
        The file.
    about
        Description of the measurement, written to the first line.
    write, parse
        Convert an item to a JSON object, and back.
    replaces
        Whether a file with another description is replaced; otherwise it is an error.
    done
        Items of each finished unit, by name.
    conditions
        Conditions under which each unit was measured, if known.
    """

    path: Path
    about: Mapping[str, object]
    write: Callable[[T], Mapping[str, object]]
    parse: Callable[[dict[str, Any]], T]
    replaces: bool = False
    done: dict[str, list[T]] = field(default_factory=dict)
    conditions: dict[str, Mapping[str, str]] = field(default_factory=dict)

    @contextmanager
    def resume_locked(self) -> Iterator[None]:
        """Resume from the file, or create it, and lock it while the block runs.

        Raises
        ------
        InputError
            For the same reasons as :meth:`resume`, or if another process holds the lock.
        """
        self._begin()
        with locked(self.path):
            self.resume()
            yield

    def resume(self) -> Self:
        """Read the finished units from the file; create the file if there is none.

        Returns
        -------
        Journal
            This journal.

        Raises
        ------
        InputError
            If the file cannot be read or written, or describes another measurement.
        """
        self._begin()
        first = json.dumps(self.about) + "\n"
        with own_output():
            text = read_bytes(self.path, SAMPLES_FILE)
        if text.startswith(first.encode()):
            if (kept := self.read(text)) < len(text):
                truncate(self.path, kept)
            return self
        if not (self.replaces or first.encode().startswith(text)):  # its own, cut in its first line
            raise InputError(
                f"{self.path}: {self._obstacle(text)}; move it away, or choose another"
            )
        truncate(self.path, 0)
        append(self.path, first)
        return self

    def _begin(self) -> None:
        """Make the file if it is not there; it is never replaced, as locks are on the file."""
        try:
            self.path.touch()
        except OSError as problem:
            raise write_error(self.path, problem) from None
        if files := current_ledger():
            files.write(self.path, "")
            files.written.append(str(self.path))

    def append(self, piece: str, items: Sequence[T], conditions: Mapping[str, str] = NONE) -> None:
        """Record a finished unit of work; it is on disk when this method returns.

        Parameters
        ----------
        piece
            Name of the unit.
        items
            Results of the unit.
        conditions
            Conditions under which it was measured, such as the clock of the GPU.

        Raises
        ------
        InputError
            If the disk is full or the file can no longer be written.
        """
        over: dict[str, object] = {"done": piece, "samples": len(items)}
        rows = [
            *map(self.write, items),
            over | ({"conditions": dict(conditions)} if conditions else {}),
        ]
        append(self.path, "".join(json.dumps(row) + "\n" for row in rows))
        self.done[piece], self.conditions[piece] = list(items), dict(conditions)

    @property
    def items(self) -> list[T]:
        """Items of all finished units, in order."""
        return [item for items in self.done.values() for item in items]

    def remove(self) -> None:
        """Delete the file, because the measurement is complete.

        Raises
        ------
        InputError
            If the folder can no longer be written.
        """
        try:
            self.path.unlink(missing_ok=True)
        except OSError as problem:
            raise InputError(
                f"{self.path}: {problem.strerror}; the run is complete, remove this file yourself"
            ) from None

    def read(self, text: bytes) -> int:
        """Read the finished units of a journal's text.

        Parameters
        ----------
        text
            Content of the file.

        Returns
        -------
        int
            Length of the text up to the end of the last finished unit. [B]
        """
        first, *lines = text.splitlines(keepends=True)
        place = end = len(first)
        found: list[T] = []
        for line in lines:
            place += len(line)
            try:
                row = json.loads(line)
                if "done" not in row:
                    found.append(self.parse(row))
                    continue
                piece, conditions = row["done"], row.get("conditions", {})
            except NO_ROW:
                break
            known = isinstance(piece, str) and isinstance(conditions, dict)
            if not (line.endswith(b"\n") and known):
                break
            self.done[piece], self.conditions[piece], found, end = found, conditions, [], place
        return end

    def _obstacle(self, text: bytes) -> str:
        """Say what a file of something else is about."""
        try:
            found = json.loads(text.partition(b"\n")[0])
            kind, *asked = self.about
            found.pop(kind)
        except NO_ROW:
            return "there is another file"
        differs = [key for key in asked if found.get(key) != self.about[key]]
        which = differs[0] if differs else "format"
        return f"{kind} of another run ({which} was {str(found.get(which))[:60]!r})"
