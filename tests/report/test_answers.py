"""Answers in words: short, with the figures of the JSON, and right about what limits them."""

import re
import shlex
from pathlib import Path

import pytest

import kvsim
from kvsim.quality.evidence import Evidence
from kvsim.report.answer import MAX_VERDICT_WORDS, Answer, verdict
from kvsim.report.suitability import describe_loss
from kvsim.report.terminal import continue_lines
from kvsim.report.units import rate
from kvsim.techniques import parse
from tests.support.commands import run
from tests.support.envelope import answer_in

A10 = ("--model", "llama3.1-8b", "--gpu", "a10", "--prompt", "8192")


def said(*arguments: str) -> str:
    result = run(*arguments)
    assert result.code == 0, result.err
    return " ".join(result.out.split())


def test_a_verdict_keeps_to_sixty_words() -> None:
    long = " ".join(["word"] * 40) + "."
    assert verdict(["First."], [long, long, "Last."]) == f"First. {long} Last."
    with pytest.raises(ValueError, match="more than 60 words"):
        Answer(" ".join(["word"] * (MAX_VERDICT_WORDS + 1)))


def test_empty_sections_are_left_out_everywhere() -> None:
    answer = Answer("Run it.", changes=("--tp 2: faster <b>",))
    assert [heading for heading, _ in answer.sections()] == ["What to change"]
    assert "Runner-up" not in answer.html() and "&lt;b&gt;" in answer.html()
    assert Answer(**answer.row()) == Answer(
        "Run it.", {}, ["--tp 2: faster <b>"], "", [], [], [], []
    )


@pytest.mark.parametrize("techniques", ["full,fp8", "fp8,full", "full,fp8,kivi"])
def test_full_kv_is_not_compared_with_itself(techniques: str) -> None:
    """Also where another technique is as fast and stands first among the rows."""
    text = said("predict", "--model", "mistral-7b-v0.3", "--gpu", "a10", "--technique", techniques,
                "--prompt", "1", "--generate", "2")  # fmt: skip
    verdict = text.partition("decode output")[0]
    assert "Full KV is the best choice" in verdict and "fp8 is as fast" in verdict
    assert "full is" not in verdict


def test_what_does_not_fit_is_told_what_would() -> None:
    text = said("predict", *A10, "--technique", "full", "--batch", "64")
    assert "does not fit" in text and "At most 6 such sequences fit." in text
    assert "It fits with --batch 6 (TPOT" in text and "--tp" in text


def test_one_count_of_sequences_is_told() -> None:
    text = said("predict", *A10[:4], "--technique", "full", "--prompt", "1", "--generate", "1")
    assert "1,978 blocks, 1,978 sequences." in text and "such sequences fit" not in text


def test_a_codec_of_stored_prefixes_is_not_said_to_run_nowhere() -> None:
    assert 'LMCache (remote_serde: "cachegen")' in said("predict", *A10, "--technique", "cachegen")


def test_a_loss_below_zero_is_no_loss() -> None:
    some = Evidence("measured", -0.00012, -0.004, 0.0038, "relative score")
    assert describe_loss(parse("kivi"), some) == (
        "It loses nothing on average (at most 0.38 %), as measured on this model."
    )


def test_the_pool_is_told_as_engines_print_it() -> None:
    text = said("predict", *A10, "--technique", "full")
    assert text.count("KV pool at 90 % of GPU memory: 31,630 tokens, 1,976 blocks, 3.80 seq") == 1
    assert text.count("Longest prompt") == text.count("KV pool") == 1


def test_offloading_what_fits_is_advised_against_with_the_reason() -> None:
    text = said("predict", *A10, "--technique", "full,offload")
    assert "Full KV is the best choice on a10" in text and "slower" in text
    assert "Limit of offload: host-to-GPU link, as every token waits" in text


def test_a_technique_that_cannot_run_is_left_out_and_named() -> None:
    result = run(
        "predict", "--model", "llama3.1-8b", "--gpu", "a100-80g", "--technique", "full,mtp,kivi"
    )
    assert result.code == 0 and "mtp cannot run here" in " ".join(result.out.split())
    assert "Left out: mtp cannot run here" in result.out
    alone = run("predict", "--model", "llama3.1-8b", "--gpu", "a100-80g", "--technique", "mtp")
    assert alone.code == 2


def test_a_plan_says_what_to_run_and_its_json_says_the_same() -> None:
    result = run("plan", "--model", "llama2-7b", "--gpu", "a6000", "--json")
    answer = answer_in(result.out)
    told, row = answer["answer"]["verdict"], answer["load"]
    assert told.startswith("Run full KV on a6000 with fp16 weights")
    assert len(told.split()) <= MAX_VERDICT_WORDS
    figures = answer["answer"]["figures"]
    assert all(
        row[key] == value for key, value in figures.items() if key in row and key != "technique"
    )
    assert f"{row['requests_per_s']:.3g} requests/s" in told and "no prefix reuse" in told
    assert answer["answer"]["settings"][0].startswith("vLLM: vllm serve ")


@pytest.mark.parametrize("sizes", [("1", "1"), ("1,8", "64"), ("1", "64,4k"), ("1,8", "64,4k")])
def test_where_one_token_is_generated_prefill_is_compared(sizes: tuple[str, str]) -> None:
    """Nothing is decoded then, so there is no TPOT and no decoding rate."""
    batch, prompt = sizes
    command = ("predict", "--model", "qwen3-4b", "--gpu", "rtx4090", "--technique",
               "full,offload,eagle" if batch == "1" else "full,fp8",
               "--batch", batch, "--prompt", prompt, "--generate", "1")  # fmt: skip
    told = said(*command)
    rows = answer_in(run(*command, "--json").out)["rows"]
    best = max(rows, key=lambda row: row["output_tok_s"])
    assert {row["decode_tok_s"] for row in rows} == {None}
    if len(prompt) + len(batch) < 8:
        assert f"{rate(best['output_tok_s'])} output tok/s" in told
    assert " 0x" not in told and "nan" not in told


def test_a_sweep_and_a_page_of_single_tokens_are_whole(tmp_path: Path) -> None:
    found = kvsim.sweep("llama3.1-8b", "h100", "full,eagle", batch="1,8", generate=1)
    assert "TPOT" not in found.answer.verdict and "output tok/s" in found.answer.verdict
    page = tmp_path / "page.html"
    told = run(
        "predict", *A10, "--technique", "full,eagle", "--generate", "1", "--report", str(page)
    )
    assert told.code == 0 and "Break-even" not in page.read_text(encoding="utf-8")
    refused = run("explore", *A10[:4], "--generate", "1", "--out", str(page))
    assert refused.code == 2 and "--generate: got 1" in refused.err


def test_where_there_is_no_plan_the_page_has_what_meets_all_limits(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = run("plan", "--model", "qwen2.5-32b", "--gpu", "a100-40g", "--prompt", "4k",
                "--report", str(page), "--json")  # fmt: skip
    text = re.sub("</?span[^>]*>", "", page.read_text(encoding="utf-8"))
    assert found.code == 1 and "No plan meets the targets." in text
    advised = answer_in(found.out)["advice"]
    assert advised and all(f'<td class="text">{a["option"]}' in text for a in advised)
    assert all(run(*shlex.split(a["command"])[1:]).code == 0 for a in advised[:2])
    told = " ".join(found.err.split())
    assert "TTFT 2s and TPOT 100ms are kvsim's default targets" in told
    assert f"Nearest plan, with {advised[0]['option']}: " in told
    assert advised[0]["command"] in told.replace("\\ ", "")


@pytest.mark.parametrize(
    "options, expected",
    [
        ("--model llama3.1-70b --gpu rtx4090", "--weights int4 --tp 2 "),  # fewer cards than 16 bit
        ("--model llama3.1-8b --gpu l4 --prompt 16k", "of requests do not fit in the KV cache"),
        ("--model llama3.1-8b --gpu l4 --prompt 16k --ttft none", "TPOT 100ms is kvsim's default"),
    ],
)
def test_no_plan_says_why_what_was_assumed_and_what_comes_nearest(
    options: str, expected: str
) -> None:
    result = run("plan", *options.split())
    told = " ".join(result.err.split())
    assert result.code == 1 and expected in told
    assert "Nearest plan, with " in told and "(p90 " in told and "vllm serve" in told


def test_an_engine_command_is_pasted_as_one_line() -> None:
    command = 'vllm serve M --one 1 --config \'{"a": "b c"}\' --three ' + "--x 10 " * 20
    lines = list(continue_lines(command, 60))
    assert len(lines) > 2 and all(line.endswith("\\") for line in lines[:-1])
    as_read = "\n".join(lines).replace("\\\n", "")  # as a shell reads it
    assert shlex.split(as_read) == shlex.split(command)


@pytest.mark.parametrize(
    "options, expected",
    [
        ("--model llama3.1-8b --gpu h100 --batch 32", "--batch 32 allows no more than 32"),
        ("--model llama3.1:8b --gpu h100 --engine ollama", "OLLAMA_NUM_PARALLEL="),
        ("--model qwen3-235b-a22b --gpu h200 --tp 4", "--ep 4: "),
        ("--model llama3.1-8b --gpu h100,l40s", "--gpu l40s: "),
    ],
)
def test_a_plan_tells_limits_and_what_it_left_out_on_one_screen(
    options: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    result = run("plan", *options.split())
    assert result.code == 0 and len(result.out.splitlines()) <= 25
    told = " ".join(result.out.split())
    assert expected in told
    assert "of mean length fit in the KV cache" in told and "Left out: prefix caching (" in told


def test_narrower_weights_are_told_with_what_a_server_needs_for_them() -> None:
    text = said(
        "plan", "--model", "qwen2.5-14b", "--gpu", "a10", "--weights", "fp16,int4", "--ttft", "4s"
    )
    assert text.count("No plan meets the targets with --weights fp16.") == 1
    assert re.search(r"(higher|lower) \(up to", text)
    assert "vLLM has no setting for making int4 weights while loading: put the Hugging Face" in text
    assert "in place of INT4_CHECKPOINT_OF_Qwen2.5-14B" in text


def test_loads_of_which_a_server_keeps_up_with_none_are_told() -> None:
    text = said(
        "simulate", "--model", "llama3.1-8b", "--gpu", "a100-80g", "--prompt", "2k",
        "--generate", "300", "--rate", "20,50", "--hours", "0.02",
    )  # fmt: skip
    assert "is overloaded at 20 and 50 requests/s: it completes at most" in text
    assert re.search(r"so about \d+ and \d+ replicas are needed", text) and "KV cache" not in text


@pytest.mark.parametrize(("memory", "assumed"), [((), True), (("--host-memory", "300"), False)])
def test_the_host_is_assumed_unless_its_memory_is_given(
    memory: tuple[str, ...], assumed: bool
) -> None:
    point = ("--model", "llama2-7b", "--gpu", "a6000", "--batch", "8", "--prompt", "2k")
    told = said("predict", *point, "--generate", "8", "--technique", "offload", *memory)
    assert ("host memory size" in told) is assumed


def test_peak_memory_has_a_range_where_such_runs_were_measured() -> None:
    asked = {"batch": 1, "prompt": 6144, "generate": 2048, "weights": "awq"}
    measured, other = (
        kvsim.predict("qwen2.5-7b", "a100-80g", ["full"], stack=stack, **asked).rows[0]
        for stack in ("hf-fa2", "vllm")
    )
    assert measured["ranges"]["gpu_bytes"]["low"] <= measured["gpu_bytes"]
    assert measured["gpu_bytes"] < measured["ranges"]["gpu_bytes"]["high"]
    assert "gpu_bytes" not in other["ranges"]


def test_a_page_begins_with_the_figures_that_decide() -> None:
    found = kvsim.plan("llama3.1-8b", "l40s", only=["full"])
    tiles = {title: (value, between) for title, value, between in found.answer.tiles()}
    assert {"requests/s", "TTFT p90", "TPOT p90", "probability of meeting the targets"} <= {*tiles}
    low, high = re.findall(r"[\d.]+", tiles["TPOT p90"][1])
    assert float(low) <= float(tiles["TPOT p90"][0].split()[0]) <= float(high)
    page = found.html()
    assert page.index('class="tiles"') < page.index("<table") and "#picture0" in page
