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
    read_bytes,
    read_json,
    remove_orphans,
    replace_text,
    replacing,
)
from kvsim.frozen import frozen
from kvsim.sweeps.plugins import Plugin
from kvsim.sweeps.spec import Spec
from kvsim.version import __version__

SWEEP_MANIFEST = "_sweep.json"  # readers of Parquet folders pass over names that begin so


@frozen
class SharedFolder:
    """A sweep's folder that other processes may be able to reach.

    Attributes
    ----------
    path
        Absolute path of the folder.
    mark
        Digest of its manifest, which tells it from a folder of the same name on another machine.
    """

    path: str
    mark: str

    def is_available(self) -> bool:
        """Whether this process can reach the folder, and its sweep and version are the same."""
        try:
            manifest = read_bytes(Path(self.path) / SWEEP_MANIFEST, JSON)
            ours = bool(json.loads(manifest)["kvsim"] == __version__)
        except (OSError, ValueError, KeyError, InputError):
            return False
        return ours and sha256(manifest).hexdigest() == self.mark

    def try_write(self, index: int, content: bytes) -> bool:
        """Write a chunk's file if this process can.

        Parameters
        ----------
        index
            Position of the chunk in the sweep.
        content
            The bytes of its file.

        Returns
        -------
        bool
            Whether it was written.
        """
        try:
            _write(chunk_path(Path(self.path), index), content)
        except (OSError, InputError):
            return False  # whoever asked for it writes it, or says why that cannot be
        return True


class ResultStore:
    """The folder of a sweep and the chunks that are finished in it."""

    def __init__(self, folder: Path, spec: Spec, plugins: tuple[Plugin, ...], resume: bool) -> None:
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
            "plugins": [sha256(p.text.encode()).hexdigest() for p in plugins],
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

    @property
    def shared(self) -> SharedFolder:
        """The folder, for processes that may share it."""
        mark = sha256(read_bytes(self.folder / SWEEP_MANIFEST, JSON)).hexdigest()
        return SharedFolder(str(self.folder.resolve()), mark)

    def keep(self, index: int, content: bytes | None) -> None:
        """Mark a chunk as done, and write its file unless another process has written it.

        Parameters
        ----------
        index
            Position of the chunk in the sweep.
        content
            The bytes of its file; None if another process wrote it.

        Raises
        ------
        InputError
            If the disk is full, or the folder can no longer be written.
        """
        if content is not None:
            _write(chunk_path(self.folder, index), content)
        self.done.add(index)

    def clean_up(self) -> None:
        """Remove unfinished files of workers that were lost."""
        remove_orphans(self.folder)


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


def _write(place: Path, content: bytes) -> None:
    with replacing(place, tidy=False, named=False) as draft:
        draft.write_bytes(content)


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
