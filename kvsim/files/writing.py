"""Writing: a file is replaced as a whole, and only where a file may be."""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvsim.errors import InputError
from kvsim.files.drafts import create_draft, remove_orphans
from kvsim.files.kinds import size_text
from kvsim.files.ledger import current
from kvsim.files.reading import shown, type_of

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NEW = 0o666  # mode of a new file, less what the umask takes away


def check_target(place: Path | str, option: str, endings: tuple[str, ...] = ()) -> Path:
    """Refuse an output that cannot or must not be written, before anything is computed.

    Parameters
    ----------
    place
        What the user gave.
    option
        Which option it was given to, as ``--report``.
    endings
        What the name must end with, if anything.

    Raises
    ------
    InputError
        If the folder is missing or cannot be written; if there is a folder, device, pipe, socket or
        read-only file; or if the command reads the file or writes it for another option.
    """
    said = f"{option}: got {str(place)[:200]!r}"
    path = Path(place)
    if endings and not path.name.endswith(endings):
        raise InputError(f"{said}; expected a name that ends with {' or '.join(endings)}")
    try:
        problem = _problem(path) if path.name and path.name.isprintable() else "not a file's name"
    except (OSError, ValueError, RuntimeError) as error:  # too long, holds a NUL, links in a loop
        problem = getattr(error, "strerror", None) or "not a path"
    if problem:
        raise InputError(f"{said}, {problem}; expected a file in an existing, writable folder")
    kept = current()
    if kept is not None:
        kept.write(_behind_links(path), option)
    remove_orphans(_behind_links(path).parent)
    return path


@contextmanager
def replacing(path: Path, tidy: bool = True, named: bool = True) -> Iterator[Path]:
    """A draft beside a file's place; it takes that place if the block ends well, else it goes.

    The draft is on disk before it takes the place. A link stays a link, and what it leads to is
    replaced; an existing file's mode and owner are kept.

    Parameters
    ----------
    tidy : whether drafts that other processes left there go first, which takes a look at all files.
    named : whether its name is on disk too before this returns; if not, a machine that loses power
        may have the file whole or not at all.

    Raises
    ------
    InputError
        If the place cannot be written, is no place for a file, or the disk is full; nothing is
        left behind.
    """
    kept = current()
    try:
        target = _behind_links(path)
        wrong = _problem(path)
        if wrong:
            raise InputError(f"{shown(path)}: {wrong}; choose another place")
        if kept is not None:
            kept.write(target, "")
        if tidy:
            remove_orphans(target.parent)
        before = target.stat() if target.exists() else None
        draft, file = create_draft(target, NEW)
    except (OSError, ValueError, RuntimeError) as problem:
        if isinstance(problem, InputError):
            raise
        raise unwritable(path, problem) from None
    try:
        try:
            yield draft
            _adopt(file, before)
            _settle(draft, file)
            draft.replace(target)
            if named:
                _settle_folder(target.parent)
        finally:
            draft.unlink(missing_ok=True)
            os.close(file)
    except OSError as problem:
        raise unwritable(path, problem) from None
    if kept is not None:
        kept.written.append(str(path))


def replace_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, as ``replacing`` does.

    Raises
    ------
    InputError
        As ``replacing``.
    """
    with replacing(path) as draft:
        write_draft(draft, text)


def write_draft(draft: Path, text: str) -> None:
    """A draft's text in UTF-8; a file's name in it that is none is shown escaped."""
    draft.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


@contextmanager
def replacing_all(*paths: Path) -> Iterator[list[Path]]:
    """Drafts of several files, which take their places only if all are written.

    Raises
    ------
    InputError
        As ``replacing``.
    """
    with ExitStack() as all_of_them:
        yield [all_of_them.enter_context(replacing(path)) for path in paths]


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep other processes from adding to an existing log while the block runs.

    Raises
    ------
    InputError
        If it is no regular file, cannot be written, or another process holds it.
    """
    with _writable(path, 0) as number:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{shown(path)}: another kvsim writes there; wait for it, or choose another place"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def append(path: Path, text: str) -> None:
    """Add to the end of an existing log; on disk before this returns, or not at all.

    Raises
    ------
    InputError
        If the disk is full or the file has become unwritable.
    """
    with _writable(path, os.O_APPEND) as number:
        size = os.fstat(number).st_size
        try:
            rest = memoryview(text.encode("utf-8", "backslashreplace"))
            while rest:
                rest = rest[os.write(number, rest) :]
            os.fsync(number)
        except OSError as problem:
            with suppress(OSError):
                os.ftruncate(number, size)
            raise unwritable(path, problem) from None


def cut_off(path: Path, size: int) -> None:
    """Drop what stands behind the first ``size`` bytes of a log. [B]

    Raises
    ------
    InputError
        If it cannot be written.
    """
    with _writable(path, 0) as number:
        try:
            os.ftruncate(number, size)
        except OSError as problem:
            raise unwritable(path, problem) from None


@contextmanager
def _writable(path: Path, flags: int) -> Iterator[int]:
    """An existing regular file, open for writing."""
    try:
        what = type_of(path.stat().st_mode)
        if what:
            raise InputError(f"{shown(path)}: is {what}; choose another place")
        number = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as problem:
        raise unwritable(path, problem) from None
    try:
        yield number
    finally:
        os.close(number)


def make_folder(path: Path, option: str) -> Path:
    """A folder for outputs, made if it is not there.

    Raises
    ------
    InputError
        If it cannot be made, or something else is there.
    """
    if not str(path).isprintable():
        said = f"{option}: got {str(path)[:200]!r}, not a folder's name"
        raise InputError(f"{said}; expected one without line breaks and other control characters")
    try:
        path.mkdir(exist_ok=True)
        if os.access(path, os.W_OK | os.X_OK):
            return path
        reason = "is not writable"
    except FileExistsError:
        reason = "is not a folder"
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or "is not a path"
    raise InputError(f"{option}: {shown(path)}: {reason}; choose another folder")


def unwritable(path: Path, problem: BaseException) -> InputError:
    """What failed while writing, in one line; a full disk is named with what is free."""
    number = getattr(problem, "errno", None)
    said = getattr(problem, "strerror", None) or str(problem).partition("\n")[0][:120]
    if number in FULL or "No space left" in str(problem):
        free = ""
        with suppress(OSError):
            free = f", {size_text(shutil.disk_usage(path.parent).free)} are free"
        reason = "the file would be larger than allowed" if number == errno.EFBIG else "disk full"
        return InputError(f"{shown(path)}: {reason}{free}; make room, or choose another place")
    return InputError(f"{shown(path)}: {said or 'cannot be written'}; choose another place")


def _behind_links(path: Path) -> Path:
    """Where writing ends up: what a link leads to, or the path itself."""
    return path.resolve() if path.is_symlink() else path


def _problem(path: Path) -> str:
    """Why nothing can be written at a place; empty if something can."""
    target = _behind_links(path)
    if not target.parent.is_dir():
        return f"there is no folder {shown(target.parent)}"
    if not os.access(target.parent, os.W_OK | os.X_OK):
        return "the folder is not writable"
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return ""
    what = type_of(mode)
    if what:
        return f"there is {what}"
    if not (mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) and os.access(target, os.W_OK)):
        return "the file there is read-only"
    return ""


def _adopt(file: int, before: os.stat_result | None) -> None:
    """Give a draft the mode and owner of the file it replaces."""
    if before is None:
        return
    with suppress(OSError):  # only root may give files away
        os.fchown(file, before.st_uid, before.st_gid)
    with suppress(OSError):  # file systems without modes
        os.fchmod(file, stat.S_IMODE(before.st_mode))


def _settle(draft: Path, file: int) -> None:
    """Have a draft on disk, also where a library wrote a new file under its name."""
    os.fsync(file)
    there, here = draft.stat(), os.fstat(file)
    if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
        with draft.open("rb") as other:
            os.fsync(other.fileno())


def _settle_folder(folder: Path) -> None:
    """Have a new name on disk; not every file system can."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
