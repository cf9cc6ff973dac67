"""Commands that write, stopped at any moment.

Usage: ``python -m tests.robust.kills [MOMENTS [SEED [NAMES]]]``.

A forked child runs a command; the parent stops it some time later with one of four signals, looks
at what is there, and runs the command again. No output may be broken, no draft may be left after
the next run, and the next run must give the same as one that was never stopped.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.robust.cases import MODEL, TRACE, WHERE
from tests.robust.readings import LOG
from tests.robust.runner import execute, fresh, preload

SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
ENDS = {
    signal.SIGINT: (0, 1, 130, -2),
    signal.SIGTERM: (0, 1, 143, -15),
    signal.SIGKILL: (0, 1, -9),
    signal.SIGPIPE: (0, 1, 141, -13),
}
ACCESS = '1.1.1.1 - - [22/Nov/2026:06:00:0{} +0000] "POST /v1/completions HTTP/1.1" 200 9 "-" "-"\n'
SWEEP = (
    '[grid]\nmodel = ["smollm2-135m"]\ngpu = ["t4"]\ntechnique = ["full"]\n'
    "batch = [1, 8]\ncontext = [64, 512]\n"
)
OWN = {
    "own.csv": TRACE,
    "sweep.toml": SWEEP,
    "some.txt": "It rains. " * 200,
    "own.jsonl": "\n".join(LOG.splitlines()[:36]) + "\n",
    "access.log": "".join(ACCESS.replace("{}", str(second)) for second in range(9)),
}
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "predict": (("predict", *WHERE, "--technique", "full", "--report", "a.html"), ("a.html",)),
    "plan": (("plan", *WHERE, "--report", "a.html"), ("a.html",)),
    "simulate": (
        ("simulate", *WHERE, "--trace", "own.csv", "--out", "a.parquet", "--report", "a.html"),
        ("a.parquet", "a.html"),
    ),
    "simulate --compare": (
        ("simulate", *WHERE, "--trace", "own.csv", "--compare", "full,kivi:bits=4", "--out", "out"),
        ("out/full.parquet",),
    ),
    "capacity": (
        ("capacity", *MODEL, "--gpus", "t4", "--ttft", "9s", "--tpot", "5s", "--trace", "own.csv",
         "--report", "a.html"), ("a.html",),
    ),
    "reproduce": (("reproduce", "kcache", "--report", "a.html"), ("a.html",)),
    "convert": (("traces", "convert", "own.csv", "a.parquet"), ("a.parquet",)),
    "import": (
        ("traces", "import", "access.log", "--out", "a.csv", "--lengths",
         "lognormal:prompt=64,generate=16"), ("a.csv",),
    ),
    "explore": (("explore", *WHERE, "--technique", "full", "--out", "a.html"), ("a.html",)),
    "sweep": (
        ("sweep", "sweep.toml", "--out", "swept", "--resume"), ("swept/chunk-0000000.parquet",),
    ),
    "calibrate": (
        ("calibrate", *WHERE, "--from-run", "own.jsonl", "--fit-first", "18", "--out", "s.toml"),
        ("s.toml",),
    ),
    "validate": (
        ("validate", "--quality", "--model", "./model", "--text", "some.txt", "--technique",
         "zipcache", "--batch", "1", "--prompt", "40", "--generate", "4", "--out", "q.json"),
        ("q.json",),
    ),
    "generate": (
        ("traces", "generate", "a.jsonl.gz", "--rate", "9", "--requests", "20000"),
        ("a.jsonl.gz",),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What one stop led to."""

    command: str
    signal: str
    after: float  # seconds
    code: int
    faults: tuple[str, ...]


def stop(name: str, folder: Path, number: int, wait: float, whole: dict[str, bytes]) -> Outcome:
    """Run a command, stop it, look, run it again."""
    arguments, outputs = COMMANDS[name]
    lay_out(folder, arguments)
    child = os.fork()
    if not child:
        run_in_child(arguments, folder)
    time.sleep(wait)
    os.kill(child, number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    faults = []
    if code not in ENDS[signal.Signals(number)]:
        faults.append(f"exit code {code}")
    for output in outputs:
        path = folder / output
        if path.exists() and not _same(path.read_bytes(), whole[output]):
            faults.append(f"{output} is broken")
    again = execute(arguments, folder)
    if again.code not in (0, 1):
        faults.append(f"the next run ends with {again.code}: {again.err[-200:]}")
    drafts = [str(p.relative_to(folder)) for p in folder.rglob(".kvsim-*")]
    if drafts:
        faults.append(f"left {drafts}")
    for output in outputs:
        path = folder / output
        if not path.exists() or not _same(path.read_bytes(), whole[output]):
            faults.append(f"{output} differs after the next run")
    return Outcome(name, signal.Signals(number).name, wait, code, tuple(faults))


def lay_out(folder: Path, arguments: tuple[str, ...]) -> None:
    """A folder with what commands read."""
    fresh(folder)
    for file, content in OWN.items():
        (folder / file).write_text(content)
    if "./model" in arguments:
        shutil.copytree(_checkpoint(folder.parent), folder / "model")


def _checkpoint(folder: Path) -> Path:
    """A small model with a tokenizer, made once."""
    place = folder / "checkpoint"
    if not place.exists():
        from tests.support.decoders import saved

        saved("llama", place)
    return place


def run_in_child(
    arguments: tuple[str, ...], folder: Path, prepare: Callable[[], None] = lambda: None
) -> None:
    """Run a command in the child that is stopped: never returns."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        prepare()
        sys.argv = ["kvsim", *arguments]
        from kvsim.cli.app import main

        main()
    except SystemExit as end:
        os._exit(int(end.code or 0))
    except KeyboardInterrupt:  # before the command began
        os._exit(130)
    finally:
        os._exit(99)


def _same(found: bytes, expected: bytes) -> bool:
    """Whether outputs are the same but for what names the moment."""
    return len(found) == len(expected) and found[:64] == expected[:64]


def stops(
    moments: int, folder: Path, names: tuple[str, ...] = tuple(COMMANDS), seed: int = 0
) -> list[Outcome]:
    """Stop commands at random moments of their run."""
    chance, found = random.Random(seed), []
    wholes: dict[str, tuple[float, dict[str, bytes]]] = {}
    for moment in range(moments):
        name, number = names[moment % len(names)], SIGNALS[(moment // len(names)) % len(SIGNALS)]
        if name not in wholes:
            wholes[name] = _whole(name, folder)
        seconds, whole = wholes[name]
        found.append(stop(name, folder, number, chance.uniform(0, seconds), whole))
    return found


def _whole(name: str, folder: Path) -> tuple[float, dict[str, bytes]]:
    """How long a command takes that is not stopped, and what it writes."""
    arguments, outputs = COMMANDS[name]
    lay_out(folder, arguments)
    begin = time.monotonic()
    ended = execute(arguments, folder)
    seconds = time.monotonic() - begin
    if ended.code not in (0, 1):
        raise RuntimeError(f"{name}: {ended.err}")
    return seconds, {output: (folder / output).read_bytes() for output in outputs}


def main(tell: Callable[[str], None] = print) -> int:
    """Stop at 150 moments, or as many as asked."""
    moments = int(sys.argv[1]) if len(sys.argv) > 1 else 150
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    names = tuple(sys.argv[3].split(",")) if len(sys.argv) > 3 else tuple(COMMANDS)
    preload(*(["torch"] if "validate" in names else []))
    with tempfile.TemporaryDirectory() as scratch:
        found = stops(moments, Path(scratch) / "kill", names, seed)
    broken = [outcome for outcome in found if outcome.faults]
    for outcome in broken:
        tell(str(outcome))
    stopped = sum(outcome.code not in (0, 1) for outcome in found)
    tell("| asked | measured |\n|---|---|")
    counts = f"{len(found)} kills over {len(names)} commands, {stopped} before the end"
    asked = "150 kills: no broken file, no draft after the next run"
    tell(f"| {asked} | {counts}, {len(broken)} with a fault |")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
