"""A signal at the worst moment: a draft is there, and nobody looks after it yet."""

from pathlib import Path

import pytest

from kvsim import files
from kvsim.cli.app import Stopped, run_command
from kvsim.files import create_draft, replacing


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), Stopped(15)])
def test_a_signal_just_after_a_draft_is_made_leaves_none(
    problem: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(target: Path, mode: int) -> tuple[Path, int]:
        create_draft(target, mode)
        raise problem

    def work() -> None:
        with replacing(tmp_path / "out.csv") as draft:
            draft.write_text("never")

    monkeypatch.setattr(files, "create_draft", interrupted)
    assert run_command(work) in (130, 143)
    assert list(tmp_path.iterdir()) == []
    assert "nothing was written" in capsys.readouterr().err
