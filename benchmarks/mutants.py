"""Mutation testing: small changes of the core's arithmetic, and whether the tests notice them.

Usage: python benchmarks/mutants.py [COUNT [SEED [ROOM]]]; by default 300 over all rooms, about two
hours. Every mutant is one operator, comparison, constant or sign changed. Its tests run in a forked
child in which the import of that one module gives the changed code. Prints each survivor, then what
was asked against what was measured.

The serving room's compiled functions are kept on disk by Numba and would run unchanged, so that
only its plain Python is changed here.
"""

import ast
import importlib.machinery
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
ORACLES = ("tests/techniques/test_technique_oracles.py", "tests/techniques/test_limits.py")
FROZEN = "tests/frozen/test_frozen.py"
ROOMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "techniques": ("kvsim/techniques", (FROZEN, *ORACLES)),
    "engine": ("kvsim/engine", ("tests/engine", FROZEN, *ORACLES)),
    "prediction": ("kvsim/prediction", ("tests/prediction", FROZEN)),
    "planner": ("planner", ("tests/planner",)),
    "serving": ("kvsim/serving", ("tests/serving",)),
}
"""Sources of a room, and the tests that should notice, the quickest first."""
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
        import pytest

        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
        code = int(pytest.main([*options, *tests]))
    finally:
        os._exit(min(code, 1))


def main() -> None:
    """Draw mutants, run them, print the survivors."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    rooms = {k: v for k, v in ROOMS.items() if len(sys.argv) < 4 or k == sys.argv[3]}
    import hypothesis
    import numpy
    import pandas
    import pulp
    import pyarrow
    import pytest
    import scipy.optimize

    assert all((hypothesis, numpy, pandas, pulp, pyarrow, pytest, scipy.optimize))
    chance, drawn = random.Random(seed), []
    for folder, tests in rooms.values():
        every = [m for path in sorted((ROOT / folder).glob("*.py")) for m in mutants(path)]
        some = chance.sample(every, min(len(every), -(-count // len(rooms))))
        drawn += [(mutant, tests) for mutant in some]
    for folder, tests in rooms.values():
        path = next(path for path in sorted((ROOT / folder).glob("*.py")) if path.stat().st_size)
        text = path.read_text(encoding="utf-8")
        if noticed(Mutant(path, 0, "", "", text), tests):
            sys.exit(f"{' '.join(tests)}: fail without any change; mend them first")
    begin, killed = time.monotonic(), 0
    for mutant, tests in drawn[:count]:
        dead = noticed(mutant, tests)
        killed += dead
        if not dead:
            where = f"{mutant.path.relative_to(ROOT)}:{mutant.line}"
            print(f"survives: {where}: {mutant.before!r} -> {mutant.after!r}", flush=True)
    done = len(drawn[:count])
    seconds = time.monotonic() - begin
    print("| asked | measured |\n|---|---|")
    print(f"| at least 90 % of 300 mutants noticed | {killed} of {done} in {seconds:.0f} s |")


if __name__ == "__main__":
    main()
