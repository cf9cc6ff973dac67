"""``make.py gpu`` with fake work on a simulated clock, to be cut; run by ``test_session``.

A second of the session's time lasts ``SCALE`` of a real one: half an hour passes in seconds. Units
are those of a session; each takes about its estimate, some fail at first, and one never ends.
"""

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from kvsim.validate.runner import Form, Unit
from kvsim.validate.session import queue
from kvsim.validate.session.queue import serve
from kvsim.validate.session.state import SessionState
from kvsim.validate.session.work import all_units

SCALE = 1 / 1000
HANGS, FAILS = "sanitizer", "kernels topk"


def units(device: str) -> Sequence[Unit]:
    """Return the units of a session, whose estimates are as short as its clock is fast."""
    found = []
    for unit in all_units(device):
        short = None if unit.short is None else SCALE * unit.short
        most = 0.3 if unit.name == HANGS else unit.most
        found.append(replace(unit, seconds=SCALE * unit.seconds, short=short, most=most))
    return found


def work(folder: Path, unit: str, form: Form) -> None:
    """Take about as long as a unit is estimated to take, and write its result."""
    state, log = SessionState(folder), folder / "runs"
    (one,) = (u for u in units("cpu") if u.name == unit)
    stated = one.short if form == "short" and one.short is not None else one.seconds
    with log.open("a") as file:
        file.write(f"{unit} {form} begun\n")
    time.sleep(random.Random(unit).uniform(0.5, 1.5) * stated)
    if unit == HANGS:
        time.sleep(600)
    if unit == FAILS and not (folder / "tried").exists():
        (folder / "tried").touch()
        raise RuntimeError("out of resources")
    state.write(unit, {"passed": True, "size": form, "cases": [], "lines": [], "found": []})
    with log.open("a") as file:
        file.write(f"{unit} {form} done\n")


def main() -> int:
    """Do units as a worker (``--work FOLDER``), or run a session (FOLDER SECONDS [BUNDLE])."""
    if sys.argv[1] == "--work":
        serve(lambda unit, form: work(Path(sys.argv[2]), unit, form))
        return 0
    from kvsim.cli import session as command

    folder, seconds, *resumed = sys.argv[1:]
    place = Path(folder)
    asked = ["--device", "cpu", "--minutes", str(float(seconds) / 60), "--out", str(place / "out")]
    asked += ["--state", str(place / "state"), "--bundle", str(place / "bundle.tar.gz")]
    asked += ["--resume", resumed[0]] if resumed else []
    worker = [sys.executable, "-I", __file__, "--work"]
    with (
        patch.object(command, "all_units", units),
        patch.object(command, "_worker", lambda _, state: [*worker, str(state.folder)]),
        patch.object(queue, "RESERVE", 0.2),
        patch.object(queue, "END", 0.1),
        patch.object(sys, "argv", ["make.py gpu", *asked]),
    ):
        return command.main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(main())
