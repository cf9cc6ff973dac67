"""A few stops at random moments; ``python -m tests.robust.kills`` does a hundred and fifty."""

from pathlib import Path

from tests.robust.kills import stops


def test_a_stopped_command_breaks_nothing(tmp_path: Path) -> None:
    for outcome in stops(8, tmp_path / "kill", ("convert", "generate")):
        assert not outcome.faults, outcome
