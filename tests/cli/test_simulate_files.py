"""What ``kvsim simulate`` writes: whole files only, which the same run goes on with."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvsim.traces.read import write as write_trace
from kvsim.traces.requests import Requests
from tests.support.commands import interruptible, run
from tests.support.envelope import answer_in, own_fields

BASE = ("simulate", "--model", "llama3.1-8b", "--gpu", "h100", "--trace")
MANY = "full,kivi,kvpr"


def answer(*arguments: str) -> Any:
    done = run(*BASE, *arguments, "--json")
    assert done.code == 0, done.err
    return answer_in(done.out)


def test_a_folder_holds_one_file_per_technique_and_is_taken_up(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    first = answer("sample:chat", "--compare", MANY, "--out", str(out))
    files = sorted(out.iterdir())
    assert [f.name.split()[0].removesuffix(".parquet") for f in files] == ["full", "kivi", "kvpr"]
    times = [f.stat().st_mtime_ns for f in files]
    files[1].unlink()
    page = tmp_path / "page.html"
    options = ("--compare", MANY, "--out", str(out), "--resume", "--report", str(page))
    again = answer("sample:chat", *options)
    assert own_fields(again) == own_fields(first)
    assert [f.stat().st_mtime_ns == t for f, t in zip(files, times, strict=True)] == [
        True,
        False,
        True,
    ]
    assert "Plotly.newPlot" in page.read_text()


@pytest.mark.parametrize(
    "changed",
    [("--rate", "2x"), ("--max-seqs", "8"), ("--tp", "2"), ("--ttft", "1"), ("--replicas", "2"),
     ("--prefill", "whole"), ("--technique", "kivi"), ("--gpu-memory", "40")],
)  # fmt: skip
def test_another_run_is_not_taken_up(changed: tuple[str, ...], tmp_path: Path) -> None:
    out = str(tmp_path / "run.parquet")
    answer("sample:chat", "--out", out)
    done = run(*BASE, "sample:chat", "--out", out, "--resume", *changed)
    # what a factor means is noted once in a process
    said = [x for x in done.err.splitlines() if "--scale clock" not in x]
    assert (done.code, done.out, len(said)) == (2, "", 1)
    assert "--resume" in said[0] and "another run" in said[0]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"arrival,prompt\n1,2\n"])
def test_a_foreign_file_is_not_taken_up(content: bytes, tmp_path: Path) -> None:
    out = tmp_path / "run.parquet"
    out.write_bytes(content)
    done = run(*BASE, "sample:chat", "--out", str(out), "--resume")
    assert done.code == 2 and len(done.err.splitlines()) == 1
    assert "no file of kvsim simulate" in done.err
    assert out.read_bytes() == content


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_nothing_that_looks_whole(
    how: signal.Signals, tmp_path: Path
) -> None:
    draws = np.random.default_rng(1)
    count = 60_000
    arrival = np.cumsum(draws.exponential(0.01, count))
    trace = tmp_path / "trace.parquet"
    write_trace(trace, Requests(arrival, draws.integers(1, 999, count), np.full(count, 150)))
    out = tmp_path / "runs"
    command = (*BASE, str(trace), "--compare", MANY, "--out", str(out), "--replicas", "8")
    moments = random.Random(int(how))
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "kvsim", *command, "--resume", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ},
            preexec_fn=interruptible,
        )
        time.sleep(moments.uniform(0.5, 5.0))
        process.send_signal(how)
        said, _ = process.communicate(timeout=60)
        assert process.returncode in (0, 130, -how)
        assert not said or len(json.loads(said)["rows"]) == len(MANY.split(","))
        for file in out.glob("[!.]*") if out.exists() else ():
            assert pq.read_metadata(file).num_rows == count
    again = command[len(BASE) :]
    assert answer(*again, "--resume")["rows"] == answer(*again)["rows"]
    if how is signal.SIGINT:
        assert not list(out.glob(".*"))


def test_names_that_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for arguments, words in [
        (("--compare", MANY, "--out", str(file)), "folder"),
        (("--compare", MANY, "--out", str(tmp_path / "no" / "where")), "does not exist"),
        (("--out", str(tmp_path / "no" / "x.parquet")), "there is no folder"),
        (("--resume",), "--out"),
        (("--report", str(tmp_path)), "--report"),
        (("--compare", "full,kivi,full"), "twice"),
    ]:
        done = run(*BASE, "sample:chat", *arguments)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1), done.err
        assert words in done.err
    assert file.read_text() == "mine"
