"""Rows read strictly, predicted by the same engine, scored, and fitted into a stack file."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.evidence.predicted import predict
from kvsim.evidence.published import PAPER_COLUMNS, papers, read
from kvsim.evidence.scores import error, score
from kvsim.report import reproduce as reproduction
from tests.support.commands import run
from tests.support.envelope import answer_in

HEADER = ",".join(PAPER_COLUMNS)
LINE = "own,1,llama2-7b,a6000,fused,kivi,bits=4;group=64,8,2048,128,decode_tok_s,200,check,"


def table(folder: Path, *lines: str, header: str = HEADER) -> str:
    path = folder / "rows.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return str(path)


def changed(column: str, value: str) -> str:
    fields = LINE.split(",")
    fields[PAPER_COLUMNS.index(column)] = value
    return ",".join(fields)


def test_a_row_is_read_as_written(tmp_path: Path) -> None:
    (row,) = read(table(tmp_path, LINE))
    assert (row.settings, row.batch, row.prompt) == ("kivi:bits=4,group=64", 8, 2048)
    assert row.published == 200 and row.use == "check"
    tiled = changed("technique", "flexgen").replace("bits=4;group=64,8,", "weights=int8,32x8,")
    (row,) = read(table(tmp_path, tiled))
    assert (row.batch, row.settings, row.options) == (256, "flexgen:parts=8", {"weights": "int8"})
    assert row.deployment().weights == "int8"
    (row,) = read(table(tmp_path, changed("batch", "max")))
    assert row.batch is None and predict(row) > 0


def test_predictions_are_those_of_kvsim_predict(tmp_path: Path) -> None:
    def of(metric: str, **columns: str) -> float:
        line = changed("metric", metric)
        fields = line.split(",")
        for column, value in columns.items():
            fields[PAPER_COLUMNS.index(column)] = value
        (row,) = read(table(tmp_path, ",".join(fields)))
        return predict(row)

    rate = of("decode_tok_s")
    assert of("decode_latency_s") == pytest.approx(8 * 127 / rate)
    assert of("step_ms") == pytest.approx(8e3 / rate)
    full = of("decode_tok_s", technique="full", params="")
    assert of("speedup", params="bits=4;group=64;baseline=full") == pytest.approx(rate / full)
    assert of("max_batch") > 8
    assert of("fits") == 1 and of("fits", batch="100000") == 0
    assert of("peak_gib", batch="16") > of("peak_gib") > 12.5
    assert of("kv_ratio") == pytest.approx((4 + 32 / 64) / 16 + 128 / 2048)
    whole_step = of("step_ms", generate="1", params="bits=4;group=64;op=attn")
    assert 0 < whole_step < of("step_ms")
    assert of("split", technique="kvpr", params="split=100") == 100


BAD: dict[str, tuple[Callable[[Path], str], str]] = {
    "no file": (lambda d: str(d / "none.csv"), "there is no such file"),
    "unknown paper": (lambda d: "kvprr", "unknown paper 'kvprr'; nearest: kvpr"),
    "empty": (lambda d: table(d, header=""), "column paper is missing"),
    "no rows": (lambda d: table(d), "holds no rows"),
    "missing column": (lambda d: table(d, LINE, header=HEADER.replace("metric,", "")), "metric"),
    "unknown column": (lambda d: table(d, LINE, header=HEADER + ",unit"), "'unit'"),
    "short line": (lambda d: table(d, "own,1"), "line 2: expected 14 fields"),
    "metric": (lambda d: table(d, changed("metric", "tokens")), "line 2:"),
    "technique": (lambda d: table(d, changed("technique", "kivy")), "'kivy'; nearest: kivi"),
    "setting": (lambda d: table(d, changed("params", "bits=3")), "line 2, technique: kivi: bits=3"),
    "params": (lambda d: table(d, changed("params", "bits")), "line 2, params"),
    "batch": (lambda d: table(d, changed("batch", "0")), "line 2, batch"),
    "prompt": (lambda d: table(d, changed("prompt", "2k")), "line 2, prompt"),
    "value": (lambda d: table(d, changed("published", "fast")), "line 2, published"),
    "speed-up of what": (lambda d: table(d, changed("metric", "speedup")), "baseline=TECHNIQUE"),
    "twice": (lambda d: table(d, LINE, LINE), "line 3: the same run and metric as"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tables_are_one_line(case: str, tmp_path: Path) -> None:
    make, said = BAD[case]
    with pytest.raises(InputError) as caught:
        read(make(tmp_path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "value"), [("model", "llama9"), ("hardware", "a600000"), ("stack", "no-engine")]
)
def test_bad_runs_name_their_row(column: str, value: str, tmp_path: Path) -> None:
    line = changed(column, value)
    (row,) = read(table(tmp_path, line))
    with pytest.raises(InputError, match=r"rows.csv, line 2: "):
        predict(row)


def test_scores_keep_fitted_and_held_out_rows_apart(tmp_path: Path) -> None:
    uses = {1: ("fit", 10), 2: ("check", 20), 4: ("check", 40), 8: ("anomaly", 1)}
    lines = [
        changed("batch", str(b)).replace(",check,", f",{use},").replace(",200,", f",{v},")
        for b, (use, v) in uses.items()
    ]
    rows = read(table(tmp_path, *lines))
    (found,) = score(rows, [11.0, 22.0, 36.0, 2.0])
    assert found.fitted == pytest.approx((0.1, 0.1))
    assert found.held_out == pytest.approx((0.1, 0.1))
    assert found.with_anomalies == pytest.approx((0.4, 1.0))
    trivial = np.mean([abs((10 + 40 + 1) / 3 / 20 - 1), abs((10 + 20 + 1) / 3 / 40 - 1)])
    assert found.skill == pytest.approx(1 - 0.1 / trivial)
    result = reproduction.make_result(rows, [11.0, 22.0, 36.0, 2.0], "own")
    written = reproduction.to_markdown(result)
    assert "| own | 1 | decode_tok_s | 4 | 10.0 / 10.0 |" in written


@pytest.mark.parametrize("paper", papers())
def test_shipped_tables_are_read_and_predicted(paper: str) -> None:
    rows = read(paper)
    for row in rows:
        predicted = predict(row)
        assert np.isfinite(predicted) and predicted >= 0, row.where
        assert np.isfinite(error(row, predicted)), row.where


def test_no_table_is_worse_than_the_page_of_errors_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
    told: dict[tuple[str, ...], float] = {}
    for line in page.partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and "/" in cells[5]:
            told[tuple(cells[:3])] = float(cells[5].partition("/")[0])
    rows = [row for paper in papers() for row in read(paper)]
    found = score(rows, [predict(row) for row in rows])
    now: dict[tuple[str, ...], float] = {
        (s.paper, s.table, s.metric): 100 * s.held_out[0] for s in found
    }
    assert set(told) == {key for key, value in now.items() if value == value}
    for key, known in told.items():
        assert now[key] <= 1.2 * known + 0.1, key  # one digit is printed


def test_errors_are_told_by_mechanism() -> None:
    found = answer_in(run("reproduce", "specache", "--json").out)["mechanisms"]
    assert {row["of"] for row in found} == {"context", "heads", "technique"}
    assert all(0 <= row["mean"] <= row["worst"] and row["rows"] > 0 for row in found)
