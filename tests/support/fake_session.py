"""A session of six short units, to be killed; run by ``test_session``."""

import sys
from pathlib import Path

from kvsim.validate.session.run import Unit, run_units
from kvsim.validate.session.state import SessionState

WORK = """
import os, sys, time
folder, name = sys.argv[1:3]
time.sleep(0.15)
with open(os.path.join(folder, "runs"), "a") as file:
    file.write(name + "\\n")
place = os.path.join(folder, "fake", name + ".json")
open(place + ".draft", "w").write("{}")
os.replace(place + ".draft", place)
"""


def main(folder: Path) -> int:
    """Run what is not done yet."""
    state = SessionState.of(folder, "fake")
    units = [
        Unit(f"unit{n}", 0.1, (sys.executable, "-S", "-c", WORK, str(folder), f"unit{n}"))
        for n in range(6)
    ]
    with state.alone():
        return int(bool(run_units(units, state, 60.0, lambda text: None)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
