"""``make.py gpu`` with fake work on a simulated clock, to be cut; run by ``test_session``.

A unit takes about its estimate by a clock that only it moves: half an hour passes in a second. One
unit fails at first and one never ends. The session may be killed at a moment of that clock.
"""

import os
import random
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # this tree's kvsim, whichever is installed
    sys.path.insert(0, str(Path(__file__).parents[2]))

from kvsim.validate import runner
from kvsim.validate.runner import Form
from kvsim.validate.session import queue
from kvsim.validate.session.queue import serve
from kvsim.validate.session.state import SessionState
from kvsim.validate.session.work import all_units

HANGS, FAILS = "sanitizer", "kernels topk"
POLL = 0.002  # [s]
LATE_SHARE = 0.9  # a cut this late in a unit comes when its result is written, but not yet packed


class Clock:
    """A simulated clock in a file that a session and its worker share."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __call__(self) -> float:
        """Tell the time. [s]"""
        return float(self._place.read_text()) if self._place.exists() else 0.0

    def set(self, now: float) -> None:
        """Move it to a moment. [s]"""
        draft = self._place.with_suffix(".draft")
        draft.write_text(repr(now))
        draft.replace(self._place)


def work(folder: Path, clock: Clock, cut: float, number: int, unit: str, form: Form) -> None:
    """Take about as long as a unit is estimated to take, and write its result.

    Parameters
    ----------
    cut, number
        When the session is sent a signal, and which.
    """
    state, log = SessionState(folder), folder / "runs"
    (one,) = (u for u in all_units("cpu") if u.name == unit)
    begin, took = clock(), random.Random(unit + form).uniform(0.5, 1.5) * one.estimate(form)
    took = 1e4 if unit == HANGS else took
    with log.open("a") as file:
        file.write(f"{begin:.3f} {form} {unit} begun\n")
    if unit == FAILS and not state.notes().get(unit, {}).get("failures"):
        raise RuntimeError("out of resources")
    cut_inside = begin <= cut < begin + took
    if cut_inside and cut < begin + LATE_SHARE * took:
        clock.set(cut)
        os.kill(os.getppid(), number)
        time.sleep(600)
    clock.set(begin + took)
    if unit == HANGS:
        time.sleep(600)
    parts: dict[str, list[str]] = {name: [] for name in ("cases", "lines", "found", "left")}
    found = {"hbm_B_per_s": 1.0} if unit == "ceilings" else {"passed": True, **parts}
    state.write(unit, {**found, "form": form, "took_s": round(took, 2)})
    with log.open("a") as file:
        file.write(f"{begin + took:.3f} {form} {unit} done\n")
    if cut_inside:
        os.kill(os.getppid(), number)
        time.sleep(600)


def main() -> int:
    """Do units as a worker, or run a session (FOLDER SECONDS CUT SIGNAL [BUNDLE])."""
    if sys.argv[1] == "--work":
        state, moved, cut, number = sys.argv[2:]
        clock = Clock(Path(moved))
        serve(lambda u, form: work(Path(state), clock, float(cut), int(number), u, form))
        return 0
    from kvsim.cli import session as command

    folder, seconds, cut, number, *resumed = sys.argv[1:]
    place = Path(folder)
    clock = Clock(place / "clock")
    asked = ["--device", "cpu", "--minutes", str(float(seconds) / 60), "--out", str(place / "out")]
    asked += ["--state", str(place / "state"), "--bundle", str(place / "bundle.tar.gz")]
    asked += ["--resume", resumed[0]] if resumed else []
    worker = [sys.executable, "-I", __file__, "--work"]
    more = [str(place / "clock"), cut, number]

    class Selector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            end = clock() + (timeout or 0.0)
            while not (ready := super().select(POLL)) and clock() < end:
                pass
            return ready

    with (
        patch.object(command, "_worker", lambda _, state: [*worker, str(state.folder), *more]),
        patch.object(queue, "monotonic", clock),
        patch.object(selectors, "DefaultSelector", Selector),
        patch.object(queue, "END", 0.1),
        patch.object(runner.Runner.__init__, "__defaults__", (float("inf"), None, clock)),
        patch.object(sys, "argv", ["make.py gpu", *asked]),
    ):
        return command.main()


if __name__ == "__main__":
    signal.alarm(300)
    sys.exit(main())
