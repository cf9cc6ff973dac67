"""The cells of the notebooks in examples/ run, and show what is kept with them."""

import json
from pathlib import Path

import pytest

from tests.docs.examples import NOTEBOOKS, played


@pytest.mark.parametrize("place", NOTEBOOKS, ids=lambda place: place.stem)
def test_a_notebook_shows_what_it_keeps(place: Path) -> None:
    notebook = json.loads(place.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells] == played(notebook, place.name)


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3
