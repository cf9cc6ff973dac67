"""A configuration is read as its family means it, or refused in one line that says what to mend."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvsim.errors import InputError
from kvsim.models.catalogue import catalogue_config
from kvsim.models.configs import from_config, load_model
from kvsim.models.model import LayerShape, Model

FULL = LayerShape()
ROUTED = LayerShape(routed=True)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "head_dim": 16}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v2",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


def test_models_are_read_from_a_file_and_from_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    model = from_config(LLAMA, "tiny")
    assert load_model(str(file)) == load_model(str(folder)) == model
    assert (model.head_dim, model.max_context, model.notes) == (16, 512, ())
    by_hand = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * 100 * 64 + 64
    assert model.parameters == by_hand
    (tmp_path / "other.json").write_text(json.dumps(LLAMA))
    assert load_model(str(tmp_path / "other.json")).name == "other"


def _model(config: dict[str, Any], **fields: object) -> Model:
    return from_config(config | fields, "x")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("falcon_h1", "mamba_d_ssm"), ("zamba2", "hybrid_layer_ids"),
        ("mimo_v2_flash", "hybrid_layer_pattern"), ("mimo_v2_flash", "swa_num_key_value_heads"),
        ("nova", "moe_intermediate_size"), ("nova", "v_head_dim"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_said_are_not_read_as_llama(name: str, field: str) -> None:
    with pytest.raises(InputError, match=f"cannot be treated as a Llama .it has {field}"):
        _model(LLAMA, model_type=name, **{field: [1]})


def test_what_was_assumed_is_noted() -> None:
    (unknown_type,) = _model(LLAMA, model_type="nova").notes
    assert "'nova' is not known: treated as a Llama" in unknown_type
    (nested,) = _model({"model_type": "vision"}, text_config=LLAMA).notes
    assert "multimodal" in nested
    (defaults,) = _model(GEMMA3, sliding_window=64, tie_word_embeddings=None).notes
    assert defaults == "missing, so the defaults of gemma3_text are used: tie_word_embeddings"


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (_model(LLAMA, sliding_window=512), (((FULL,), 2),)),
        (_model(LLAMA, sliding_window=511), (((LayerShape(511),), 2),)),
        (
            _model(GEMMA3, sliding_window=8, sliding_window_pattern=2),
            (((LayerShape(8),), 1), ((FULL,), 1)),
        ),
        (
            _model(LLAMA, sliding_window=8, layer_types=["full_attention", "sliding_attention"]),
            (((FULL,), 1), ((LayerShape(8),), 1)),
        ),
        (
            _model(
                LLAMA | {"model_type": "qwen2", "use_sliding_window": True},
                sliding_window=8,
                max_window_layers=1,
            ),
            (((FULL,), 1), ((LayerShape(8),), 1)),
        ),
        (
            _model(MIXTRAL | {"model_type": "qwen3_moe"}, num_experts=4, mlp_only_layers=[0]),
            (((FULL,), 1), ((ROUTED,), 1)),
        ),
    ],
)
def test_fields_that_set_the_layout(
    model: Model, layout: tuple[tuple[tuple[LayerShape, ...], int], ...]
) -> None:
    assert model.layout == layout


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    (LLAMA | {"hidden_size": None}, "hidden_size", "is missing"),
    (LLAMA | {"vocab_size": "100"}, "vocab_size", "is '100', expected a whole number"),
    (LLAMA | {"vocab_size": "1\n2"}, "vocab_size", r"is '1\n2'"),
    (LLAMA | {"vocab_size": "1" * 10**6}, "vocab_size", "111..., expected"),
    (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers", "from 1 to 1000"),
    (LLAMA | {"num_attention_heads": -4}, "num_attention_heads", "is -4"),
    (LLAMA | {"intermediate_size": math.nan}, "intermediate_size", "is nan"),
    (LLAMA | {"vocab_size": 10**9 + 1}, "vocab_size", "from 1 to 1000000000"),
    (LLAMA | {"num_key_value_heads": 3}, "num_attention_heads", "multiple of the 3 key-value"),
    (LLAMA | {"hidden_size": 66}, "hidden_size", "multiple of the 4 heads; correct it or add"),
    (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings", "expected true or false"),
    (LLAMA | {"layer_types": ["mamba", "mamba"]}, "layer_types", "full_attention"),
    (LLAMA | {"layer_types": ["full_attention"]}, "layer_types", "has 1 entries, expected 2"),
    (LLAMA | {"layer_types": ["sliding_attention"] * 2}, "sliding_window", "is not set"),
    (LLAMA | {"model_type": None}, "model_type", "is missing, expected one of"),
    (LLAMA | {"model_type": "zamba", "mamba_d_state": 16}, "model_type", "it has mamba_d_state"),
    ({"model_type": "gpt2", "n_embd": 768}, "model_type", "it has no hidden_size"),
    (MIXTRAL | {"num_experts_per_tok": 5}, "num_experts_per_tok", "at most the 4 experts"),
    (DEEPSEEK | {"attention_bias": True}, "attention_bias", "expected false"),
    (DEEPSEEK | {"mlp_only_layers": 3}, "mlp_only_layers", "expected a list"),
    ({"model_type": "gemma3", "text_config": 5}, "text_config", "expected an object"),
    ({"text_config": LLAMA | {"vocab_size": 0}}, "text_config.vocab_size", "is 0"),
    (LLAMA | {"head_dim": 100_000}, "head_dim", "from 1 to 4096"),
    (LLAMA | {"torch_dtype": "int3"}, "torch_dtype", "expected one of float32"),
    (LLAMA | {"model_type": "t5"}, "model_type", "an encoder with a decoder"),
    (
        LLAMA | {"quantization_config": {"quant_method": "hqq"}},
        "quantization_config.quant_method",
        "whose weights kvsim does not model",
    ),
]


@pytest.mark.parametrize(("config", "field", "problem"), BAD_FIELDS)
def test_a_bad_field_is_named(
    config: dict[str, Any], field: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(config))
    with pytest.raises(InputError) as caught:
        load_model(str(file))
    message = str(caught.value)
    assert message.startswith(f"{str(file)!r}: field '{field}' ")
    assert problem in message
    assert "; " in message, "says how to fix it"
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[1, 2]", "holds a list, expected an object"),
        (b'{\n"hidden_size": 64,\n', "not valid JSON in line 3"),
        (b"[" * 200_000, "nested too deeply"),
        (b" " * 11_000_000, "has 11 MB, a Hugging Face config.json has at most 10 MB"),
    ],
)
def test_a_bad_file_is_named(content: bytes, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_model(str(tmp_path))
    message = str(caught.value)
    assert message.startswith((f"{str(tmp_path)!r}: ", str(file)))
    assert problem in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("llama2-8b", r"unknown model 'llama2-8b'; nearest: .*llama2-7b.*path to a config.json"),
        ("meta-llama/Llama-2-8b", "nearest: .*llama2"),
        ("", "unknown model ''"),
        ("missing.json", "no such file or directory"),
        ("~nobody-has-this-name/x", "cannot be opened"),
        ("/dev/null", "is a device; .* regular file"),
        (".", "the directory holds no config.json"),
        ("two\nlines.json", r"two\\nlines"),
    ],
)
def test_what_is_not_there(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=problem) as caught:
        load_model(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_mixture_without_a_catalogue_entry_counts_as_transformers_does() -> None:
    """Parameters of the class of transformers 5.23 with these fields, made without weights."""
    some = LLAMA | {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096,
        "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    assert from_config(some, "x").parameters == 106851591808


@pytest.mark.parametrize(
    ("change", "context"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                           "original_max_position_embeddings": 256}}, 1024),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0,
                           "original_max_position_embeddings": 128}}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": 2048}, 2048),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 512),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 8}}}, 512),
    ],
)  # fmt: skip
def test_stretched_contexts_are_read(change: dict[str, Any], context: int) -> None:
    assert from_config(LLAMA | change, "tiny").max_context == context


@pytest.mark.parametrize("factor", [True, "4", 0.5, float("nan")])
def test_a_factor_that_is_none_is_refused(factor: object) -> None:
    some = LLAMA | {"rope_scaling": {"type": "yarn", "factor": factor}}
    with pytest.raises(InputError, match=r"rope_scaling\.factor"):
        from_config(some, "tiny")


@pytest.mark.parametrize(
    ("weights", "dynamic", "released"),
    [
        ({"type": "float", "num_bits": 8}, False, "fp8"),
        ({"type": "float", "num_bits": 8}, True, "fp8-dynamic"),
        ({"type": "float", "num_bits": 8, "strategy": "block"}, True, "fp8-block"),
        ({"type": "float", "num_bits": 4, "group_size": 16}, False, "nvfp4"),
        ({"type": "float", "num_bits": 4, "group_size": 32}, False, "mxfp4"),
        ({"type": "int", "num_bits": 4, "group_size": 128}, False, "int4"),
        ({"type": "int", "num_bits": 4, "group_size": 32}, False, "int4-g32"),
        ({"type": "int", "num_bits": 8}, True, "int8"),
    ],
)
def test_compressed_tensors_are_of_the_format_that_they_state(
    weights: dict[str, Any], dynamic: bool, released: str
) -> None:
    group = {"weights": weights, "input_activations": {"dynamic": dynamic}}
    stated = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    assert from_config(LLAMA | {"quantization_config": stated}, "tiny").released == released


@pytest.mark.parametrize("pattern", ["M-Q*", 4])
def test_a_pattern_of_layers_has_known_letters_alone(pattern: object) -> None:
    some = LLAMA | {"model_type": "nemotron_h", "hybrid_override_pattern": pattern}
    with pytest.raises(InputError, match="hybrid_override_pattern"):
        from_config(some, "tiny")


def test_a_plain_model_has_nothing_that_it_does_not_state() -> None:
    model = from_config(LLAMA, "tiny")
    given = {"name", "family", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab",
             "max_context", "layout", "gated", "released", "norms"}  # fmt: skip
    rest = {f.name: getattr(model, f.name) for f in fields(model) if f.name not in given}
    assert not [name for name, value in rest.items() if value]


def test_counts_of_layers_may_be_zero() -> None:
    gemma: Any = catalogue_config("gemma-3n-e2b")["text_config"]
    assert from_config(gemma, "x").owners
    assert not from_config(gemma | {"num_kv_shared_layers": 0}, "x").owners
    ernie = dict(catalogue_config("ernie-4.5-21b-a3b"))
    ernie |= {"moe_layer_start_index": 0, "moe_layer_end_index": 0}
    assert [shape.routed for shape in from_config(ernie, "x").shapes()][:2] == [True, False]


def test_every_fourth_layer_of_cohere2_is_global_by_default() -> None:
    some = LLAMA | {
        "model_type": "cohere2",
        "num_hidden_layers": 8,
        "sliding_window": 64,
        "tie_word_embeddings": True,
    }
    windows = [shape.window for shape in from_config(some, "tiny").shapes()]
    assert windows == [64, 64, 64, None] * 2
