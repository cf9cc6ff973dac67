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


DAY = {"requests": 50_000, "runs": 8}


@pytest.mark.parametrize(
    ("command", "given", "seconds", "said"),
    [
        ("simulate", {"requests": 10**6}, 2.95, ""),
        ("simulate", {"requests": 33 * 10**6}, 60.55, "33,000,000 requests takes about 61 s"),
        ("simulate", {"requests": 33 * 10**6}, 60.55, " and 8.6 GB"),
        ("simulate", {"requests": 9 * 10**6, "runs": 4}, 66.4, "with 4 settings takes about 66 s"),
        ("simulate", {"requests": 10**8}, 181.15, "3 min and 25.3 GB"),
        ("simulate", {**DAY, "passes": 1e9}, 802.92, "13 min and 0.4 GB"),
        ("simulate", {**DAY, "work": 1e9}, 14402.2, "240 min"),
        ("simulate", {"requests": 6_799_999}, 13.39, ""),
        ("simulate", {"requests": 6_800_001}, 13.39, "13 s and 2.0 GB"),
        ("plan", DAY, 9.02, ""),
        ("plan", {**DAY, "more": 51.0, "passes": 1e3}, 60.08, "60 s and 0.3 GB"),
        ("capacity", DAY, 124.0, "2 min and 1.0 GB"),
        ("capacity", {**DAY, "passes": 1e6, "longest": 10**7}, 156.0, "3 min and 3.4 GB"),
    ],
)
def test_the_estimate_is_printed(
    capsys: pytest.CaptureFixture[str],
    command: str,
    given: dict[str, Any],
    seconds: float,
    said: str,
) -> None:
    with run_on_command_line():
        found = announce_cost(cast(Any, Given(command, yes=True)), **given)
    printed = capsys.readouterr().err
    assert found == pytest.approx(seconds, abs=0.005)
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
