"""``kvsim reproduce``: its fields, its tables, its files, and what it refuses."""

from pathlib import Path

import pytest

from kvsim.evidence.published import PAPER_COLUMNS, papers
from kvsim.machines.profiles import load_stack
from tests.support.commands import WIDTH, run
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


def test_tables_fit_the_terminal_and_cover_all_papers() -> None:
    result = run("reproduce")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= WIDTH
    assert all(paper in result.out for paper in papers() if paper != "engines")


def test_reports_are_whole_files(tmp_path: Path) -> None:
    page, table = tmp_path / "page.html", tmp_path / "errors.md"
    assert run("reproduce", "kcache", "--report", str(page)).code == 0
    assert run("reproduce", "kcache", "--report", str(table)).code == 0
    assert "Predicted against published: kcache" in page.read_text()
    assert '"kcache 3: decode_tok_s"' in page.read_text()
    assert "| kcache | 3 | decode_tok_s | 32 |" in table.read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"page.html", "errors.md"}


def test_own_rows_are_compared_and_fitted(tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text(
        'title = "ours"\nbasis = "carried over"\nerror = ""\nextends = "fused"\n'
        '[free]\n"kernel.gemm.memory" = [0.3, 1.0]\n'
    )
    measured = ((1, 35, "fit"), (4, 130, "fit"), (8, 190, "check"))
    rows = [MINE.format(base, batch, rate, use) for batch, rate, use in measured]
    table = tmp_path / "mine.csv"
    table.write_text("\n".join([HEADER, *rows]) + "\n")
    assert "mine" in run("reproduce", str(table)).out
    fitted = tmp_path / "fitted.toml"
    result = run("reproduce", str(table), "--stack", str(base), "--fit", str(fitted))
    assert result.code == 0 and "kernel.gemm.memory" in result.out
    assert 0.3 < load_stack(fitted).kernels["gemm"].memory < 0.8
    assert load_stack(fitted).basis == "calibrated"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kcash"], "unknown paper 'kcash'; nearest: kcache"),
        (["kcache", "--fit", "x.toml"], "stack fused frees no number"),
        (["kcache", "--fit", "x.toml", "--stack", "fuzed"], "unknown stack 'fuzed'"),
        (["kcache", "--fit", "x.toml", "--stack", "gpt-fast"], "0 rows cannot determine 2"),
    ],
)
def test_refusals_are_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("reproduce", *arguments)
    assert (result.code, result.out) == (2, "")
    assert said in result.err and result.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
