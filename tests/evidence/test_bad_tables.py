"""Tables of operators and load tests that cannot be used: one line each, nothing is written."""

import csv
from pathlib import Path

import pytest

from tests.support.commands import run

ROW = {
    "device": "h100", "engine": "mine", "version": "1", "op": "gemm", "dtype": "bfloat16",
    "ms": "1.0", "quantise_ms": "0", "m": "64", "n": "4096", "k": "4096",
}  # fmt: skip
CACHE = {
    "device": "h100", "engine": "mine", "version": "1", "op": "decode_attention", "ms": "1.0",
    "kv_dtype": "bfloat16", "batch": "8", "context": "4095", "heads": "32", "kv_heads": "8",
    "head_dim": "128", "l2": "cold",
}  # fmt: skip
LOAD = {
    "device": "h100", "engine": "mine", "model": "llama3.1-8b", "precision": "bf16", "tp": "1",
    "dp": "1", "isl": "128", "osl": "128", "concurrency": "8", "ttft_ms": "20", "tpot_ms": "8",
}  # fmt: skip


def written(path: Path, row: dict[str, str], change: dict[str, str | None], count: int) -> Path:
    """A table of equal rows with some cells changed; without the columns whose change is None."""
    row = {k: v for k, v in (row | change).items() if v is not None}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows([row] * count)
    return path


def refused(path: Path, option: str, *more: str) -> str:
    """What the command says of a table; it must write nothing."""
    out = path.parent / "out.toml"
    result = run("calibrate", option, str(path), "--engine", "mine", "--out", str(out), *more)
    assert result.code == 2, result
    (line,) = [said for said in result.err.splitlines() if "are omitted" not in said]
    assert line.startswith("kvsim: ") and not out.exists()
    return line


@pytest.mark.parametrize(
    ("row", "change", "said"),
    [
        (ROW, {"m": "many"}, "whose m is no whole number"),
        (ROW, {"n": "-1"}, "whose n is no whole number"),
        (ROW, {"k": "2.5"}, "whose k is no whole number"),
        (ROW, {"k": "nan"}, "whose k is no whole number"),
        (ROW, {"n": "1e13"}, "whose n is absurdly large"),
        (ROW, {"ms": "-1"}, "whose time is not a positive number"),
        (ROW, {"ms": "fast"}, "whose time is not a positive number"),
        (ROW, {"ms": "1e8"}, "whose time is not a positive number"),
        (ROW, {"quantise_ms": "2"}, "whose time is not a positive number"),
        (ROW, {"ms": "1e-6"}, "faster than memory allows"),
        (ROW, {"op": "conv"}, "of an unknown op 'conv'"),
        (ROW, {"dtype": "fp5"}, "of an unknown number format 'fp5'"),
        (ROW, {"m": None}, "without a column m"),
        (ROW, {"device": "gpu9"}, "unknown GPU"),
        (ROW, {"engine": "theirs"}, "no rows for 'mine', only for theirs"),
        (ROW, {"device": None}, "column device is missing"),
        (CACHE, {"l2": "warm"}, "warm in the L2 cache"),
        (ROW, {}, "no class has 25 rows: gemm (1 rows)"),  # forty times the same row is one row
    ],
)
def test_rows_that_are_no_evidence(
    tmp_path: Path, row: dict[str, str], change: dict[str, str | None], said: str
) -> None:
    assert said in refused(written(tmp_path / "ops.csv", row, change, 40), "--from-ops")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "ops.csv"),
        (b"device,engine,version,op,dtype,ms,m,n,k\n", "ops.csv: no rows; expected the columns"),
        (b"device,engine,op,ms,ms\nh100,mine,gemm,1,2\n", "ms"),
        (b"device,engine,op,ms\nh100,mine,gemm,1,2,3,4\n", "line 2"),
        (b'device,engine,op,ms\nh100,mine,gemm,"1\n', "ops.csv"),
        (b"device,engine,op,ms\nh100,mi\x00ne,gemm,1\n", "no rows for 'mine'"),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "ops.csv"
    path.write_bytes(content)
    assert said in refused(path, "--from-ops")


def test_what_stands_around_a_table(tmp_path: Path) -> None:
    good = written(tmp_path / "ops.csv", ROW, {}, 40)
    assert "missing.csv" in refused(tmp_path / "missing.csv", "--from-ops")
    assert str(tmp_path) in refused(tmp_path, "--from-ops")
    assert "unknown GPU" in refused(good, "--from-ops", "--gpu", "gpu9")
    assert "unknown engine or stack" in refused(good, "--from-ops", "--stack", "stack9")
    two = tmp_path / "two.csv"
    two.write_text(good.read_text() + good.read_text().splitlines()[1].replace("h100", "h200"))
    assert "the files hold h100, h200; name one" in refused(two, "--from-ops")
    wrong = run("calibrate", "--from-ops", str(good), "--engine", "mine", "--out", "out.txt")
    assert wrong.code == 2 and "--out" in wrong.err and ".toml" in wrong.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ttft_ms": None}, "column ttft_ms is missing"),
        ({"precision": "fp5"}, "precision in load.csv, line 2"),
        ({"tp": "3"}, "--tp: got 3"),
        ({"tp": "0"}, "line 2, tp: got '0'"),
        ({"isl": "x"}, "line 2, isl: got 'x'"),
        ({"osl": "-1"}, "line 2, osl: got '-1'"),
        ({"concurrency": "nan"}, "line 2, concurrency: got 'nan'"),
        ({"tpot_ms": "inf"}, "line 2, tpot_ms: got 'inf'"),
        ({"tpot_ms": "0.4"}, "0.4 ms per token, where h100 needs 4.4"),
        ({"model": "none"}, "unknown model"),
        ({"device": "gpu9"}, "unknown GPU"),
        ({"engine": "theirs"}, "no row of engine 'mine'"),
        ({"random_range_ratio": "1.2"}, "got '1.2'; expected a number above 0 and at most 1"),
    ],
)
def test_load_tests_that_are_none(tmp_path: Path, change: dict[str, str | None], said: str) -> None:
    assert said in refused(written(tmp_path / "load.csv", LOAD, change, 8), "--from-serving")
