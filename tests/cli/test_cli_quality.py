"""`kvsim validate quality`: what it prints and writes, and what it refuses before it starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvsim.traces import attention
from kvsim.validate.model.architecture import Architecture
from kvsim.validate.model.checkpoint import open_weights
from kvsim.validate.model.weights import TensorSource
from tests.support.commands import WIDTH, check, line, run
from tests.support.decoders import CONFIGS, saved
from tests.support.envelope import answer_in, own_fields
from tests.support.smollm2 import NAME, checkpoint, needed

QUALITY = ("validate", "--quality")
SMALL = ("--batch", "1", "--prompt", "48", "--generate", "6")
ONE = ("--techniques", "specache:bits=1,group=32,residual=32,k=8")


def test_a_trace_is_printed_and_written(tmp_path: Path) -> None:
    needed()
    path = tmp_path / "trace.json"
    result = run(*QUALITY, *SMALL, *ONE, "--json", "--out", str(path))
    assert result.code == 0, result
    assert [each.split(": ")[1] for each in result.err.splitlines()[-2:]] == ["1 of 2", "2 of 2"]
    trace = attention.load(path)
    assert (
        own_fields(answer_in(result.out)) == attention.record(trace) == json.loads(path.read_text())
    )
    assert (trace.model, trace.tokens, trace.layers) == (NAME, 48 + 1 + 6, 30)
    assert trace.weights.startswith("SmolLM2-135M-Instruct.Q4_1.gguf; sha256 ")
    assert trace.text.startswith("manual of Python")
    assert trace.settings.startswith("cpu, fp32, PyTorch") and "48 tokens" in trace.settings
    assert 2 < trace.perplexity < 100
    assert trace.top_k is not None and trace.top_k.k == (1, 2, 4, 8, 16)
    assert [p.k for p in trace.prefetch] == [8]


def folder(tmp_path: Path, tokeniser: bool = True) -> Path:
    """A checkpoint of its own for a test."""
    return saved("llama", tmp_path / "model", tokeniser)


def test_any_directory_and_any_text_in_a_table(tmp_path: Path) -> None:
    text = tmp_path / "some.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    model = folder(tmp_path)
    asked = ("zipcache", "kvpr:bits=4", "specache:group=16,residual=16,k=4", "magicdec:budget=20")
    techniques = [item for name in asked for item in ("--techniques", name)]
    result = run(
        *QUALITY, "--model", str(model), "--text", str(text), *techniques,
        "--batch", "2", "--prompt", "40", "--generate", "20",
    )  # fmt: skip
    assert result.code == 0, result
    assert max(map(len, result.out.splitlines())) <= WIDTH
    for words in ("model; sha256", "some.txt; sha256", "mass, mean of layers", "k=4, 2-bit keys",
                  "60 % salient, 10 % probes", "greedy", "temperature 1"):  # fmt: skip
        assert words in result.out
    said = " ".join(result.out.split())  # headings are broken over lines
    assert "KL technique perplexity of full nat/token zipcache" in said
    least = " ".join(["least"] * 6)
    assert f"tokens at at at at at at per {least} gamma round 1 2 3 4 5 6" in said
    assert "6 of 6: magicdec" in result.err


def opened_once(name: str) -> tuple[Architecture, TensorSource]:
    """SmolLM2's file takes seconds to open."""
    return checkpoint() if name == NAME else open_weights(name)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--techniques", "kivvi"), "technique 'kivvi'|kivi"),
        (("--techniques", "full"), "full|no loss of quality to measure|omit it"),
        (("--techniques", "infinite"), "'infinite'|known"),
        (("--text", "none.txt"), "none.txt|no such file|expected a text file"),
        (("--text", "empty.txt"), "empty.txt|holds no text"),
        (("--text", "bad.txt"), "bad.txt|byte 3 (line 1, 0xff) is not UTF-8"),
        (("--text", "short.txt", *ONE), "tokens, but 8 windows of 1089 need 8712|--prompt"),
        (("--text", "huge.txt"), "huge.txt|20,000,000 bytes|at most 20 MB"),
        (("--model", "llama2-7b"), "--model|'llama2-7b' has no weights|smollm2-135m"),
        (("--model", "./bare"), "bare|no *.safetensors"),
        (("--layers", "3"), "give either --layers or --quality, not both"),
        (("--out", "none/trace.json"), "--out|none/trace.json|existing, writable folder"),
        (("--prompt", "9000", *ONE), "--prompt|9000|8192 positions"),
        (("--generate", "5", "--techniques", "magicdec"), "--generate|too few rounds|16"),
        (("--device", "tpu"), "--device|'tpu'|cpu"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: Any
) -> None:
    needed()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvsim.validate.quality.measure.load_weights", None)  # nothing gets here
    monkeypatch.setattr("kvsim.validate.quality.measure.open_weights", opened_once)
    Path("empty.txt").write_text(" \n")
    Path("short.txt").write_text("Some words. " * 100)
    Path("bad.txt").write_bytes(b"abc\xff")
    with Path("huge.txt").open("wb") as file:
        file.truncate(20_000_001)
    Path("bare").mkdir()
    CONFIGS["llama"].save_pretrained("bare")
    check(line(*QUALITY, *arguments), words)


def test_options_about_quality_need_it() -> None:
    for name in ("--text", "--out"):
        check(line("validate", name, "file"), f"{name}: has no effect without --quality")


@pytest.mark.parametrize("broken", [False, True])
def test_a_directory_without_a_tokeniser_is_refused(tmp_path: Path, broken: bool) -> None:
    place = folder(tmp_path, tokeniser=False)
    if broken:
        (place / "tokenizer.json").write_text("{}")
    words = (
        "not a tokeniser|download the file again"
        if broken
        else "no such file|expected a tokenizer.json"
    )
    asked = ("--model", str(place), "--techniques", "zipcache")
    check(line(*QUALITY, *SMALL, *asked), f"tokenizer.json|{words}")


def test_settings_that_the_model_cannot_run_are_refused_before_the_first(tmp_path: Path) -> None:
    asked = ("--model", str(folder(tmp_path)), "--techniques", "kivi:group=32")
    check(line(*QUALITY, *SMALL, *asked), "group=32 does not divide the head dim 16|choose")
