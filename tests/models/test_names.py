"""Models are found by the names people type, and never another one instead."""

import json
from pathlib import Path
from random import Random

import pytest

from kvsim.errors import InputError
from kvsim.models.catalogue import catalogue_entry, find_model, model_names, split_words
from kvsim.models.configs import load_model

TYPED = [
    ("llama3.1-8b", "llama3.1-8b", ""),
    ("LLaMA3.1-8B", "llama3.1-8b", ""),
    ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b", ""),
    ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama3.1-70b", ""),
    ("https://huggingface.co/Qwen/Qwen3-8B", "qwen3-8b", ""),
    ("llama-3.1-8b", "llama3.1-8b", ""),
    ("Llama 3.1 8B Instruct", "llama3.1-8b", ""),
    ("llama3.1:8b", "llama3.1-8b", ""),
    ("llama3.1:8b-instruct-q4_K_M", "llama3.1-8b", "q4_k_m"),
    ("accounts/fireworks/models/llama-v3p1-8b-instruct", "llama3.1-8b", ""),
    ("llama-3-1-8b", "llama3.1-8b", ""),
    ("gemma3-27b", "gemma-3-27b", ""),
    ("google/gemma-3-27b-it", "gemma-3-27b", ""),
    ("gpt-oss:20b", "gpt-oss-20b", ""),
    ("phi4:14b", "phi-4", ""),
    ("deepseek-v3:671b", "deepseek-v3", ""),
    ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3", ""),
    ("Qwen/Qwen3-8B-FP8", "qwen3-8b", "fp8-block"),
    ("Qwen/Qwen3-8B-AWQ", "qwen3-8b", "awq"),
    ("TheBloke/Llama-2-7B-Chat-GPTQ", "llama2-7b", "int4"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "llama3.1-8b", "fp8"),
    ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "llama3.1-8b", "fp8-dynamic"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama3.1-8b", "int4"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama3.1-8b", "int8"),
    ("nvidia/Llama-3.1-8B-Instruct-NVFP4", "llama3.1-8b", "nvfp4"),
    ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama3.1-8b", "int4"),
    ("hf.co/bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", "llama3.2-3b", "q4_k_m"),
    ("mlx-community/Meta-Llama-3.1-8B-Instruct-8bit", "llama3.1-8b", "int8"),
    ("mistral:7b", "mistral-7b-v0.3", ""),
    ("qwen3:30b", "qwen3-30b-a3b", ""),
    ("models--Qwen--Qwen3-8B", "qwen3-8b", ""),
    ("Qwen3VL-32B", "qwen3-vl-32b", ""),
    ("DeepSeekV3-0324", "deepseek-v3-0324", ""),
    ("me/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16-AWQ", "nemotron-3-nano-30b-a3b", "awq"),
]


@pytest.mark.parametrize(("typed", "name", "weights"), TYPED)
def test_a_name_is_read_as_its_model_and_format(typed: str, name: str, weights: str) -> None:
    found = find_model(typed)
    assert found is not None
    assert found[:2] == (name, weights)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("llama3.1", "llama3.1-405b, llama3.1-70b, llama3.1-8b"),
        ("unsloth/Llama-3.2-3B-Instruct-GGUF", ":Q4_K_M"),
        ("Llama-3.1-8B-FP8-AWQ-INT4", "several weight formats"),
    ],
)
def test_a_name_of_several_lists_them(typed: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        find_model(typed)


@pytest.mark.parametrize(
    "typed",
    ["qwen-34b", "llama38b", "me/My-Tune-Llama-3.1-8B", "gemma-31b", "gpt-4", "foo",
     "llama-3.1-9b", "phi-4:70b"],
)  # fmt: skip
def test_a_name_that_is_near_is_not_taken_for_a_model(typed: str) -> None:
    assert find_model(typed) is None


def spellings(name: str) -> list[str]:
    """Ways in which people write a model of the catalogue."""
    entry = catalogue_entry(name)["hf_id"]
    owner, _, last = entry.partition("/")
    spaced = " ".join(split_words(last))
    return [
        entry, entry.lower(), last, last.upper(), name.replace("-", "_"), name.replace("-", " "),
        spaced, f"unsloth/{last}", f"{entry}-Instruct", f"TheBloke/{last}-AWQ", f"{last}-FP8",
        f"https://huggingface.co/{entry}", f" {owner}/{last} ", f"{last}-GPTQ-Int4", f"{entry}/",
        f"models--{owner}--{last}", f"bartowski/{last}-GGUF:Q4_K_M", last.replace("-", "", 1),
        f"unsloth/{last}-bnb-4bit", f"/models/{last}", f"{name}:latest",
    ]  # fmt: skip


def test_300_spellings_drawn_from_the_catalogue() -> None:
    """At least 97 % are read right, and none is read as another shape in silence."""
    draw = Random(36)
    cases = [(name, draw.choice(spellings(name))) for name in draw.choices(model_names(), k=300)]
    missed = []
    for name, typed in cases:
        try:
            found = find_model(typed)
        except InputError:
            found = None
        if found is None:
            missed.append(typed)
        else:
            assert load_model(found.name).layout == load_model(name).layout, (typed, found.name)
            assert load_model(found.name).hidden == load_model(name).hidden, (typed, found.name)
    assert len(missed) <= 9, missed


def test_a_repository_is_kept_for_engines_to_load() -> None:
    assert load_model("llama3.1-8b").repository == "meta-llama/Llama-3.1-8B"
    asked = "meta-llama/Llama-3.1-8B-Instruct"
    assert load_model(asked).repository == asked
    assert load_model("Llama 3.1 8B Instruct").repository == asked
    assert load_model("qwen3-8b-awq").repository == "AWQ_CHECKPOINT_OF_Qwen3-8B"
    assert load_model("llama3.1-8b-fp16").repository == "meta-llama/Llama-3.1-8B"
    assert load_model("Qwen/Qwen3-8B-AWQ").released == "awq"


def test_an_id_is_found_in_the_local_hugging_face_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"hf download me/My-Model config.json"):
        load_model("me/My-Model")
    revision = tmp_path / "models--me--My-Model" / "snapshots" / "abc"
    revision.mkdir(parents=True)
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (revision / "config.json").write_text(json.dumps(config))
    assert load_model("me/My-Model").name == "My-Model"
    assert load_model(config | {"_name_or_path": "me/other"}).name == "other"
