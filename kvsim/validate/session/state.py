"""What a session has done so far: one file per unit, whole or not there."""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsim.errors import InputError
from kvsim.frozen import frozen

GIVEN_UP = 2  # times that a unit may fail before it is left alone


@frozen
class SessionState:
    """A folder of results of one kind of device."""

    folder: Path

    @classmethod
    def of(cls, folder: Path, device: str) -> "SessionState":
        """The results of a kind of device, by its name; made if it is not there."""
        place = folder / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        place.mkdir(parents=True, exist_ok=True)
        return cls(place)

    def path(self, name: str) -> Path:
        """A file of the session beside the units' results."""
        return self.folder / name

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse a second session in the same folder.

        Raises
        ------
        InputError
            If one runs.
        """
        with (self.folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"--state: a session runs in {self.folder}; wait for it") from None
            yield

    def write(self, unit: str, result: Mapping[str, Any]) -> None:
        """Keep a unit's result; on disk when this returns."""
        place = self._place(unit)
        draft = place.with_name(f".{place.name}.{os.getpid()}")
        with draft.open("w", encoding="utf-8") as file:
            json.dump(result, file, indent=1, default=str)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(place)

    def read(self, unit: str) -> dict[str, Any] | None:
        """A unit's result, if it is done."""
        try:
            found: dict[str, Any] = json.loads(self._place(unit).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return found

    def note(self, unit: str, **changes: Any) -> None:
        """Remember how a unit that is not done went: time it took, failures."""
        known = self.notes()
        known[unit] = known.get(unit, {}) | changes
        SessionState.write(self, "notes", known)

    def notes(self) -> dict[str, dict[str, Any]]:
        """What is remembered, by unit."""
        return self.read("notes") or {}

    def failures(self, unit: str) -> int:
        """How often a unit has failed."""
        return int(self.notes().get(unit, {}).get("failures", 0))

    def _place(self, unit: str) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9.=_-]+', '_', unit)}.json"
