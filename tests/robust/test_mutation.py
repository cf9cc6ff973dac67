"""The mutation tool changes functions that are loaded, also those that the tests froze."""

import gc
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.robust.mutation.changes import GENERATORS, ROOT, Piece, plant
from tests.robust.mutation.code import swap, touched

ERRORS = "kvsim/errors.py"


def test_a_planted_change_is_swapped_in_behind_a_freeze() -> None:
    from kvsim.errors import first_line

    path = ROOT / "kvsim" / "errors.py"
    planted = plant(path, "first_line")
    assert planted is not None and planted.source.count("\n") == path.read_text().count("\n")
    assert touched(path.read_text(), planted.source, path) == ({"first_line"}, False)
    gc.freeze()
    try:
        swap(planted.source, path)
        with pytest.raises(AssertionError, match="planted"):
            first_line(ValueError("x"), 10)
    finally:
        swap(path.read_text(), path)
    assert first_line(ValueError("x"), 10) == "x"


def test_a_module_that_is_imported_late_is_changed_too() -> None:
    path = ROOT / "kvsim" / "sweeps" / "store.py"
    planted = plant(path, "ResultStore.keep")
    assert planted is not None
    with patch.dict(sys.modules):
        sys.modules.pop("kvsim.sweeps.store", None)
        swap(planted.source, path)
        try:
            late = import_module("kvsim.sweeps.store")
            with pytest.raises(AssertionError, match="planted"):
                late.ResultStore.keep(None, 0, b"")
        finally:
            swap(path.read_text(), path)


@pytest.mark.parametrize("name", ["nothing", "ROOMS", "main.inner"])
def test_only_functions_are_planted_in(name: str) -> None:
    assert plant(ROOT / "kvsim" / "errors.py", name) is None


def test_rooms_and_tests_of_the_tool_are_there() -> None:
    tool = import_module("benchmarks.mutants")
    for folder, quick, further in tool.ROOMS.values():
        assert (ROOT / folder).is_dir() and not Path(ROOT / folder).is_symlink()
        assert tool.existing((*quick, *further)) == [*quick, *further]


def test_explained_survivors_are_of_lines_that_are_there() -> None:
    tool = import_module("benchmarks.mutants")
    assert tool.EXPLAINED
    gone = f"{ERRORS}: 'x' -> 'y' in z"
    assert tool.undrawable([*tool.EXPLAINED, gone]) == [gone]


def test_changes_are_made_of_symbols_and_of_logic() -> None:
    source = (
        "def f(a: float = 2.0, b: int = 1) -> float:\n"
        "    if not a and b > 1:\n"
        "        return min(a, b)\n"
        "    return a - b if g(a, b) else a * 3.0\n"
    )
    found = {
        name: {
            line.strip()
            for piece in change(source.encode())
            for line in replaced(source, piece).splitlines()
        }
        - {line.strip() for line in source.splitlines()}
        for name, change in GENERATORS.items()
    }
    assert not found["symbols"] & found["logic"]
    assert {"if not a and b >= 1:", "return a + b if g(a, b) else a * 3.0"} <= found["symbols"]
    assert found["logic"] == {
        "def f(a: float = (3.0), b: int = 1) -> float:",
        "if ((not a) or (b > 1)):", "if ((a)) and b > 1:", "if not a and (not (b > 1)):",
        "return (max(a, b))", "return ((a * 3.0) if (g(a, b)) else (a - b))",
        "return ((a)) if g(a, b) else a * 3.0", "return ((b)) if g(a, b) else a * 3.0",
        "return a - b if (g(b, a)) else a * 3.0", "return a - b if g(a, b) else ((a))",
        "return a - b if g(a, b) else ((3.0))", "return a - b if g(a, b) else a * (4.5)",
    }  # fmt: skip
    for name in GENERATORS:
        for piece in GENERATORS[name](source.encode()):
            compile(replaced(source, piece), "x", "exec")


def replaced(source: str, piece: Piece) -> str:
    _, first, last, text = piece
    return source[:first] + text + source[last:]
