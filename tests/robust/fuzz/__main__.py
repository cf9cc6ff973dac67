"""All fuzzers: ``python -m tests.robust.fuzz [--minutes N] [--only PART of a name] [--seed N]``.

The minutes are shared by the formats. Every input goes to the reader and, in turns, to the commands
that read it; a fault is printed once, with the smallest input that shows it.
"""

import argparse
import faulthandler
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from tests.robust.fuzz.formats import FORMATS, Format
from tests.robust.fuzz.play import warm_up
from tests.robust.fuzz.search import Found, rounds

WALL = 120.0  # seconds until one input counts as hanging in compiled code
MOST = 8 * 10**9  # memory of this process [B]


def fuzz(name: str, kind: Format, seconds: float, seed: int, folder: Path) -> Found:
    """Rounds of new inputs until the time is over; what they found is printed."""
    faulthandler.dump_traceback_later(WALL + seconds, exit=True)
    found = rounds(kind, seconds, seed, folder / "in")
    faulthandler.cancel_dump_traceback_later()
    for place, (fault, content) in found.faults.items():
        print(f"{name}: {place}\n  {fault}\n  input: {content[:300]!r}", flush=True)
    return found


def main() -> int:
    """Try the formats; 1 if one breaks the rule."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--minutes", type=float, default=10.0, help="for all formats together")
    options.add_argument("--only", default="", help="formats whose name holds this")
    options.add_argument("--seed", type=int, default=int(time.time()), help="of the inputs")
    given = options.parse_args()
    chosen = {name: kind for name, kind in FORMATS.items() if given.only in name}
    if not chosen:
        known = ", ".join(FORMATS)
        sys.exit(f"--only: no format has {given.only!r} in its name; there are {known}")
    resource.setrlimit(resource.RLIMIT_DATA, (MOST, MOST))
    rows, broken = [], 0
    warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        for name, kind in chosen.items():
            begin = time.process_time()
            found = fuzz(name, kind, 60 * given.minutes / len(chosen), given.seed, Path(scratch))
            broken += len(found.faults)
            spent = time.process_time() - begin
            counts = f"{found.inputs:,} inputs, {found.accepted:,} of them sound"
            rows.append(f"| {name} | {counts}, {len(found.faults)} faults, {spent:.0f} s of CPU |")
    print("| no traceback, hang or 2 GB more, by format | measured |\n|---|---|")
    print("\n".join(rows))
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
