"""A few stops at random moments; ``python -m tests.robust.kills`` does a hundred and fifty."""

from pathlib import Path

import pytest

from tests.robust import resumes
from tests.robust.kills import stops
from tests.robust.runner import preload


def test_a_stopped_command_breaks_nothing(tmp_path: Path) -> None:
    preload()
    for outcome in stops(4, tmp_path / "kill", ("convert",)):
        assert not outcome.faults, outcome


@pytest.mark.parametrize("name", resumes.COMMANDS)
def test_a_resume_loses_at_most_one_unit_of_work(name: str, tmp_path: Path) -> None:
    preload()
    assert not resumes.faults_of_kills(name, 6, tmp_path / "resumed")
