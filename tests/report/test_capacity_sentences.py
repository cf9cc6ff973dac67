"""Sentences of ``kvsim capacity`` that depend on what was asked, and on where the limit is."""

from typing import Any

import pytest

from kvsim.report import capacity
from kvsim.report.capacity import (
    _describe_certainty,
    _describe_prices,
    _load_table,
)


def sure(ttft: float | None, tpot: float | None) -> dict[str, Any]:
    """A row of how likely the targets are kept."""
    likely = {"ttft_met": ttft, "tpot_met": tpot, "both_met": ttft}
    return {"certainty": {"days": 32, "spread": 0.2, "source": "rows", "asked": 0.9, **likely}}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (sure(0.82, 1.0), "each target: TTFT 82 %, TPOT > 99 % (over 32 simulated days"),
        (sure(0.82, None), "each target: TTFT 82 % (over 32"),
        (sure(None, None), ""),
    ],
)
def test_how_certain_it_is_is_said_for_what_was_asked(row: dict[str, Any], said: str) -> None:
    text = _describe_certainty(row)
    assert said in text and bool(text) == bool(said)


@pytest.mark.parametrize(
    ("headroom", "failures", "said"),
    [
        (0.0, 0, ""),
        (0.2, 0, "also met with 20 % more load"),
        (0.0, 1, "also met after the loss of any replica"),
        (0.3, 2, "with 30 % more load and after the loss of any 2 replicas"),
    ],
)
def test_what_fleets_for_other_loads_survive_is_said(
    headroom: float, failures: int, said: str
) -> None:
    times = {
        "met": True,
        "good_share": 1.0,
        "ttft_s": {"at_target": 1.0},
        "tpot_s": {"at_target": 1},
    }
    row = {
        "headroom": headroom, "failures": failures, "planned_for": {"load": 1}, "at_load": {},
        "simulated": times, "after_loss": {}, "usd_per_hour": 1.0,
        "certainty": {"asked": 0.0, "both_met": 1.0},
    }  # fmt: skip
    note = _load_table(row).note
    assert said in note and bool(note) == bool(said)


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (["a, spot, 2026-01-02", "given"], "x0 $1.00 (a, spot, 2026-01-02), x1 $1.00 (given)."),
        (["a, spot, 2026-01-02", "b, spot, 2026"], "2026); no seller offers all of them."),
        (["a, spot, 2026-01-02", "a, spot, 2026"], "x0 $1.00, x1 $1.00 (a, spot, 2026-01-02 and"),
    ],
)
def test_prices_are_told_by_seller_beside_those_given(sources: list[str], said: str) -> None:
    prices = {f"x{i}": {"usd_per_gpu_hour": 1.0, "source": x} for i, x in enumerate(sources)}
    assert said in _describe_prices({"sellers": {"prices": prices, "others": []}})


@pytest.mark.parametrize("words", [20, 58])
def test_a_page_says_what_falls_short_however_long_the_answer(words: int) -> None:
    row = sure(0.8, 1.0) | {"answer": "word " * words, "met": False, "shortfall": "TTFT is longer"}
    page = capacity.write_answer(row)
    assert str(page).count("The request could not be met: TTFT is longer.") == 1
    assert ("The request could not be met" in page.verdict) == (words == 20)
