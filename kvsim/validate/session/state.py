"""Results of a session: a folder with a file per unit, and one archive that holds all of it.

Results are packed by the standard library alone, on machines where nothing is installed.
"""

import fcntl
import gzip
import io
import json
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from kvsim.errors import InputError, first_line
from kvsim.files import BUNDLE, display, read_bytes, replacing
from kvsim.frozen import frozen
from kvsim.validate.runner import Form, Past, Unit

MOST_BUNDLE_BYTES = 15 * 10**6
"""Size of a bundle at most: what a machine that is lent for minutes may hand back. [B]"""
MOST_UNPACKED_BYTES = 500 * 10**6  # a larger archive is no bundle [B]
MOST_MEMBERS = 5000
LOG_BYTES = 16 * 2**10  # of the end of each log that a bundle keeps [B]
COMPILED = "triton"  # folder of compiled kernels, which the next machine need not compile again
MEMBER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*|triton/[A-Za-z0-9_-]+/[A-Za-z0-9_.-]+")
MANIFEST = "bundle.json"
WORTH = (".json", ".toml", ".samples.jsonl", ".log", "")
"""Endings of files, from what a bundle keeps first to what it leaves out first."""


@frozen
class SessionState:
    """Folder with the results of a session on one kind of device."""

    folder: Path

    @classmethod
    def open(cls, folder: Path, device: str) -> "SessionState":
        """Open the results of a kind of device; create their folder if necessary."""
        place = folder / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        place.mkdir(parents=True, exist_ok=True)
        return cls(place)

    def path(self, name: str) -> Path:
        """Return the path of a file in the results' folder."""
        return self.folder / name

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder, so that no second session uses it.

        Raises
        ------
        InputError
            If another session runs.
        """
        with (self.folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"--state: a session runs in {self.folder}; wait for it") from None
            yield

    def write(self, unit: str, result: Mapping[str, object]) -> None:
        """Store a unit's result; it is on disk when this returns."""
        _replace(self._place(unit), json.dumps(result, indent=1, default=str).encode())

    def read(self, unit: str) -> dict[str, Any] | None:
        """Return a unit's result, or None if it is not done."""
        try:
            found: dict[str, Any] = json.loads(self._place(unit).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return found

    def note(self, unit: str, **changes: Any) -> None:
        """Record how a unit failed, or after which time it was stopped."""
        known = self.notes()
        known[unit] = known.get(unit, {}) | changes
        self.write("notes", known)

    def notes(self) -> dict[str, dict[str, Any]]:
        """Return the records of each unit."""
        return self.read("notes") or {}

    def past(self, units: Iterable[Unit]) -> dict[str, Past]:
        """Return how units have gone, by name."""
        notes, found = self.notes(), {}
        for unit in units:
            note, result = notes.get(unit.name, {}), self.read(unit.name)
            form: Form | None = None if result is None else result.get("form", unit.shortest)
            took = None if result is None else result.get("took_s")
            ended = {f: float(note.get(f"{f}_ended_after_s", 0.0)) for f in get_args(Form)}
            failures = int(note.get("failures", 0))
            found[unit.name] = Past(form, took, failures, ended)
        return found

    def _place(self, unit: str) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9.=_-]+', '_', unit)}.json"

    def pack(self, bundle: Path) -> list[str]:
        """Write all results into one archive, which replaces the previous one when it is complete.

        Parameters
        ----------
        bundle
            The archive, a ``.tar.gz`` of at most ``MOST_BUNDLE_BYTES``.

        Returns
        -------
        list of str
            Files that were left out because of the size limit.
        """
        pieces: list[bytes] = []
        left: list[str] = []
        for path in sorted(self._files(), key=_worth):
            content = path.read_bytes()
            if path.suffix == ".log":
                content = content[-LOG_BYTES:]
            name = path.relative_to(self.folder).as_posix()
            piece = _member(name, content)
            if sum(map(len, pieces)) + len(piece) > MOST_BUNDLE_BYTES - 2**16:
                left.append(name)
            else:
                pieces.append(piece)
        manifest = {"device": self.folder.name, "left_out": left}
        pieces.append(_member(MANIFEST, json.dumps(manifest).encode()))
        pieces.append(gzip.compress(bytes(2 * tarfile.BLOCKSIZE)))
        _replace(bundle, b"".join(pieces))
        return left

    def _files(self) -> Iterator[Path]:
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and MEMBER.fullmatch(name) and name not in ("lock", MANIFEST):
                yield path


def unpack(bundle: Path, folder: Path) -> SessionState:
    """Unpack a bundle; existing files of the folder are kept.

    Raises
    ------
    InputError
        If the file is not a bundle.
    """
    packed = read_bytes(bundle, BUNDLE)
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
            found: dict[str, bytes] = {}
            size = 0
            for member in archive:
                size += member.size
                sound = member.isreg() and MEMBER.fullmatch(member.name)
                if not sound or size > MOST_UNPACKED_BYTES or len(found) > MOST_MEMBERS:
                    raise ValueError(f"has {member.name[:60]!r}, which no session writes")
                file = archive.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
        device = json.loads(found.pop(MANIFEST))["device"]
        if not re.fullmatch(r"[a-z0-9-]+", device):
            raise ValueError(f"names the device {device[:60]!r}")
    except (tarfile.TarError, OSError, ValueError, KeyError, TypeError, EOFError, zlib.error) as e:
        reason = first_line(e, 100)
        raise InputError(
            f"{display(bundle)}: not a bundle that make.py gpu --bundle wrote ({reason})"
        ) from None
    state = SessionState.open(folder, device)
    for name, content in found.items():
        place = state.folder / name
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            _replace(place, content)
    return state


def _worth(path: Path) -> tuple[int, int, str]:
    """What a bundle keeps first: results, profiles, samples, logs, then what was compiled."""
    rank = next(i for i, ending in enumerate(WORTH) if path.name.endswith(ending))
    compiled = path.parent.parent.name == COMPILED
    return (len(WORTH) if compiled else rank), path.stat().st_size, path.name


def _replace(place: Path, content: bytes) -> None:
    """Write a file that is whole or as it was before, whenever this process ends."""
    with replacing(place) as draft:
        draft.write_bytes(content)


def _member(name: str, content: bytes) -> bytes:
    """A file of an archive, compressed by itself; such pieces behind each other are the archive."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    padding = b"\0" * (-len(content) % tarfile.BLOCKSIZE)
    return gzip.compress(info.tobuf() + content + padding, 6)
