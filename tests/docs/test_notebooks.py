"""The cells of the notebooks run, one after another."""

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
            exec(compile("".join(cell["source"]), place.name, "exec"), names)
            assert not cell["outputs"]  # results are made by whoever runs it
    assert "kvsim" in names


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3
