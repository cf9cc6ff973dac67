"""Drafts: hidden files beside a target, locked by the process that writes them.

The lock is the owner's mark. The system drops it when the process ends, however it ends, so a
draft that is not locked belongs to a dead process and the next run removes it.
"""

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path

from kvsim.files.ledger import DRAFT

NAME = re.compile(r"\.kvsim-[0-9]+-.+", re.DOTALL)
LONGEST = 100  # characters of the target's name that a draft's name keeps


def create_draft(target: Path, mode: int) -> tuple[Path, int]:
    """An empty, locked draft beside a target, and its open file.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """
    while True:
        token = os.urandom(4).hex()
        draft = target.with_name(f"{DRAFT}{os.getpid()}-{token}-{target.name[-LONGEST:]}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(draft, flags, mode)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if _same(draft, file):
            return draft, file
        os.close(file)  # another process took it for an orphan before it was locked


def remove_orphans(folder: Path) -> int:
    """Remove drafts of processes that ended before they finished; how many were removed."""
    removed = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                removed += _remove_orphan(folder / entry.name)
    return removed


def remove_own(folder: Path) -> None:
    """Remove this process's drafts: a signal may come just after one is made."""
    with suppress(OSError):
        for draft in folder.glob(f"{DRAFT}{os.getpid()}-*"):
            draft.unlink(missing_ok=True)


def _remove_orphan(draft: Path) -> bool:
    """Remove a draft unless its owner lives, or it belongs to another user."""
    try:
        file = os.open(draft, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(file).st_uid != os.geteuid():
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _same(draft, file):
            return False
        draft.unlink()
    except OSError:  # locked by its owner, or the file system has no locks
        return False
    finally:
        os.close(file)
    return True


def _same(path: Path, file: int) -> bool:
    """Whether a name still leads to an open file."""
    try:
        there, here = path.lstat(), os.fstat(file)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
