"""Which unit of work is next in the time there is, and the worker process that does it.

Units stand in the order of their worth. A unit may have a short form: the short forms of all units
that fit come before the long form of any whose time they would need. What is left is planned anew
after each unit, by how long those before it took on this machine.
"""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Literal

from kvsim.frozen import frozen
from kvsim.validate.session.state import COMPILED, SessionState

Form = Literal["short", "long"]
Say = Callable[[str], None]

GIVEN_UP = 2  # times that a unit may fail before it is left alone
LOST = 3  # units that fail one after another for the same reason: no other is tried
RESERVE = 2.0  # for ending a unit and saying what is left [s]
END = 1.0  # a worker that is told to end has this long [s]
PACE = (0.2, 5.0)
"""Least and most that the time of units on this machine corrects the estimates of others."""
RETRY_FACTOR = 1.5
"""What a unit that was ended early needs at least, over the time that it was given."""
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


@frozen
class Unit:
    """A piece of work, whose worker writes the result itself before it says that it is done."""

    name: str
    seconds: float  # estimate of its long form, or of the only one [s]
    short: float | None = None  # estimate of its short form, if it has one [s]
    needs: tuple[str, ...] = ()  # units before it
    most: float = 600.0  # longer than this it has failed [s]
    resumes: bool = False  # keeps what it has when it is ended, and goes on from there

    def is_complete(self, state: SessionState) -> bool:
        """Tell whether nothing more can be found out by it."""
        if state.read(self.name) is None:
            return False
        return self.short is None or state.notes().get(self.name, {}).get("form") == "long"


@frozen
class Left:
    """A unit that is not done, and why."""

    unit: Unit
    reason: str


@frozen
class Chosen:
    """A unit that is next, and in which form."""

    unit: Unit
    form: Form
    seconds: float  # estimate on this machine [s]


def estimate(unit: Unit, form: Form, state: SessionState, pace: float = 1.0) -> float:
    """Estimate how long a unit takes.

    Parameters
    ----------
    form
        Its short or its long form.
    pace
        Time of other units on this machine over their estimates.

    Returns
    -------
    float
        Time; longer than it was given where it was ended early. [s]
    """
    stated = unit.short if form == "short" and unit.short is not None else unit.seconds
    ended = float(state.notes().get(unit.name, {}).get(f"{form}_ended_after_s", 0.0))
    return max(pace * stated, RETRY_FACTOR * ended)


def measure_pace(unit: Unit, units: Sequence[Unit], state: SessionState) -> float:
    """Compare the time that units took on this machine with their estimates.

    Returns
    -------
    float
        Median ratio of the units of the same kind, within ``PACE``; where none is done, that of
        all others if they took longer than estimated, else 1.
    """
    ratios: dict[bool, list[float]] = {True: [], False: []}
    notes = state.notes()
    for other in units:
        note = notes.get(other.name, {})
        if "took_s" in note:
            same = other.name.split()[0] == unit.name.split()[0]
            ratio = float(note["took_s"]) / estimate(other, note["form"], state)
            ratios[same].append(min(max(ratio, PACE[0]), PACE[1]))
    if ratios[True]:
        return median(ratios[True])
    return max(1.0, median(ratios[False])) if ratios[False] else 1.0


def choose(
    units: Sequence[Unit], state: SessionState, seconds: float, passed: Sequence[str] = ()
) -> Chosen | None:
    """Choose what is done next.

    Parameters
    ----------
    units
        All units in the order of their worth.
    passed
        Names of units that are not tried again now.

    Returns
    -------
    Chosen or None
        The first unit of a plan that fits the time; None where nothing fits.
    """
    budget = seconds

    def expect(unit: Unit, form: Form) -> float:
        return estimate(unit, form, state, measure_pace(unit, units, state))

    open_ = [u for u in units if u.name not in passed and state.failures(u.name) < GIVEN_UP]
    planned: list[Chosen] = []
    coming = {u.name for u in units if state.read(u.name) is not None}
    for unit in open_:  # first of every unit as little as tells something
        if unit.name in coming or not set(unit.needs) <= coming:
            continue
        form: Form = "long" if unit.short is None else "short"
        needed = expect(unit, form)
        if needed <= budget or (unit.resumes and budget > END):
            planned.append(Chosen(unit, form, needed))
            coming.add(unit.name)
            budget -= needed
    for i, chosen in enumerate(planned):  # then more of those that are worth most
        if chosen.form == "short" and not state.failures(chosen.unit.name):
            needed = expect(chosen.unit, "long")
            if needed - chosen.seconds <= budget:
                budget -= needed - chosen.seconds
                planned[i] = Chosen(chosen.unit, "long", needed)
    if planned:
        return planned[0]
    for unit in open_:
        if unit.name in coming and not unit.is_complete(state):
            needed = expect(unit, "long")
            if needed <= budget:
                return Chosen(unit, "long", needed)
    return None


def run_units(
    units: Sequence[Unit],
    state: SessionState,
    seconds: float,
    say: Say,
    worker: Sequence[str],
    keep: Callable[[], None] = lambda: None,
) -> list[Left]:
    """Do what fits the time.

    Parameters
    ----------
    units
        All units in the order of their worth.
    say
        Told what runs, and what is left when.
    worker
        Command of a process that does units; see ``kvsim.validate.session.work``.
    keep
        Called after every unit, to pack the results.
    """
    deadline = monotonic() + seconds - RESERVE
    reasons: dict[str, str] = {}
    last = ""
    alike: list[str] = []  # units that failed one after another for the same reason
    with Worker(worker, state) as process:
        while chosen := choose(units, state, deadline - monotonic(), list(reasons)):
            unit, left = chosen.unit, deadline - monotonic()
            done = sum(state.read(u.name) is not None for u in units)
            say(
                f"{unit.name} ({chosen.form}): about {chosen.seconds:.0f} s; "
                f"{done} of {len(units)} done, {left:.0f} s left"
            )
            reason = _run(chosen, state, process, min(left, unit.most), left >= unit.most)
            same = reason.startswith("failed") and alike and reason == last
            alike = [*alike, unit.name] if same else [unit.name] if reason else []
            last = reason
            if reason:
                say(f"{unit.name}: {reason}")
                if state.failures(unit.name) != 1:  # one that failed once is tried once more
                    reasons[unit.name] = reason
            if len(set(alike)) == LOST:
                for name in set(alike):  # it is the device's fault: another may do them
                    state.note(name, failures=0)
                say(f"{LOST} units in a row {reason}: the device may be lost; it ends here")
                keep()
                break
            keep()
    return [Left(u, _reason(u, state, reasons)) for u in units if state.read(u.name) is None]


def _reason(unit: Unit, state: SessionState, reasons: dict[str, str]) -> str:
    if unit.name in reasons:
        return reasons[unit.name]
    if state.failures(unit.name) >= GIVEN_UP:
        return f"failed {GIVEN_UP} times: {state.notes()[unit.name].get('error', '')}"
    missing = [name for name in unit.needs if state.read(name) is None]
    return f"needs {', '.join(missing)}" if missing else "no time left"


def _run(chosen: Chosen, state: SessionState, process: "Worker", limit: float, whole: bool) -> str:
    """Do one unit; why it is not done, or nothing.

    Parameters
    ----------
    whole
        Whether this is all that a unit may ever take, so that one that takes longer has failed.
    """
    unit, begin = chosen.unit, monotonic()
    error = process.do(unit.name, chosen.form, limit)
    took = monotonic() - begin
    if not error:
        if state.read(unit.name) is not None:
            state.note(unit.name, form=chosen.form, took_s=round(took, 2))
            return ""
        error = "nothing was written"
    if error == LATE and not whole:
        if not unit.resumes:
            state.note(unit.name, **{f"{chosen.form}_ended_after_s": took})
        return "ended, as time is up"
    error = f"took more than {limit:.0f} s" if error == LATE else error
    state.note(unit.name, failures=state.failures(unit.name) + 1, error=error)
    return f"failed: {error}"


LATE = "late"


class Worker:
    """A process that has imported PyTorch and does one unit after another.

    It is started when it is needed, and anew after a unit has ended it. The session itself never
    touches the GPU, so that no fault of a kernel reaches it.
    """

    def __init__(self, command: Sequence[str], state: SessionState) -> None:
        self._command, self._state = tuple(command), state
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def do(self, unit: str, form: Form, limit: float) -> str:
        """Do a unit.

        Returns
        -------
        str
            Why it is not done; ``LATE`` if it took too long; empty if it is done.
        """
        process = self._started()
        log = self._log(unit)
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"unit": unit, "form": form, "log": str(log)}).encode())
            process.stdin.write(b"\n")
            process.stdin.flush()
            answer = self._answer(process, limit)
        except BrokenPipeError:
            answer = b""
        except BaseException:
            self.end()
            raise
        if answer is None:
            self.end()
            return LATE
        if not answer.endswith(b"\n"):
            code = process.wait()
            self.end()
            return f"exit code {code}, {_last_line(log)}"
        error = str(json.loads(answer)["error"])
        if error:
            self.end()  # a GPU may be left with a fault: the next unit has a new process
        return error

    def end(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            compiled = self._state.path(COMPILED)
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "TRITON_CACHE_DIR": str(compiled)},
                preexec_fn=die_with_parent,
            )
        return self._process

    def _answer(self, process: "subprocess.Popen[bytes]", limit: float) -> bytes | None:
        """Wait for a line; what came where the process has ended, None where time is up."""
        assert process.stdout is not None
        deadline, said = monotonic() + limit, b""
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while not said.endswith(b"\n"):
                if not ready.select(max(0.0, deadline - monotonic())):
                    return None
                more = os.read(process.stdout.fileno(), 2**16)
                if not more:
                    break
                said += more
        return said

    def _log(self, unit: str) -> Path:
        return self._state.path("_".join(unit.replace("/", " ").split()) + ".log")


def die_with_parent() -> None:
    """End this process when its parent is gone; for ``preexec_fn``."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:160] if lines else "nothing said"


def serve(do: Callable[[str, Form], None]) -> None:
    """Do the units that are asked for, in the worker's process.

    Standard output carries the answers alone; what units print goes to their logs.

    Parameters
    ----------
    do
        Does a unit and keeps its result.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    asked: Iterator[str] = iter(sys.stdin.readline, "")
    for line in asked:
        order = json.loads(line)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        error = ""
        try:
            do(order["unit"], order["form"])
        except (Exception, SystemExit) as problem:
            import traceback

            traceback.print_exc()
            error = f"{type(problem).__name__}: {problem}".splitlines()[0][:160]
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        answers.write(json.dumps({"error": error}) + "\n")
