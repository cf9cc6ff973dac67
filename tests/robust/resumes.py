"""What is lost where a command is killed and the next run goes on.

A forked child runs a command that keeps finished units of its work (a chunk of a sweep, the run of
one technique) and notes each unit that it begins. It is killed some time later. What was finished
before has to be as it was and is not begun again; of what was begun, at most one unit may be
missing. ``kvsim calibrate --device`` has a test of its own with the same rule:
``tests/support/killed_calibration.py``.
"""

import os
import random
import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.robust.cases import TRACE, WHERE
from tests.robust.kills import run_in_child
from tests.robust.runner import fresh

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


def _note_units() -> None:
    """Have every unit that is begun add its name to a file.

    The functions are replaced in the modules that call them, which other tests may have imported.
    """
    simulations: Any = import_module("kvsim.api.simulations")
    workers: Any = import_module("kvsim.sweeps.workers")
    file = os.open(BEGUN, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    compute, read_finished_run = workers.compute, simulations.read_finished_run

    def computed(chunk: Any) -> Any:
        os.write(file, f"chunk-{chunk.index:07d}.parquet\n".encode())
        return compute(chunk)

    def looked_for(place: Path, mark: Any) -> Any:
        found = read_finished_run(place, mark)
        if found is None:
            os.write(file, f"{place.name}\n".encode())
        return found

    workers.compute = computed
    simulations.read_finished_run = looked_for


def _units(folder: Path, pattern: str) -> dict[str, tuple[int, bytes]]:
    """Finished units: when they were written, and what is in them."""
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.glob(pattern)}


def _begun(folder: Path) -> tuple[str, ...]:
    path = folder / BEGUN
    names = tuple(path.read_text().splitlines()) if path.exists() else ()
    path.unlink(missing_ok=True)
    return names


def faults_of_kills(name: str, count: int, folder: Path, seed: int = 0) -> list[str]:
    """Kill a command, look, go on; start anew when it is complete; what was lost or done twice."""
    arguments, pattern = COMMANDS[name]
    chance, faults = random.Random(seed), []

    def started() -> int:
        child = os.fork()
        if not child:
            run_in_child(arguments, folder, _note_units)
        return child

    def lay_out() -> None:
        fresh(folder)
        (folder / "own.csv").write_text(TRACE)
        (folder / "sweep.toml").write_text(SWEEP)

    lay_out()
    begin = time.monotonic()
    os.waitpid(started(), 0)
    seconds, whole = time.monotonic() - begin, _units(folder, pattern)
    assert set(_begun(folder)) == set(whole), name
    lay_out()
    for _ in range(count):
        before, child = _units(folder, pattern), started()
        time.sleep(chance.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        after, begun = _units(folder, pattern), _begun(folder)
        lost = sorted(set(begun) - set(after))
        faults += [f"{unit} is begun again" for unit in sorted(set(begun) & set(before))]
        faults += [f"{unit} is not as it was" for unit in before if after.get(unit) != before[unit]]
        faults += [f"{unit} differs" for unit, (_, x) in after.items() if x != whole[unit][1]]
        faults += [f"loses {', '.join(lost)}"] if len(lost) > 1 else []
        if len(after) == len(whole):
            lay_out()
    return faults
