"""Reading and writing of files: kvsim opens files nowhere else.

Reading takes regular files only, no more of them than their kind may have, and text in UTF-8; JSON,
TOML and CSV are parsed with bounded nesting and errors that name the line.

Writing replaces a file as a whole: a locked draft beside it takes its place once it is on disk. The
lock is the owner's mark. The system drops it when the process ends, however it ends, so a draft
that is not locked belongs to a dead process and the next run removes it.

A command keeps a ledger of what it reads and writes, so that no output lands on an input or another
output.
"""

import csv
import errno
import fcntl
import json
import os
import re
import resource
import shutil
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from io import BufferedReader, StringIO
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from kvsim.errors import InputError, unknown
from kvsim.frozen import frozen

ALWAYS_FREE = 50e6  # memory that is always there [B]
VARIABLE = "KVSIM_FILE_LIMITS"
SIZE_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kMGT]?)B?", re.ASCII)
SIZE_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@frozen
class Kind:
    """A purpose for which kvsim reads files.

    Attributes
    ----------
    name
        Name of the kind in the environment variable ``KVSIM_FILE_LIMITS``.
    expected
        Description of a valid file, for error messages.
    most
        Largest size of a file; a larger one is taken for a mistake. [B]
    growth
        Memory that the parsed content takes per byte of the file.
    """

    name: str
    expected: str
    most: int
    growth: float = 1.0


CONFIG = Kind("config", "a Hugging Face config.json", 10_000_000, 8)
TOML_PROFILE = Kind("profile", "a TOML profile", 1_000_000, 8)
SPECIFICATION = Kind("specification", "a TOML specification", 1_000_000, 8)
TABLE = Kind("table", "a CSV file", 50_000_000, 8)
RUN_LOG = Kind("run-log", "a run's log", 500_000_000, 4)
ATTENTION_FILE = Kind("attention", "an attention trace", 50_000_000, 8)
SAMPLES_FILE = Kind("samples", "the samples of kvsim calibrate", 500_000_000, 4)
PLAN = Kind("plan", "a plan that kvsim plan --json printed", 50_000_000, 8)
JSON = Kind("json", "a JSON file", 50_000_000, 8)
METRICS = Kind("metrics", "a file of metrics", 500_000_000, 4)
TEXT = Kind("text", "a text file", 20_000_000, 4)
TOKENIZER = Kind("tokenizer", "a tokenizer.json", 100_000_000, 8)
TRACE = Kind("trace", "a request trace or sample:NAME", 100_000_000_000, 0)  # read in pieces
WEIGHTS_FILE = Kind("weights", "a checkpoint", 10**13, 0)  # mapped, not read
RESULT = Kind("result", "a Parquet file that kvsim wrote", 100_000_000_000, 0)
BUNDLE = Kind("bundle", "a bundle of make.py gpu", 20_000_000, 30)
FILE_KINDS = {kind.name: kind for kind in tuple(vars().values()) if isinstance(kind, Kind)}


def most_bytes(kind: Kind) -> int:
    """Return the largest size that a kind of file may have.

    Parameters
    ----------
    kind
        Kind of the file, with its limits.

    Returns
    -------
    int
        The kind's own limit, or that set by ``KVSIM_FILE_LIMITS=config=50MB,trace=1TB``. [B]

    Raises
    ------
    InputError
        If the variable says something else.
    """
    said = os.environ.get(VARIABLE, "")
    limits: dict[str, int] = {}
    for item in said.split(",") if said.strip() else ():
        name, _, size = (part.strip() for part in item.partition("="))
        if name not in FILE_KINDS:
            raise unknown(f"kind of file in {VARIABLE}:", name, FILE_KINDS)
        found = SIZE_PATTERN.fullmatch(size)
        if not found:
            raise InputError(
                f"{VARIABLE}: got {item[:40]!r}; expected KIND=SIZE, such as config=50MB"
            )
        limits[name] = int(float(found[1]) * SIZE_UNITS[found[2]])
    return limits.get(kind.name, kind.most)


def size_text(count: float) -> str:
    """Format a number of bytes for a message, such as "1.5 GB".

    Parameters
    ----------
    count
        Number of bytes. [B]

    Returns
    -------
    str
        The size with three significant digits and a decimal unit.
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:  # which three digits round to it
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def system_text(path: Path) -> str:
    """Read a file of the system, as under ``/proc``.

    Parameters
    ----------
    path
        Path of the file.

    Returns
    -------
    str
        Empty if the file is not there.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def free_memory() -> float:
    """Return the memory that this process can still allocate.

    Returns
    -------
    float
        Available memory, within the process's own limit; infinite if the system does not report it.
        [B]
    """
    free = float("inf")
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", system_text(Path("/proc/meminfo")))
        free = int(found[1]) * 1024.0 if found else free
        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        if soft != resource.RLIM_INFINITY:
            pages = int(system_text(Path("/proc/self/statm")).split()[0])
            free = min(free, soft - pages * resource.getpagesize())
    except (OSError, IndexError):  # not Linux
        pass
    return max(free, 0.0)


def check_room(needed: float, what: str, mend: str) -> None:
    """Refuse work for which the machine has too little free memory, before it begins.

    Parameters
    ----------
    needed
        Memory that the work takes. [B]
    what
        Name of the work, with which the message begins.
    mend
        Remedy for the user, with which the message ends.

    Raises
    ------
    InputError
        If less memory is free.
    """
    if needed < ALWAYS_FREE:
        return
    free = free_memory()
    if needed > free:
        sizes = f"about {size_text(needed)} of memory, {size_text(free)} are free"
        raise InputError(f"{what}: needs {sizes}; {mend}")


DRAFT = ".kvsim-"  # how names of drafts begin
Key = tuple[object, ...]


@dataclass
class Ledger:
    """Inputs and outputs of one command, which refuses to write a file that it reads.

    A file that is reached by two paths is one file.

    Attributes
    ----------
    inputs
        Paths that were read, by device and inode.
    outputs
        Option and path of each output, by device and inode or, for files that do not exist yet, by
        folder and name.
    written
        Paths of the outputs that are complete, in order.
    """

    inputs: dict[Key, str] = field(default_factory=dict)
    outputs: dict[Key, tuple[str, str]] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)

    def read(self, path: Path, status: os.stat_result) -> None:
        """Record an input of the command.

        Parameters
        ----------
        path
            Path of the file.
        status
            Status of the open file.

        Raises
        ------
        InputError
            If the command also writes the file.
        """
        if path.name.startswith(DRAFT):  # an output of our own, read back before it is kept
            return
        key = (status.st_dev, status.st_ino)
        if key in self.outputs:
            option, _ = self.outputs[key]
            raise InputError(_conflict(option, path))
        self.inputs[key] = str(path)

    def write(self, path: Path, option: str) -> None:
        """Record an output of the command; the same option may write its file repeatedly.

        Parameters
        ----------
        path
            Path of the file.
        option
            Option that names the output, such as ``--out``.

        Raises
        ------
        InputError
            If the command also reads the file, or writes it for another option.
        """
        keys = _keys(path)
        for key in keys:
            if key in self.inputs:
                raise InputError(_conflict(option, path))
            other = self.outputs.get(key, (option, ""))[0]
            if option and other and other != option:
                raise InputError(
                    f"{other} and {option}: both would write {path}; expected two different files"
                )
        for key in keys:
            self.outputs.setdefault(key, (option, str(path)))


_CURRENT: ContextVar[Ledger | None] = ContextVar("ledger", default=None)


def current_ledger() -> Ledger | None:
    """Return the ledger of the running command.

    Returns
    -------
    Ledger or None
        None if kvsim is used as a library.
    """
    return _CURRENT.get()


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Record everything that the block reads and writes.

    Yields
    ------
    Ledger
        The inputs and outputs so far.
    """
    kept = Ledger()
    token = _CURRENT.set(kept)
    try:
        yield kept
    finally:
        _CURRENT.reset(token)


@contextmanager
def own_output() -> Iterator[None]:
    """Let the block read files that the command has written itself."""
    token = _CURRENT.set(None)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _keys(path: Path) -> list[Key]:
    """Keys that identify a file, whether it exists or not."""
    folder = path.parent.stat()
    keys: list[Key] = [(folder.st_dev, folder.st_ino, path.name)]
    try:
        status = path.stat()
        keys.append((status.st_dev, status.st_ino))
    except FileNotFoundError:
        pass
    return keys


def _conflict(option: str, path: Path) -> str:
    return f"{option or 'output'}: {path} is also read by this command; choose another place"


PIECE_BYTES = 1 << 20  # bytes read at once
BOM = b"\xef\xbb\xbf"
TYPES = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def display(path: object) -> str:
    """Format a path for a message: quoted if it has unusual characters, shortened if it is long.

    Parameters
    ----------
    path
        The path.

    Returns
    -------
    str
        The path as text.
    """
    name = str(path)
    if len(name) > 200:
        name = f"{name[:80]}...{name[-80:]}"
    return name if name.isprintable() and " " not in name and name else repr(name)


def type_of(mode: int) -> str:
    """Describe a file that is not a regular one.

    Parameters
    ----------
    mode
        File mode, as ``os.stat`` returns it.

    Returns
    -------
    str
        For example "a folder" or "a pipe"; empty for a regular file.
    """
    if stat.S_ISREG(mode):
        return ""
    return next((words for holds, words in TYPES if holds(mode)), "no regular file")


def check_type(path: Path | str, kind: Kind) -> None:
    """Refuse an existing path that is not a regular file.

    Parameters
    ----------
    path
        Path of the file.
    kind
        Kind of the file, with its limits.

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
        raise InputError(f"{display(path)}: is {what}; expected {kind.expected}, a regular file")


def open_input(path: Path | str, kind: Kind) -> BufferedReader:
    """Open a regular file for reading; devices and pipes are refused before they are opened.

    Parameters
    ----------
    path
        Path of the file.
    kind
        Purpose of the file, which limits its size.

    Returns
    -------
    BufferedReader
        The open file, at its first byte.

    Raises
    ------
    InputError
        If the file is missing, not a regular file, too large, not readable, or an output of this
        command.
    """
    where, expected = display(path), f"expected {kind.expected}"
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
        kept = current_ledger()
        if kept is not None:
            kept.read(path, status)
    except InputError:
        file.close()
        raise
    return file


def check_input(path: Path | str, kind: Kind) -> Path:
    """Check that a file can be read, before its path is passed to another library.

    Parameters
    ----------
    path
        Path of the file.
    kind
        Purpose of the file, which limits its size.

    Returns
    -------
    Path
        The same path.

    Raises
    ------
    InputError
        For the same reasons as ``open_input``.
    """
    open_input(path, kind).close()
    return Path(path)


def read_bytes(path: Path | str, kind: Kind) -> bytes:
    """Read all bytes of a file.

    Parameters
    ----------
    path
        Path of the file.
    kind
        Purpose of the file, which limits its size.

    Returns
    -------
    bytes
        The content.

    Raises
    ------
    InputError
        For the same reasons as ``open_input``, or if too little memory is free.
    """
    where, most = display(path), most_bytes(kind)
    pieces, total = [], 0
    with open_input(path, kind) as file:
        size = os.fstat(file.fileno()).st_size
        check_room(size * max(kind.growth, 1.0), where, "give a smaller file")
        try:
            while piece := file.read(PIECE_BYTES):
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
    r"""Read a text file in UTF-8.

    Parameters
    ----------
    path
        Path of the file.
    kind
        Purpose of the file, which limits its size.

    Returns
    -------
    str
        The text without a byte-order mark, and with ``\n`` as line ending.

    Raises
    ------
    InputError
        For the same reasons as ``read_bytes``, or naming the byte that is not UTF-8.
    """
    content = decode_text(read_bytes(path, kind), display(path), kind.expected)
    return content.replace("\r\n", "\n").replace("\r", "\n") if "\r" in content else content


def decode_text(content: bytes, where: str, expected: str) -> str:
    """Decode UTF-8, without a byte-order mark.

    Parameters
    ----------
    content
        Bytes of the file.
    where
        Name of the file in messages.
    expected
        Description of a valid file, for messages.

    Returns
    -------
    str
        The text.

    Raises
    ------
    InputError
        Naming the byte and the line that are not UTF-8.
    """
    try:
        return content.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as problem:
        start = problem.start + (len(BOM) if content.startswith(BOM) else 0)
        line = content.count(b"\n", 0, start) + 1
        place = f"byte {start} (line {line}, 0x{content[start]:02x}) is not UTF-8"
        raise InputError(f"{where}: {place}; expected {expected} in UTF-8") from None


def _check_size(where: str, size: int, kind: Kind) -> None:
    most = most_bytes(kind)
    if size > most:
        has = size_text(size) if size > 1.01 * most else f"over {most:,} bytes"
        limit = f"{kind.expected} has at most {size_text(most)}"
        mend = f"check the path, or allow more with {VARIABLE}={kind.name}=SIZE"
        raise InputError(f"{where}: has {has}, {limit}; {mend}")


DEEPEST = 64  # levels of JSON and TOML; a config.json has 4, a profile 3
# Strings first, so that brackets inside them do not count.
# Nothing is scanned twice: a string without an end reaches to the end, and takes no step back.
TOML_STRINGS = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:"{3,5}|)'
    r"|'''(?:[^']|'(?!''))*+(?:'{3,5}|)"
    r'|"(?:[^"\\\n]|\\[^\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
DOTTED = re.compile(rf"(?<![A-Za-z0-9_.-])(?:[A-Za-z0-9_-]++[ \t]*+\.[ \t]*+){{{DEEPEST}}}")
LONGEST_FIELD = 1_000_000  # characters of one CSV field
MOST_DIGITS = 300  # of a whole number in JSON, so that it is one for floats, too


def read_json(path: Path | str, kind: Kind, strict: bool = True) -> Any:
    """Read a JSON document.

    Parameters
    ----------
    path
        Path of the file.
    kind
        Purpose of the file, which limits its size.
    strict
        Whether a name that appears twice in an object is refused.

    Returns
    -------
    object
        The parsed document.

    Raises
    ------
    InputError
        For the same reasons as ``read_text`` and ``parse_json``.
    """
    return parse_json(read_text(path, kind), display(path), kind.expected, strict)


def parse_json(text: str, where: str, expected: str, strict: bool = True) -> Any:
    """Parse a JSON text.

    Parameters
    ----------
    text
        The text.
    where
        Name of the file in messages.
    expected
        Description of a valid file, for messages.
    strict
        Whether a name that appears twice in an object is refused.

    Returns
    -------
    object
        The parsed document.

    Raises
    ------
    InputError
        Naming the line that is not JSON, or if the document is nested too deeply.
    """
    try:
        found = json.loads(
            text, object_pairs_hook=unique_names if strict else None, parse_int=_parse_whole
        )
        check_depth(found, where)
    except json.JSONDecodeError as problem:
        place = f"not valid JSON in line {problem.lineno} ({problem.msg})"
        raise InputError(f"{where}: {place}; expected {expected}") from None
    except RecursionError:
        raise too_deep(where) from None
    except InputError:
        raise
    except ValueError as problem:  # a number of 5000 digits, a name twice
        reason = str(problem)[:80]
        raise InputError(f"{where}: not valid JSON ({reason}); expected {expected}") from None
    return found


def _parse_whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def unique_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a JSON object and refuse duplicate names: an ``object_pairs_hook`` for ``json``.

    Parameters
    ----------
    pairs
        Names and values in the order of the text.

    Returns
    -------
    dict
        Values by name.

    Raises
    ------
    ValueError
        If a name appears twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = sorted(name for name, _ in pairs)
        twice = next(name for name, following in pairwise(names) if name == following)
        raise ValueError(f"{twice[:40]!r} appears twice")
    return found


def read_toml(path: Path | str, kind: Kind) -> dict[str, object]:
    """Read a TOML document.

    Parameters
    ----------
    path
        Path of the file.
    kind
        Purpose of the file, which limits its size.

    Returns
    -------
    dict
        The parsed tables and entries.

    Raises
    ------
    InputError
        For the same reasons as ``read_text``; or naming the line that is not TOML; or if the
        document is nested too deeply.
    """
    text, where = read_text(path, kind), display(path)
    plain = TOML_STRINGS.sub("s", text)  # a key of 100,000 dots ends the interpreter
    depths = accumulate(
        {"[": 1, "{": 1, "]": -1, "}": -1}[x] for x in re.findall(r"[\[\]{}]", plain)
    )
    if DOTTED.search(plain) or max(depths, default=0) > DEEPEST:
        raise too_deep(where)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as problem:  # syntax; an integer of 5000 digits
        reason = str(problem).partition("\n")[0][:120]
        raise InputError(f"{where}: not valid TOML: {reason}; expected {kind.expected}") from None


def check_depth(value: object, where: str) -> None:
    """Refuse a parsed JSON document that is nested too deeply for recursive functions.

    Parameters
    ----------
    value
        The parsed document.
    where
        Name of the file in messages.

    Raises
    ------
    InputError
        If it has more than ``DEEPEST`` levels.
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [x for values in inner for x in values if isinstance(x, dict | list)]
        if not level:
            return
    raise too_deep(where)


def too_deep(where: str) -> InputError:
    """Create the error about a document that is nested too deeply.

    Parameters
    ----------
    where
        Name of the file in the message.

    Returns
    -------
    InputError
        The error, to be raised.
    """
    return InputError(f"{where}: nested too deeply; expected at most {DEEPEST} levels")


def read_rows(path: Path | str, kind: Kind) -> Iterator[tuple[int, list[str]]]:
    """Read the rows of a CSV file, without empty lines.

    Parameters
    ----------
    path
        Path of the file.
    kind
        Purpose of the file, which limits its size.

    Yields
    ------
    tuple of int and list of str
        Number of the row's last line, and the row's fields.

    Raises
    ------
    InputError
        For the same reasons as ``read_text``; or naming the line that is not CSV or has a field
        that is too long.
    """
    text, where = read_text(path, kind), display(path)
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(StringIO(text, newline=""), strict=True)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as problem:
            place = f"{where}, line {reader.line_num}: not CSV ({problem})"
            raise InputError(f"{place}; expected {kind.expected}") from None
        if row is None:
            return
        if row:
            yield reader.line_num, row


def read_records(path: Path | str, kind: Kind) -> Iterator[tuple[int, dict[str, str]]]:
    """Read the rows of a CSV file that has a header.

    Parameters
    ----------
    path
        Path of the file.
    kind
        Purpose of the file, which limits its size.

    Yields
    ------
    tuple of int and dict
        Number of the row's last line, and the row's fields by name of the column.

    Raises
    ------
    InputError
        For the same reasons as ``read_rows``; or naming the row that has more or fewer fields than
        the header, or the column that appears twice.
    """
    rows = read_rows(path, kind)
    line, header = next(rows, (1, []))
    names = [name.strip() for name in header]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise InputError(f"{display(path)}, line {line}: column {twice[:40]!r} appears twice")
    for number, cells in rows:
        if len(cells) != len(names):
            where = f"{display(path)}, line {number}"
            raise InputError(f"{where}: has {len(cells)} fields; expected {len(names)}")
        yield number, dict(zip(names, cells, strict=True))


DRAFT_NAME = re.compile(r"\.kvsim-[0-9]+-.+", re.DOTALL)
NAME_CHARS = 100  # characters of the target's name that a draft's name keeps


def create_draft(target: Path, mode: int) -> tuple[Path, int]:
    """Create an empty temporary file next to a target, and lock it.

    Other processes recognise an abandoned draft by its missing lock.

    Parameters
    ----------
    target
        File that the draft will replace.
    mode
        Permissions of the draft.

    Returns
    -------
    tuple of Path and int
        Path and open file descriptor of the draft.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """
    while True:
        token = os.urandom(4).hex()
        draft = target.with_name(f"{DRAFT}{os.getpid()}-{token}-{target.name[-NAME_CHARS:]}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(draft, flags, mode)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if _is_same_file(draft, file):
            return draft, file
        os.close(file)  # another process took it for an orphan before it was locked


def remove_orphans(folder: Path) -> int:
    """Remove drafts that were left behind by processes that have ended.

    Parameters
    ----------
    folder
        Folder to clean up.

    Returns
    -------
    int
        Number of files that were removed.
    """
    removed = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if DRAFT_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                removed += _remove_orphan(folder / entry.name)
    return removed


def remove_own(folder: Path) -> None:
    """Remove all drafts of this process, which is about to end because of a signal.

    Parameters
    ----------
    folder
        Folder to clean up.
    """
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
        if not _is_same_file(draft, file):
            return False
        draft.unlink()
    except OSError:  # locked by its owner, or the file system has no locks
        return False
    finally:
        os.close(file)
    return True


def _is_same_file(path: Path, file: int) -> bool:
    """Whether a name still leads to an open file."""
    try:
        there, here = path.lstat(), os.fstat(file)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NEW = 0o666  # mode of a new file, less what the umask takes away


def check_target(place: Path | str, option: str, endings: tuple[str, ...] = ()) -> Path:
    """Refuse an output path that cannot or must not be written, before anything is computed.

    Parameters
    ----------
    place
        Path as the user gave it.
    option
        Option that it was given to, such as ``--report``.
    endings
        File name extensions that are allowed; empty for any.

    Returns
    -------
    Path
        The path.

    Raises
    ------
    InputError
        If its folder is missing or not writable; if the path is that of a folder, device, pipe,
        socket or read-only file; or if the command also reads the file, or writes it for another
        option.
    """
    said = f"{option}: got {str(place)[:200]!r}"
    path = Path(place)
    if endings and not path.name.endswith(endings):
        raise InputError(f"{said}; expected a name that ends with {' or '.join(endings)}")
    try:
        problem = _obstacle(path) if path.name and path.name.isprintable() else "not a file's name"
    except (OSError, ValueError, RuntimeError) as error:  # too long, holds a NUL, links in a loop
        problem = getattr(error, "strerror", None) or "not a path"
    if problem:
        raise InputError(f"{said}, {problem}; expected a file in an existing, writable folder")
    kept = current_ledger()
    if kept is not None:
        kept.write(_resolve_link(path), option)
    remove_orphans(_resolve_link(path).parent)
    return path


@contextmanager
def replacing(path: Path, tidy: bool = True, named: bool = True) -> Iterator[Path]:
    """Write a file atomically: the draft replaces it when the block ends without an error.

    The draft is flushed to disk first. If the path is a symbolic link, the file that it points to
    is replaced. Mode and owner of an existing file are kept.

    Parameters
    ----------
    path
        Path of the file.
    tidy
        Whether abandoned drafts in the folder are removed first, which lists the folder.
    named
        Whether the folder is flushed to disk as well. If not, the file may be missing, but never
        incomplete, after a power failure.

    Yields
    ------
    Path
        Path of the draft, to which the block writes.

    Raises
    ------
    InputError
        If the path cannot be written, or the disk is full; nothing is left behind.
    """
    kept = current_ledger()
    try:
        target = _resolve_link(path)
        wrong = _obstacle(path)
        if wrong:
            raise InputError(f"{display(path)}: {wrong}; choose another place")
        if kept is not None:
            kept.write(target, "")
        if tidy:
            remove_orphans(target.parent)
        before = target.stat() if target.exists() else None
        draft, file = create_draft(target, NEW)
    except (OSError, ValueError, RuntimeError) as problem:
        if isinstance(problem, InputError):
            raise
        raise write_error(path, problem) from None
    try:
        try:
            yield draft
            _keep_owner(file, before)
            _sync(draft, file)
            draft.replace(target)
            if named:
                _sync_folder(target.parent)
        finally:
            draft.unlink(missing_ok=True)
            os.close(file)
    except OSError as problem:
        raise write_error(path, problem) from None
    if kept is not None:
        kept.written.append(str(path))


def replace_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically.

    Parameters
    ----------
    path
        Path of the file.
    text
        The text.

    Raises
    ------
    InputError
        For the same reasons as ``replacing``.
    """
    with replacing(path) as draft:
        write_draft(draft, text)


def write_draft(draft: Path, text: str) -> None:
    """Write a text to a draft in UTF-8; characters of file names that are not UTF-8 are escaped.

    Parameters
    ----------
    draft
        Path of the draft.
    text
        The text.
    """
    draft.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


@contextmanager
def replacing_all(*paths: Path) -> Iterator[list[Path]]:
    """Write several files, which replace their targets only if the block succeeds for all of them.

    Parameters
    ----------
    *paths
        Paths of the files.

    Yields
    ------
    list of Path
        Paths of the drafts, in the same order.

    Raises
    ------
    InputError
        For the same reasons as ``replacing``.
    """
    with ExitStack() as all_of_them:
        yield [all_of_them.enter_context(replacing(path)) for path in paths]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock an existing log against other processes while the block runs.

    Parameters
    ----------
    path
        Path of the log.

    Raises
    ------
    InputError
        If it is not a regular file, cannot be written, or is locked by another process.
    """
    with _writable(path, 0) as number:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{display(path)}: another kvsim process is writing there; wait for it, or "
                "choose another place"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def append(path: Path, text: str) -> None:
    """Append text to an existing log; it is on disk when this function returns.

    Parameters
    ----------
    path
        Path of the log.
    text
        The text.

    Raises
    ------
    InputError
        If the disk is full or the log cannot be written; the log is then unchanged.
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
            raise write_error(path, problem) from None


def truncate(path: Path, size: int) -> None:
    """Truncate a log to its first bytes.

    Parameters
    ----------
    path
        Path of the file.
    size
        Bytes to keep. [B]

    Raises
    ------
    InputError
        If it cannot be written.
    """
    with _writable(path, 0) as number:
        try:
            os.ftruncate(number, size)
        except OSError as problem:
            raise write_error(path, problem) from None


@contextmanager
def _writable(path: Path, flags: int) -> Iterator[int]:
    """An existing regular file, open for writing."""
    try:
        what = type_of(path.stat().st_mode)
        if what:
            raise InputError(f"{display(path)}: is {what}; choose another place")
        number = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as problem:
        raise write_error(path, problem) from None
    try:
        yield number
    finally:
        os.close(number)


def make_folder(path: Path, option: str) -> Path:
    """Create a folder for outputs unless it exists.

    Parameters
    ----------
    path
        Path of the folder.
    option
        Option that names the folder, for messages.

    Returns
    -------
    Path
        The same path.

    Raises
    ------
    InputError
        If it cannot be created or written, or is not a folder.
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
    raise InputError(f"{option}: {display(path)}: {reason}; choose another folder")


def write_error(path: Path, problem: BaseException) -> InputError:
    """Create the error about a failed write; for a full disk it names the free space.

    Parameters
    ----------
    path
        Path of the file.
    problem
        Exception that the system raised.

    Returns
    -------
    InputError
        The error, to be raised.
    """
    number = getattr(problem, "errno", None)
    said = getattr(problem, "strerror", None) or str(problem).partition("\n")[0][:120]
    if number in DISK_FULL_ERRORS or "No space left" in str(problem):
        free = ""
        with suppress(OSError):
            free = f", {size_text(shutil.disk_usage(path.parent).free)} are free"
        reason = "the file would be larger than allowed" if number == errno.EFBIG else "disk full"
        return InputError(f"{display(path)}: {reason}{free}; make room, or choose another place")
    return InputError(f"{display(path)}: {said or 'cannot be written'}; choose another place")


def _resolve_link(path: Path) -> Path:
    """The file that is written: the target of a link, or the path itself."""
    return path.resolve() if path.is_symlink() else path


def _obstacle(path: Path) -> str:
    """Why a path cannot be written; empty if it can."""
    target = _resolve_link(path)
    if not target.parent.is_dir():
        return f"there is no folder {display(target.parent)}"
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


def _keep_owner(file: int, before: os.stat_result | None) -> None:
    """Give a draft the mode and owner of the file it replaces."""
    if before is None:
        return
    with suppress(OSError):  # only root may give files away
        os.fchown(file, before.st_uid, before.st_gid)
    with suppress(OSError):  # file systems without modes
        os.fchmod(file, stat.S_IMODE(before.st_mode))


def _sync(draft: Path, file: int) -> None:
    """Flush a draft to disk, also where a library replaced it by a new file of that name."""
    os.fsync(file)
    there, here = draft.stat(), os.fstat(file)
    if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
        with draft.open("rb") as other:
            os.fsync(other.fileno())


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk; not every file system can."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def toml_lines(entries: Mapping[str, object], quoted: bool = False) -> str:
    """Format the entries of a TOML table, one per line.

    Parameters
    ----------
    entries
        Texts, numbers, booleans and lists of texts by key.
    quoted
        Whether keys are quoted, so that they may contain dots.

    Returns
    -------
    str
        Lines of the form ``key = value``.
    """
    return "".join(
        f'"{key}" = {_toml(value)}\n' if quoted else f"{key} = {_toml(value)}\n"
        for key, value in entries.items()
    )


def _toml(value: object) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{"".join(c if c.isprintable() else " " for c in escaped)}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)
