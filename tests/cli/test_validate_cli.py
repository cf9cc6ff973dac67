"""``kvsim validate`` through the command line: its answer, and bad input before anything starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvsim.validate import machine
from kvsim.validate.counts import check
from tests.support.commands import WIDTH, line, run, run_and_keep, shown
from tests.support.commands import check as words_in
from tests.support.decoders import oracle
from tests.support.envelope import answer_in

SMALL = ("--batch", "2", "--prompt", "40", "--generate", "6")
TECHNIQUES = ("full", "kvpr:split=7", "specache:group=8,residual=8,k=4", "h2o:heavy=6,recent=6")
ASKED = tuple(word for text in TECHNIQUES for word in ("--techniques", text))
OP = {
    "phase", "op", "predicted_flop", "counted_flop", "predicted_bytes", "counted_bytes",
    "launches", "verdict", "reason",
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers as transformers saves it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    oracle("llama").save_pretrained(folder)
    return folder


def copied(checkpoint: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """The checkpoint with its tensors changed."""
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())
    return str(folder)


def test_json_is_alone_on_standard_output_and_progress_beside_it(checkpoint: Path) -> None:
    """And the tables that are printed without ``--json`` fit the terminal."""
    done, found = run_and_keep("validate", "--model", str(checkpoint), *SMALL, *ASKED, "--json")
    assert done.code == 0, done.err
    answer = answer_in(done.out)
    assert answer["passed"] is True and answer["device"] == "cpu"
    assert answer["weights"] == str(checkpoint)
    assert [t["technique"].partition(":")[0] for t in answer["techniques"]] == [
        text.partition(":")[0] for text in TECHNIQUES
    ]
    full, kvpr, specache, _ = answer["techniques"]
    assert full["same_tokens"] == kvpr["same_tokens"] == 1.0
    assert (full["exact"], kvpr["exact"], specache["exact"]) == (True, True, False)
    assert full["logit_difference"] == 0.0 <= kvpr["logit_difference"] < 1e-4
    assert specache["logit_difference"] > 0.01
    for technique in answer["techniques"]:
        assert {frozenset(op) for op in technique["ops"]} == {frozenset(OP)}
        for op in technique["ops"]:
            assert set(op["counted_bytes"]) == {"hbm", "dram", "h2d", "d2h"}
            assert op["predicted_flop"] == op["counted_flop"]
            assert (op["verdict"] == "explained") == bool(op["reason"])
        assert {b["tier"] for b in technique["buffers"]} <= {"gpu", "host"}
        assert all(b["verdict"] in ("equal", "explained") for b in technique["buffers"])
    lines = done.err.splitlines()
    assert lines[0].startswith("kvsim: loading") and len(lines) == 1 + 2 * len(TECHNIQUES)
    tables = shown(found)
    lines = tables.splitlines()
    assert max(map(len, lines)) <= WIDTH
    for text in ("full", "kvpr", "specache", "h2o"):
        assert text in lines, "a table of its own"
    assert any(line.startswith("explained: graduate: ") for line in lines)
    assert "DIFFERS" not in tables and "FAILED" not in tables


def test_all_techniques_that_a_model_allows(tmp_path: Path) -> None:
    oracle("mistral").save_pretrained(tmp_path)
    done = run("validate", "--model", str(tmp_path), "--layers", "1", *SMALL, "--json")
    assert done.code == 0, done.err
    names = {t["technique"].partition(":")[0] for t in answer_in(done.out)["techniques"]}
    assert names >= {"full", "offload", "kvpr", "kcache", "streamingllm"}
    left_out = [line for line in done.err.splitlines() if line.startswith("kvsim: left out: ")]
    packed, choosing = {"specache", "zipcache", "quantspec", "kivi", "fp8"}, {"h2o", "snapkv"}
    assert len(left_out) >= len(packed | choosing | {"pyramidkv"})
    assert all("sliding windows" in line for line in left_out)


def test_a_difference_ends_with_1(checkpoint: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(check, "LOGIT_TOLERANCE", -1.0)
    done = run("validate", "--model", str(checkpoint), *SMALL, "--techniques", "full")
    assert done.code == 1
    assert "FAILED" in done.out


def refused(*args: str) -> str:
    """The one line that ends a command before it loads or runs anything."""
    done = run("validate", *args)
    assert (done.code, done.out) == (2, ""), done
    assert done.err.count("\n") == 1 and "Traceback" not in done.err, done.err
    assert "loading" not in done.err
    return done.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--device", "tpu"), "expected cpu, cuda or cuda:N"),
        (("--device", "cuda:-1"), "expected cpu, cuda or cuda:N"),
        (("--techniques", "kvpr2"), "nearest: kvpr"),
        (("--techniques", "infllm"), "unknown real implementation 'infllm'"),
        (("--techniques", "kivi:group=48,residual=48"), "does not divide the head dim 64"),
        (("--techniques", "kivi:group=32,residual=40"), "not a multiple of group=32"),
        (("--techniques", "offload:schedule=column,parts=3"), "does not divide into 3 parts"),
        (("--prompt", "9000"), "more than the 8192 positions of smollm2-135m"),
        (("--layers", "31"), "expected 1 to 30"),
        (("--model", "smollm"), "smollm2-135m"),
        (("--model", "llama3.1-405b"), "GiB are free"),
        (("--batch", "1000000"), "GiB are free"),
        (("--model", "mixtral-8x7b"), "unknown architecture"),
    ],
)
def test_bad_arguments(args: tuple[str, ...], message: str) -> None:
    assert message in refused(*args)


def test_no_gpu(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "cuda:0 is not there, PyTorch sees no GPU" in refused("--device", "cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "cuda:2 is not there, PyTorch sees 2 GPUs" in refused("--device", "cuda:2")


def test_too_little_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: 2**20)
    assert "are needed on cpu, 0.0 GiB are free" in refused(*SMALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight' is missing"),
        (lambda t: t.clear() or t.update(x=torch.zeros(1)), "is missing (it has 1 others)"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(65)}),
            "'model.norm.weight' has shape 65, expected 64",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()}),
            "has shape 64 x 199, expected 199 x 64",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            "holds I8 numbers, expected floating point",
        ),
    ],
)
def test_bad_tensors(checkpoint: Path, tmp_path: Path, change: Any, message: str) -> None:
    assert message in refused("--model", copied(checkpoint, tmp_path, change), *SMALL)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "bert", "unknown architecture"),
        ("hidden_act", "tanh", "hidden_act"),
        ("rms_norm_eps", "small", "rms_norm_eps"),
        ("rope_parameters", {"rope_type": "spiral", "rope_theta": 1e4}, "rope_type"),
        ("num_hidden_layers", 4, "layers.3.input_layernorm.weight' is missing"),
    ],
)
def test_bad_configurations(
    checkpoint: Path, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | {field: value}
    folder = copied(checkpoint, tmp_path, lambda tensors: None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert message in refused("--model", folder, *SMALL)


def test_weights_that_are_no_numbers_are_named(checkpoint: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"][3] = torch.nan

    ended = run("validate", "--model", copied(checkpoint, tmp_path, spoil), *SMALL)
    assert ended.code == 2 and ended.out == ""
    assert "tensor model.norm.weight holds NaN or infinity; fetch the checkpoint" in ended.err


def test_files_that_are_no_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert "holds no *.safetensors" in refused("--model", str(tmp_path))
    whole = (checkpoint / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "expected a safetensors file" in refused("--model", str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(whole[:100])
    assert "not readable as GGUF" in refused("--model", str(tmp_path / "model.gguf"))
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in refused("--model", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("quality --layers 3", "--layers|validate quality --help"),
        ("layers --bits 9", "--bits|from 2 to 4"),
        ("plan", "file|missing|validate plan --help"),
        ("--device cpu quality", "--device|quality|put it after"),
        ("quantity", "no such command|quantity"),
        ("--quality --layers 3", "give either --layers or --quality, not both"),
        ("--per-layer", "--per-layer|has no effect without --quality"),
        ("--bits 3", "--bits|has no effect without --per-layer"),
    ],
)
def test_subcommands_and_the_older_spellings(arguments: str, words: str) -> None:
    words_in(line("validate", *arguments.split()), words)


def test_the_help_of_validate_lists_its_subcommands() -> None:
    text = run("validate", "--help").out
    assert all(f"  {name} " in text for name in ("quality", "layers", "plan"))
    assert "--per-layer" not in text and "--max-error" in text
    assert "--bits" in run("validate", "layers", "--help").out
