"""Programmes that questions are turned into stay what ``programmes.json`` has, row by row.

A few are built in every run, all of them with KVSIM_FROZEN=all or parts.
"""

import os

import pytest

from tests.frozen import programmes
from tests.frozen.keeping import kept
from tests.frozen.moved import moved

SAME = 1e-6  # relative; later programmes rest on solutions of the first
QUICK = ("little host memory", "the CPU attends", "windows")
CHOSEN = [*programmes.QUESTIONS] if os.environ.get("KVSIM_FROZEN") in ("all", "parts") else QUICK


@pytest.mark.parametrize("name", CHOSEN)
def test_a_question_becomes_the_programmes_that_it_became(name: str) -> None:
    found = list(moved(kept(programmes.PLACE)[name], programmes.answered(name), SAME))
    assert not found, "\n".join(["if meant: python -m tests.frozen.programmes", *found[:20]])


def test_every_question_is_kept() -> None:
    assert kept(programmes.PLACE).keys() == programmes.QUESTIONS.keys()
