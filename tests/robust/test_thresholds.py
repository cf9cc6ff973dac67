"""Thresholds, grids and defaults of the core are those listed: none changes unseen."""

from tests.support.thresholds import PLACE, lines


def test_numbers_of_modules_are_as_listed() -> None:
    listed, found = PLACE.read_text(encoding="utf-8").splitlines(), lines()
    changed = sorted({*found} ^ {*listed})
    assert not changed, "\n".join(["if meant: python -m tests.support.thresholds", *changed[:20]])
