"""Plans and a fleet stay what ``plans.json`` has, number by number.

A few are asked in every run, all of them with KVSIM_FROZEN=all or parts.
"""

import os

import pytest

from tests.frozen import plans
from tests.frozen.keeping import kept
from tests.frozen.moved import moved

SAME = 1e-6  # relative; solvers stop at tolerances of their own
QUICK = ("an engine", "loss measured", "no plan: time")
CHOSEN = [*plans.QUESTIONS] if os.environ.get("KVSIM_FROZEN") in ("all", "parts") else QUICK


@pytest.mark.parametrize("name", CHOSEN)
def test_a_question_is_answered_as_it_was(name: str) -> None:
    found = list(moved(kept(plans.PLACE)[name], plans.answered(name), SAME))
    assert not found, "\n".join(["if meant: python -m tests.frozen.plans", *found[:20]])


def test_every_question_is_kept() -> None:
    assert kept(plans.PLACE).keys() == plans.QUESTIONS.keys()
