"""Simulated workloads stay what ``runs.json`` has, figure by figure.

A fifth is played in every run, all of them with KVSIM_FROZEN=all or parts.
"""

import os

import pytest

from tests.frozen import runs
from tests.frozen.keeping import kept
from tests.frozen.moved import moved

SAME = 1e-9  # relative
KEPT = kept(runs.PLACE)
EVERY = os.environ.get("KVSIM_FROZEN") in ("all", "parts")
CHOSEN = list(KEPT) if EVERY else list(KEPT)[::5]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_workload_goes_as_it_went(name: str) -> None:
    found = list(moved(KEPT[name], runs.answered(name), SAME))
    assert not found, "\n".join(["if meant: python -m tests.frozen.runs", *found[:20]])
