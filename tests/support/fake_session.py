"""``make.py gpu`` with its own list of units and fake work, to be stopped; run by ``test_session``.

Every unit takes a few hundredths of a second; some fail at first, and one never ends.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from kvsim.cli import session as command
from kvsim.validate.session import run
from kvsim.validate.session.run import SessionState, Unit, all_units

HANGS, FAILS = "sanitizer", "kernels topk"
WORK = """
import os, sys, time
place, seconds, fate = sys.argv[1:]
folder, name = os.path.split(place)
log = open(os.path.join(folder, "runs"), "a")
log.write(name + " begun\\n"); log.flush()
time.sleep(float(seconds))
if fate == "fails" and not os.path.exists(place + ".tried"):
    open(place + ".tried", "w").close()
    sys.exit("out of resources")
if fate == "hangs":
    time.sleep(600)
open(place + ".draft", "w").write('{"passed": true}')
os.replace(place + ".draft", place)
log.write(name + " done\\n")
"""


def fake(device: str, state: SessionState) -> Sequence[Unit]:
    """The units of a session, each a few lines of Python."""
    drawn = random.Random(0)
    found = []
    for unit in all_units(device, state):
        seconds = drawn.uniform(0.0, 0.05)
        fate = {HANGS: "hangs", FAILS: "fails"}.get(unit.name, "ends")
        place = str(state._place(unit.name))
        words = (sys.executable, "-S", "-c", WORK, place, f"{seconds:.3f}", fate)
        most = 0.3 if unit.name == HANGS else unit.most
        found.append(replace(unit, command=words, seconds=seconds, most=most))
    return found


def main(folder: Path, seconds: float) -> int:
    """What is not done yet, in so many seconds."""
    asked = ["--device", "cpu", "--minutes", str(seconds / 60), "--state", str(folder / "state")]
    with (
        patch.object(command, "all_units", fake),
        patch.object(run, "RESERVE", 0.2),
        patch.object(run, "END", 0.1),
        patch.object(sys, "argv", ["make.py gpu", *asked, "--out", str(folder / "out")]),
    ):
        return command.main()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
