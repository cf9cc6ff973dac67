"""Traces from production: metrics over time, spans, and access logs."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim.traces.read import load
from kvsim.traces.requests import Requests
from tests.support.commands import check, line, run

EDGES = [
    float(f"{digit}e{power}") for power in range(6) for digit in (1, 2, 5)
]  # vLLM's buckets of tokens
STEP = 30.0  # between two looks [s]


def chat() -> Requests:
    return load("sample:chat").requests


def matrix(requests: Requests, prompt: str, generate: str, restart: int = 0) -> dict[str, Any]:
    """What Prometheus would answer of an engine that served a trace; two instances."""
    looks = np.arange(0, requests.duration + STEP, STEP)
    looks[-1] = np.ceil(requests.duration) + 1
    result = []
    for instance in range(2):
        mine = np.arange(len(requests)) % 2 == instance
        for name, values in ((prompt, requests.prompt), (generate, requests.generate)):
            for edge in [*EDGES, np.inf]:
                within = mine & (values <= edge)
                counts = np.searchsorted(requests.arrival[within], looks, side="right")
                if restart and instance == 0:
                    counts[restart:] -= counts[restart]
                metric = {"__name__": f"{name}_bucket", "instance": str(instance), "le": str(edge)}
                pairs = [[t, str(c)] for t, c in zip(looks, counts, strict=True)]
                result.append({"metric": metric, "values": pairs})
            sums = [int(values[mine & (requests.arrival <= t)].sum()) for t in looks]
            if restart and instance == 0:
                sums[restart:] = [s - sums[restart] for s in sums[restart:]]
            metric = {"__name__": f"{name}_sum", "instance": str(instance)}
            pairs = [[t, str(s)] for t, s in zip(looks, sums, strict=True)]
            result.append({"metric": metric, "values": pairs})
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


VLLM = ("vllm:request_prompt_tokens", "vllm:request_generation_tokens")
SGLANG = ("sglang:prompt_tokens_histogram", "sglang:generation_tokens_histogram")


def imported(tmp_path: Path, *files: Path, options: tuple[str, ...] = ()) -> Requests:
    out = tmp_path / "out.parquet"
    result = run("traces", "import", *map(str, files), "--out", str(out), *options)
    assert result.code == 0, result
    return load(str(out)).requests


@pytest.mark.parametrize("names", [VLLM, SGLANG], ids=["vllm", "sglang"])
@pytest.mark.parametrize("restart", [0, 4])
def test_histograms_over_time_give_rate_and_lengths(
    names: tuple[str, str], restart: int, tmp_path: Path
) -> None:
    (tmp_path / "range.json").write_text(json.dumps(matrix(chat(), *names, restart)))
    found, real = imported(tmp_path, tmp_path / "range.json"), chat()
    assert abs(len(found) - len(real)) <= 0.01 * len(real) + (60 if restart else 0)
    if restart:
        return  # what was counted between the last look and the restart is lost
    grid = np.arange(0, real.duration, STEP)
    counts = np.histogram(real.arrival, grid)[0]
    assert np.abs(np.histogram(found.arrival, grid)[0] - counts).max() <= 3
    for name in ("prompt", "generate"):
        mine, theirs = getattr(found, name), getattr(real, name)
        assert mine.mean() == pytest.approx(theirs.mean(), rel=0.02)
        for share in (0.1, 0.5, 0.9):
            edges = np.searchsorted(EDGES, [np.quantile(x, share) for x in (mine, theirs)])
            assert abs(int(edges[0]) - int(edges[1])) <= 1


def test_prefix_hits_are_drawn(tmp_path: Path) -> None:
    document = matrix(chat(), *VLLM)
    for name, total in (("prefix_cache_hits", 300.0), ("prefix_cache_queries", 1000.0)):
        document["data"]["result"].append(
            {"metric": {"__name__": f"vllm:{name}_total"}, "values": [[0, "0"], [250, str(total)]]}
        )
    (tmp_path / "range.json").write_text(json.dumps(document))
    found = imported(tmp_path, tmp_path / "range.json")
    from kvsim.traces.statistics import reuse

    known = reuse(found)
    assert known is not None
    assert known.token_share == pytest.approx(0.3, abs=0.08)


def test_texts_of_metrics(tmp_path: Path) -> None:
    texts = []
    for count in (0, 10, 30):
        lines = ["# HELP vllm:request_prompt_tokens Number", "# TYPE x histogram"]
        for name in VLLM:
            for edge, share in (("100.0", 0.5), ("200.0", 1.0), ("+Inf", 1.0)):
                labels = f'le="{edge}",model_name="m"'
                lines.append(f"{name}_bucket{{{labels}}} {count * share}")
        path = tmp_path / f"{count}.txt"
        path.write_text("\n".join(lines) + "\n")
        texts.append(path)
    found = imported(tmp_path, *texts, options=("--every", "60s"))
    assert len(found) == 30
    assert (found.arrival <= 60).sum() in range(8, 22)
    assert ((found.prompt <= 100).sum(), (found.prompt <= 200).sum()) == (15, 30)


def test_spans_are_requests(tmp_path: Path) -> None:
    def span(start: int, prompt: int, generate: int, kind: str) -> dict[str, Any]:
        tokens = {f"gen_ai.usage.{kind}_tokens": prompt, "gen_ai.usage.output_tokens": generate}
        attributes = [{"key": k, "value": {"intValue": str(v)}} for k, v in tokens.items()]
        return {"name": "llm", "startTimeUnixNano": str(start), "attributes": attributes}

    spans = [span(2 * 10**9, 20, 5, "prompt"), span(10**9, 10, 3, "input"), {"name": "other"}]
    spans += [span(10**9, 2**64, 3, "input"), span(10**400, 10, 3, "input")]  # left out
    text = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    (tmp_path / "spans.jsonl").write_text(text + "\n" + text + "\n")
    found = imported(tmp_path, tmp_path / "spans.jsonl")
    assert found.arrival.tolist() == [0, 0, 1, 1]
    assert found.prompt.tolist() == [10, 10, 20, 20]
    assert found.generate.tolist() == [3, 3, 5, 5]


def test_access_log_gives_arrivals(tmp_path: Path) -> None:
    start = datetime(2026, 11, 22, 3, 10, 0, tzinfo=UTC)
    lines = []
    for second, method, status in (
        (0, "POST", 200),
        (5, "GET", 200),
        (7, "POST", 200),
        (9, "POST", 500),
    ):
        when = start.replace(second=second).strftime("%d/%b/%Y:%H:%M:%S %z")
        lines.append(f'10.0.0.1 - - [{when}] "{method} /v1/chat/completions HTTP/1.1" {status} 512')
    (tmp_path / "access.log").write_text("\n".join([*lines, "nonsense"]) + "\n")
    options = ("--lengths", "lognormal:prompt=500,generate=50")
    found = imported(tmp_path, tmp_path / "access.log", options=options)
    assert found.arrival.tolist() == [0, 7]


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("hello\n", (), "not recognised|--kind"),
        ('{"data": {"resultType": "matrix", "result": [1]}}', (), "range query"),
        ('{"data": {"resultType": "matrix", "result": []}}', (), "no histogram of prompts"),
        ('vllm:request_prompt_tokens_bucket{le="1"} 1\n', (), "one sample"),
        ("vllm:x one two three\n", ("--kind", "prometheus"), "line 1|no metric"),
        ('{"resourceSpans": []}', (), "no span"),
        ('{"resourceSpans": [{"scopeSpans": 3}', (), "JSON"),
        ("hello\n", ("--kind", "access"), "--lengths"),
        ("hello\n", ("--kind", "access", "--lengths", "lognormal"), "no answered POST"),
        ("vllm:x 1\n", ("--lengths", "lognormal"), "--lengths"),
        ("{}", ("--every", "60s"), "--every"),
    ],
)
def test_bad_input_is_one_line(
    text: str, options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    (tmp_path / "in").write_text(text)
    out = str(tmp_path / "out.csv")
    check(line("traces", "import", str(tmp_path / "in"), "--out", out, *options), words)
    assert not (tmp_path / "out.csv").exists()
