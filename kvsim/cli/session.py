"""The command behind ``make.py gpu``."""

import argparse
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path
from shlex import quote

from kvsim.errors import InputError
from kvsim.files import TOML_PROFILE, read_text, replace_text
from kvsim.report.session import make_result
from kvsim.validate.runner import Unit
from kvsim.validate.session.queue import run_units
from kvsim.validate.session.state import SessionState, unpack
from kvsim.validate.session.work import REPOSITORY, all_units, profile_of

ASK_NAME = """
import sys
try:
    import torch
except ImportError:
    sys.exit("there is no PyTorch here; run it with the Python that has it")
try:
    print(torch.cuda.get_device_name(torch.device(sys.argv[1])))
except (RuntimeError, AssertionError) as problem:
    sys.exit(f"--device: {sys.argv[1]} does not answer ({str(problem).splitlines()[0][:100]})")
"""
"""Asked in a process of its own, as the session itself never touches the GPU."""


def main() -> int:
    """Run the units that fit in the time; returns 1 after a failure, 2 for bad input."""
    parser = argparse.ArgumentParser("make.py gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="what it may take")
    parser.add_argument(
        "--state", type=Path, default=REPOSITORY / ".gpu", help="where it continues from"
    )
    parser.add_argument("--out", type=Path, help="page, profile and stack; results/DEVICE/DATE")
    parser.add_argument("--bundle", type=Path, help="all results in one .tar.gz after every unit")
    parser.add_argument("--resume", type=Path, help="a bundle to continue from")
    parser.add_argument("--device", default="cuda:0", help="cuda:N; cpu rehearses the path")
    parser.add_argument("--report", action="store_true", help="write the report and run nothing")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _session(asked)
    except InputError as problem:
        print(f"make.py gpu: {problem}", file=sys.stderr)
        return 2


def _session(asked: argparse.Namespace) -> int:
    if not 0 < asked.minutes <= 24 * 60:
        raise InputError(f"--minutes: got {asked.minutes:g}; expected 0 to 1440")
    if asked.bundle is not None and not asked.bundle.name.endswith(".tar.gz"):
        raise InputError(f"--bundle: got {asked.bundle.name!r}; expected a name in .tar.gz")
    carried = unpack(asked.resume, asked.state) if asked.resume is not None else None
    if asked.report:
        state = carried or SessionState.open(asked.state, _name(asked.device))
    else:
        state = SessionState.open(asked.state, _name(asked.device))
        if carried is not None and carried.folder != state.folder:
            raise InputError(
                f"--resume: {asked.resume} belongs to {carried.folder.name}, not to "
                f"{state.folder.name}; omit the option to start again"
            )
    units = all_units(asked.device)
    if asked.report:
        _report(asked, state, units)
        return 0
    stopped = False
    with state.lock():
        try:
            left = run_units(
                units,
                state,
                60 * asked.minutes,
                _log,
                _worker(asked.device, state),
                lambda: _pack(asked.bundle, state),
            )
        except KeyboardInterrupt:
            left, stopped = [], True
    past = state.past(units)
    done = sum(one.form is not None for one in past.values())
    short = done - sum(unit.is_complete(past[unit.name]) for unit in units)
    more = f", {short} of them in their short form" if short else ""
    _log(
        f"{done} of {len(units)} units are done{more}"
        + ("; run it again to continue" if done < len(units) or short else "")
    )
    _report(asked, state, units)
    failed = any(one.reason.startswith("failed") for one in left)
    return 130 if stopped else int(failed)


def _worker(device: str, state: SessionState) -> list[str]:
    return [sys.executable, "-m", "kvsim.validate.session.work", device, str(state.folder)]


def _pack(bundle: Path | None, state: SessionState) -> None:
    if bundle is None:
        return
    try:
        left_out = state.pack(bundle)
    except InputError as problem:  # the one before stays, and so does what it would hold
        _log(f"{problem}; results are in {state.folder}")
        return
    if left_out:
        _log(f"{bundle}: no room for {len(left_out)} files, among them {left_out[0]}")


def _report(asked: argparse.Namespace, state: SessionState, units: list[Unit]) -> None:
    place = REPOSITORY / "results" / state.folder.name / str(date.today())
    where = asked.out or place
    where.mkdir(parents=True, exist_ok=True)
    if profile := profile_of(state):
        for ending in (".toml", ".stack.toml"):
            text = read_text(profile.with_suffix(ending), TOML_PROFILE)
            replace_text(where / f"profile{ending}", text)
    command = f"python3 make.py gpu --device {quote(asked.device)}"
    make_result(state, units, command).write(where / "index.html")
    _pack(asked.bundle, state)
    _log(f"{where / 'index.html'} shows what was found")


def _name(device: str) -> str:
    """Ask the driver for the name of a device."""
    if device == "cpu":
        return device
    asked = subprocess.run(
        [sys.executable, "-c", ASK_NAME, device], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        lines = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        raise InputError(lines[-1][:200])
    return asked.stdout.strip()


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
