"""How large a file of each kind may be, and what else bounds the memory that reading takes."""

import os
import re
import resource
from pathlib import Path

from kvsim.errors import InputError, unknown
from kvsim.frozen import frozen

SMALL = 50e6  # memory that is always there [B]
VARIABLE = "KVSIM_FILE_LIMITS"
NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kMGT]?)B?", re.ASCII)
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@frozen
class Kind:
    """What a file is for.

    Attributes
    ----------
    name
        How the environment variable ``KVSIM_FILE_LIMITS`` calls it.
    expected
        What it should be, for messages.
    most
        Bytes that are read at most; a larger file is another file by mistake. [B]
    growth
        Memory that the parsed content takes, per byte of the file.
    """

    name: str
    expected: str
    most: int
    growth: float = 1.0


CONFIG = Kind("config", "a Hugging Face config.json", 10_000_000, 8)
PROFILE = Kind("profile", "a TOML profile", 1_000_000, 8)
SPECIFICATION = Kind("specification", "a TOML specification", 1_000_000, 8)
TABLE = Kind("table", "a CSV file", 50_000_000, 8)
RUN_LOG = Kind("run-log", "a run's log", 500_000_000, 4)
ATTENTION = Kind("attention", "an attention trace", 50_000_000, 8)
SAMPLES = Kind("samples", "the samples of kvsim calibrate", 500_000_000, 4)
PLAN = Kind("plan", "a plan that kvsim plan --json printed", 50_000_000, 8)
JSON = Kind("json", "a JSON file", 50_000_000, 8)
METRICS = Kind("metrics", "a file of metrics", 500_000_000, 4)
TEXT = Kind("text", "a text file", 20_000_000, 4)
TOKENIZER = Kind("tokenizer", "a tokenizer.json", 100_000_000, 8)
TRACE = Kind("trace", "a request trace or sample:NAME", 100_000_000_000, 0)  # read in pieces
WEIGHTS = Kind("weights", "a checkpoint", 10**13, 0)  # mapped, not read
RESULT = Kind("result", "a Parquet file that kvsim wrote", 100_000_000_000, 0)
KINDS = {
    kind.name: kind
    for kind in (
        CONFIG, PROFILE, SPECIFICATION, TABLE, RUN_LOG, ATTENTION, SAMPLES, PLAN, JSON, METRICS,
        TEXT, TOKENIZER, TRACE, WEIGHTS, RESULT,
    )
}  # fmt: skip


def most_bytes(kind: Kind) -> int:
    """The limit of a kind, or what ``KVSIM_FILE_LIMITS=config=50MB,trace=1TB`` says instead. [B]

    Raises
    ------
    InputError
        If the variable says something else.
    """
    said = os.environ.get(VARIABLE, "")
    limits: dict[str, int] = {}
    for item in said.split(",") if said.strip() else ():
        name, _, size = (part.strip() for part in item.partition("="))
        if name not in KINDS:
            raise unknown(f"kind of file in {VARIABLE}:", name, KINDS)
        found = NUMBER.fullmatch(size)
        if not found:
            raise InputError(f"{VARIABLE}: got {item[:40]!r}; expected KIND=SIZE, as config=50MB")
        limits[name] = int(float(found[1]) * UNITS[found[2]])
    return limits.get(kind.name, kind.most)


def size_text(count: float) -> str:
    """Bytes for a message. [B]"""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def system_text(path: Path) -> str:
    """What the system says in a file of its own, as under ``/proc``; empty if it is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def free_memory() -> float:
    """Memory that this process can still have, as far as the system says. [B]"""
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
    """Refuse work that the machine's free memory cannot hold, before it begins.

    Parameters
    ----------
    needed
        Memory that it will take. [B]
    what, mend
        What takes it, and what the user can do.

    Raises
    ------
    InputError
        If less is free.
    """
    if needed < SMALL:
        return
    free = free_memory()
    if needed > free:
        sizes = f"about {size_text(needed)} of memory, {size_text(free)} are free"
        raise InputError(f"{what}: needs {sizes}; {mend}")


def table() -> str:
    """All kinds as a table in Markdown."""
    lines = ["| kind | what it is | read at most |", "|---|---|---:|"]
    for kind in KINDS.values():
        lines.append(f"| `{kind.name}` | {kind.expected} | {size_text(kind.most)} |")
    return "\n".join(lines) + "\n"
