"""The command behind ``make.py gpu``."""

import argparse
import sys
from datetime import date
from pathlib import Path
from shlex import quote

from kvsim.errors import InputError, first_line
from kvsim.report.session import make_result
from kvsim.validate.session.report import write_report
from kvsim.validate.session.run import REPOSITORY, SessionState, all_units, run_units


def main() -> int:
    """Run what fits, report what there is; 1 if something failed, 2 for bad input."""
    parser = argparse.ArgumentParser("make.py gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="what it may take")
    parser.add_argument(
        "--state", type=Path, default=REPOSITORY / ".gpu", help="where it goes on from"
    )
    parser.add_argument("--out", type=Path, help="the report; validate/results/DEVICE/DATE")
    parser.add_argument("--device", default="cuda:0", help="cuda:N; cpu rehearses the path")
    parser.add_argument("--report", action="store_true", help="write the report and run nothing")
    asked = parser.parse_args()
    try:
        return _session(asked)
    except InputError as problem:
        print(f"make.py gpu: {problem}", file=sys.stderr)
        return 2


def _session(asked: argparse.Namespace) -> int:
    if not 0 < asked.minutes <= 24 * 60:
        raise InputError(f"--minutes: got {asked.minutes:g}; expected 0 to 1440")
    state = SessionState.open(asked.state, _name(asked.device))
    units, failed = all_units(asked.device, state), False
    if not asked.report:
        with state.lock():
            left = run_units(units, state, 60 * asked.minutes, _log)
        done = len(units) - len(left)
        _log(f"{done} of {len(units)} units are done" + ("; run it again to go on" if left else ""))
        failed = any(one.reason.startswith("failed") for one in left)
    where = asked.out or REPOSITORY / "kvsim" / "validate" / "results" / state.folder.name / str(
        date.today()
    )
    files = write_report(state, units, where)
    command = f"python3 make.py gpu --device {quote(asked.device)}"
    make_result(state, units, command).write(where / "index.html")
    _log(f"{len(files) + 1} files in {where}; index.html shows them")
    return int(failed)


def _name(device: str) -> str:
    """Of the device, from its driver."""
    if device == "cpu":
        return device
    try:
        import torch
    except ImportError:
        raise InputError("there is no PyTorch here; run it with the Python that has it") from None
    from kvsim.validate.machine import find_device

    where = find_device(device)
    try:
        return torch.cuda.get_device_name(where)
    except RuntimeError as problem:
        raise InputError(
            f"--device: {device} does not answer ({first_line(problem, 100)})"
        ) from None


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
