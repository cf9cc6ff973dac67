"""A session's units: what there is, what is done, and which are run in the time there is.

A unit is a process of its own with a deadline, whose result is one file, whole or not there. One
that crashes, hangs or is killed ends no other one. One that does not fit the time left is passed
over for those that do.
"""

import ctypes
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from kvsim.errors import InputError
from kvsim.frozen import frozen

GIVEN_UP = 2  # times that a unit may fail before it is left alone


@frozen
class SessionState:
    """A folder of results of one kind of device."""

    folder: Path

    @classmethod
    def open(cls, folder: Path, device: str) -> "SessionState":
        """The results of a kind of device, by its name; made if it is not there."""
        place = folder / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        place.mkdir(parents=True, exist_ok=True)
        return cls(place)

    def path(self, name: str) -> Path:
        """A file of the session beside the units' results."""
        return self.folder / name

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Refuse a second session in the same folder.

        Raises
        ------
        InputError
            If one runs.
        """
        with (self.folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"--state: a session runs in {self.folder}; wait for it") from None
            yield

    def write(self, unit: str, result: Mapping[str, Any]) -> None:
        """Keep a unit's result; on disk when this returns."""
        place = self._place(unit)
        draft = place.with_name(f".{place.name}.{os.getpid()}")
        with draft.open("w", encoding="utf-8") as file:
            json.dump(result, file, indent=1, default=str)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(place)

    def read(self, unit: str) -> dict[str, Any] | None:
        """A unit's result, if it is done."""
        try:
            found: dict[str, Any] = json.loads(self._place(unit).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return found

    def note(self, unit: str, **changes: Any) -> None:
        """Remember how a unit that is not done went: time it took, failures."""
        known = self.notes()
        known[unit] = known.get(unit, {}) | changes
        SessionState.write(self, "notes", known)

    def notes(self) -> dict[str, dict[str, Any]]:
        """What is remembered, by unit."""
        return self.read("notes") or {}

    def failures(self, unit: str) -> int:
        """How often a unit has failed."""
        return int(self.notes().get(unit, {}).get("failures", 0))

    def _place(self, unit: str) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9.=_-]+', '_', unit)}.json"


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


ORACLE_KERNELS = ("attention", "factors", "quantise", "topk", "gather", "lanes")
COUNTED = (("smollm2-135m", 0), ("llama2-7b", 2))
"""Models, and the layers they are cut to (0: all)."""
TIMED = (("smollm2-135m", 0), ("llama2-7b", 4))
SHORT_SIZES = ((1, 1024), (8, 1024), (1, 8192), (8, 8192), (64, 1024))
"""Batches and prompts that every technique runs."""
LONG = ((1, 65536), (64, 8192), (8, 65536))
REPOSITORY = Path(__file__).resolve().parents[3]
LONG_TECHNIQUES = ("full", "kivi", "quantspec", "specache:k=64")
POINT_LIMIT = 90.0  # of one timed point [s]
POINT_START = 20.0  # PyTorch, weights, kernels that are compiled [s]
FULL_POINT = 65536  # tokens of a batch's prompts for which a point may take all of its time


def all_units(device: str, state: SessionState) -> list[Unit]:
    """Facts and ceilings, kernels, tokens and counts, calibration, timed points, rates."""

    def unit(name: str, seconds: float, **more: object) -> Unit:
        command = (sys.executable, "-m", "kvsim.validate.session.work", name, device)
        return Unit(name, seconds, (*command, str(state.folder)), **more)  # type: ignore[arg-type]

    return [
        unit("facts", 10.0),
        unit("ceilings", 20.0),
        unit("compile", 40.0),
        *(unit(f"kernels {name}", 30.0) for name in ORACLE_KERNELS),
        unit("sanitizer", 60.0, most=180.0),
        *(unit(f"counts {model} {layers}", 60.0) for model, layers in COUNTED),
        unit("calibration", 60.0, most=1200.0, goes_on=True),
        *(
            unit(name, seconds, most=POINT_LIMIT, needs=("calibration",))
            for name, seconds in _points()
        ),
        unit("rates", 60.0, most=180.0, needs=("ceilings",)),
    ]


def _points() -> Iterator[tuple[str, float]]:
    for kind, sizes in (("short", SHORT_SIZES), ("long", LONG)):
        for batch, prompt in sizes:
            share = min(1.0, batch * prompt / FULL_POINT)
            for model, layers in TIMED:
                seconds = POINT_START + (POINT_LIMIT - POINT_START - 10) * share
                yield f"point {kind} {model} {layers} {batch} {prompt}", seconds
