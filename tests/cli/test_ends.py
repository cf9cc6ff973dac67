"""How commands end: by a signal at the worst moment, by a problem, by a limit of time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvsim import files
from kvsim.cli import session
from kvsim.cli.app import Stopped, run_command
from kvsim.errors import InfeasibleError, InputError
from kvsim.files import create_draft, replacing
from kvsim.validate.session.state import SessionState


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


def broken_pipe() -> SystemExit:
    ended = SystemExit(1)
    ended.__context__ = BrokenPipeError()
    return ended


@pytest.mark.parametrize(
    ("problem", "code", "said"),
    [
        (broken_pipe(), 141, ""),
        (BrokenPipeError(), 141, ""),
        (ModuleNotFoundError("no", name="torch"), 2, "need torch, not installed"),
        (OSError(28, "No space left", "F"), 2, "F: No space left; expected a place with room"),
        (OSError(28, "No space left"), 2, "standard output: No space left"),
        (MemoryError(), 2, "memory ran out"),
        (InputError("a\nb"), 2, "kvsim: a b"),
        (InfeasibleError("none\n  try this"), 1, "kvsim: none\n  try this\n"),
        (KeyError("x"), 70, "fault in kvsim, please report it (KeyError at "),
    ],
)
def test_a_problem_has_its_code_and_its_line(
    problem: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise problem

    assert run_command(work) == code
    found = capsys.readouterr().err
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize(
    ("forms", "said"),
    [
        (("long", "long"), "2 of 2 units are done\n"),
        (("long", "short"), "2 of 2 units are done, 1 of them in their short form; run it again"),
        (("long", None), "1 of 2 units are done; run it again to continue\n"),
    ],
)
def test_a_session_says_how_far_it_came_and_packs_what_it_has(
    forms: tuple[str | None, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def unit(i: int) -> SimpleNamespace:
        return SimpleNamespace(
            name=f"u{i}", shortest="short", is_complete=lambda past: past.form == "long"
        )

    def play(some: Any, state: SessionState, *more: Any) -> list[Any]:
        for i, form in enumerate(forms):
            if form:
                state.write(f"u{i}", {"form": form})
        return []

    shown = SimpleNamespace(write=lambda place: place.write_text("page"))
    monkeypatch.setattr(session, "all_units", lambda device: [unit(i) for i in range(2)])
    monkeypatch.setattr(session, "run_units", play)
    monkeypatch.setattr(session, "make_result", lambda *given: shown)
    monkeypatch.setattr(session, "profile_of", lambda state: None)
    out, bundle, more = tmp_path / "out", tmp_path / "b.tar.gz", tmp_path / "more.tar.gz"
    words = ["make.py gpu", "--device", "cpu", "--out", str(out), "--state", str(tmp_path / "a")]
    monkeypatch.setattr("sys.argv", [*words, "--bundle", str(bundle)])
    assert session.main() == 0
    told = capsys.readouterr()
    assert said in told.out + told.err and (out / "index.html").read_text() == "page"
    monkeypatch.setattr("sys.argv", [*words, "--resume", str(bundle), "--bundle", str(more)])
    assert session.main() == 0 and bundle.stat().st_size > 0 < more.stat().st_size
