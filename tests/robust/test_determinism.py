"""Some commands in two environments; ``python -m tests.robust.determinism`` runs all."""

from tests.robust.determinism import ENVIRONMENTS, QUICK, differences


def test_the_same_command_gives_the_same_bytes() -> None:
    assert not differences(QUICK, ENVIRONMENTS[:2])
