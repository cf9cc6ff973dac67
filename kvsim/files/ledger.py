"""Which files a command reads and writes, so that no output lands on an input or another output."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from kvsim.errors import InputError

DRAFT = ".kvsim-"  # how names of drafts begin
Key = tuple[object, ...]


@dataclass
class Ledger:
    """The files of one command; the same file under two names is one file.

    Attributes
    ----------
    inputs
        What was read, by device and inode.
    outputs
        What will be written, by device and inode or by folder and name, with the option that
        named it.
    written
        Outputs that are complete, in order.
    """

    inputs: dict[Key, str] = field(default_factory=dict)
    outputs: dict[Key, tuple[str, str]] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)

    def read(self, path: Path, status: os.stat_result) -> None:
        """Note an input.

        Raises
        ------
        InputError
            If it is an output as well.
        """
        if path.name.startswith(DRAFT):  # an output of our own, read back before it is kept
            return
        key = (status.st_dev, status.st_ino)
        if key in self.outputs:
            option, _ = self.outputs[key]
            raise InputError(_both(option, path))
        self.inputs[key] = str(path)

    def write(self, path: Path, option: str) -> None:
        """Note an output; one that was noted under the same option before is the same output.

        Raises
        ------
        InputError
            If it is an input, or the output of another option.
        """
        keys = _keys(path)
        for key in keys:
            if key in self.inputs:
                raise InputError(_both(option, path))
            other = self.outputs.get(key, (option, ""))[0]
            if option and other and other != option:
                raise InputError(
                    f"{other} and {option}: both would write {path}; expected two different files"
                )
        for key in keys:
            self.outputs.setdefault(key, (option, str(path)))


_CURRENT: ContextVar[Ledger | None] = ContextVar("ledger", default=None)


def current() -> Ledger | None:
    """The ledger of the command that runs; nothing where kvsim is used as a library."""
    return _CURRENT.get()


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Keep a ledger of everything that the block reads and writes."""
    kept = Ledger()
    token = _CURRENT.set(kept)
    try:
        yield kept
    finally:
        _CURRENT.reset(token)


@contextmanager
def own_output() -> Iterator[None]:
    """The block reads back what the command itself writes, so a file may be both."""
    token = _CURRENT.set(None)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _keys(path: Path) -> list[Key]:
    """What tells a file from others, whether it exists or not."""
    folder = path.parent.stat()
    keys: list[Key] = [(folder.st_dev, folder.st_ino, path.name)]
    try:
        status = path.stat()
        keys.append((status.st_dev, status.st_ino))
    except FileNotFoundError:
        pass
    return keys


def _both(option: str, path: Path) -> str:
    return f"{option or 'output'}: {path} is also read by this command; choose another place"
