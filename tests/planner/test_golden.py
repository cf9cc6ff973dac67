"""Every family of rows that a programme may have is in some golden text."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pulp

import kvsim.planner
from tests.planner import test_fleets, test_layers_programme
from tests.quality import test_layers

GOLDEN = Path(__file__).parent / "golden"
PACKAGE = Path(kvsim.planner.__file__).parents[1]
TEXTS = (test_layers_programme.texts, test_fleets.texts, test_layers.texts)
Site = tuple[str, int]


def every_text() -> dict[str, pulp.LpProblem]:
    return {name: problem for texts in TEXTS for name, problem in texts().items()}


def sites() -> Iterator[Site]:
    """Where programmes get rows: files, and the first lines of calls."""
    for file in (*(PACKAGE / "planner").rglob("*.py"), *(PACKAGE / "quality").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr == "addConstraint":
                yield str(file.relative_to(PACKAGE)), called.lineno


def test_every_golden_text_is_of_a_programme_that_is_built() -> None:
    assert {f.stem for f in GOLDEN.iterdir()} == set(every_text())


def test_every_row_that_the_planner_may_add_is_in_a_golden_text() -> None:
    """Whatever its name: the lines that add rows are all reached while the texts are built."""
    reached: set[Site] = set()
    add = pulp.LpProblem.addConstraint

    def noted(problem: pulp.LpProblem, *args: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            reached.add((str(file.relative_to(PACKAGE)), frame.f_lineno))
        return add(problem, *args, **named)

    with patch.object(pulp.LpProblem, "addConstraint", noted):
        every_text()
    expected = set(sites())
    assert len(expected) > 8
    assert not expected - reached
