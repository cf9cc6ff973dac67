"""A few stops at random moments; ``python -m tests.robust.kills`` does a hundred and fifty."""

from pathlib import Path

from tests.robust.kills import stops
from tests.robust.runner import preload


def test_a_stopped_command_breaks_nothing(tmp_path: Path) -> None:
    preload()
    for outcome in stops(4, tmp_path / "kill", ("convert",)):
        assert not outcome.faults, outcome
