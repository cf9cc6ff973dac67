"""``kvsim reproduce``: its fields, its tables, its files, and what it refuses."""

from pathlib import Path

import pytest

from kvsim.evidence.published import PAPER_COLUMNS
from tests.support.commands import run
from tests.support.envelope import answer_in, own_fields

HEADER = ",".join(PAPER_COLUMNS)
MINE = "mine,1,llama2-7b,a6000,{},full,,{},2048,128,decode_tok_s,{},{},"


def test_json_holds_rows_and_tables() -> None:
    result = run("reproduce", "kcache", "--json")
    assert (result.code, result.err) == (0, "")
    answer = answer_in(result.out)
    assert {"answer", "rows", "tables", "mechanisms"} == set(own_fields(answer))
    assert "26 held-out rows" in answer["answer"]["verdict"]
    row = answer["rows"][0]
    assert {"published", "predicted", "error", "basis", "use", "technique"} <= set(row)
    assert row["error"] == pytest.approx(row["predicted"] / row["published"] - 1)
    assert row["basis"] == "carried over"  # the stack is fitted, the card is not measured
    (rates,) = (t for t in answer["tables"] if t["metric"] == "decode_tok_s")
    assert {"fitted_mean", "held_out_mean", "held_out_worst", "skill"} <= set(rates)
    assert rates["held_out_mean"] <= 0.03 and rates["held_out_worst"] <= 0.09


def test_reports_are_whole_files(tmp_path: Path) -> None:
    page, table = tmp_path / "page.html", tmp_path / "errors.md"
    assert run("reproduce", "kcache", "--report", str(page)).code == 0
    assert run("reproduce", "kcache", "--report", str(table)).code == 0
    assert "Predicted against published: kcache" in page.read_text()
    assert '"kcache 3: decode_tok_s"' in page.read_text()
    assert "| kcache | 3 | decode_tok_s | 32 |" in table.read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"page.html", "errors.md"}


def test_own_rows_are_compared(tmp_path: Path) -> None:
    measured = ((1, 35, "fit"), (4, 130, "fit"), (8, 190, "check"))
    rows = [MINE.format("fused", batch, rate, use) for batch, rate, use in measured]
    table = tmp_path / "mine.csv"
    table.write_text("\n".join([HEADER, *rows]) + "\n")
    assert "mine" in run("reproduce", str(table)).out


def test_an_unknown_paper_is_refused_in_one_line() -> None:
    result = run("reproduce", "kcash")
    assert (result.code, result.out) == (2, "")
    assert "unknown paper 'kcash'; nearest: kcache" in result.err
    assert result.err.count("\n") == 1
