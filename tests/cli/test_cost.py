"""Long work is announced before it begins, and very long work waits for --yes."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from kvsim.api.cost import COMMAND_COSTS, announce_cost
from kvsim.console import ProgressLine, TimeLeft, run_on_command_line
from kvsim.errors import InputError


@dataclass
class Given:
    """As much of a command's options as the estimate reads."""

    command: str
    yes: bool = False


@pytest.mark.parametrize(("command", "runs"), [("simulate", 9), ("plan", 9), ("capacity", 12)])
def test_a_day_on_a_few_cards_is_begun_without_a_word(
    capsys: pytest.CaptureFixture[str], command: str, runs: int
) -> None:
    with run_on_command_line():
        announce_cost(cast(Any, Given(command)), 2000, runs)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("command", COMMAND_COSTS)
def test_documented_sizes_never_need_a_yes(command: str) -> None:
    with run_on_command_line():
        announce_cost(cast(Any, Given(command)), COMMAND_COSTS[command].free, 100)


@pytest.mark.parametrize(
    ("requests", "runs", "yes", "said"),
    [
        (10**6, 1, False, ""),
        (33 * 10**6, 1, True, "33,000,000 requests takes about 61 s and 8.6 GB"),
        (9 * 10**6, 4, True, "with 4 settings takes about 66 s and 9.3 GB"),
        (10**8, 1, True, "3 min and 25.3 GB"),
    ],
)
def test_the_estimate_is_printed(
    capsys: pytest.CaptureFixture[str], requests: int, runs: int, yes: bool, said: str
) -> None:
    with run_on_command_line():
        announce_cost(cast(Any, Given("simulate", yes)), requests, runs)
    printed = capsys.readouterr().err
    assert said in printed and bool(printed) == bool(said)


def test_what_takes_longer_waits_for_a_yes() -> None:
    some = cast(Any, Given("simulate"))
    announce_cost(some, 10**8)  # a function of Python does what it is told
    with run_on_command_line(), pytest.raises(InputError, match=r"3 min and 25\.3 GB; add"):
        announce_cost(some, 10**8)


def test_the_time_left_is_what_the_later_items_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of a hundred takes a minute to load and compile, each of the others a second."""
    times = iter([0.0, 60.0, *(60.0 + n for n in range(1, 13))])
    monkeypatch.setattr("kvsim.console.monotonic", lambda: next(times))
    progress = ProgressLine("", "chunks", 100, estimates=True)
    for done in range(1, 14):
        progress(done)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["kvsim: 1 of 100 chunks", "kvsim: 11 of 100 chunks, about 89 s left"]


def test_the_time_left_is_told_after_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 9.0, 20.0, 30.0])
    monkeypatch.setattr("kvsim.console.monotonic", lambda: next(times))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with run_on_command_line():
        tell = TimeLeft()
        for step, share in (("begins", 0.1), ("goes on", 0.25), ("nobody knows", 0.0)):
            tell(step, share)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["kvsim: begins", "kvsim: goes on; about 60 s left", "kvsim: nobody knows"]
