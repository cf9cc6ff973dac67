"""Which units are run in the time there is, each in a process of its own with a deadline.

A unit that crashes, hangs or is killed ends no other one. One that does not fit the time left is
passed over for those that do.
"""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from time import monotonic

from kvsim.frozen import frozen
from kvsim.validate.session.state import GIVEN_UP, SessionState

RESERVE = 2.0  # for ending a unit and saying what is left [s]
END = 1.0  # a unit that is told to end has this long [s]
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux

Say = Callable[[str], None]


@frozen
class Unit:
    """A piece of work; its process writes the result itself before it ends well."""

    name: str
    seconds: float  # estimate [s]
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()  # units before it
    most: float = 600.0  # longer than this it has failed [s]
    goes_on: bool = False  # keeps what it has when it is ended, and takes up from there


@frozen
class Left:
    """A unit that is not done, and why."""

    unit: Unit
    reason: str


def run_units(units: Sequence[Unit], state: SessionState, seconds: float, say: Say) -> list[Left]:
    """Do what fits the time; what is left, and why.

    Parameters
    ----------
    seconds : what all of it may take. [s]
    """
    deadline = monotonic() + seconds - RESERVE
    left = []
    for unit in units:
        if state.read(unit.name) is not None:
            continue
        time = deadline - monotonic()
        reason = _obstacle(unit, state, time)
        if not reason:
            say(f"{unit.name}: about {estimate(unit, state):.0f} s of {time:.0f}")
            reason = _run(unit, state, min(time, unit.most))
        if reason:
            left.append(Left(unit, reason))
            say(f"{unit.name}: {reason}")
    return left


def estimate(unit: Unit, state: SessionState) -> float:
    """Seconds that a unit will take: as stated, or longer if it was ended before. [s]"""
    tried = float(state.notes().get(unit.name, {}).get("ended_after_s", 0.0))
    return max(unit.seconds, 1.5 * tried)


def _obstacle(unit: Unit, state: SessionState, time: float) -> str:
    missing = [name for name in unit.needs if state.read(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if state.failures(unit.name) >= GIVEN_UP:
        return f"failed {GIVEN_UP} times: {state.notes()[unit.name].get('error', '')}"
    needed = 0.0 if unit.goes_on else estimate(unit, state)
    return "no time left" if time < max(needed, END) else ""


def _run(unit: Unit, state: SessionState, limit: float) -> str:
    """Why a unit is not done; empty if it is."""
    begin = monotonic()
    log = state.path(f"{unit.name.replace('/', '_')}.log")
    with log.open("ab") as said:
        process = subprocess.Popen(
            unit.command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            preexec_fn=die_with_parent,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            _end(process)
            code = None
        except BaseException:
            _end(process)
            raise
    if state.read(unit.name) is not None:
        return ""
    took = monotonic() - begin
    if code is None and limit < unit.most:
        if not unit.goes_on:
            state.note(unit.name, ended_after_s=took)
        return "ended, as time is up"
    error = (
        f"took more than {unit.most:.0f} s" if code is None else _last_line(log.read_bytes(), code)
    )
    state.note(unit.name, failures=state.failures(unit.name) + 1, error=error)
    return f"failed: {error}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def die_with_parent() -> None:
    """Nothing goes on with a GPU when the session is gone; for ``preexec_fn``."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)


def _last_line(said: bytes, code: int) -> str:
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return f"exit code {code}, {lines[-1][:160] if lines else 'nothing said'}"
