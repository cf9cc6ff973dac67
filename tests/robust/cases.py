"""The table of cases: what is given to which command, and how that must end."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

Made = bytes | Callable[[Path], None]
"""A file of a case: its content, or what makes it at its path."""

REFUSED = 2
MODEL = ("--model", "smollm2-135m")
WHERE = (*MODEL, "--gpu", "t4")
TRACE = "arrival_s,prompt_tokens,generate_tokens\n0,10,5\n1,20,5\n2,30,4\n"


@dataclass(frozen=True)
class Case:
    """One command and how it must end.

    Attributes
    ----------
    name
        What is odd about it.
    arguments
        The command line.
    code
        Its exit code, or several that are right.
    words
        Patterns, any of which the last line on standard error must match.
    files
        Files that are there, by name in the folder where it runs.
    kept
        Files that must be as they were afterwards.
    environment, limits
        Variables and resource limits of the child.
    """

    name: str
    arguments: tuple[str, ...]
    code: int | tuple[int, ...] = REFUSED
    words: tuple[str, ...] = ()
    files: dict[str, Made] = field(default_factory=dict)
    environment: dict[str, str | None] = field(default_factory=dict)
    limits: dict[int, int] = field(default_factory=dict)
    large: bool = False  # the case is about size, so that its own bounds are not checked


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


INPUTS: dict[str, tuple[str, ...]] = {
    "predict --model": ("predict", "--gpu", "t4", "--technique", "full", "--model", "{}"),
    "predict --gpu": ("predict", *MODEL, "--technique", "full", "--gpu", "{}"),
    "predict --stack": ("predict", *WHERE, "--technique", "full", "--stack", "{}"),
    "plan --model": ("plan", "--gpu", "t4", "--model", "{}"),
    "plan --gpu": ("plan", *MODEL, "--gpu", "{}"),
    "plan --stack": ("plan", *WHERE, "--stack", "{}"),
    "plan --trace": ("plan", *WHERE, "--trace", "{}"),
    "plan --quality": ("plan", *WHERE, "--quality", "{}"),
    "simulate --trace": ("simulate", *WHERE, "--trace", "{}"),
    "simulate --model": ("simulate", "--trace", "sample:chat", "--gpu", "t4", "--model", "{}"),
    "simulate --gpu": ("simulate", "--trace", "sample:chat", *MODEL, "--gpu", "{}"),
    "simulate --acceptance": (
        "simulate", "--trace", "sample:chat", *WHERE, "--technique", "magicdec",
        "--acceptance", "{}",
    ),
    "capacity --trace": (
        "capacity", *MODEL, "--gpus", "t4", "--ttft", "2s", "--tpot", "1s", "--trace", "{}",
    ),
    "capacity --quality": (
        "capacity", *MODEL, "--gpus", "t4", "--ttft", "2s", "--tpot", "1s", "--trace",
        "sample:chat", "--quality", "{}",
    ),
    "reproduce": ("reproduce", "{}"),
    "reproduce --stack": ("reproduce", "kcache", "--fit", "fit.toml", "--stack", "{}"),
    "calibrate --from-run": ("calibrate", "--out", "s.toml", *WHERE, "--from-run", "{}"),
    "validate --model": ("validate", "--techniques", "full", "--model", "{}"),
    "validate --gpu": ("validate", "--techniques", "full", *MODEL, "--gpu", "{}"),
    "validate --text": ("validate", "--quality", *MODEL, "--text", "{}"),
    "doctor": ("doctor", "{}"),
    "traces inspect": ("traces", "inspect", "{}"),
    "traces convert": ("traces", "convert", "{}", "out.parquet"),
    "traces generate --like": ("traces", "generate", "out.parquet", "--like", "{}"),
    "traces generate --lengths": (
        "traces", "generate", "out.parquet", "--rate", "1", "--requests", "5",
        "--lengths", "empirical:{}",
    ),
}  # fmt: skip
"""Every place of the command line that takes a file to read; {} is where its name goes."""

ENDINGS = {
    "--model": ".json", "--gpu": ".toml", "--stack": ".toml", "--quality": ".json",
    "--acceptance": ".json", "--from-run": ".jsonl", "--text": ".txt",
}  # fmt: skip
"""Names that options recognise; the others read CSV."""

SPECIAL: dict[str, tuple[Made | str, str]] = {
    "pipe": (fifo, "a pipe"),
    "socket": (unix_socket, "a socket|no such file"),
    "folder": (folder, "a folder|no config.json"),
    "zero": ("/dev/zero", "a device"),
    "null": ("/dev/null", "a device"),
    "full": ("/dev/full", "a device"),
    "link to a device": (link_to("/dev/zero"), "a device"),
    "loop": (link_to("loop{ending}"), "symbolic links|cannot be|no such"),
    "dangling": (link_to("nowhere"), "no such file"),
    "missing": ("missing{ending}", "no such file"),
    "sparse terabyte": (sparse, "has 1 TB|1e.06 MB|longer than|not UTF-8|not CSV|header|empty"),
    "empty": (b"", "."),
    "zeros": (bytes(5000), "."),
    "brackets": (b"[" * 100_000, "."),
    "braces": (b'{"a":' * 50_000, "."),
    "noise": (bytes(range(256)) * 40, "."),
    "UTF-16": ("a,b\n1,2\n".encode("utf-16"), "."),
    "long field": (b"a,b\n1," + b"x" * 10_000_000, "."),
    "CR only": (b"a,b\r1,2\r", "."),
    "text": (b"hello, world\nthis is no such file\n", "."),
    "a number": (b"1e999\n", "."),
    "a name twice": (b'{"a": 1, "a": 2}', "."),
    "no name in UTF-8": (b"\x00\x01", "."),
}
"""Whatever a path may lead to that is no sound file, and how the line must name it."""


def inputs() -> Iterator[Case]:
    """Every input with everything that is none."""
    for slot, pattern in INPUTS.items():
        ending = next((e for o, e in ENDINGS.items() if slot.endswith(o)), ".csv")
        for name, (made, words) in SPECIAL.items():
            file = f"in{ending}" if name != "no name in UTF-8" else f"in\udcff\udcfe{ending}"
            files: dict[str, Made] = {}
            if isinstance(made, str):
                file = made.replace("{ending}", ending)
            else:
                files[file] = made
            if not file.startswith("/"):
                file = f"./{file}"
            code = (REFUSED, 1) if slot == "doctor" else REFUSED
            if slot == "validate --text" and name not in NO_TEXT:
                continue  # a text like any other
            arguments = tuple(part.replace("{}", file) for part in pattern)
            yield Case(f"{slot}: {name}", arguments, code, (words,), files)


NO_TEXT = {"pipe", "socket", "folder", "zero", "null", "full", "link to a device", "loop",
           "dangling", "missing", "sparse terabyte", "noise", "UTF-16"}  # fmt: skip

OUTPUTS: dict[str, tuple[tuple[str, ...], str]] = {
    "predict --report": (("predict", *WHERE, "--technique", "full", "--report", "{}"), ".html"),
    "plan --report": (("plan", *WHERE, "--report", "{}"), ".html"),
    "simulate --report": (
        ("simulate", *WHERE, "--trace", "own.csv", "--report", "{}"), ".html",
    ),
    "simulate --out": (("simulate", *WHERE, "--trace", "own.csv", "--out", "{}"), ".parquet"),
    "capacity --report": (
        ("capacity", *MODEL, "--gpus", "t4", "--ttft", "2s", "--tpot", "1s", "--trace", "own.csv",
         "--report", "{}"), ".html",
    ),
    "reproduce --report": (("reproduce", "kcache", "--report", "{}"), ".html"),
    "reproduce --fit": (("reproduce", "kcache", "--fit", "{}"), ".toml"),
    "calibrate --from-run --out": (
        ("calibrate", *WHERE, "--from-run", "own.csv", "--out", "{}"), ".toml",
    ),
    "calibrate --device --out": (("calibrate", "--device", "cpu", "--out", "{}"), ".toml"),
    "validate --out": (
        ("validate", "--quality", *MODEL, "--text", "own.csv", "--out", "{}"), ".json",
    ),
    "traces convert": (("traces", "convert", "own.csv", "{}"), ".parquet"),
    "traces generate": (
        ("traces", "generate", "{}", "--rate", "1", "--requests", "3"), ".csv",
    ),
}  # fmt: skip
"""Every place of the command line that takes a file to write."""

PLACES: dict[str, tuple[Made | str, str]] = {
    "null device": ("/dev/null", "there is a device|ends with|name in|expected a name"),
    "full device": ("/dev/full", "there is a device|ends with|name in|expected a name"),
    "terminal": ("/dev/tty", "there is a device|ends with|name in|expected a name"),
    "pipe": (fifo, "there is a pipe"),
    "socket": (unix_socket, "there is a socket"),
    "folder": (folder, "there is a folder|is a folder|expected a name"),
    "link to a device": (link_to("/dev/null"), "there is a device"),
    "link to a pipe": (link_to("pipe"), "there is a pipe"),
    "loop": (link_to("out{ending}"), "loop|links|symbolic|not"),
    "read-only": (read_only, "read-only"),
    "no folder": ("no/such/out{ending}", "no folder|not there"),
    "a file as folder": ("own.csv/out{ending}", "no folder|not there"),
    "long name": ("x" * 300 + "{ending}", "long|not a"),
    "two lines": ("a\nb{ending}", "not a file's name"),
    "link to the input": (link_to("own.csv"), "also read|the file there is"),
    "hard link of the input": (lambda path: path.hardlink_to(path.parent / "own.csv"), "also read"),
}
"""Whatever may be where an output should go, and how the line must name it."""
READS_OWN = ("simulate", "capacity", "calibrate --from-run", "validate", "traces convert")


def outputs() -> Iterator[Case]:
    """Every output in every place where none may go."""
    for slot, (pattern, ending) in OUTPUTS.items():
        for name, (made, words) in PLACES.items():
            if "the input" in name and not slot.startswith(READS_OWN):
                continue
            files: dict[str, Made] = {"own.csv": TRACE.encode()}
            file = f"out{ending}"
            if isinstance(made, str):
                file = made.replace("{ending}", ending)
            elif name == "loop":
                files[file] = link_to(file)
            elif name == "link to a pipe":
                files |= {"pipe": fifo, file: made}
            else:
                files[file] = made
            arguments = tuple(part.replace("{}", file) for part in pattern)
            yield Case(f"{slot}: {name}", arguments, REFUSED, (words,), files)
    yield from twice()


def twice() -> Iterator[Case]:
    """The same file for two outputs, or for an input and an output."""
    own: dict[str, Made] = {"own.csv": TRACE.encode(), "link.parquet": link_to("x.parquet")}
    simulate = ("simulate", *WHERE, "--trace", "own.csv")
    for place, report in (("x.parquet", "x.parquet"), ("./x.parquet", "x.parquet"),
                        ("x.parquet", "link.parquet")):  # fmt: skip
        words = (*simulate, "--out", place, "--report", report)
        yield Case(f"{place} and {report}", words, REFUSED, ("both would write",), own)
    arguments = ("reproduce", "kcache", "--fit", "x", "--report", "x")
    yield Case("one place for --fit and --report", arguments, REFUSED, ("both",))


NUMBERS = (
    "0", "-1", "1e308", "1e400", "nan", "inf", "-inf", "", "x", "1.5.2", "1_0", "٣", "0x10",
    "9" * 400, "1e-320", "1;2", " ",
)  # fmt: skip
TYPED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "predict": (("predict", *WHERE, "--technique", "full"), (
        "--batch", "--prompt", "--generate", "--tp", "--host-memory")),
    "plan": (("plan", *WHERE), (
        "--prompt", "--generate", "--batch", "--max-loss", "--ttft", "--tpot", "--gpu-memory",
        "--host-memory", "--tp", "--acceptance")),
    "simulate": (("simulate", *WHERE, "--trace", "sample:chat"), (
        "--replicas", "--rate", "--max-seqs", "--max-tokens", "--block-tokens", "--blocks",
        "--host-cache", "--ttft", "--tpot", "--tp", "--gpu-memory", "--chars-per-token")),
    "capacity": (("capacity", *MODEL, "--gpus", "t4", "--ttft", "2s", "--tpot", "1s", "--trace",
                  "sample:chat"), (
        "--percentile", "--headroom", "--failures", "--windows", "--configurations", "--max-gpus",
        "--max-host", "--gpu-memory-utilization", "--spread")),
    "validate": (("validate", "--techniques", "full"), (
        "--layers", "--batch", "--prompt", "--generate", "--max-error")),
    "traces generate": (("traces", "generate", "out.csv"), ("--requests", "--rate", "--seed")),
}  # fmt: skip
SOUND = {
    ("--blocks", "0"), ("--layers", "0"), ("--seed", "0"), ("--max-loss", "0"), ("--failures", "0"),
    ("--headroom", "0"), ("--acceptance", "0"), ("--max-loss", "1e-320"),
    ("--acceptance", "1e-320"), ("--headroom", "1e-320"),
}  # fmt: skip
"""What only looks odd."""


def numbers() -> Iterator[Case]:
    """Every numeric option with everything that is no such number."""
    for slot, (pattern, options) in TYPED.items():
        for option in options:
            for value in NUMBERS:
                rest: tuple[str, ...] = (option, value)
                if slot == "traces generate":
                    others = {"--rate": "1", "--requests": "3"}
                    more = {k: v for k, v in others.items() if k != option}
                    rest += tuple(word for pair in more.items() for word in pair)
                if (option, value) in SOUND:
                    continue
                words = ("expected", "unit", "not there", "needs", "is not")
                name = f"{slot} {option} {value[:12]!r}"
                yield Case(name, (*pattern, *rest), REFUSED, words)
