"""Every place of the command line that takes a file to write, and where none may go."""

from collections.abc import Iterator

from tests.robust import special
from tests.robust.cases import MODEL, REFUSED, TRACE, WHERE, Case, Made

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
    "calibrate --from-run --out": (
        ("calibrate", *WHERE, "--from-run", "own.csv", "--out", "{}"), ".toml",
    ),
    "calibrate --device --out": (("calibrate", "--device", "cpu", "--out", "{}"), ".toml"),
    "validate --out": (
        ("validate", "--quality", *MODEL, "--text", "own.csv", "--out", "{}"), ".json",
    ),
    "validate --report": (("validate", "--techniques", "full", "--report", "{}"), ".html"),
    "calibrate --report": (
        ("calibrate", *WHERE, "--from-run", "own.csv", "--out", "s.toml", "--report", "{}"),
        ".html",
    ),
    "sweep --out": (("sweep", "own.toml", "--out", "{}"), ""),
    "sweep --report": (("sweep", "own.toml", "--out", "swept", "--report", "{}"), ".html"),
    "explore --out": (("explore", *WHERE, "--out", "{}"), ".html"),
    "traces inspect --report": (("traces", "inspect", "own.csv", "--report", "{}"), ".html"),
    "traces import --out": (("traces", "import", "own.csv", "--out", "{}"), ".csv"),
    "traces convert target": (("traces", "convert", "own.csv", "{}"), ".parquet"),
    "traces generate target": (
        ("traces", "generate", "{}", "--rate", "1", "--requests", "3"), ".csv",
    ),
}  # fmt: skip
"""Every place of the command line that takes a file to write."""

SWEEP = b"""[grid]
model = ["smollm2-135m"]
gpu = ["t4"]
technique = ["full"]
batch = [1]
context = [64]
"""
PLACES: dict[str, tuple[Made | str, str]] = {
    "null device": ("/dev/null", "there is a device|ends with|name in|expected a name"),
    "full device": ("/dev/full", "there is a device|ends with|name in|expected a name"),
    "terminal": ("/dev/tty", "there is a device|ends with|name in|expected a name"),
    "pipe": (special.fifo, "there is a pipe"),
    "socket": (special.unix_socket, "there is a socket"),
    "folder": (special.folder, "there is a folder|is a folder|expected a name"),
    "link to a device": (special.link_to("/dev/null"), "there is a device"),
    "link to a pipe": (special.link_to("pipe"), "there is a pipe"),
    "loop": (special.link_to("out{ending}"), "loop|links|symbolic|not"),
    "read-only": (special.read_only, "read-only"),
    "no folder": ("no/such/out{ending}", "no folder|not there"),
    "a file as folder": ("own.csv/out{ending}", "no folder|not there"),
    "long name": ("x" * 300 + "{ending}", "long|not a"),
    "two lines": ("a\nb{ending}", "not a file's name"),
    "link to the input": (special.link_to("own.csv"), "also read|the file there is"),
    "hard link of the input": (lambda path: path.hardlink_to(path.parent / "own.csv"), "also read"),
}
"""Whatever may be where an output should go, and how the line must name it."""
READS_OWN = ("simulate", "capacity", "calibrate --from-run", "calibrate --report", "validate --out",
             "traces convert", "traces inspect", "traces import")  # fmt: skip


def outputs() -> Iterator[Case]:
    """Every output in every place where none may go."""
    for slot, (pattern, ending) in OUTPUTS.items():
        for name, (made, words) in PLACES.items():
            if "the input" in name and not slot.startswith(READS_OWN):
                continue
            files: dict[str, Made] = {"own.csv": TRACE.encode()}
            if slot.startswith("sweep"):
                files["own.toml"] = SWEEP
            if slot == "sweep --out":  # a folder, made where none is
                if name == "folder":
                    continue
                words += "|choose another folder|not a folder's name"
            file = f"out{ending}"
            if isinstance(made, str):
                file = made.replace("{ending}", ending)
            elif name == "loop":
                files[file] = special.link_to(file)
            elif name == "link to a pipe":
                files |= {"pipe": special.fifo, file: made}
            else:
                files[file] = made
            arguments = tuple(part.replace("{}", file) for part in pattern)
            yield Case(f"{slot}: {name}", arguments, REFUSED, (words,), files)
    yield from twice()


def twice() -> Iterator[Case]:
    """The same file for two outputs, or for an input and an output."""
    own: dict[str, Made] = {"own.csv": TRACE.encode(), "link.parquet": special.link_to("x.parquet")}
    simulate = ("simulate", *WHERE, "--trace", "own.csv")
    for place, report in (("x.parquet", "x.parquet"), ("./x.parquet", "x.parquet"),
                        ("x.parquet", "link.parquet")):  # fmt: skip
        words = (*simulate, "--out", place, "--report", report)
        yield Case(f"{place} and {report}", words, REFUSED, ("both would write",), own)
