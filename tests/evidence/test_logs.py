"""Logs of serving runs and tables of measured runs, as docs/logs.md shows them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.evidence import published
from kvsim.evidence.logs import MeasuredRun, read_run
from kvsim.evidence.predicted import METRICS, predict
from tests.support.commands import run as kvsim

DOCS = (Path(__file__).parents[2] / "docs" / "logs.md").read_text()
EXAMPLES: dict[str, str] = dict(re.findall(r"```\w+ (\S+)\n(.*?)```", DOCS, re.S))


def example(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.write_text(EXAMPLES[name])
    return path


def result(**changes: object) -> str:
    return json.dumps(json.loads(EXAMPLES["vllm-or-trtllm.json"]) | changes)


def test_a_result_of_vllm_or_tensorrt_llm(tmp_path: Path) -> None:
    run = read_run(example(tmp_path, "vllm-or-trtllm.json"))
    assert run.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert run.left_out == 1
    assert run.requests.prompt.tolist() == [512, 480, 256]
    assert run.requests.generate.tolist() == [3, 2, 1]
    np.testing.assert_allclose(run.requests.arrival, [0.0, 0.4, 1.1])
    np.testing.assert_allclose(run.first, [0.05, 0.46, 1.14])
    np.testing.assert_allclose(run.last, [0.072, 0.471, 1.14])


def test_a_result_of_sglang_whose_requests_begin_as_others_end(tmp_path: Path) -> None:
    run = read_run(example(tmp_path, "sglang.jsonl"))
    np.testing.assert_allclose(run.requests.arrival, [0.0, 0.0, 0.071])  # 0.06 + 0.011
    np.testing.assert_allclose(run.first, [0.05, 0.06, 0.111])


def test_one_request_per_line(tmp_path: Path) -> None:
    run = read_run(example(tmp_path, "requests.jsonl"))
    np.testing.assert_allclose(run.requests.arrival, [0.0, 0.5])
    np.testing.assert_allclose(run.last, [1.4, 1.9])


def test_what_simulate_wrote_gives_its_times_back(tmp_path: Path) -> None:
    out = tmp_path / "run.parquet"
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,generate_tokens\n0,200,20\n0.1,300,30\n0.2,100,5\n")
    done = kvsim(
        "simulate", "--trace", str(trace), "--model", "llama3.1-8b", "--gpu", "h100",
        "--technique", "full", "--out", str(out),
    )  # fmt: skip
    assert done.code == 0, done.err
    run = read_run(out)
    assert isinstance(run, MeasuredRun) and run.left_out == 0
    assert run.requests.generate.tolist() == [20, 30, 5]
    assert (run.first > run.requests.arrival).all() and (run.last > run.first).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (result(ttfts=None), "no list ttfts, so no times of individual requests; save them"),
        (result(itls=[[], []]), "lists of unequal length (input_lens 4"),
        (result(start_times=None), "2 requests a second, but no start_times"),
        (result(ttfts=[0.1, "x", 0.1, 0.1]), "request 2, ttfts: got 'x'; expected a number"),
        (result(itls=[0.1, [], [], []]), "request 1, itls: got '0.1'; expected a list"),
        (result(ttfts=[0.1, -0.2, 0.1, 0.1]), "request 2, ttfts: got -0.2; expected seconds"),
        (result(itls=[[0.1, -0.01], [], [], []]), "request 1, itls: got -0.01; expected seconds"),
        (result() + "\n" + result(), "results of 2 runs"),
        ("PAR1 and no more", "no file of kvsim simulate --out"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(InputError) as problem:
        read_run(path)
    assert message in str(problem.value) and "\n" not in str(problem.value)


def test_seven_columns_are_a_table_of_runs(tmp_path: Path) -> None:
    path = example(tmp_path, "runs.csv")
    rows = published.read(str(path))
    assert [row.metric for row in rows] == ["tpot_ms"] * 3
    assert [row.settings for row in rows] == ["full", "full", "kivi:bits=4,group=32"]
    assert {(row.use, row.stack, row.hardware) for row in rows} == {("check", "vllm", "h100")}
    for row in rows:
        assert 0.3 < predict(row) / row.published < 3
    done = kvsim("reproduce", str(path))
    assert done.code == 0, done.err


def test_a_file_for_the_other_command_is_sent_there(tmp_path: Path) -> None:
    table, log = (str(example(tmp_path, name)) for name in ("runs.csv", "vllm-or-trtllm.json"))
    sent = kvsim("calibrate", "--from-run", table, "--model", "llama3.1-8b", "--gpu", "h100",
                 "--out", str(tmp_path / "mine.toml"))  # fmt: skip
    assert sent.code == 2 and "goes to kvsim reproduce" in sent.err
    sent = kvsim("reproduce", log)
    assert sent.code == 2 and "goes to kvsim calibrate --from-run" in sent.err


def test_own_metrics_are_those_of_tables() -> None:
    assert set(published.OWN_METRICS) < set(METRICS)
    for metric in published.OWN_METRICS:
        assert f"`{metric}`" in DOCS


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("model,gpu,technique,batch,prompt,tpot_ms", "column generate is missing"),
        ("model,gpu,technique,batch,prompt,generate", "got none besides the run's columns"),
        ("model,gpu,technique,batch,prompt,generate,tpot_ms,ttft_ms", "got tpot_ms, ttft_ms"),
        ("model,gpu,technique,batch,prompt,generate,tpot_ms,tp,tp", "appears twice"),
    ],
)
def test_headers_that_are_wrong(tmp_path: Path, header: str, message: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{header}\n")
    with pytest.raises(InputError, match=re.escape(message)):
        published.read(str(path))


def test_degrees_and_formats_are_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "model,gpu,technique,batch,prompt,generate,decode_tok_s,tp,weights,stack\n"
        "llama3.1-70b,h100,full,4,1024,256,230,8,fp8,fused\n"
    )
    (row,) = published.read(str(path))
    d = row.deployment()
    assert (d.tp, d.weights) == (8, "fp8") and row.published == 230
