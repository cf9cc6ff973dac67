"""Answers in words: short, with the figures of the JSON, and right about what limits them."""

import re
import shlex
from pathlib import Path

import pytest

import kvsim
from kvsim.quality.evidence import Evidence
from kvsim.report.answer import MAX_VERDICT_WORDS, Answer, verdict
from kvsim.report.suitability import describe_loss, describe_quality
from kvsim.report.terminal import continue_lines
from kvsim.techniques import parse
from tests.support.commands import run
from tests.support.envelope import answer_in

A10 = ("--model", "llama3.1-8b", "--gpu", "a10", "--prompt", "8192")


def said(*arguments: str) -> str:
    result = run(*arguments)
    assert result.code == 0, result.err
    return " ".join(result.out.split())


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("full,offload --prompt 8k --batch 1,1,64", "3 of 4 points fit"),
        ("full,offload --prompt 8k --batch 1,64", "at batch 64, only offload fits."),
        (
            "full,offload --prompt 16k,64k,128k",
            "at prompt 16,000; at prompt 64,000 and prompt 128,000, only offload fits.",
        ),
        ("full,offload --prompt 16k,64k --batch 1,4", "offload is fastest at 3 of 4 points"),
        (
            "full --prompt 40000 --batch 4",
            "At most 1 such sequence fits in all of the memory, none at the engines' default share",
        ),
        ("full --prompt 2k --batch 36", "At most 14 such sequences fit at the engines' default"),
        (
            "full --prompt 2k --batch 16",
            "KV pool at 90 % of GPU memory: 31,654 tokens, 1,978 blocks, 14.9 sequences.",
        ),
        (
            "full --prompt 2k --batch 16",
            "Longest prompt at the engines' default share of memory: 1,850 tokens.",
        ),
    ],
)
def test_what_fits_is_told_for_each_point_and_share(asked: str, told: str) -> None:
    technique, *sizes = asked.split()
    where = ("--model", "llama3.1-8b", "--gpu", "a10", "--technique", technique)
    assert told in said("predict", *where, *sizes)


def test_a_ratio_to_full_kv_needs_full_kv_that_fits() -> None:
    where = ("--model", "llama3.1-8b", "--gpu", "a10", "--prompt", "8k", "--batch", "1,64")
    done = run("predict", *where, "--technique", "full,magicdec")
    fits, beyond = (line.split() for line in done.out.splitlines() if line[:8] == "magicdec")
    assert len(beyond) == len(fits) and "!" in beyond  # a mark, but no ratio


def test_a_verdict_keeps_to_sixty_words() -> None:
    long = " ".join(["word"] * 40) + "."
    assert verdict(["First."], [long, long, "Last."]) == f"First. {long} Last."


@pytest.mark.parametrize(
    ("said", "short", "notes"),
    [
        (f"First. {'Word ' * 59}last.", "First.", [f"{'Word ' * 59}last."]),
        (f"{'a ' * 30}b. One. {'c ' * 40}d.", f"{'a ' * 30}b. One.", [f"{'c ' * 40}d."]),
        (f"{'a ' * 40}b; {'c ' * 40}d.", f"{'a ' * 40}b.", [f"C {'c ' * 39}d."]),
        ("a " * 61 + "b.", " ".join("a" * 60) + ".", ["A b."]),
    ],
)
def test_what_a_verdict_has_no_room_for_becomes_notes(
    said: str, short: str, notes: list[str]
) -> None:
    answer = Answer(said, notes=["Known before."])
    assert len(answer.verdict.split()) <= MAX_VERDICT_WORDS
    assert (answer.verdict, answer.notes) == (short, [*notes, "Known before."])
    assert answer.row()["notes"] == answer.notes and "notes" not in Answer("Short.").row()


def test_empty_sections_are_left_out_everywhere() -> None:
    answer = Answer("Run it.", changes=("--tp 2: faster <b>",))
    assert [heading for heading, _ in answer.sections()] == ["What to change"]
    assert "Runner-up" not in answer.html() and "&lt;b&gt;" in answer.html()
    assert Answer(**answer.row()) == Answer(
        "Run it.", {}, ["--tp 2: faster <b>"], "", [], [], [], []
    )


def test_a_codec_of_stored_prefixes_is_not_said_to_run_nowhere() -> None:
    assert 'LMCache (remote_serde: "cachegen")' in said("predict", *A10, "--technique", "cachegen")


def test_a_loss_below_zero_is_no_loss() -> None:
    some = Evidence("measured", -0.00012, -0.004, 0.0038, "relative score")
    assert describe_loss(parse("kivi"), some) == (
        "No loss on average, 0.38 % at most, as measured on this model."
    )


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
    assert "TTFT 2 s and TPOT 100 ms are kvsim's default targets" in told
    assert f"Nearest plan, with {advised[0]['option']}: " in told
    assert advised[0]["command"] in told.replace("\\ ", "")


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
        ("--model qwen3-14b --gpu l40s --weights fp16 --batch 500", "--max-num-seqs 500 "),
        ("--model llama3.1:8b --gpu h100 --engine ollama", "OLLAMA_NUM_PARALLEL="),
        ("--model qwen3-235b-a22b --gpu h200 --tp 4", "--ep 4: "),
        ("--model llama3.1-8b --gpu h100,l40s", "--gpu l40s: "),
        (
            "--model llama3.1-8b --gpu rtx3090 --weights int4 --prompt 64k --lengths equal",
            "(raised: twice an idle server's p90, margin included)",
        ),
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
    assert text.count("per GPU or more) do not fit with --weights fp16.") == 1
    assert re.search(r"(higher|lower) \(up to", text)
    assert "vLLM has no setting for quantising weights to int4 while loading: replace" in text
    assert "replace INT4_CHECKPOINT_OF_Qwen2.5-14B with the Hugging" in text


def test_peak_memory_has_a_range_where_such_runs_were_measured() -> None:
    asked = {"batch": 1, "prompt": 6144, "generate": 2048, "weights": "awq"}
    measured, other = (
        kvsim.predict("qwen2.5-7b", "a100-80g", ["full"], stack=stack, **asked).rows[0]
        for stack in ("hf-fa2", "vllm")
    )
    assert measured["ranges"]["gpu_bytes"]["low"] <= measured["gpu_bytes"]
    assert measured["gpu_bytes"] < measured["ranges"]["gpu_bytes"]["high"]
    assert "gpu_bytes" not in other["ranges"]


def test_evidence_of_other_settings_is_called_that() -> None:
    for setting, elsewhere in (("kivi:bits=4", True), ("kivi", False)):
        (found,) = kvsim.predict("llama3.1-8b", "h100", setting, batch=8).found
        (said,) = describe_quality([found])
        assert (" with bits 2 (bits 4 was not measured)" in said) == elsewhere, said
