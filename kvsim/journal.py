"""What long measurements have finished: on disk after every piece, so that they can be resumed."""

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
    """A file with one JSON object per line: what is measured, then the rows of piece after piece.

    A line that names a piece closes its rows. What follows the last such line was being written
    when a run ended, and is cut off.

    Parameters
    ----------
    path
        The file.
    about
        What is measured, the object of the first line.
    write, parse
        An item to its row, and back.
    replaces
        Whether a file about something else is begun anew; otherwise it is refused.
    done
        Items of every finished piece, by name.
    conditions
        What each piece was measured under, where that is known.
    """

    path: Path
    about: Mapping[str, object]
    write: Callable[[T], Mapping[str, object]]
    parse: Callable[[dict[str, Any]], T]
    replaces: bool = False
    done: dict[str, list[T]] = field(default_factory=dict)
    conditions: dict[str, Mapping[str, str]] = field(default_factory=dict)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Resume, and keep other runs away from the file while the block runs.

        Raises
        ------
        InputError
            As ``resume``; or if another run has the file.
        """
        self._begin()
        with locked(self.path):
            self.resume()
            yield

    def resume(self) -> Self:
        """Take over what the file holds, and begin it where there is none.

        Raises
        ------
        InputError
            If the place cannot be read or written, or holds something else.
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
        """Keep a finished piece; it is on disk before this returns.

        Raises
        ------
        InputError
            If the disk is full or the place has become unwritable.
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
        """The items of all finished pieces, in their order."""
        return [item for items in self.done.values() for item in items]

    def remove(self) -> None:
        """Remove the file: what it was kept for is complete.

        Raises
        ------
        InputError
            If the folder has become unwritable.
        """
        try:
            self.path.unlink(missing_ok=True)
        except OSError as problem:
            raise InputError(
                f"{self.path}: {problem.strerror}; the run is complete, remove this file yourself"
            ) from None

    def read(self, text: bytes) -> int:
        """Take over every finished piece of a file, and tell where the last one ends. [B]"""
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
