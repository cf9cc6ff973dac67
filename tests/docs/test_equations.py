"""docs/equations.md points at functions that exist and say what they compute."""

import re
from importlib import import_module

import pytest

from tests.support.places import ROOT

TEXT = (ROOT / "docs" / "equations.md").read_text()
POINTERS = sorted(set(re.findall(r"`(kvsim(?:\.\w+)+)`", TEXT)))


@pytest.mark.parametrize("pointer", POINTERS)
def test_every_function_named_exists_and_has_a_docstring(pointer: str) -> None:
    module, _, name = pointer.rpartition(".")
    assert getattr(import_module(module), name).__doc__


def test_every_formula_names_its_function() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and "---" not in line]
    formulas = [line for line in rows if line.count("|") == 4 and "| function |" not in line]
    symbols = TEXT[TEXT.index("## Symbols") : TEXT.index("## Work of an op")]
    missing = [line for line in formulas if "`kvsim." not in line and line not in symbols]
    assert len(POINTERS) > 20 and not missing
