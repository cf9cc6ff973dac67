"""What is lost where a command is killed and the next run goes on.

Usage: ``python -m tests.robust.resumes [KILLS [SEED]]``.

A forked child runs a command that keeps finished units of its work (a chunk of a sweep, the run of
one technique) and notes each unit that it begins. It is killed some time later. What was finished
before has to be as it was and is not begun again; of what was begun, at most one unit may be
missing. ``kvsim calibrate --device`` has a test of its own with the same rule:
``tests/support/killed_calibration.py``.
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.robust.cases import TRACE, WHERE
from tests.robust.runner import fresh, preload

BEGUN = "begun.txt"
SWEEP = (
    '[grid]\nmodel = ["smollm2-135m"]\ngpu = ["t4", "a10", "l4"]\n'
    'technique = ["full", "kivi:bits=4", "h2o", "snapkv"]\nbatch = [1, 8]\ncontext = [64, 512]\n'
)
COMPARED = "full,kivi:bits=4,h2o,snapkv,offload,zipcache"
COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "sweep": (("sweep", "sweep.toml", "--out", "kept", "--resume"), "kept/chunk-*.parquet"),
    "simulate --compare": (
        ("simulate", *WHERE, "--trace", "own.csv", "--compare", COMPARED, "--out", "kept",
         "--resume"), "kept/*.parquet",
    ),
}  # fmt: skip
"""A command that goes on, and its units."""


@dataclass(frozen=True)
class Kill:
    """What one kill led to.

    Attributes
    ----------
    finished
        Units that were there when the run began.
    begun
        Units that it began, by name.
    lost
        Units that it began and that are not there.
    """

    command: str
    finished: int
    begun: tuple[str, ...]
    lost: tuple[str, ...]
    faults: tuple[str, ...]


def run(arguments: tuple[str, ...], folder: Path) -> int:
    """Start a child that runs a command and notes the units it begins."""
    child = os.fork()
    if child:
        return child
    try:
        os.chdir(folder)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        _note_units()
        sys.argv = ["kvsim", *arguments]
        from kvsim.cli.app import main

        main()
    except SystemExit as end:
        os._exit(int(end.code or 0))
    finally:
        os._exit(99)


def _note_units() -> None:
    """Have every unit that is begun add its name to a file."""
    runfile: Any = import_module("kvsim.report.simulate")
    workers: Any = import_module("kvsim.sweeps.workers")
    file = os.open(BEGUN, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    compute, read_finished_run = workers.compute, runfile.read_finished_run

    def computed(chunk: Any) -> Any:
        os.write(file, f"chunk-{chunk.index:07d}.parquet\n".encode())
        return compute(chunk)

    def looked_for(place: Path, mark: Any) -> Any:
        found = read_finished_run(place, mark)
        if found is None:
            os.write(file, f"{place.name}\n".encode())
        return found

    workers.compute = computed
    runfile.read_finished_run = looked_for


def _units(folder: Path, pattern: str) -> dict[str, tuple[int, bytes]]:
    """Finished units: when they were written, and what is in them."""
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.glob(pattern)}


def _begun(folder: Path) -> tuple[str, ...]:
    path = folder / BEGUN
    names = tuple(path.read_text().splitlines()) if path.exists() else ()
    path.unlink(missing_ok=True)
    return names


def kills(name: str, count: int, folder: Path, seed: int = 0) -> list[Kill]:
    """Kill a command, look, go on; start anew when it is complete."""
    arguments, pattern = COMMANDS[name]
    chance = random.Random(seed)
    found: list[Kill] = []

    def lay_out() -> None:
        fresh(folder)
        (folder / "own.csv").write_text(TRACE)
        (folder / "sweep.toml").write_text(SWEEP)

    lay_out()
    begin = time.monotonic()
    os.waitpid(run(arguments, folder), 0)
    seconds, whole = time.monotonic() - begin, _units(folder, pattern)
    noted = set(_begun(folder))
    if noted != set(whole):
        raise RuntimeError(f"{name}: noted are {sorted(noted)}, finished {sorted(whole)}")
    lay_out()
    while len(found) < count:
        before = _units(folder, pattern)
        child = run(arguments, folder)
        time.sleep(chance.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        after, begun = _units(folder, pattern), _begun(folder)
        lost = tuple(sorted(set(begun) - set(after)))
        faults = [f"{unit} is begun again" for unit in sorted(set(begun) & set(before))]
        faults += [f"{unit} is not as it was" for unit in before if after.get(unit) != before[unit]]
        faults += [
            f"{unit} is not that of a run without a kill"
            for unit, (_, content) in after.items()
            if content != whole[unit][1]
        ]
        faults += [f"loses {', '.join(lost)}"] if len(lost) > 1 else []
        found.append(Kill(name, len(before), begun, lost, tuple(faults)))
        if len(after) == len(whole):
            lay_out()
    return found


def main(tell: Callable[[str], None] = print) -> int:
    """Kill each command fifty times, or as often as asked."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    preload()
    found: list[Kill] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in COMMANDS:
            found += kills(name, count, Path(scratch) / "resumed", seed)
    for kill in found:
        for fault in kill.faults:
            tell(f"{kill.command}: {fault}")
    tell("| asked | measured |\n|---|---|")
    for name in COMMANDS:
        mine = [kill for kill in found if kill.command == name]
        within = sum(bool(kill.begun) for kill in mine)
        on = sum(kill.finished > 0 for kill in mine)
        most = max(len(kill.lost) for kill in mine)
        tell(
            f"| {name}: a resume loses at most one unit of work | {len(mine)} kills, {within} "
            f"while units were computed, {on} of runs that went on; at most {most} lost |"
        )
    return int(any(kill.faults for kill in found))


if __name__ == "__main__":
    sys.exit(main())
