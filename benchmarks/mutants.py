"""Mutation testing: small changes of the core's arithmetic, and whether the tests notice them.

Usage: python benchmarks/mutants.py [--count N] [--seed N] [--room NAME] [--keep FILE]; by default
300 over all rooms. Every mutant is one operator, comparison, constant or sign changed. The tests
are collected once; the first run sees which functions each of them calls, so that a mutant meets
only tests that run it, the quickest first, in a forked child. With --keep the results are added to
a file and a run goes on where it was; --again tries survivors once more, with slower tests too.
Prints each survivor that EXPLAINED does not list, then what was asked against what was measured.

The serving room's compiled functions run as plain Python.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ORACLES = tuple(
    f"tests/techniques/test_{name}.py"
    for name in ("settings", "more_techniques", "preset_oracles", "layer_kinds",
                 "technique_oracles", "recompute", "limits")
)  # fmt: skip
FROZEN = tuple(f"tests/frozen/test_{name}.py" for name in ("frozen", "parts", "plans"))
SERVING = tuple(f"tests/serving/test_{name}.py" for name in ("lanes", "tiers"))
PLANS = tuple(f"tests/planner/test_{name}.py" for name in ("fleet_programme", "flips"))
CORE = (*FROZEN, *ORACLES, "tests/engine", "tests/prediction", *PLANS)
ALL_CORE = (*FROZEN, "tests/techniques", "tests/engine", "tests/prediction", "tests/planner")
RUNS = ("tests/frozen/test_runs.py", *SERVING)
ALL_RUNS = (RUNS[0], "tests/serving")
ROOMS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "techniques": ("kvsim/techniques", CORE, ALL_CORE),
    "engine": ("kvsim/engine", CORE, ALL_CORE),
    "prediction": ("kvsim/prediction", CORE, ALL_CORE),
    "planner": ("planner", CORE, ALL_CORE),
    "serving": ("kvsim/serving", RUNS, ALL_RUNS),
}
"""Sources of a room, the quick tests that may notice a change of them, and all of them."""
EXPLAINED: dict[str, str] = {}
"""Survivors that no test can notice, by name, and why."""


def tried_in_a_child(rooms: dict[str, Any], given: argparse.Namespace, keep: Path) -> None:
    """Try mutants of rooms with the same tests; their outcomes are added to a file."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.environ["KVSIM_FROZEN"] = "parts"
    if "serving" in rooms:
        os.environ["NUMBA_DISABLE_JIT"] = "1"
    import pytest

    from tests.robust.mutation.changes import Mutant, drawn
    from tests.robust.mutation.session import QUIET, Outcome, Session

    done = {row["mutant"]: row["killed"] for row in rows(keep)}
    each = -(-given.count // len(ROOMS))
    columns = [drawn(ROOT / folder, each, given.seed) for folder, _, _ in rooms.values()]
    waiting = [
        column[i]
        for i in range(each)
        for column in columns
        if i < len(column) and not done.get(column[i].name, False)
        and (given.again or column[i].name not in done)
    ]  # fmt: skip

    def write(mutant: Mutant, outcome: Outcome) -> None:
        row = {"mutant": mutant.name, "line": mutant.line, "killed": outcome.killed,
               "by": outcome.by, "tried": outcome.tried}  # fmt: skip
        with keep.open("a") as file:
            file.write(json.dumps(row) + "\n")

    tests = next(iter(rooms.values()))[2 if given.again else 1]
    calls = keep.with_suffix(f".{Path(tests[0]).stem}.calls.json")
    code = pytest.main([*QUIET, *tests], plugins=[Session(waiting, calls, write)])
    sys.exit(int(code))


def rows(keep: Path) -> list[dict[str, Any]]:
    """What a file has; the last outcome of a mutant counts."""
    lines = keep.read_text().splitlines() if keep.exists() else []
    return list({row["mutant"]: row for row in map(json.loads, lines)}.values())


def main() -> None:
    """Draw mutants, run them, print the survivors."""
    options = argparse.ArgumentParser(description="Whether tests notice changed arithmetic.")
    options.add_argument("--count", type=int, default=300, help="mutants")
    options.add_argument("--seed", type=int, default=0, help="of the draw")
    options.add_argument("--room", default="", choices=["", *ROOMS], help="only this one")
    options.add_argument("--keep", type=Path, help="results are added to this file, and not redone")
    options.add_argument("--again", action="store_true", help="try survivors that were kept again")
    given = options.parse_args()
    keep = (given.keep or Path("mutants.jsonl")).resolve()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    begin = time.monotonic()
    chosen = {name: room for name, room in ROOMS.items() if given.room in ("", name)}
    for tests in dict.fromkeys(room[1] for room in chosen.values()):
        some = {name: room for name, room in chosen.items() if room[1] == tests}
        tried_in_a_child(some, given, keep)
    from tests.robust.mutation.changes import drawn

    each, found, explained, killed = -(-given.count // len(ROOMS)), 0, 0, 0
    outcomes = {row["mutant"]: row["killed"] for row in rows(keep)}
    for folder, _, _ in chosen.values():
        for mutant in drawn(ROOT / folder, each, given.seed):
            if mutant.name in outcomes:
                found += 1
                killed += outcomes[mutant.name]
                if not outcomes[mutant.name]:
                    explained += mutant.name in EXPLAINED
                    if mutant.name not in EXPLAINED:
                        print(f"survives: line {mutant.line} of {mutant.name}")
    print("| asked | measured |\n|---|---|")
    counts = f"{killed} of {found}, {explained} more are explained"
    seconds = time.monotonic() - begin
    print(f"| at least 90 % of 300 mutants noticed | {counts}; {seconds:.0f} s |")


if __name__ == "__main__":
    main()
