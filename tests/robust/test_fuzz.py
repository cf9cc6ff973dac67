"""Some hundred odd inputs of every format; ``make.py robust --minutes N`` tries more of them."""

from pathlib import Path

import pytest

from tests.robust.fuzz.formats import FORMATS
from tests.robust.fuzz.play import faults, given_file, warm_up
from tests.robust.fuzz.search import Found, search

INPUTS = 60  # for a reader
MORE = 3  # for each command that reads the format
NEEDS = {"GGUF": ("torch", "gguf"), "safetensors": ("torch", "safetensors"),
         "tokenizer": ("torch", "tokenizers")}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warm_up()


@pytest.mark.parametrize("name", FORMATS)
def test_no_input_of_a_format_breaks_the_rule(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    kind, found = FORMATS[name], Found()
    search(kind, INPUTS, 0, tmp_path / "in", found, commands=False)
    if kind.commands:
        search(kind, MORE * (1 + len(kind.commands)), 1, tmp_path / "in", found, commands=True)
    assert not found.faults, found.faults
    assert found.inputs >= INPUTS // 2


@pytest.mark.parametrize("name", [name for name, kind in FORMATS.items() if kind.sound])
def test_sound_inputs_are_taken(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    kind = FORMATS[name]
    for content in kind.sound:
        with given_file(kind.file, content, tmp_path / "in") as path:
            assert faults(kind.read, path) == (0, [])
