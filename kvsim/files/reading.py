"""Reading: regular files only, no more than their kind may have, text in UTF-8."""

import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from kvsim.errors import InputError
from kvsim.files.kinds import VARIABLE, Kind, check_room, most_bytes, size_text
from kvsim.files.ledger import current

PIECE = 1 << 20  # bytes read at once
LONGEST_LINE = 100_000_000  # bytes of one line
BOM = b"\xef\xbb\xbf"
TYPES = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def shown(path: object) -> str:
    """A path for a message: quoted where it has blanks or odd characters, long ones shortened."""
    name = str(path)
    if len(name) > 200:
        name = f"{name[:80]}...{name[-80:]}"
    return name if name.isprintable() and " " not in name and name else repr(name)


def type_of(mode: int) -> str:
    """What a path leads to, in words; empty for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    return next((words for holds, words in TYPES if holds(mode)), "no regular file")


def check_type(path: Path | str, kind: Kind) -> None:
    """Refuse what is there but no regular file, before a name is judged by its ending.

    Raises
    ------
    InputError
        For a folder, device, pipe or socket.
    """
    try:
        what = type_of(Path(path).stat().st_mode)
    except (OSError, ValueError):  # nothing is there, or the text is no path
        return
    if what:
        raise InputError(f"{shown(path)}: is {what}; expected {kind.expected}, a regular file")


def opened(path: Path | str, kind: Kind) -> BufferedReader:
    """Open a file of a kind; whatever may block or never end is refused before it is opened.

    Parameters
    ----------
    path
        The file.
    kind
        What it is for, which says how large it may be.

    Raises
    ------
    InputError
        If it is missing, no regular file, too large, not readable, or an output of this command.
    """
    where, expected = shown(path), f"expected {kind.expected}"
    try:
        path = Path(path)
        what = type_of(path.stat().st_mode)  # before opening: a device may act on that
        if not what:
            number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
            file = os.fdopen(number, "rb")
    except FileNotFoundError:
        raise InputError(f"{where}: there is no such file; {expected}") from None
    except (OSError, ValueError) as problem:  # a NUL in the name is a ValueError
        reason = getattr(problem, "strerror", None) or "not a path"
        raise InputError(f"{where}: cannot be read ({reason}); {expected}") from None
    if what:
        raise InputError(f"{where}: is {what}; {expected}, a regular file")
    status = os.fstat(file.fileno())
    try:
        what = type_of(status.st_mode)  # it may have been exchanged since
        if what:
            raise InputError(f"{where}: is {what}; {expected}, a regular file")
        _check_size(where, status.st_size, kind)
        kept = current()
        if kept is not None:
            kept.read(path, status)
    except InputError:
        file.close()
        raise
    return file


def check_input(path: Path | str, kind: Kind) -> Path:
    """See that a library may open a path; as ``opened``, and closed again.

    Raises
    ------
    InputError
        As ``opened``.
    """
    opened(path, kind).close()
    return Path(path)


def read_bytes(path: Path | str, kind: Kind) -> bytes:
    """All bytes of a file.

    Raises
    ------
    InputError
        As ``opened``; or if memory is short.
    """
    where, most = shown(path), most_bytes(kind)
    pieces, total = [], 0
    with opened(path, kind) as file:
        size = os.fstat(file.fileno()).st_size
        check_room(size * max(kind.growth, 1.0), where, "give a smaller file")
        try:
            while piece := file.read(PIECE):
                total += len(piece)
                if total > most:  # what has no size, as files under /proc, or grows meanwhile
                    _check_size(where, total, kind)
                pieces.append(piece)
        except OSError as problem:
            reason = problem.strerror or "damaged"
            raise InputError(
                f"{where}: cannot be read ({reason}); expected {kind.expected}"
            ) from None
    return b"".join(pieces)


def read_text(path: Path | str, kind: Kind) -> str:
    """A text in UTF-8, without a byte-order mark, every line ending with a newline.

    Raises
    ------
    InputError
        As ``read_bytes``; or naming the byte that is not UTF-8.
    """
    content = decoded(read_bytes(path, kind), shown(path), kind.expected)
    return content.replace("\r\n", "\n").replace("\r", "\n") if "\r" in content else content


def decoded(content: bytes, where: str, expected: str) -> str:
    """Bytes as UTF-8 text, without a byte-order mark.

    Raises
    ------
    InputError
        Naming the byte and line that are not UTF-8.
    """
    try:
        return content.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as problem:
        start = problem.start + (len(BOM) if content.startswith(BOM) else 0)
        line = content.count(b"\n", 0, start) + 1
        place = f"byte {start} (line {line}, 0x{content[start]:02x}) is not UTF-8"
        raise InputError(f"{where}: {place}; expected {expected} in UTF-8") from None


def read_lines(path: Path | str, kind: Kind) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text that are not blank, one in memory at a time.

    Raises
    ------
    InputError
        As ``opened``; or naming the line that is too long or not UTF-8.
    """
    where, number = shown(path), 0
    with opened(path, kind) as file:
        while True:
            try:
                line = file.readline(LONGEST_LINE)
            except OSError as problem:
                raise InputError(f"{where}: cannot be read ({problem.strerror})") from None
            if not line:
                return
            number += 1
            if len(line) >= LONGEST_LINE:
                limit = f"expected lines of at most {size_text(LONGEST_LINE)}"
                raise InputError(f"{where}, line {number}: is longer; {limit}")
            if number == 1:
                line = line.removeprefix(BOM)
            text = decoded(line, f"{where}, line {number}", kind.expected)
            if text.strip():
                yield number, text.rstrip("\r\n")


def _check_size(where: str, size: int, kind: Kind) -> None:
    most = most_bytes(kind)
    if size > most:
        has = size_text(size) if size > 1.01 * most else f"over {most:,} bytes"
        limit = f"{kind.expected} has at most {size_text(most)}"
        mend = f"check the path, or allow more with {VARIABLE}={kind.name}=SIZE"
        raise InputError(f"{where}: has {has}, {limit}; {mend}")
