"""The families of rows that questions need stay what ``families.json`` has.

One question is asked in every run, all of them with KVSIM_FROZEN=all or parts.
"""

import os

import pytest

from tests.frozen import families
from tests.frozen.keeping import kept

QUICK = ("windows",)
CHOSEN = [*families.QUESTIONS] if os.environ.get("KVSIM_FROZEN") in ("all", "parts") else QUICK


@pytest.mark.parametrize("name", CHOSEN)
def test_a_question_needs_the_families_of_rows_that_it_needed(name: str) -> None:
    found = families.answered(name)
    assert found == kept(families.PLACE)[name], "if meant: python -m tests.frozen.families"


def test_every_question_is_kept() -> None:
    assert kept(families.PLACE).keys() == families.QUESTIONS.keys()
