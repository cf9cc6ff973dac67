"""Bad traces: one line that names file, place, column, rule and mend; or left out and counted."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvsim.errors import InputError
from kvsim.traces import rules
from kvsim.traces.read import ReadOptions, load
from tests.support.bad_traces import BAD_FILES, BAD_ROWS, DAY, azure

NAMED = {"arrival": "t", "prompt": "p", "generate": "g"}


def refused(path: Path, words: str, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        load(str(path), ReadOptions(**options))
    message = str(caught.value)
    assert message.isprintable() and len(message) < 600, message
    assert path.name in message
    missing = [word for word in words.split("|") if word.lower() not in message.lower()]
    assert not missing, (missing, message)
    return message


def written(folder: Path, data: bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named(case: str, tmp_path: Path) -> None:
    data, rule, words = BAD_ROWS[case]
    message = refused(written(tmp_path, data), words)
    assert f"[rule: {rule}]" in message
    assert "--skip-bad" in message


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_left_out_and_counted(case: str, tmp_path: Path) -> None:
    data, rule, _ = BAD_ROWS[case]
    trace = load(str(written(tmp_path, data)), ReadOptions(skip_bad=True))
    assert len(trace.requests) == 4
    assert trace.left_out.counts == {rule: 1}
    assert f"omitted 1 rows [{rule}]" in trace.notes[0]


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.parametrize("skip", [False, True])
def test_a_bad_file_is_named(case: str, skip: bool, tmp_path: Path) -> None:
    data, words = BAD_FILES[case]
    if skip and case.startswith("lists"):
        words = "all 1 rows were omitted"
    refused(written(tmp_path, data), words, skip_bad=skip)


def test_every_rule_is_broken_by_some_row_here() -> None:
    assert set(rules.RULES) == {rule for _, rule, _ in BAD_ROWS.values()} | {"failed"}


def test_the_first_of_many_bad_rows_is_named_and_all_are_counted(tmp_path: Path) -> None:
    bad = [f"{DAY}1.6,-1,1", "", f"{DAY}1.7,5", f"{DAY}1.8,x,1"] * 50
    path = written(tmp_path, azure(*bad))
    refused(path, "line 4|-1")
    left = load(str(path), ReadOptions(skip_bad=True)).left_out
    assert left.counts == {"least": 50, "columns": 50, "number": 50}
    assert "line 6:" in left.first["columns"] and "line 7," in left.first["number"]


def test_lines_are_counted_over_blocks_and_torn_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvsim.traces import source

    monkeypatch.setattr(source, "BYTES_AT_ONCE", 64)
    rows = [f"{i},{i},1" if i % 7 else f"{i}" for i in range(1, 60)]
    rows[40] = "41,x,1"
    path = written(
        tmp_path, "\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]).encode()
    )
    refused(path, "line 8:|1 columns")
    trace = load(str(path), ReadOptions(skip_bad=True))
    assert trace.left_out.counts == {"columns": 8, "number": 1}
    assert "line 42," in trace.left_out.first["number"]
    assert trace.requests.prompt.tolist() == [i for i in range(1, 60) if i % 7 and i != 41]


def test_places_that_are_no_files(tmp_path: Path) -> None:
    refused(tmp_path / "none.csv", "no such file|sample:NAME")
    refused(tmp_path, "a folder")
    for name, words in [("sample:chet", "sample trace|chat"), ("a\0b", "not a path")]:
        with pytest.raises(InputError) as caught:
            load(name)
        assert any(word in str(caught.value) for word in words.split("|"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "azur"}, "unknown trace format 'azur'|azure"),
        ({"format": "burstgpt"}, "line 1|'Timestamp'|TIMESTAMP|--columns arrival="),
        (
            {"columns": {"arrival": "TIMESTAMP", "prompt": "Context", "generate": "x"}},
            "'Context'|ContextTokens|--columns prompt=",
        ),
        ({"columns": {"arival": "TIMESTAMP"}}, "column role 'arival'|arrival"),
        ({"columns": {"arrival": "TIMESTAMP"}}, "no prompt"),
        ({"columns": NAMED, "format": "azure"}, "--columns or --format"),
        ({"time_unit": "min"}, "time unit 'min'|ms"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(str(written(tmp_path, azure())), ReadOptions(**options))
    assert all(word in str(caught.value) for word in words.split("|")), caught.value


@pytest.mark.parametrize(
    ("column", "rule"),
    [
        (pa.array([1, None, 3]), "missing"),
        (pa.array([True, False, True]), "type"),
        (pa.array([[1], [2], [3]]), "type"),
        (pa.array(["1", "x", "3"]), "number"),
        (pa.array([1.0, float("nan"), 3.0]), "finite"),
        (pa.array([None, None, None]), "missing"),
    ],
)
def test_bad_parquet_columns(column: Any, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    pq.write_table(pa.table({"t": [1, 2, 3], "p": column, "g": [1, 1, 1]}), path)
    message = refused(path, f"'p'|row|[rule: {rule}]", columns=NAMED)
    assert "row 2" in message or "row 1" in message


def test_many_requests_at_one_instant_are_no_error(tmp_path: Path) -> None:
    same = [f"{DAY}1.5,100,10"] * 3
    assert len(load(str(written(tmp_path, azure(*same)))).requests) == 7


@pytest.mark.parametrize("name", ["t.csv.gz", "t.jsonl.gz"])
def test_a_file_of_blank_lines_ends_soon(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 MB that unpack to 3 GB of line ends are not read to their end."""
    monkeypatch.setattr("kvsim.traces.source.BYTES_AT_ONCE", 2**16)
    monkeypatch.setattr("kvsim.traces.containers.MAX_BLANK_BYTES", 2**20)
    first = b"arrival_s,prompt_tokens,generate_tokens\n" if "csv" in name else b""
    fields = {"arrival_s": 0, "prompt_tokens": 5, "generate_tokens": 5}
    row = b"0,5,5\n" if "csv" in name else json.dumps(fields).encode() + b"\n"
    with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
        file.write(first + row)
        file.write(b"\n" * 2**21)
    with pytest.raises(InputError, match="of blank lines in a row"):
        load(str(tmp_path / name))
