"""Answers in words: short, with the figures of the JSON, and right about what limits them."""

import json

import pytest

from kvsim.report.answer import WORDS, Answer, verdict
from tests.support.commands import run

A10 = ("--model", "llama3.1-8b", "--gpu", "a10", "--prompt", "8192")


def said(*arguments: str) -> str:
    result = run(*arguments)
    assert result.code == 0, result.err
    return " ".join(result.out.split())


def test_a_verdict_keeps_to_sixty_words() -> None:
    long = " ".join(["word"] * 40) + "."
    assert verdict(["First."], [long, long, "Last."]) == f"First. {long} Last."
    with pytest.raises(ValueError, match="more than 60 words"):
        Answer(" ".join(["word"] * (WORDS + 1)))


def test_empty_sections_are_left_out_everywhere() -> None:
    answer = Answer("Run it.", changes=("--tp 2: faster <b>",))
    assert [heading for heading, _ in answer.sections()] == ["What to change"]
    assert "Runner-up" not in answer.html() and "&lt;b&gt;" in answer.html()
    assert Answer(**answer.row()) == Answer(
        "Run it.", {}, ["--tp 2: faster <b>"], "", [], [], [], []
    )


def test_what_does_not_fit_is_told_what_would() -> None:
    text = said("predict", *A10, "--technique", "full", "--batch", "64")
    assert "does not fit" in text and "At most 6 such sequences fit." in text
    assert "It fits with --batch 6 (TPOT" in text and "--tp" in text


def test_the_pool_is_told_as_engines_print_it() -> None:
    text = said("predict", *A10, "--technique", "full")
    assert "KV pool at 0.9 of the GPU's memory: 39,126 tokens, 2,445 blocks of 16" in text
    assert "maximum concurrency 4.70" in text and "Longest prompt that fits at batch 1: " in text


def test_offloading_what_fits_is_advised_against_with_the_reason() -> None:
    text = said("predict", *A10, "--technique", "full,offload")
    assert "Stay with full KV on a10" in text and "slower" in text
    assert "Limit: host-to-GPU link, as every token waits" in text


def test_a_technique_that_cannot_run_is_left_out_and_named() -> None:
    result = run("predict", "--model", "llama3.1-8b", "--gpu", "a100-80g", "--technique",
                 "full,eagle,kivi")  # fmt: skip
    assert result.code == 0 and "left out: eagle cannot run here" in result.err
    assert "Left out: eagle cannot run here" in result.out
    alone = run("predict", "--model", "llama3.1-8b", "--gpu", "a100-80g", "--technique", "eagle")
    assert alone.code == 2


def test_a_plan_says_what_to_run_and_its_json_says_the_same() -> None:
    result = run("plan", "--model", "llama2-7b", "--gpu", "a6000", "--json")
    answer = json.loads(result.out)
    told, row = answer["answer"]["verdict"], answer["predicted"]
    assert told.startswith("Run full KV on a6000 with fp16 weights")
    assert len(told.split()) <= WORDS
    figures = answer["answer"]["figures"]
    assert all(
        row[key] == value for key, value in figures.items() if key in row and key != "technique"
    )
    assert f"{row['ttft_s'] * 1e3:.0f} ms" in told and f"{row['batch']} sequences" in told
    assert answer["answer"]["settings"][1].startswith("vLLM: vllm serve ")
