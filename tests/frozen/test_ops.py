"""Every op of a pass is what ``ops.json.gz`` has, field by field.

An eighth of the cases is compared in every run, all of them with KVSIM_FROZEN=all or parts.
"""

import os

import pytest

from tests.frozen import ops
from tests.frozen.moved import moved

SAME = 1e-9  # relative; the file has twelve digits
KEPT, CASES = ops.kept(), ops.cases()
EVERY = 1 if os.environ.get("KVSIM_FROZEN") in ("all", "parts") else 8


@pytest.mark.parametrize("name", [*CASES][::EVERY])
def test_a_pass_states_what_it_stated(name: str) -> None:
    now = ops.stated(CASES[name])
    found = list(moved(KEPT[name], now, SAME))
    assert not found, "\n".join(["if meant: python -m tests.frozen.ops", *found[:20]])
    assert KEPT[name].keys() == now.keys()


def test_every_case_is_kept() -> None:
    assert KEPT.keys() == CASES.keys()
