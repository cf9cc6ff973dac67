"""Running the units of a session in a worker process, which is restarted after a crash."""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from kvsim.frozen import frozen
from kvsim.validate.runner import GIVEN_UP, Chosen, Form, Past, Runner, Unit
from kvsim.validate.session.state import COMPILED, SessionState

Say = Callable[[str], None]

LOST = 3  # units that fail one after another for the same reason: no other is tried
RESERVE = 2.0  # for ending a unit and saying what is left [s]
END = 1.0  # a worker that is told to end has this long [s]
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


@frozen
class Left:
    """A unit that was not done, and the reason."""

    unit: Unit
    reason: str


def run_units(
    units: Sequence[Unit],
    state: SessionState,
    seconds: float,
    say: Say,
    worker: Sequence[str],
    keep: Callable[[], None] = lambda: None,
) -> list[Left]:
    """Run the units that fit in the available time.

    Parameters
    ----------
    say
        Prints progress.
    worker
        Command that starts a worker process; see ``kvsim.validate.session.work``.
    keep
        Called after every unit, to pack the results.
    """
    runner = Runner(units, seconds - RESERVE, state.past(units))
    reasons: dict[str, str] = {}
    last = ""
    alike: list[str] = []  # units that failed one after another for the same reason
    with Worker(worker, state) as process:
        for chosen in runner:
            unit, left = chosen.unit, runner.time_left
            done = sum(past.form is not None for past in runner.past.values())
            say(
                f"{unit.name} ({chosen.form}): about {chosen.seconds:.0f} s; "
                f"{done} of {len(units)} done, {left:.0f} s left"
            )
            reason = _run(chosen, state, process, min(left, unit.most), left >= unit.most)
            runner.past |= state.past([unit])
            same = reason.startswith("failed") and alike and reason == last
            alike = [*alike, unit.name] if same else [unit.name] if reason else []
            last = reason
            if reason:
                say(f"{unit.name}: {reason}")
                if runner.past[unit.name].failures != 1:  # one that failed once is tried once more
                    reasons[unit.name] = reason
                    runner.passed.add(unit.name)
            if len(set(alike)) == LOST:
                for name in set(alike):  # it is the device's fault: another may do them
                    state.note(name, failures=0)
                say(f"{LOST} units in a row {reason}: the device may be lost; it ends here")
                keep()
                break
            keep()
    past = state.past(units)
    return [Left(u, _reason(u, past, reasons, state)) for u in units if not past[u.name].form]


def _reason(
    unit: Unit, past: Mapping[str, Past], reasons: Mapping[str, str], state: SessionState
) -> str:
    if unit.name in reasons:
        return reasons[unit.name]
    if past[unit.name].failures >= GIVEN_UP:
        return f"failed {GIVEN_UP} times: {state.notes()[unit.name].get('error', '')}"
    missing = [name for name in unit.needs if not past[name].form]
    return f"needs {', '.join(missing)}" if missing else "no time left"


def _run(chosen: Chosen, state: SessionState, process: "Worker", limit: float, whole: bool) -> str:
    """Run one unit; return why it is not done, or an empty string.

    Parameters
    ----------
    whole
        Whether this is all that a unit may ever take, so that one that takes longer has failed.
    """
    unit, begin = chosen.unit, monotonic()
    error = process.do(unit.name, chosen.form, limit)
    if not error:
        if state.read(unit.name) is not None:
            return ""
        error = "nothing was written"
    if error == LATE and not whole:
        if not unit.resumes:
            state.note(unit.name, **{f"{chosen.form}_ended_after_s": monotonic() - begin})
        return "ended, as time is up"
    error = f"took more than {limit:.0f} s" if error == LATE else error
    state.note(unit.name, failures=state.past([unit])[unit.name].failures + 1, error=error)
    return f"failed: {error}"


LATE = "late"


class Worker:
    """A process that has imported PyTorch and runs one unit after another.

    It is started when needed, and again after a unit has crashed it. The session itself never uses
    the GPU, so that a faulty kernel cannot affect it.
    """

    def __init__(self, command: Sequence[str], state: SessionState) -> None:
        self._command, self._state = tuple(command), state
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def do(self, unit: str, form: Form, limit: float) -> str:
        """Run a unit.

        Returns
        -------
        str
            Empty if it succeeded, ``LATE`` if it took too long, else the reason of the failure.
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
        """Kill the worker's process, even if it is busy."""
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
        """Wait for a line of output: what came so far if the process ended, None if time is up."""
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
    """Make this process end together with its parent; for ``preexec_fn``."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:160] if lines else "nothing said"


def serve(do: Callable[[str, Form], None]) -> None:
    """Run the requested units, in the worker's process.

    Standard output carries only the answers; the output of units goes to their logs.

    Parameters
    ----------
    do
        Runs a unit and stores its result.
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
