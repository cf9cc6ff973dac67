"""What a path may lead to that is no file a command could read or write, made for a case."""

import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def fifo(path: Path) -> None:
    """A named pipe that nobody writes to."""
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    """A socket that nobody listens to."""
    with socket.socket(socket.AF_UNIX) as listener, suppress(OSError):
        listener.bind(str(path))


def link_to(target: str) -> Callable[[Path], None]:
    """A symbolic link."""
    return lambda path: path.symlink_to(target)


def sparse(path: Path) -> None:
    """A terabyte of nothing."""
    with path.open("wb") as file:
        file.truncate(10**12)


def folder(path: Path) -> None:
    """A folder."""
    path.mkdir()


def read_only(path: Path) -> None:
    """A file that may not be written."""
    path.write_text("mine")
    path.chmod(stat.S_IRUSR)
