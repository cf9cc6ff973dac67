"""Every place of the command line that takes a file to read, with everything that is none."""

from collections.abc import Iterator

from tests.robust import special
from tests.robust.cases import MODEL, REFUSED, WHERE, Case, Made

CAPACITY = (
    "capacity", *MODEL, "--gpus", "t4", "--ttft", "2s", "--tpot", "1s", "--trace", "sample:chat",
)  # fmt: skip
LOG = "".join(
    f'{{"arrival_time": {i}.0, "first_token_ts": {i}.2, "last_token_ts": {i}.9, "input_toks": 64, '
    '"output_toks": 16}\n'
    for i in range(1, 40)
)
OUT, OWN, ENGINE = ("--out", "s.toml"), ("--from-run", "own.jsonl"), ("--engine", "vllm")
INPUTS: dict[str, tuple[str, ...]] = {
    "predict --model": ("predict", "--gpu", "t4", "--technique", "full", "--model", "{}"),
    "predict --gpu": ("predict", *MODEL, "--technique", "full", "--gpu", "{}"),
    "predict --stack": ("predict", *WHERE, "--technique", "full", "--stack", "{}"),
    **{
        f"{command} --host": (command, *more, *WHERE, "--stack", "llamacpp", "--host", "{}")
        for command, more in {
            "predict": ("--technique", "full"), "plan": (), "explore": ("--out", "o.html"),
            "simulate": ("--trace", "sample:chat", "--technique", "full"),
        }.items()
    },
    "capacity --host": (*CAPACITY, "--stack", "llamacpp", "--host", "{}"),
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
    "capacity --trace": (*CAPACITY[:-2], "--trace", "{}"),
    "capacity --quality": (*CAPACITY, "--quality", "{}"),
    "plan --acceptance": ("plan", *WHERE, "--acceptance", "{}"),
    "simulate --stack": ("simulate", "--trace", "sample:chat", *WHERE, "--stack", "{}"),
    "capacity --model": (*CAPACITY[:1], "--model", "{}", *CAPACITY[3:]),
    "capacity --stack": (*CAPACITY, "--stack", "{}"),
    "capacity --acceptance": (*CAPACITY, "--acceptance", "{}"),
    "sweep spec": ("sweep", "{}", "--out", "grid"),
    "explore --model": ("explore", "--gpu", "t4", "--out", "o.html", "--model", "{}"),
    "explore --gpu": ("explore", *MODEL, "--out", "o.html", "--gpu", "{}"),
    "explore --stack": ("explore", *WHERE, "--out", "o.html", "--stack", "{}"),
    "reproduce source": ("reproduce", "{}"),
    "calibrate --from-run": ("calibrate", "--out", "s.toml", *WHERE, "--from-run", "{}"),
    "calibrate --from-ops": ("calibrate", *OUT, "--gpu", "t4", *ENGINE, "--from-ops", "{}"),
    "calibrate --from-serving": ("calibrate", *OUT, *ENGINE, "--from-serving", "{}"),
    "calibrate --from-bundle": ("calibrate", *OUT, "--from-bundle", "{}"),
    "validate --from-bundle": ("validate", "--from-bundle", "{}"),
    "calibrate --model": ("calibrate", *OUT, *OWN, "--gpu", "t4", "--model", "{}"),
    "calibrate --gpu": ("calibrate", *OUT, *OWN, *MODEL, "--gpu", "{}"),
    "calibrate --stack": ("calibrate", *OUT, *OWN, *WHERE, "--stack", "{}"),
    "validate --model": ("validate", "--techniques", "full", "--model", "{}"),
    "validate --gpu": ("validate", "--techniques", "full", *MODEL, "--gpu", "{}"),
    "validate --text": ("validate", "--quality", *MODEL, "--text", "{}"),
    "validate --plan": ("validate", "--plan", "{}"),
    "doctor file": ("doctor", "{}"),
    "traces import files": ("traces", "import", "{}", "--out", "out.csv"),
    "traces inspect file": ("traces", "inspect", "{}"),
    "traces convert file": ("traces", "convert", "{}", "out.parquet"),
    "traces generate --like": ("traces", "generate", "out.parquet", "--like", "{}"),
    "traces generate --lengths": (
        "traces", "generate", "out.parquet", "--rate", "1", "--requests", "5",
        "--lengths", "empirical:{}",
    ),
}  # fmt: skip
"""Every place of the command line that takes a file to read; {} is where its name goes."""

ENDINGS = {
    "--model": ".json", "--gpu": ".toml", "--stack": ".toml", "--quality": ".json",
    "--acceptance": ".json", "--from-run": ".jsonl", "--text": ".txt", "spec": ".toml",
    "--plan": ".json", "--host": ".toml", "--from-bundle": ".tar.gz",
}  # fmt: skip
"""Names that options recognise; the others read CSV."""

SPECIAL: dict[str, tuple[Made | str, str]] = {
    "pipe": (special.fifo, "a pipe"),
    "socket": (special.unix_socket, "a socket|no such file"),
    "folder": (special.folder, "a folder|no config.json"),
    "zero": ("/dev/zero", "a device"),
    "null": ("/dev/null", "a device"),
    "full": ("/dev/full", "a device"),
    "link to a device": (special.link_to("/dev/zero"), "a device"),
    "loop": (special.link_to("loop{ending}"), "symbolic links|cannot be|no such"),
    "dangling": (special.link_to("nowhere"), "no such file"),
    "missing": ("missing{ending}", "no such file"),
    "sparse terabyte": (
        special.sparse,
        "has 1 TB|1e.06 MB|longer than|not UTF-8|not CSV|header|empty",
    ),
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
            files: dict[str, Made] = {"own.jsonl": LOG.encode()} if "own.jsonl" in pattern else {}
            if isinstance(made, str):
                file = made.replace("{ending}", ending)
            else:
                files[file] = made
            if not file.startswith("/"):
                file = f"./{file}"
            code = (REFUSED, 1) if slot == "doctor file" else REFUSED
            if slot == "validate --text" and name not in NO_TEXT:
                continue  # a text like any other
            arguments = tuple(part.replace("{}", file) for part in pattern)
            yield Case(f"{slot}: {name}", arguments, code, (words,), files)


NO_TEXT = {"pipe", "socket", "folder", "zero", "null", "full", "link to a device", "loop",
           "dangling", "missing", "sparse terabyte", "noise", "UTF-16"}  # fmt: skip
