"""The folder of a sweep: what it is of, and one Parquet file per finished chunk.

Every file is there whole or not at all, so what is there is done.
"""

import json
from hashlib import sha256
from pathlib import Path

from kvsim import __version__
from kvsim.errors import InputError
from kvsim.files import (
    make_folder,
    opened,
    read_json,
    remove_orphans,
    replace_text,
    replacing,
)
from kvsim.files.kinds import JSON, TRACE
from kvsim.sweeps.plugins import Plugin
from kvsim.sweeps.spec import Spec

MANIFEST = "_sweep.json"  # readers of Parquet folders pass over names that begin so


class ResultStore:
    """The folder and what it holds."""

    def __init__(self, folder: Path, spec: Spec, plugins: tuple[Plugin, ...], resume: bool) -> None:
        """Open or begin the folder.

        Raises
        ------
        InputError
            If there is another sweep, or one without ``resume``, or it cannot be written.
        """
        self.folder = make_folder(folder, "--out")
        remove_orphans(self.folder)  # or what a killed sweep left would be another's file
        about = spec.described() | {
            "kvsim": __version__,
            "plugins": [sha256(p.text.encode()).hexdigest() for p in plugins],
            "files": {name: _digest(name) for name in _files(spec)},
        }
        place = self.folder / MANIFEST
        self.done = {int(p.stem.partition("-")[2]) for p in self.folder.glob("chunk-*.parquet")}
        if place.exists() and (self.done or resume):
            if not resume:
                raise InputError(
                    f"--out: {folder} has a sweep already; add --resume or choose another folder"
                )
            before = read_json(place, JSON)
            if before != json.loads(json.dumps(about)):
                raise InputError(
                    f"--resume: {folder} is of another sweep, its files or another kvsim; choose "
                    f"another folder"
                )
        elif any(other != place for other in self.folder.iterdir()):
            raise InputError(f"--out: {folder} has other files; choose an empty folder")
        else:
            replace_text(place, json.dumps(about, indent=1) + "\n")

    def place(self, index: int) -> Path:
        """The file of a chunk."""
        return self.folder / f"chunk-{index:07d}.parquet"

    def keep(self, index: int, content: bytes) -> None:
        """Write a chunk's file.

        Raises
        ------
        InputError
            If the disk is full, or the folder can no longer be written.
        """
        with replacing(self.place(index)) as draft:
            draft.write_bytes(content)
        self.done.add(index)


def _files(spec: Spec) -> list[str]:
    """Values of axes that are paths: traces, profiles, models of the user's own."""
    names = [
        str(value)
        for axis in ("trace", "gpu", "stack", "model")
        for value in spec.axes.get(axis, ())
    ]
    return [name for name in names if Path(name).is_file()]


def _digest(name: str) -> str:
    found = sha256()
    with opened(name, TRACE) as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()
