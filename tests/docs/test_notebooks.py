"""The cells of the notebooks run, one after another."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("place", NOTEBOOKS, ids=lambda place: place.stem)
def test_a_notebook_runs(place: Path) -> None:
    notebook = json.loads(place.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            shown = _run("".join(cell["source"]), place.name, names)
            assert shown is None or len(str(_shown(shown))) > 10
            assert not cell["outputs"]  # results are made by whoever runs it
    assert "kvsim" in names


def _run(source: str, name: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of its last expression, as a notebook shows it."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, name, "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), name, "exec"), names)
    return eval(compile(ast.Expression(last.value), name, "eval"), names)


def _shown(value: Any) -> Any:
    """What a notebook prints of a value."""
    html = getattr(value, "_repr_html_", None)
    return html() if html else repr(value)


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3
