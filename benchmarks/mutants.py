"""Mutation testing: small changes of the core's arithmetic, and whether the tests notice them.

Usage: python benchmarks/mutants.py [--count N] [--seed N] [--room NAME] [--keep FILE]; by default
300 over all rooms, about an hour. Every mutant is one operator, comparison, constant or sign
changed. Its tests run in a forked child in which the import of that one module gives the changed
code. With --keep the results are added to a file, and a run goes on where it was. Prints each
survivor that EXPLAINED does not list, then what was asked against what was measured.

The serving room's compiled functions are kept on disk by Numba and would run unchanged, so that
only its plain Python is changed here.
"""

import argparse
import ast
import importlib.machinery
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FROZEN = "tests/frozen/test_frozen.py"
ORACLES = tuple(
    f"tests/techniques/test_{name}.py"
    for name in ("settings", "more_techniques", "preset_oracles", "layer_kinds",
                 "technique_oracles", "recompute", "limits")
)  # fmt: skip
PLANS = ("tests/planner/test_programme.py", "tests/planner/test_planner.py")
ROOMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "techniques": ("kvsim/techniques", (FROZEN, *ORACLES)),
    "engine": ("kvsim/engine", (FROZEN, *ORACLES[1:4], "tests/engine")),
    "prediction": ("kvsim/prediction", (FROZEN, "tests/prediction")),
    "planner": ("planner", PLANS),
    "serving": ("kvsim/serving", ("tests/serving",)),
}
"""Sources of a room, and the tests that should notice, the quickest first."""
EXPLAINED: dict[str, str] = {}
"""Survivors that no test can notice, or should, and why: the changed line of source."""
Room = tuple[str, tuple[str, ...]]
PRELOADED = (
    "hypothesis", "numpy", "pandas", "pulp", "pyarrow.parquet", "pytest", "scipy.optimize",
    "typer", "numba", "plotly.graph_objects",
)  # fmt: skip
SECONDS = 240  # of CPU for one mutant's tests; one that takes longer is noticed
SWAPS: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "*",
    ast.Pow: "*", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=",
    ast.NotEq: "==", ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes
    ----------
    path
        The module.
    line
        Where the change is.
    before, after
        The changed piece of source.
    source
        The whole changed module.
    """

    path: Path
    line: int
    before: str
    after: str
    source: str


def mutants(path: Path) -> Iterator[Mutant]:
    """Every change of one module."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    content = text.encode()

    def place(node: ast.AST, end: bool = False) -> int:
        line, column = ("end_lineno", "end_col_offset") if end else ("lineno", "col_offset")
        return starts[getattr(node, line) - 1] + int(getattr(node, column))

    def change(first: int, last: int, piece: str, line: int) -> Mutant:
        made = (content[:first] + piece.encode() + content[last:]).decode()
        return Mutant(path, line, content[first:last].decode(), piece, made)

    skipped = _docstrings_and_types(ast.parse(text))
    for node in ast.walk(ast.parse(text)):
        if (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)) in skipped:
            continue
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            first, last = place(node.left, True), place(node.right)
            between = content[first:last].decode()
            symbol = between.strip(" ()\n")
            if symbol and "\n" not in between and symbol in ["+", "-", "*", "/", "//", "%", "**"]:
                piece = between.replace(symbol, SWAPS[type(node.op)], 1)
                yield change(first, last, piece, node.lineno)
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            first, last = place(node.left, True), place(node.comparators[0])
            between = content[first:last].decode()
            symbol = between.strip(" ()\n")
            if symbol in ("<", "<=", ">", ">=", "==", "!="):
                piece = between.replace(symbol, SWAPS[type(node.ops[0])], 1)
                yield change(first, last, piece, node.lineno)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            piece = repr(node.value + 1)
            yield change(place(node), place(node, True), piece, node.lineno)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield change(place(node), place(node.operand), "+", node.lineno)


def _docstrings_and_types(tree: ast.AST) -> set[tuple[int, int]]:
    """Places that are no arithmetic: annotations and their literals."""
    found: set[tuple[int, int]] = set()
    for node in ast.walk(tree):
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for annotation in annotations:
            if isinstance(annotation, ast.AST):
                for inner in ast.walk(annotation):
                    found.add((getattr(inner, "lineno", 0), getattr(inner, "col_offset", 0)))
    return found


def noticed(mutant: Mutant, tests: tuple[str, ...]) -> bool:
    """Whether a test fails, or never ends, with the change."""
    child = os.fork()
    if not child:
        _run(mutant, tests)
    _, status = os.waitpid(child, 0)
    return status != 0


def _run(mutant: Mutant, tests: tuple[str, ...]) -> None:
    """The child: tests with the changed module; never returns."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (1, 2):
            os.dup2(null, number)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        changed = str(mutant.path.resolve())
        original = importlib.machinery.SourceFileLoader.get_code

        def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> object:
            if str(Path(self.path).resolve()) == changed:
                return compile(mutant.source, changed, "exec", dont_inherit=True)
            return original(self, name)

        importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
        if FROZEN in tests and _frozen_differs(mutant.path.stem.replace("_", "-")):
            os._exit(1)
        import pytest

        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
        quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = int(pytest.main([*options, *quiet, *tests]))
    finally:
        os._exit(min(code, 1))


def _frozen_differs(technique: str) -> bool:
    """What ``FROZEN`` checks first, ended by the first difference; one technique's rows lead."""
    import numpy as np

    from tests.frozen import test_frozen as frozen

    rows = frozen.rows("predictions")[3 :: frozen.PARTS]
    for row in sorted(rows, key=lambda row: technique not in row["technique"]):
        now = frozen.predicted(row)
        for column in frozen.COLUMNS:
            before, after = float(row[column]), float(np.ravel(getattr(now, column))[0])
            near = abs(after - before) <= frozen.SAME * abs(before)
            if not (near or frozen.corrected(row, column)):
                return True
    return False


def preload() -> None:
    """Import what the children share; nothing of kvsim, as one module of it is to change."""
    for name in PRELOADED:
        importlib.import_module(name)


def drawn(rooms: dict[str, Room], count: int, seed: int) -> list[tuple[Mutant, tuple[str, ...]]]:
    """As many mutants of each room, in turns."""
    chance, columns = random.Random(seed), []
    for folder, tests in rooms.values():
        every = [m for path in sorted((ROOT / folder).glob("*.py")) for m in mutants(path)]
        some = chance.sample(every, min(len(every), -(-count // len(rooms))))
        columns.append([(mutant, tests) for mutant in some])
    longest = max(map(len, columns))
    turns = [column[i] for i in range(longest) for column in columns if i < len(column)]
    return turns[:count]


def check_unchanged(rooms: dict[str, Room]) -> None:
    """Stop if a room's tests fail without any change."""
    for folder, tests in rooms.values():
        path = next(path for path in sorted((ROOT / folder).glob("*.py")) if path.stat().st_size)
        text = path.read_text(encoding="utf-8")
        if noticed(Mutant(path, 0, "", "", text), tests):
            sys.exit(f"{' '.join(tests)}: fail without any change; mend them first")


def main() -> None:
    """Draw mutants, run them, print the survivors."""
    options = argparse.ArgumentParser(description="Whether tests notice changed arithmetic.")
    options.add_argument("--count", type=int, default=300, help="mutants")
    options.add_argument("--seed", type=int, default=0, help="of the draw")
    options.add_argument("--room", default="", choices=["", *ROOMS], help="only this one")
    options.add_argument("--keep", type=Path, help="results are added to this file, and not redone")
    given = options.parse_args()
    keep = given.keep.resolve() if given.keep else None
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    rooms = {name: room for name, room in ROOMS.items() if given.room in ("", name)}
    preload()
    known: dict[str, bool] = {}
    if keep and keep.exists():
        known = {row["mutant"]: row["killed"] for row in map(json.loads, keep.open())}
    else:
        check_unchanged(rooms)
    begin, killed, explained = time.monotonic(), 0, 0
    all_of_them = drawn(rooms, given.count, given.seed)
    for mutant, tests in all_of_them:
        line = mutant.path.read_text(encoding="utf-8").splitlines()[mutant.line - 1].strip()
        change = f"{mutant.before!r} -> {mutant.after!r}"
        name = f"{mutant.path.relative_to(ROOT)}:{mutant.line}: {change} in {line}"
        if name not in known:
            known[name] = noticed(mutant, tests)
            if keep:
                with keep.open("a") as file:
                    file.write(json.dumps({"mutant": name, "killed": known[name]}) + "\n")
        killed += known[name]
        explained += not known[name] and line in EXPLAINED
        if not known[name] and line not in EXPLAINED:
            print(f"survives: {name}", flush=True)
    seconds = time.monotonic() - begin
    print("| asked | measured |\n|---|---|")
    counts = f"{killed} of {len(all_of_them)}, {explained} more are explained"
    print(f"| at least 90 % of 300 mutants noticed | {counts}; {seconds:.0f} s |")


if __name__ == "__main__":
    main()
