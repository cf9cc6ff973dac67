"""Every op, buffer and time that a technique states is what ``parts.csv.gz`` has.

A third of the techniques is compared in every run, all of them with KVSIM_FROZEN=all or parts.
"""

import os

import pytest

from tests.frozen import parts

SAME = 1e-9  # relative; the file has twelve digits
KEPT = parts.kept()
EVERY = os.environ.get("KVSIM_FROZEN") in ("all", "parts")
CHOSEN = sorted(KEPT) if EVERY else sorted(KEPT)[::3]


@pytest.mark.parametrize("text", CHOSEN)
def test_what_a_technique_states_is_as_it_was(text: str) -> None:
    now = {(where, name): value for _, where, name, value in parts.rows(text)}
    moved = [
        f"{where}: {name}: {KEPT[text].get((where, name))} became {now.get((where, name))}"
        for where, name in sorted(KEPT[text].keys() | now.keys())
        if not _same(KEPT[text].get((where, name)), now.get((where, name)))
    ]
    assert not moved, "\n".join(["if meant: python -m tests.frozen.parts", *moved[:20]])


def _same(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return before == after
    return before == after or abs(after - before) <= SAME * abs(before)


def test_every_text_is_kept_or_cannot_run_where_it_is_put() -> None:
    assert KEPT.keys() <= set(parts.texts()) and len(KEPT) >= 120
