"""Mutation testing: small changes of the core's arithmetic, and whether the tests notice them.

Usage: python -m benchmarks.mutants [--count N] [--seed N] [--room NAME...] [--keep FILE] [--again]
[--slow]; by default 300 over all rooms. Every mutant is one change by one of two generators, in
turns; see tests/robust/mutation/changes.py. The tests are collected once; the first run sees which
functions each of them calls, so that a mutant meets only tests that run it, the quickest first, in
a forked child. Before them a function of each room is made to raise; unless tests notice that, the
run fails. Results are added to build/mutants/mutants.jsonl, or the file of --keep, and a run goes
on where it was; --again tries survivors once more, --slow with slower tests too. Prints each
survivor that EXPLAINED does not list, then what was asked against what was measured.

The serving room's compiled functions run as plain Python, but for the files that compile them.
"""

import argparse
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.robust.mutation.changes import Mutant

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "build" / "mutants"


def quick_tests(folder: str, *slow: str) -> tuple[str, ...]:
    """Return the test files of a folder but for those that take too long to be traced."""
    files = {path.stem.removeprefix("test_") for path in (ROOT / folder).glob("test_*.py")}
    if not files.issuperset(slow):
        raise ValueError(f"{folder}: no tests of {', '.join(sorted(set(slow) - files))}")
    return tuple(f"{folder}/test_{name}.py" for name in sorted(files.difference(slow)))


FROZEN = "tests/frozen/test_frozen.py"
SLOW_ANSWERS = r"test_frozen\.py::.*\[(plans|simulations|capacity|reproduced|runs)/"
SLOW_RUNS = r"test_frozen\.py::.*\[(passes|runs|programmes)/"
"""Frozen answers that tests of a room leave out: of whole commands, and what commands rest on."""
CORE = (
    FROZEN,
    *quick_tests("tests/techniques", "compositions", "contract", "one_paper", "shares"),
    "tests/techniques/test_compositions.py::test_bad_notation_is_one_line_with_its_column",
    *quick_tests("tests/engine"),
    *quick_tests("tests/prediction"),
)
PLANS = (
    FROZEN,
    *quick_tests("tests/planner", "planner"),
)
RUNS = (
    FROZEN,
    *quick_tests("tests/serving", "core", "serving", "spread"),
    "tests/serving/test_serving.py::test_every_request_has_the_times_of_the_plain_simulator",
    "tests/serving/test_serving.py::test_a_round_of_many_tokens_can_be_drawn_or_taken_at_its_mean",
)
COMPILER = ("core.py",)
"""Files of the serving room that make machine code of the others, as functions of KINDS do."""
KINDS = "kinds_of"
MACHINE_CODE = ("tests/serving/test_core.py",)
DATA = (
    *(t for room in ("models", "machines", "quality") for t in quick_tests(f"tests/{room}")),
    *quick_tests("tests/traces", "production"),
    *quick_tests("tests/evidence", "calibrate"),
    *quick_tests("tests/emit"),
    *quick_tests("tests/report", "every_page", "pages"),
    *quick_tests("tests/sweep"),
    "tests/cli/test_validate_plan.py",
)
"""Tests of the rooms of data and of what is shown; few of them take long."""
FLEETS = (*quick_tests("tests/planner", "planner"), *DATA)
COMMANDS = (
    FROZEN,
    "tests/test_api.py",
    "tests/validate/test_session.py",
    *quick_tests("tests/cli", "calibrate_machine"),
    *quick_tests("tests/report", "every_page", "explore", "pages"),
    "tests/docs/test_blocks.py",
)
"""Tests of commands, of what is shown, and of what the documentation prints."""
REAL = quick_tests(
    "tests/validate", "any_cpu", "impl_composed", "impl_lossless", "impl_overlap", "kernels_triton",
    "launches", "pretended_units", "session", "smollm2",
)  # fmt: skip
ROOMS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    **{
        room: (f"kvsim/{room}", DATA, (f"tests/{room}",))
        for room in ("models", "machines", "traces", "quality", "evidence", "emit")
    },
    "sweeps": ("kvsim/sweeps", DATA, ("tests/sweep",)),
    "fleet": ("kvsim/planner/fleet", FLEETS, ("tests/planner",)),
    "techniques": ("kvsim/techniques", CORE, ("tests/techniques",)),
    "engine": ("kvsim/engine", CORE, ("tests/techniques",)),
    "prediction": ("kvsim/prediction", CORE, ("tests/planner",)),
    "planner": ("kvsim/planner", PLANS, ("tests/planner",)),
    "serving": ("kvsim/serving", RUNS, ("tests/serving",)),
    "api": ("kvsim/api", COMMANDS, ("tests/cli",)),
    "report": ("kvsim/report", COMMANDS, ("tests/report",)),
    "cli": ("kvsim/cli", COMMANDS, ("tests/cli",)),
    "validate": ("kvsim/validate", REAL, ("tests/validate",)),
}
"""Sources of a room, the quick tests that may notice a change of them, and further ones."""
EXPLAINED: dict[str, str] = tomllib.loads(
    (ROOT / "tests" / "robust" / "mutation" / "explained.toml").read_text(encoding="utf-8")
)
"""Survivors that no test can notice, by name, and why."""


def sources_of(folder: str) -> list[Path]:
    """Return a room's modules without those of a room within it."""
    within = [other for other, _, _ in ROOMS.values() if other.startswith(f"{folder}/")]
    return [
        path
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(path.is_relative_to(ROOT / other) for other in within)
    ]


def undrawable(names: Iterable[str]) -> list[str]:
    """Return the names that no change has, as the line of source is another now."""
    from tests.robust.mutation.changes import GENERATORS, mutants

    files = {name.partition(":")[0] for name in names}
    known = {
        mutant.name
        for file in files
        if (ROOT / file).exists()
        for generator in GENERATORS
        for mutant in mutants(ROOT / file, generator)
    }
    return [name for name in names if name not in known]


def existing(tests: Iterable[str]) -> list[str]:
    """Return the tests whose files are there; the others are named on standard error."""
    found = []
    for test in tests:
        if (ROOT / test.partition("::")[0]).exists():
            found.append(test)
        else:
            print(f"mutants: there is no {test}", file=sys.stderr)
    return found


def tried_in_a_child(
    rooms: dict[str, Any], given: argparse.Namespace, keep: Path, compiles: bool = False
) -> None:
    """Try mutants of rooms with the same tests; their outcomes are added to a file."""
    child = os.fork()
    if child:
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(f"mutants of {', '.join(rooms)} were not tried")
        return
    if "serving" in rooms and not compiles:
        os.environ["NUMBA_DISABLE_JIT"] = "1"
    import pytest

    from tests.robust.mutation.changes import Mutant, drawn
    from tests.robust.mutation.session import QUIET, Outcome, Session

    done = {row["mutant"]: row["killed"] for row in rows(keep)}
    each = -(-given.count // len(ROOMS))
    columns = [drawn(sources_of(folder), each, given.seed) for folder, _, _ in rooms.values()]
    waiting = [
        column[i]
        for i in range(each)
        for column in columns
        if i < len(column)
        and not done.get(column[i].name, False)
        and (given.again or column[i].name not in done)
        and _compiles(column[i]) == compiles
    ]

    def write(mutant: Mutant, outcome: Outcome) -> None:
        row = {"mutant": mutant.name, "line": mutant.line, "killed": outcome.killed,
               "by": outcome.by, "tried": outcome.tried}  # fmt: skip
        with keep.open("a") as file:
            file.write(json.dumps(row) + "\n")

    _, quick, further = next(iter(rooms.values()))
    tests = dict.fromkeys((*quick, *further) if given.slow else quick)
    calls = OUTPUT / f"{next(iter(rooms))}.calls.json"
    planted = [folder for folder, _, _ in rooms.values()] if waiting or not compiles else []
    left_out = SLOW_RUNS if quick is COMMANDS else SLOW_ANSWERS
    session = Session(waiting, calls, write, planted, left_out)
    code = pytest.main([*QUIET, *existing(tests)], plugins=[session])
    sys.exit(int(code))


def _compiles(mutant: "Mutant") -> bool:
    """Whether a change is seen only where the serving room is compiled."""
    from tests.robust.mutation.code import touched

    before = mutant.path.read_text(encoding="utf-8")
    names, _ = touched(before, mutant.source, mutant.path)
    return mutant.path.name in COMPILER or any(KINDS in name for name in names)


def rows(keep: Path) -> list[dict[str, Any]]:
    """What a file has; the last outcome of a mutant counts."""
    lines = keep.read_text().splitlines() if keep.exists() else []
    return list({row["mutant"]: row for row in map(json.loads, lines)}.values())


def main() -> None:
    """Draw mutants, run them, print the survivors."""
    options = argparse.ArgumentParser(description="Whether tests notice changed arithmetic.")
    options.add_argument("--count", type=int, default=300, help="mutants")
    options.add_argument("--seed", type=int, default=0, help="of the draw")
    options.add_argument("--room", nargs="*", choices=ROOMS, help="only these")
    options.add_argument("--keep", type=Path, help="results are added to this file, and not redone")
    options.add_argument("--again", action="store_true", help="try survivors that were kept again")
    options.add_argument("--slow", action="store_true", help="with slower tests too")
    given = options.parse_args()
    keep = (given.keep or OUTPUT / "mutants.jsonl").resolve()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    begin = time.monotonic()
    chosen = {name: room for name, room in ROOMS.items() if name in (given.room or ROOMS)}
    for tests in dict.fromkeys(room[1] for room in chosen.values()):
        some = {name: room for name, room in chosen.items() if room[1] == tests}
        tried_in_a_child(some, given, keep)
    if "serving" in chosen:
        machine = {"serving": ("kvsim/serving", MACHINE_CODE, ())}
        tried_in_a_child(machine, given, keep, compiles=True)
    from tests.robust.mutation.changes import drawn

    each, found, explained, killed = -(-given.count // len(ROOMS)), 0, 0, 0
    outcomes = {row["mutant"]: row["killed"] for row in rows(keep)}
    for folder, _, _ in chosen.values():
        for mutant in drawn(sources_of(folder), each, given.seed):
            if mutant.name in outcomes:
                found += 1
                killed += outcomes[mutant.name]
                if not outcomes[mutant.name]:
                    explained += mutant.name in EXPLAINED
                    if mutant.name not in EXPLAINED:
                        print(f"survives: line {mutant.line} of {mutant.name}")
    for name in undrawable(EXPLAINED):
        print(f"explained, but its line is gone: {name}")
    print("| asked | measured |\n|---|---|")
    counts = f"{killed} of {found}, {explained} more are explained"
    seconds = time.monotonic() - begin
    print(f"| at least 95 % of 300 mutants noticed | {counts}; {seconds:.0f} s |")


if __name__ == "__main__":
    main()
