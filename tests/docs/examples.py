"""The notebooks of examples/ with what their cells show; ``--write`` renews it."""

import ast
import io
import json
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.docs.blocks import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

Output = dict[str, Any]


def played(notebook: dict[str, Any], name: str) -> list[list[Output]]:
    """The outputs of each code cell, run one after another in a folder of their own."""
    names: dict[str, Any] = {}
    with TemporaryDirectory() as folder, chdir(folder):
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return [_run("".join(cell["source"]), name, names) for cell in cells]


def _run(source: str, name: str, names: dict[str, Any]) -> list[Output]:
    """Run a cell: what it prints, then the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    with redirect_stdout(printed):
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    outputs: list[Output] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(text)})
    if value is not None:
        result = {"data": _shown(value), "metadata": {}, "execution_count": None}
        outputs.append({"output_type": "execute_result"} | result)
    return outputs


def _shown(value: Any) -> dict[str, list[str]]:
    """What a page shows of a value; figures need a browser, so they are named alone."""
    if hasattr(value, "to_plotly_json"):
        return {"text/plain": [f"a figure of {len(value.data)} series; run the cell to see it"]}
    import pandas as pd

    with pd.option_context("display.width", 100, "display.max_columns", 20):
        return {"text/plain": _lines(repr(value))}


def _lines(text: str) -> list[str]:
    return [line.rstrip(" ") for line in text.splitlines(keepends=True)]


def write(place: Path) -> None:
    """Put into a notebook what its cells show now."""
    notebook = json.loads(place.read_text(encoding="utf-8"))
    outputs = iter(played(notebook, place.name))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = next(outputs)
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    place.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for one in [Path(name).resolve() for name in sys.argv[2:]] or NOTEBOOKS:
        write(one)
