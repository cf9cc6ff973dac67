"""All cases: ``python -m tests.robust [PART of a name]``; prints what was asked and measured."""

import sys
import tempfile
import time
from pathlib import Path

from tests.robust.rule import violations
from tests.robust.runner import preload
from tests.robust.table import table


def main() -> int:
    """Run the cases whose names hold a text; 1 if one breaks the rule."""
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [case for case in table() if part in case.name]
    preload("torch")
    begin, broken = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(chosen, 1):
            wrong = violations(case, Path(scratch) / "case")
            broken += bool(wrong)
            for fault in wrong:
                print(f"{number} {case.name}: {fault}", flush=True)
    seconds = time.monotonic() - begin
    print("| asked | measured |\n|---|---|")
    print(
        "| at least 600 cases, each one line, at most 10 s of CPU and 2 GB, nothing touched "
        f"| {len(chosen)} cases, {broken} break the rule, {seconds:.0f} s |"
    )
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
