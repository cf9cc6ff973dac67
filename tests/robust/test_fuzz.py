"""Four seconds of odd inputs, shared by all formats.

CI gives them a minute more, with KVSIM_FUZZ_SECONDS; ``make.py robust --minutes N`` takes longer.
"""

import os
from pathlib import Path

import pytest

from tests.robust.fuzz.formats import FORMATS
from tests.robust.fuzz.play import faults, given_file, warm_up
from tests.robust.fuzz.search import rounds

SECONDS = float(os.environ.get("KVSIM_FUZZ_SECONDS", "4")) / len(FORMATS)  # for each, by the clock
ROUND = 20  # inputs
NEEDS = {"GGUF": ("torch", "gguf"), "safetensors": ("torch", "safetensors"),
         "tokenizer": ("torch", "tokenizers")}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warm_up()


@pytest.mark.parametrize("name", FORMATS)
def test_no_input_of_a_format_breaks_the_rule(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    found = rounds(FORMATS[name], SECONDS, 0, tmp_path / "in", ROUND)
    assert not found.faults, found.faults
    assert found.inputs


@pytest.mark.parametrize("name", [name for name, kind in FORMATS.items() if kind.sound])
def test_sound_inputs_are_taken(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    kind = FORMATS[name]
    for content in kind.sound:
        with given_file(kind.file, content, tmp_path / "in") as path:
            assert faults(kind.read, path) == (0, [])
