"""Small decoders for the tests of validate/: configurations, weights and their oracles."""

import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from kvsim.validate.model.architecture import load_architecture
from kvsim.validate.model.checkpoint import Safetensors
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import load_weights
from tests.support.ulps import move_weights

torch.set_num_threads(int(os.environ.get("KVSIM_TEST_THREADS", "1")))
_quiet: Any = transformers.logging
_quiet.set_verbosity_error()
_quiet.disable_progress_bar()

VOCAB = 199
LENGTH = 512
_SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
_GROUPED = _SMALL | {"intermediate_size": 160, "num_key_value_heads": 2}
_TRAINED = {"rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
_LLAMA3 = _TRAINED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**_GROUPED),
    "llama-mha": transformers.LlamaConfig(**_GROUPED | {"num_key_value_heads": 4}),
    "llama3": transformers.LlamaConfig(**_GROUPED, rope_parameters=_LLAMA3),
    "linear": transformers.LlamaConfig(
        **_GROUPED, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "yarn": transformers.Qwen2Config(**_GROUPED, rope_parameters={**_TRAINED, "rope_type": "yarn"}),
    "tied": transformers.LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**_GROUPED, sliding_window=20),
    "qwen2": transformers.Qwen2Config(**_GROUPED),
    "qwen2-mixed": transformers.Qwen2Config(
        **_GROUPED, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "biased": transformers.LlamaConfig(**_GROUPED, head_dim=24, attention_bias=True, mlp_bias=True),
    "qwen3": transformers.Qwen3Config(**_GROUPED, head_dim=32),
    "opt": transformers.OPTConfig(**_SMALL, ffn_dim=160, word_embed_proj_dim=64),
}


@cache
def oracle(name: str) -> Any:
    """The model in transformers, with random weights that leave no layer idle."""
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(CONFIGS[name]).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@cache
def decoder(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """The same model from the files that transformers writes."""
    with TemporaryDirectory() as folder:
        oracle(name).save_pretrained(folder)
        arch = load_architecture(folder)
        weights = load_weights(arch, Safetensors(Path(folder)), torch.device("cpu"), dtype)
    move_weights(weights.tensors())
    return Decoder(arch, weights, LENGTH)


def oracle_logits(name: str, prompt: list[int], generated: list[int]) -> Tensor:
    """What transformers chooses each generated token by, (generated, vocab)."""
    with torch.no_grad():
        logits: Tensor = oracle(name)(torch.tensor([prompt + generated])).logits
    return logits[0, len(prompt) - 1 : -1]


def oracle_attentions(name: str, ids: list[int]) -> Tensor:
    """Of every layer, (layers, heads, queries, tokens), as transformers computes them."""
    model = oracle(name)
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            found = model(torch.tensor([ids]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    return torch.stack([layer[0] for layer in found])


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def saved(name: str, place: Path, tokeniser: bool = True) -> Path:
    """A folder as Hugging Face has them: toy weights, every byte a token."""
    place.mkdir()
    oracle(name).config.save_pretrained(place)
    save_file(oracle(name).state_dict(), place / "model.safetensors")
    if tokeniser:
        words = {chr(i): i for i in range(decoder(name).arch.model.vocab)}
        made: Any = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token="?"))
        made.save(str(place / "tokenizer.json"))
    return place
