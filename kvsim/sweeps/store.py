"""The folder of a sweep: a manifest and one Parquet file per finished chunk.

Files are written atomically, so a chunk whose file exists is complete.
"""

import json
from hashlib import sha256
from pathlib import Path

from kvsim.errors import InputError
from kvsim.files import (
    JSON,
    TRACE,
    make_folder,
    open_input,
    read_json,
    remove_orphans,
    replace_text,
    replacing,
)
from kvsim.sweeps.spec import Spec
from kvsim.version import __version__

SWEEP_MANIFEST = "_sweep.json"  # readers of Parquet folders pass over names that begin so


class ResultStore:
    """Folder of a sweep's results.

    Attributes
    ----------
    folder
        Path of the folder.
    done
        Indices of the chunks that are finished.
    """

    def __init__(self, folder: Path, spec: Spec, resume: bool) -> None:
        """Open the folder of an earlier run, or start a new one.

        Raises
        ------
        InputError
            If the folder holds another sweep, or the same one and ``resume`` is not set, or it
            cannot be written.
        """
        self.folder = make_folder(folder, "--out")
        remove_orphans(self.folder)  # or what a killed sweep left would be another's file
        about = spec.described() | {
            "kvsim": __version__,
            "files": {name: _digest(name) for name in _files(spec)},
        }
        place = self.folder / SWEEP_MANIFEST
        self.done = {int(p.stem.partition("-")[2]) for p in self.folder.glob("chunk-*.parquet")}
        if place.exists() and (self.done or resume):
            if not resume:
                raise InputError(
                    f"--out: {folder} has a sweep already; add --resume or choose another folder"
                )
            before = read_json(place, JSON)
            if before != json.loads(json.dumps(about)):
                raise InputError(
                    f"--resume: {folder} belongs to another sweep or version; choose another folder"
                )
        elif any(other != place for other in self.folder.iterdir()):
            raise InputError(f"--out: {folder} has other files; choose an empty folder")
        else:
            replace_text(place, json.dumps(about, indent=1) + "\n")

    def keep(self, index: int, content: bytes) -> None:
        """Write the file of a finished chunk.

        Parameters
        ----------
        index
            Position of the chunk in the sweep.
        content
            Content of the Parquet file.

        Raises
        ------
        InputError
            If it cannot be written.
        """
        with replacing(chunk_path(self.folder, index), tidy=False, named=False) as draft:
            draft.write_bytes(content)
        self.done.add(index)


def chunk_path(folder: Path, index: int) -> Path:
    """Return the path of a chunk's file.

    Parameters
    ----------
    folder
        The sweep's folder.
    index
        Position of the chunk in the sweep.

    Returns
    -------
    Path
        The file, which need not exist.
    """
    return folder / f"chunk-{index:07d}.parquet"


def _files(spec: Spec) -> list[str]:
    """Values of axes that are files: the user's traces, profiles and models."""
    names = [
        str(value)
        for axis in ("trace", "gpu", "stack", "model")
        for value in spec.axes.get(axis, ())
    ]
    return [name for name in names if Path(name).is_file()]


def _digest(name: str) -> str:
    found = sha256()
    with open_input(name, TRACE) as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()
