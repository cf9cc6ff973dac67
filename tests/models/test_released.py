"""The format of released weights: read from configurations, and what --weights makes of it."""

import pytest

import kvsim
from kvsim.api.deployments import build_deployment, build_deployments
from kvsim.emit.engines import emit
from kvsim.machines.deployment import WEIGHT_FORMATS, Deployment
from kvsim.machines.hardware import RELEASED
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.catalogue import model_names
from kvsim.models.configs import load_model, released_format
from kvsim.options import Inputs
from tests.emit.test_emit import served
from tests.support.commands import run

RELEASED_IN = {
    "fp8-block": "deepseek-r1 deepseek-v3 deepseek-v3-0324 deepseek-v3.1 deepseek-v3.2 "
    "deepseek-v3.2-exp kimi-k2 kimi-k2-0905 minimax-m2 minimax-m2.1 minimax-m2.5 "
    "minimax-m2.7",
    "int4-g32": "kimi-k2-thinking kimi-k2.5 kimi-k2.6",
    "mxfp4": "gpt-oss-20b gpt-oss-120b gpt-oss-safeguard-20b gpt-oss-safeguard-120b",
}
KNOWN = {name: form for form, names in RELEASED_IN.items() for name in names.split()}
"""Models of the catalogue whose checkpoints are not in 16 bits, as their model cards say."""

GROUP = {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}


def test_the_catalogue_knows_which_checkpoints_are_quantised() -> None:
    found = {name: load_model(name).released for name in model_names()}
    assert {name: kind for name, kind in found.items() if kind != "fp16"} == KNOWN
    assert set(found.values()) <= WEIGHT_FORMATS.keys()


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        (None, "fp16"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "gptq", "bits": [4]}, ""),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}, "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": 4}}, ""),
        ({"quant_method": "bitsandbytes"}, ""),
        ({"quant_method": ["fp8"]}, ""),
        ("fp8", ""),
    ],
)
def test_a_configuration_says_the_format_or_nothing(stated: object, found: str) -> None:
    assert released_format(stated) == found


def test_released_weights_are_those_of_the_checkpoint() -> None:
    h200, stack = load_hardware("h200"), load_stack("vllm")
    one, other = (
        Deployment(load_model("deepseek-v3"), h200, stack, kind, 8)
        for kind in (RELEASED, "fp8-block")
    )
    assert one == other and one.weights == "fp8-block"
    plain = run("predict", "--model", "llama3-8b", "--gpu", "h100", "--technique", "full")
    assert "fp16 weights" in plain.out
    blocks = run(
        "predict", "--model", "deepseek-v3", "--gpu", "h200", "--tp", "8", "--technique", "full"
    )
    assert "fp8-block weights" in blocks.out


@pytest.mark.parametrize(
    ("model", "found"),
    [("deepseek-r1", "fp8-block"), ("qwen3-30b-a3b", "fp8-block"), ("llama3-8b", "fp8")],
)
def test_fp8_of_a_mixture_published_in_blocks_is_that_checkpoint(model: str, found: str) -> None:
    where = {"model": model, "weights": "fp8"}
    one = build_deployment(Inputs("predict", {**where, "gpu": "h200", "tp": 8}))
    (compared,) = build_deployments(Inputs("plan", {**where, "gpu": "h200", "tp": "8"}))
    assert compared == one and one.weights == found
    named = build_deployment(Inputs("predict", {"model": f"{model}-fp8", "gpu": "h200", "tp": 8}))
    assert named.weights == found


def test_an_engine_needs_no_flag_for_released_weights() -> None:
    own = emit("vllm", served("full", weights="fp8", released=True))
    assert "--quantization" not in own.text and not own.missing
    assert "--quantization fp8" in emit("vllm", served("full", weights="fp8")).text


@pytest.mark.parametrize(
    ("model", "stack", "weights"),
    [
        ("llama3.1:8b", "llamacpp", "q4_k_m"),
        ("llama3.1:8b-instruct-q8_0", "llamacpp", "q8_0"),
        ("llama3.1-8b", "llamacpp", "f16"),
        ("llama3.1:8b", "vllm", "fp16"),
    ],
)
def test_an_ollama_tag_without_a_format_is_ollamas_default(
    model: str, stack: str, weights: str
) -> None:
    found = kvsim.predict(model, "rtx4090", stack=stack)
    assert found.rows[0]["weights"] == weights
