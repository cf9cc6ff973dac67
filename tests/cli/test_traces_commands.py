"""`kvsim traces`: statistics against plain counting, conversion, generation, samples, options."""

import gzip
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata, spearmanr

from kvsim.traces.read import ReadOptions, load, write
from kvsim.traces.requests import Requests
from kvsim.traces.source import samples
from kvsim.traces.statistics import describe, leading_hits, ranks
from tests.support.bad_traces import azure
from tests.support.commands import interruptible, line, run
from tests.support.envelope import answer_in, own_fields
from tests.support.traces import TRACE_FILES


def answer(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.code == 0, result
    return answer_in(result.out)


def seen_before(rows: list[list[int]]) -> list[int]:
    """Leading blocks of each row that an earlier row had, counted with a set."""
    known: set[int] = set()
    found = []
    for row in rows:
        hits = 0
        while hits < len(row) and row[hits] in known:
            hits += 1
        found.append(hits)
        known.update(row)
    return found


@given(st.lists(st.lists(st.integers(0, 12), max_size=6, unique=True), min_size=1, max_size=12))
def test_prefix_hits_are_what_a_set_counts(rows: list[list[int]]) -> None:
    start = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    ids = np.array([i for row in rows for i in row], dtype=np.int64)
    ones = np.ones(len(rows), dtype=np.int64)
    requests = Requests(ones.astype(float), ones * 96, ones, ids, start, 16)
    assert leading_hits(requests).tolist() == seen_before(rows)


def test_statistics_are_what_plain_counting_gives() -> None:
    requests = load("sample:chat").requests
    found = answer("traces", "inspect", "sample:chat")
    arrival = requests.arrival.tolist()
    gaps = [b - a for a, b in pairwise(arrival)]
    mean = math.fsum(gaps) / len(gaps)
    deviation = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert found["requests"] == len(arrival) == 500
    assert found["rate_rps"] == pytest.approx(1 / mean, rel=1e-12)
    assert found["gap_cv"] == pytest.approx(deviation / mean, rel=1e-9)
    minutes = int(arrival[-1] // 60)
    per_minute = Counter(int(time // 60) for time in arrival)
    counts = [per_minute[minute] for minute in range(minutes)]
    average = sum(counts) / minutes
    variance = sum((count - average) ** 2 for count in counts) / minutes
    assert found["dispersion_per_minute"] == pytest.approx(variance / average, rel=1e-12)
    assert found["length_correlation"] == pytest.approx(
        spearmanr(requests.prompt, requests.generate).statistic, rel=1e-9
    )
    assert found["prompt_tokens"]["total"] == sum(requests.prompt.tolist())
    assert found["prompt_tokens"]["p50"] == np.median(requests.prompt)
    assert found["input_tok_s"] == pytest.approx(sum(requests.prompt.tolist()) / arrival[-1])
    assert found["reuse"] is None and found["left_out"] == {}


@given(st.lists(st.integers(0, 9), min_size=1))
def test_ranks_are_scipys(values: list[int]) -> None:
    assert ranks(np.array(values)).tolist() == rankdata(values).tolist()


@pytest.mark.parametrize("count", [1, 2])
def test_a_trace_too_short_to_tell(count: int) -> None:
    ones = np.ones(count, dtype=np.int64)
    requests = Requests(np.zeros(count), ones, ones)
    found = describe(requests)
    assert (found.rate, found.gap_cv, found.dispersion, found.correlation) == (None,) * 4
    assert found.simultaneous == (0.0 if count == 1 else 1.0)


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.csv.gz", "a.jsonl", "a.jsonl.gz"])
def test_what_is_written_is_what_is_read(name: str, tmp_path: Path) -> None:
    requests = load("sample:conversation").requests
    if "csv" in name:
        requests = Requests(requests.arrival, requests.prompt, requests.generate)
    write(tmp_path / name, requests)
    again = load(str(tmp_path / name))
    for column in ("prompt", "generate", "block_ids", "block_start"):
        assert np.array_equal(getattr(requests, column), getattr(again.requests, column)), column
    assert np.allclose(requests.arrival, again.requests.arrival, rtol=0, atol=1e-9)
    assert again.requests.block_tokens == requests.block_tokens
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("case", ["mooncake", "azure 2024", "burstgpt", "vllm json"])
def test_convert_keeps_everything(case: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(TRACE_FILES[case][1])
    result = run("traces", "convert", str(tmp_path / "in"), str(tmp_path / "out.parquet"))
    assert (result.code, result.out) == (0, "")
    assert "4 requests written" in result.err
    before, after = (load(str(tmp_path / name)).requests for name in ("in", "out.parquet"))
    for column in ("arrival", "prompt", "generate", "block_ids", "block_start"):
        assert np.array_equal(getattr(before, column), getattr(after, column)), column
    assert before.block_tokens == after.block_tokens


def test_convert_sorts_and_leaves_out_on_request(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:48,7,7", "2023-11-16 18:15:41,5,-5"]
    (tmp_path / "in").write_bytes(azure(*rows))
    arguments = ["traces", "convert", str(tmp_path / "in"), str(tmp_path / "out.parquet")]
    assert "line 5" in line(*arguments)
    assert "--sort" in line(*arguments, "--skip-bad")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    result = run(*arguments, "--skip-bad", "--sort")
    assert result.code == 0
    assert "omitted 1 rows [least], the first:" in result.err
    assert load(str(tmp_path / "out.parquet")).requests.prompt.tolist() == [100] * 4 + [7]


def test_a_conversion_that_is_killed_leaves_what_was_there(tmp_path: Path) -> None:
    """SIGKILL while writing: the old file stays as it is; SIGINT: and nothing else is there."""
    source, out = tmp_path / "in.csv", tmp_path / "out.parquet"
    rows = "".join(f"{i},100,10\n" for i in range(1_500_000))
    source.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    command = [sys.executable, "-m", "kvsim", "traces", "convert", str(source), str(out)]
    for sent in (signal.SIGINT, signal.SIGKILL):
        for _ in range(5):  # on a busy machine the file may be in place before the signal comes
            out.write_text("old")
            with subprocess.Popen(
                command, stderr=subprocess.PIPE, preexec_fn=interruptible
            ) as process:
                while not list(tmp_path.glob(".kvsim-*")) and process.poll() is None:
                    time.sleep(0.001)
                os.kill(process.pid, sent)
                process.communicate()
            if process.returncode and out.read_bytes() == b"old":
                break
            assert len(load(str(out)).requests) == 1_500_000
        assert process.returncode in (130, -signal.SIGINT, -signal.SIGKILL)
        assert out.read_bytes() == b"old"
        assert bool(list(tmp_path.glob(".kvsim-*"))) == (sent == signal.SIGKILL)


def test_inspect_says_what_was_left_out(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(azure("2023-11-16 18:15:41.7,0,0", "x"))
    result = run("traces", "inspect", str(path), "--skip-bad", "--json")
    assert answer_in(result.out)["left_out"] == {"columns": 1, "least": 1}
    assert result.err.count("omitted 1 rows") == 2
    table = run("traces", "inspect", str(path), "--skip-bad").out
    assert "requests" in table and max(map(len, table.splitlines())) <= 100


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl.gz"])
def test_generate_is_deterministic(name: str, tmp_path: Path) -> None:
    told = []
    for folder, seed in (("1", "5"), ("2", "5"), ("3", "6")):
        (tmp_path / folder).mkdir()
        out = tmp_path / folder / name
        options = ["--like", "sample:chat", "--seed", seed]
        told.append(own_fields(answer("traces", "generate", str(out), *options)) | {"trace": ""})
    first, again, other = ((tmp_path / folder / name).read_bytes() for folder in "123")
    assert first == again != other
    assert told[0] == told[1] != told[2]
    assert told[0]["like"]["requests"] == 500


def test_a_likeness_keeps_prefixes_and_takes_what_is_given(tmp_path: Path) -> None:
    out = str(tmp_path / "a.jsonl")
    found = answer("traces", "generate", out, "--like", "sample:conversation", "--requests", "2000")
    assert found["reuse"]["hit_rate"] == pytest.approx(found["like"]["reuse"]["hit_rate"], abs=0.05)
    faster = answer(
        "traces", "generate", out, "--like", "sample:conversation", "--requests", "2000",
        "--rate", "50", "--arrivals", "poisson", "--lengths", "empirical:sample:code",
    )  # fmt: skip
    assert faster["rate_rps"] == pytest.approx(50, rel=0.1)
    assert faster["prompt_tokens"]["p50"] == pytest.approx(
        np.median(load("sample:code").requests.prompt), rel=0.1
    )


def test_samples_are_what_their_commands_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(
        r"^    kvsim (.*)$", (samples()["chat"].parent / "README.md").read_text(), re.MULTILINE
    )
    assert len(commands) == len(samples()) == 4
    for command in commands:
        assert run(*shlex.split(command)).code == 0
    for name, path in samples().items():
        made = tmp_path / path.name
        mine, shipped = (load(str(one)).requests for one in (made, path))
        for column in ("arrival", "prompt", "generate", "block_ids"):
            assert np.array_equal(getattr(mine, column), getattr(shipped, column)), name
        unpack = gzip.decompress if path.suffix == ".gz" else bytes
        assert unpack(made.read_bytes()) == unpack(path.read_bytes()), name
        assert len(load(f"sample:{name}").requests) == len(mine) >= 400


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("inspect", "missing argument|kvsim traces inspect --help"),
        ("inspekt x", "inspekt|kvsim traces --help"),
        ("inspect sample:chat --format azur", "trace format 'azur'|azure"),
        ("inspect sample:chat --columns arrival", "--columns|arrival=NAME"),
        ("convert sample:chat out.csv", "out.csv|.parquet"),
        ("generate out.txt --like sample:chat", "out.txt|.parquet, .csv"),
        ("generate out.csv", "--rate: not given|--like"),
        ("generate out.csv --rate 5", "--requests or --duration: not given"),
        ("generate out.csv --rate 5 --requests 5 --duration 5", "not both"),
        ("generate out.csv --rate 0.001 --duration 0.001", "no request fell into"),
        ("generate out.csv --rate 5 --requests 5 --prefixes reuse", "csv holds no prefix blocks"),
        (
            "generate out.jsonl --rate 5 --requests 5 --prefixes reuse:block=16",
            "blocks of 512|blocks of 16|.parquet",
        ),
        ("generate out.csv --rate 5 --requests 5 --arrivals gama", "'gama'|gamma"),
    ],
)
def test_bad_options(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = line("traces", *arguments.split())
    missing = [word for word in words.split("|") if word.lower() not in message.lower()]
    assert not missing, (missing, message)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_row_far_down_leaves_nothing(tmp_path: Path) -> None:
    """Pieces before it were written beside, and went."""
    path = tmp_path / "in.csv"
    body = "".join(f"{i},100,10\n" for i in range(400_000))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + body + "400000,0,1\n")
    assert "line 400002" in line("traces", "convert", str(path), str(tmp_path / "out.parquet"))
    assert [one.name for one in tmp_path.iterdir()] == ["in.csv"]
    assert len(load(str(path), ReadOptions(skip_bad=True)).requests) == 400_000
