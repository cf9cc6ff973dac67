"""The mutation tool changes functions that are loaded, also those that the tests froze."""

import gc
from importlib import import_module
from pathlib import Path

import pytest

from tests.robust.mutation.changes import ROOT, plant
from tests.robust.mutation.code import swap, touched


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


@pytest.mark.parametrize("name", ["nothing", "ROOMS", "main.inner"])
def test_only_functions_are_planted_in(name: str) -> None:
    assert plant(ROOT / "kvsim" / "errors.py", name) is None


def test_rooms_and_tests_of_the_tool_are_there() -> None:
    tool = import_module("benchmarks.mutants")
    for folder, quick, further in tool.ROOMS.values():
        assert (ROOT / folder).is_dir() and not Path(ROOT / folder).is_symlink()
        assert tool.existing((*quick, *further)) == [*quick, *further]
